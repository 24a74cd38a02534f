//! What the chunk tiers are made of, and the rules that they follow, as data.

use crate::cache::Cache;
use crate::eviction::kind::EvictionKind;
use crate::tiers::device::DeviceConfig;
use crate::tiers::level::{Disk, DiskRules};
use crate::time;

/// Where new chunks go, and what becomes of those that the CPU tier drops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// To the CPU tier, and copied from there to disk.
    Copy,
    /// To the CPU tier, where they take the place of others, which move to disk.
    Waterfall,
    /// To the CPU tier while it is filled below the watermark, else to disk; nothing moves.
    Spillover,
}

impl Placement {
    pub const ALL: [(&str, Self); 3] =
        [("copy", Self::Copy), ("waterfall", Self::Waterfall), ("spillover", Self::Spillover)];
}

/// How many chunks a tick drops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TickShare {
    /// ExtentId the watermark or above: a share, rounded down, at least one.
    Ratio,
    /// Above the watermark, or after a store without room: a share and what is above the watermark, rounded up.
    Surplus,
}

impl TickShare {
    pub const ALL: [(&str, Self); 2] = [("ratio", Self::Ratio), ("surplus", Self::Surplus)];
}

#[derive(Clone, Debug)]
#[cfg_attr(feature = "python", derive(pyo3::FromPyObject))]
pub struct TierPolicy {
    /// Which chunk goes next, in the CPU tier and on disk.
    pub eviction: EvictionKind,
    pub disk_eviction: EvictionKind,
    /// A request's end uses its prompt's chunks once more, and a store of what is there does not; otherwise the store.
    pub end_uses: bool,
    /// How long a use keeps a chunk from being evicted, for `EvictionKind::Lease`.
    pub lease_s: f64,
    pub placement: Placement,
    /// A store without room for all its chunks keeps the first ones. Otherwise none.
    pub partial_stores: bool,
    /// Evict when a write needs room. Otherwise only at ticks, and a write without room is given up.
    pub evict_on_demand: bool,
    pub tick_s: f64,
    pub watermark: f64,
    pub evict_ratio: f64,
    pub tick_share: TickShare,
    /// Chunks read from disk stay in the CPU tier.
    pub keep_prefetched: bool,
    /// Chunks read from disk take no room in the CPU tier.
    pub read_in_place: bool,
    /// So many more schedules of an engine, at least, pass until it sees the answer to a look-up.
    pub lookup_polls: u64,
    pub max_prefetches: u64,
    /// Hits of fewer tokens on disk are not read.
    pub min_prefetch_tokens: u64,
    /// Nothing more is read while so large a share of the CPU tier, or more, is being read into. None: no limit.
    pub prefetch_share: Option<f64>,
    /// A read from disk stops after so long, and so much longer a token. None: never.
    pub prefetch_timeout_s: Option<f64>,
    pub prefetch_token_s: f64,
    /// A full disk drops its least recently used chunks. Otherwise it takes no more.
    pub disk_evicts: bool,
    /// A write that would fill the disk further than the first share of it empties it down to the second one.
    pub disk_watermark: f64,
    pub disk_target: f64,
}

#[derive(Clone, Debug)]
#[cfg_attr(feature = "python", derive(pyo3::FromPyObject))]
pub struct TierConfig {
    pub policy: TierPolicy,
    pub chunk_bytes: u64,
    pub chunk_tokens: u64,
    pub cpu_chunks: u64,
    /// None: there is no disk tier.
    pub disk_chunks: Option<u64>,
    /// Reads bypass the page cache.
    pub odirect: bool,
    /// Someone else makes the disk's transfers, on a real device.
    pub external_disk: bool,
    pub cpu_read: DeviceConfig,
    pub cpu_write: DeviceConfig,
    pub disk_read: DeviceConfig,
    pub disk_write: DeviceConfig,
    pub page_cache_read: DeviceConfig,
}

/// Times of transfers are still far from the end of time.
const LARGEST_CHUNK_BYTES: u64 = 1 << 33;
/// So many can read the same chunk at a time, and one store it: their number has 16 bits.
const MOST_PREFETCHES: u64 = u16::MAX as u64 - 1;

impl TierPolicy {
    /// Writes to the CPU tier evict. In a waterfall always: what ticks drop would move down at no known time.
    pub fn evicts(&self) -> bool {
        self.evict_on_demand || self.placement == Placement::Waterfall
    }

    /// Requests that may read from disk at a time.
    pub fn prefetches(&self) -> u64 {
        self.max_prefetches.min(MOST_PREFETCHES)
    }
}

impl TierConfig {
    /// Why these tiers could keep nothing, in one line; None: they can.
    pub fn refusal(&self, block_tokens: u64) -> Option<String> {
        let policy = &self.policy;
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
        if self.cpu_chunks == 0 && policy.placement == Placement::Copy {
            return Some(format!(
                "the CPU tier has no room for {chunk}: raise it, or use the spillover placement"
            ));
        }
        if self.disk_chunks == Some(0) {
            return Some(format!("the disk tier has no room for {chunk}: raise it or leave it out"));
        }
        let numbers = [
            ("lease_s", policy.lease_s),
            ("tick_s", policy.tick_s),
            ("watermark", policy.watermark),
            ("evict_ratio", policy.evict_ratio),
            ("prefetch_share", policy.prefetch_share.unwrap_or(0.0)),
            ("prefetch_timeout_s", policy.prefetch_timeout_s.unwrap_or(0.0)),
            ("prefetch_token_s", policy.prefetch_token_s),
            ("disk_watermark", policy.disk_watermark),
            ("disk_target", policy.disk_target),
        ];
        let bad = numbers.iter().find(|(_, number)| !(number.is_finite() && *number >= 0.0));
        bad.map(|(name, number)| {
            format!("the tier policy's {name} must be a number of 0 or more, not {number}")
        })
    }

    pub fn cpu_tier(&self, loose: bool, journal: bool) -> Cache {
        let lease = time::from_s(self.policy.lease_s);
        let mut tier = Cache::new(self.cpu_chunks, self.policy.eviction, lease, loose);
        tier.notes_gone = journal || self.policy.placement == Placement::Waterfall;
        tier
    }

    pub fn disk_tier(&self, loose: bool) -> Option<Disk> {
        let policy = &self.policy;
        // What falls down a waterfall, and who keeps a real disk's slots, know single chunks only.
        let loose = loose || self.external_disk || policy.placement == Placement::Waterfall;
        let share = |share: f64, chunks: u64| (share * chunks as f64) as u64;
        let rules = |chunks| DiskRules {
            chunks,
            evicts: policy.disk_evicts,
            watermark: share(policy.disk_watermark, chunks),
            target: share(policy.disk_target, chunks),
            odirect: self.odirect,
            eviction: policy.disk_eviction,
            lease: time::from_s(policy.lease_s),
            loose,
        };
        self.disk_chunks.map(|chunks| Disk::new(rules(chunks)))
    }
}
