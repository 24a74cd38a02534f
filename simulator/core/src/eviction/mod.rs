//! Which chunk goes next. `Cache` has the loop that evicts; a policy has what differs.
//!
//! LRU, FIFO, LFU, S3-FIFO and ARC decide as the reference implementations of libCacheSim 0.3.5 do, for chunks of one
//! size. A policy passes over locked chunks. If the queue that should give a victim has only locked ones, the other
//! queue gives it.

pub mod kind;
pub mod lease;

mod arc;
mod ghosts;
mod lfu;
mod lmcache_arc;
mod ordered;
mod queue;
mod s3fifo;

use std::fmt::Debug;

use crate::chunks::{Chunks, ExtentId, FRESH};
use crate::time::Ticks;

pub trait Eviction: Debug + Send + Sync {
    /// Sets the time, for policies that depend on it.
    fn clock(&mut self, _now: Ticks) {}

    /// When time alone next makes a chunk evictable; None: never.
    fn next_change(&self) -> Option<Ticks> {
        None
    }

    /// How many settled chunks the policy lets go now; None: all of them.
    fn ready(&self, _chunks: &Chunks) -> Option<u64> {
        None
    }

    /// So many chunks are to go at once.
    fn begin(&mut self, _chunks: &Chunks, _count: u64) {}

    /// The policy knows single chunks only, each an extent by itself. The cache makes room for one after another, as
    /// the victim may depend on the chunk that comes. Otherwise an extent's chunks are one entry of a queue.
    fn one_by_one(&self) -> bool {
        true
    }

    /// `other` was cut off the end of an extent.
    fn cut(&mut self, _chunks: &mut Chunks, _at: ExtentId, _other: ExtentId) {}

    /// A chunk that the cache lacks is about to come; the cache has not made room for it yet.
    fn miss(&mut self, _chunks: &Chunks, _at: ExtentId) {}

    /// The cache has reserved room for a chunk.
    fn insert(&mut self, chunks: &mut Chunks, at: ExtentId);

    /// A write of a chunk ended, or another write reserved room: part of the use that brought the chunk.
    fn written(&mut self, _chunks: &mut Chunks, _at: ExtentId) {}

    /// The look-up that brought a chunk uses it. Policies may count both as one use.
    fn used_first(&mut self, chunks: &mut Chunks, at: ExtentId) {
        self.written(chunks, at);
    }

    /// A request used a chunk again.
    fn used(&mut self, chunks: &mut Chunks, at: ExtentId);

    /// `written` for each, the last one first.
    fn written_all(&mut self, chunks: &mut Chunks, extents: &[ExtentId]) {
        extents.iter().rev().for_each(|&at| self.written(chunks, at));
    }

    /// `used_first` or `used` for each extent that is in a queue, the last one first.
    fn used_all(&mut self, chunks: &mut Chunks, extents: &[ExtentId]) {
        for &at in extents.iter().rev() {
            if !chunks[at].queued() {
                continue;
            }
            if chunks[at].is(FRESH) {
                chunks[at].set(FRESH, false);
                self.used_first(chunks, at);
            } else {
                self.used(chunks, at);
            }
        }
    }

    /// The free chunk that goes next; None: no chunk is free. It may move other chunks. `from`: the neighbour of the
    /// same eviction's last victim, or NONE; chunks before it in the queue are not free.
    fn victim(&mut self, chunks: &mut Chunks, from: ExtentId) -> Option<ExtentId>;

    /// A chunk goes: the cache evicted it, or its write failed.
    fn remove(&mut self, chunks: &mut Chunks, at: ExtentId, evicted: bool);
}
