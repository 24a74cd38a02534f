//! What the chunk tiers are made of, and the rules that they follow, as data.

use crate::cache::Cache;
use crate::device::DeviceConfig;
use crate::disk::{Disk, DiskRules};
use crate::eviction::EvictionKind;

#[derive(Clone, Debug)]
#[cfg_attr(feature = "python", derive(pyo3::FromPyObject))]
pub struct TierPolicy {
    /// Which chunk goes next, in each tier.
    pub eviction: EvictionKind,
    /// A request's end uses its prompt's chunks once more, and a store of what is there does not; otherwise the store.
    pub end_uses: bool,
    /// Evict when a write needs room. Otherwise only at ticks, and a write without room is given up.
    pub evict_on_demand: bool,
    pub tick_s: f64,
    pub watermark: f64,
    pub evict_ratio: f64,
    /// Chunks read from disk stay in the CPU tier.
    pub keep_prefetched: bool,
    pub max_prefetches: u64,
    /// A full disk drops its least recently used chunks. Otherwise it takes no more.
    pub disk_evicts: bool,
}

#[derive(Clone, Debug)]
#[cfg_attr(feature = "python", derive(pyo3::FromPyObject))]
pub struct TierConfig {
    pub policy: TierPolicy,
    pub chunk_bytes: u64,
    pub cpu_chunks: u64,
    /// None: there is no disk tier.
    pub disk_chunks: Option<u64>,
    /// Reads bypass the page cache.
    pub odirect: bool,
    pub cpu_read: DeviceConfig,
    pub cpu_write: DeviceConfig,
    pub disk_read: DeviceConfig,
    pub disk_write: DeviceConfig,
    pub page_cache_read: DeviceConfig,
}

impl TierConfig {
    pub fn cpu_tier(&self) -> Cache {
        Cache::new(self.cpu_chunks, self.policy.eviction, 0)
    }

    pub fn disk_tier(&self) -> Option<Disk> {
        let (policy, odirect) = (&self.policy, self.odirect);
        let rules = |chunks| DiskRules {
            chunks,
            evicts: policy.disk_evicts,
            odirect,
            eviction: policy.eviction,
            lease: 0,
        };
        self.disk_chunks.map(|chunks| Disk::new(rules(chunks)))
    }
}
