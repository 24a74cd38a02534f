//! The router's rules.

/// Which instance gets a request. The router decides at the moment at which the request is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Routing {
    /// The n-th request sent goes to instance n modulo their number.
    RoundRobin,
    /// The instance with the fewest unfinished requests; of those, the lowest number.
    LeastLoaded,
    /// The instance that holds the longest prefix of the prompt: in whole blocks on its GPU, or in whole chunks in the
    /// tiers that it can load from, whichever reaches further. Of those, the least loaded.
    PrefixAware,
}

impl Routing {
    pub const ALL: [(&str, Self); 3] = [
        ("round-robin", Self::RoundRobin),
        ("least-loaded", Self::LeastLoaded),
        ("prefix-aware", Self::PrefixAware),
    ];
}
