//! The policies by name, and the factory.

use super::Eviction;
use super::arc::Arc;
use super::lease::{Lease, SHARDS};
use super::lfu::Lfu;
use super::lmcache_arc::LmcacheArc;
use super::ordered::{Fifo, Lru};
use super::s3fifo::S3Fifo;
use crate::chunks::{Chunks, ExtentId};
use crate::time::Ticks;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EvictionKind {
    Lru,
    Fifo,
    Lfu,
    S3Fifo,
    Arc,
    Lease,
    ShardedLease,
    LmcacheArc,
}

impl EvictionKind {
    pub const ALL: [(&str, Self); 8] = [
        ("lru", Self::Lru),
        ("fifo", Self::Fifo),
        ("lfu", Self::Lfu),
        ("s3-fifo", Self::S3Fifo),
        ("arc", Self::Arc),
        ("lease", Self::Lease),
        ("sharded-lease", Self::ShardedLease),
        ("lmcache-arc", Self::LmcacheArc),
    ];

    /// A use keeps a chunk for a while.
    pub fn leases(self) -> bool {
        matches!(self, Self::Lease | Self::ShardedLease)
    }

    pub fn make(self, capacity: u64, lease: Ticks) -> Policy {
        Policy::Other(match self {
            Self::Lru => return Policy::Lru(Lru::new()),
            Self::Fifo => Box::new(Fifo::new()),
            Self::Lfu => Box::new(Lfu::default()),
            Self::S3Fifo => Box::new(S3Fifo::new(capacity)),
            Self::Arc => Box::new(Arc::new(capacity)),
            Self::Lease => Box::new(Lease::new(lease, 1)),
            Self::ShardedLease => Box::new(Lease::new(lease, SHARDS)),
            Self::LmcacheArc => Box::new(LmcacheArc::new()),
        })
    }
}

/// Most caches use LRU: the cache calls it directly.
#[derive(Debug)]
pub enum Policy {
    Lru(Lru),
    Other(Box<dyn Eviction>),
}

/// Calls the policy.
macro_rules! either {
    ($policy:expr, $verb:ident($($given:expr),*)) => {
        match $policy {
            Policy::Lru(lru) => lru.$verb($($given),*),
            Policy::Other(policy) => policy.$verb($($given),*),
        }
    };
}

impl Eviction for Policy {
    #[inline(always)]
    fn clock(&mut self, now: Ticks) {
        either!(self, clock(now));
    }
    #[inline(always)]
    fn next_change(&self) -> Option<Ticks> {
        either!(self, next_change())
    }
    #[inline(always)]
    fn ready(&self, chunks: &Chunks) -> Option<u64> {
        either!(self, ready(chunks))
    }
    #[inline(always)]
    fn begin(&mut self, chunks: &Chunks, count: u64) {
        either!(self, begin(chunks, count));
    }
    #[inline(always)]
    fn one_by_one(&self) -> bool {
        either!(self, one_by_one())
    }
    #[inline(always)]
    fn cut(&mut self, chunks: &mut Chunks, at: ExtentId, other: ExtentId) {
        either!(self, cut(chunks, at, other));
    }
    #[inline(always)]
    fn miss(&mut self, chunks: &Chunks, at: ExtentId) {
        either!(self, miss(chunks, at));
    }
    #[inline(always)]
    fn insert(&mut self, chunks: &mut Chunks, at: ExtentId) {
        either!(self, insert(chunks, at));
    }
    #[inline(always)]
    fn written(&mut self, chunks: &mut Chunks, at: ExtentId) {
        either!(self, written(chunks, at));
    }
    #[inline(always)]
    fn used_first(&mut self, chunks: &mut Chunks, at: ExtentId) {
        either!(self, used_first(chunks, at));
    }
    #[inline(always)]
    fn used(&mut self, chunks: &mut Chunks, at: ExtentId) {
        either!(self, used(chunks, at));
    }
    #[inline(always)]
    fn written_all(&mut self, chunks: &mut Chunks, extents: &[ExtentId]) {
        either!(self, written_all(chunks, extents));
    }
    #[inline(always)]
    fn used_all(&mut self, chunks: &mut Chunks, extents: &[ExtentId]) {
        either!(self, used_all(chunks, extents));
    }
    #[inline(always)]
    fn victim(&mut self, chunks: &mut Chunks, from: ExtentId) -> Option<ExtentId> {
        either!(self, victim(chunks, from))
    }
    #[inline(always)]
    fn remove(&mut self, chunks: &mut Chunks, at: ExtentId, evicted: bool) {
        either!(self, remove(chunks, at, evicted));
    }
}
