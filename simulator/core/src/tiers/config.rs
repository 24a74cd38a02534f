//! What the chunk tiers are made of, and the rules that they follow, as data.

use super::device::DeviceConfig;
use crate::eviction::kind::EvictionKind;

/// The most levels below the GPU.
pub const MOST_LEVELS: usize = 4;
/// Times of transfers of such chunks are still far from the end of time.
const LARGEST_CHUNK_BYTES: u64 = 1 << 33;
/// The most readers of one chunk at a time, besides one store: their number has 16 bits.
const MOST_PREFETCHES: u64 = u16::MAX as u64 - 1;

/// Where stores write new chunks, and what becomes of chunks that a level drops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Stores write to the first level; the tiers copy the chunks from there to each level below, one after another.
    Copy,
    /// Stores write to the first level and evict there on demand; a chunk that a level drops moves to the next one.
    Waterfall,
    /// Stores write to the first level while it is filled below the watermark, else to the first level below that takes
    /// chunks; nothing moves.
    Spillover,
}

impl Placement {
    pub const ALL: [(&str, Self); 3] =
        [("copy", Self::Copy), ("waterfall", Self::Waterfall), ("spillover", Self::Spillover)];
}

/// How many chunks a tick drops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TickShare {
    /// At the watermark or above: a share, rounded down, at least one.
    Ratio,
    /// Above the watermark, or after a store without room: a share and what is above the watermark, rounded up.
    Surplus,
}

impl TickShare {
    pub const ALL: [(&str, Self); 2] = [("ratio", Self::Ratio), ("surplus", Self::Surplus)];
}

/// When ticks drop how much from a level.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(feature = "python", derive(pyo3::FromPyObject))]
pub struct TickConfig {
    pub tick_s: f64,
    pub watermark: f64,
    pub evict_ratio: f64,
    pub tick_share: TickShare,
}

/// The rules of a cache server that concern all levels, or the first one. `simulator/policies/tiers.py` documents each
/// field; `LevelConfig` has the rules of each level.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "python", derive(pyo3::FromPyObject))]
pub struct TierPolicy {
    pub end_uses: bool,
    pub placement: Placement,
    pub partial_stores: bool,
    pub evict_on_demand: bool,
    pub tick_s: f64,
    pub watermark: f64,
    pub evict_ratio: f64,
    pub tick_share: TickShare,
    pub keep_prefetched: bool,
    pub read_in_place: bool,
    pub max_prefetches: u64,
    pub min_prefetch_tokens: u64,
    pub prefetch_share: Option<f64>,
    pub prefetch_timeout_s: Option<f64>,
    pub prefetch_token_s: f64,
    pub write_end_uses: bool,
}

impl TierPolicy {
    /// Writes to the first level evict. In a waterfall always: chunks that ticks drop would move down at no known time.
    pub fn evicts(&self) -> bool {
        self.evict_on_demand || self.placement == Placement::Waterfall
    }

    /// The ticks of the first level.
    pub fn ticks(&self) -> Option<TickConfig> {
        let Self { tick_s, watermark, evict_ratio, tick_share, .. } = *self;
        (!self.evicts()).then_some(TickConfig { tick_s, watermark, evict_ratio, tick_share })
    }

    /// Requests may read ahead of their turn: what the tiers read stays in the first level.
    pub fn reads_ahead(&self) -> bool {
        self.keep_prefetched && !self.read_in_place
    }

    /// How many requests may read from lower levels at a time.
    pub fn prefetches(&self) -> u64 {
        self.max_prefetches.min(MOST_PREFETCHES)
    }
}

/// One level below the GPU. The GPU loads from the first level and stores to it; `read` and `write` of the first level
/// are these copies. `evicts`, `watermark`, `target`, `page_cache_read` and `external` concern lower levels only.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "python", derive(pyo3::FromPyObject))]
pub struct LevelConfig {
    /// The tier's name in counters, completions and messages.
    pub name: String,
    pub chunks: u64,
    pub eviction: EvictionKind,
    /// For "lease": how long a use keeps a chunk.
    pub lease_s: f64,
    /// Ticks of a level below the first; the policy has those of the first one.
    pub ticks: Option<TickConfig>,
    /// With the placement `Copy`: stores pass this level by, which gets what the level above it drops.
    pub takes_dropped: bool,
    /// Above 0: of a level that takes what the one above drops. A chunk stays there until it is here, too. Writes begin
    /// at multiples of so long.
    pub offload_every_s: f64,
    /// A write uses those of its chunks that the level holds.
    pub writes_use: bool,
    /// What the first level has read from here, and keeps, goes.
    pub exclusive: bool,
    /// What the first level reads from here is written to the level above this one, too.
    pub promotes: bool,
    /// Look-ups find chunks as soon as their write begins, while no more than so many are being written.
    pub buffer_chunks: u64,
    /// A full level drops chunks. Otherwise it takes no more.
    pub evicts: bool,
    /// A write that would fill the level beyond the first share of it empties it down to the second one, if it evicts.
    pub watermark: f64,
    pub target: f64,
    pub read: DeviceConfig,
    pub write: DeviceConfig,
    /// Reads that the page cache answers. None: reads bypass the page cache.
    pub page_cache_read: Option<DeviceConfig>,
    /// The caller makes this level's transfers on a real device. Such a level is the only one below the first.
    pub external: bool,
}

