//! The router's rules.

/// Which instance gets a request, decided at the moment at which it is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Routing {
    /// The n-th request that is sent goes to instance n modulo their number.
    RoundRobin,
    /// The one with the fewest unfinished requests; of those, the lowest number.
    LeastLoaded,
    /// The one that holds the longest prefix of the prompt, in whole blocks on its GPU or in whole chunks in the tiers
    /// that it can load from, whichever reaches further; of those, the least loaded.
    PrefixAware,
}

impl Routing {
    pub const ALL: [(&str, Self); 3] = [
        ("round-robin", Self::RoundRobin),
        ("least-loaded", Self::LeastLoaded),
        ("prefix-aware", Self::PrefixAware),
    ];
}