#[derive(Clone, Debug)]
#[cfg_attr(feature = "python", derive(pyo3::FromPyObject))]
pub struct TierConfig {
    pub policy: TierPolicy,
    pub chunk_bytes: u64,
    pub chunk_tokens: u64,
    /// From the one next to the GPU down: at least one, MOST_LEVELS at most.
    pub levels: Vec<LevelConfig>,
    /// Where instances share lower levels: how many levels, from the first one on, each has for itself; at least one.
    pub private_levels: usize,
}

impl TierConfig {
    /// The level's chunks stay until the one below it has them, too.
    pub fn offloads(&self, level: usize) -> bool {
        self.levels.get(level + 1).is_some_and(|below| below.offload_every_s > 0.0)
    }

    /// There are levels below the private ones.
    pub fn has_lower(&self) -> bool {
        self.levels.len() > self.private_levels.max(1)
    }

    /// Why these tiers could keep nothing, in one line; None: they can.
    pub fn refusal(&self, block_tokens: u64) -> Option<String> {
        let chunk = format!("one chunk of {} tokens, {} bytes", self.chunk_tokens, self.chunk_bytes);
        if self.chunk_tokens == 0 || !self.chunk_tokens.is_multiple_of(block_tokens) {
            let sizes = (self.chunk_tokens, block_tokens);
            return Some(format!(
                "chunk_tokens must be a multiple of block_tokens, not {} of {}",
                sizes.0, sizes.1
            ));
        }
        if self.chunk_bytes > LARGEST_CHUNK_BYTES {
            return Some(format!("{chunk}, is more than {LARGEST_CHUNK_BYTES} bytes: use smaller chunks"));
        }
        self.levels_refusal(&chunk).or_else(|| self.numbers_refusal())
    }

    fn levels_refusal(&self, chunk: &str) -> Option<String> {
        let Some((first, lower)) = self.levels.split_first().filter(|(_, lower)| lower.len() < MOST_LEVELS)
        else {
            return Some(format!("levels must be 1 to {MOST_LEVELS}, not {}", self.levels.len()));
        };
        if first.chunks == 0 && self.policy.placement == Placement::Copy {
            return Some(format!(
                "the {} tier has no room for {chunk}: raise it, or use the spillover placement",
                first.name
            ));
        }
        if let Some(level) = lower.iter().find(|level| level.chunks == 0) {
            return Some(format!(
                "the {} tier has no room for {chunk}: raise it or leave it out",
                level.name
            ));
        }
        let promotes = first.promotes || lower.first().is_some_and(|level| level.promotes);
        if promotes || first.takes_dropped || first.exclusive {
            let says = "only a level with another one between it and the GPU may promote, and the first takes stores";
            return Some(says.to_string());
        }
        let passes_by = |level: &&LevelConfig| level.offload_every_s > 0.0 && !level.takes_dropped;
        if self.levels.iter().any(|level| passes_by(&level)) {
            return Some("a level that is offloaded to takes what the one above it drops".to_string());
        }
        if first.external || (lower.len() > 1 && lower.iter().any(|level| level.external)) {
            return Some("a level whose transfers the caller makes must be the second of two".to_string());
        }
        let plain =
            |level: &LevelConfig| !level.exclusive && level.buffer_chunks == 0 && level.ticks.is_none();
        let external = lower.iter().find(|level| level.external && (level.takes_dropped || !plain(level)));
        if external.is_some() {
            return Some(
                "a level whose transfers the caller makes has no buffer, ticks or dropped chunks".to_string(),
            );
        }
        None
    }

    fn numbers_refusal(&self) -> Option<String> {
        let policy = &self.policy;
        let numbers = [
            ("tick_s", policy.tick_s),
            ("watermark", policy.watermark),
            ("evict_ratio", policy.evict_ratio),
            ("prefetch_share", policy.prefetch_share.unwrap_or(0.0)),
            ("prefetch_timeout_s", policy.prefetch_timeout_s.unwrap_or(0.0)),
            ("prefetch_token_s", policy.prefetch_token_s),
        ];
        let own = numbers.into_iter().map(|(name, number)| (name.to_string(), number));
        let shares = self.levels.iter().skip(1).flat_map(|level| {
            let name = |of: &str| format!("{}_{of}", level.name);
            [(name("watermark"), level.watermark), (name("target"), level.target)]
        });
        let leases = self.levels.iter().flat_map(|level| {
            let name = |of: &str| format!("{}_{of}", level.name);
            [(name("lease_s"), level.lease_s), (name("offload_every_s"), level.offload_every_s)]
        });
        let ticks =
            self.levels.iter().filter_map(|level| Some((level, level.ticks?))).flat_map(|(level, ticks)| {
                let name = |of: &str| format!("{}_{of}", level.name);
                let numbers =
                    [("tick_s", ticks.tick_s), ("watermark", ticks.watermark), ("ratio", ticks.evict_ratio)];
                numbers.map(|(of, number)| (name(of), number))
            });
        let bad = own
            .chain(shares)
            .chain(leases)
            .chain(ticks)
            .find(|(_, number)| !(number.is_finite() && *number >= 0.0));
        bad.map(|(name, number)| {
            format!("the tier policy's {name} must be a number of 0 or more, not {number}")
        })
    }
}
