//! Which chunk goes next. The loop that evicts is `Cache`'s; a policy supplies what differs.
//!
//! LRU, FIFO, LFU, S3-FIFO and ARC decide as the reference implementations of libCacheSim 0.3.5 do, for chunks of one
//! size. A chunk that is locked is passed over; where the queue that should give one has only such, the other one does.

pub mod kind;

mod arc;
mod fifo;
mod ghosts;
mod lease;
mod lfu;
mod lmcache_arc;
mod lru;
mod queue;
mod s3fifo;

use std::fmt::Debug;

use crate::chunks::{Chunks, ExtentId, FRESH};
use crate::time::Ticks;

pub trait Eviction: Debug + Send + Sync {
    /// The time from now on, for policies that know one.
    fn clock(&mut self, _now: Ticks) {}

    /// When a chunk that may not go now may, by time alone; None: never.
    fn next_change(&self) -> Option<Ticks> {
        None
    }

    /// How many chunks the policy lets go now, of those that nobody reads or writes; None: all of them.
    fn ready(&self, _chunks: &Chunks) -> Option<u64> {
        None
    }

    /// It knows single chunks only, each an extent by itself, and room is made for one after another: which one goes may
    /// depend on the one that comes. Otherwise chunks of an extent are one in its queue.
    fn one_by_one(&self) -> bool {
        true
    }

    /// `other` was cut off the end of an extent.
    fn cut(&mut self, _chunks: &mut Chunks, _at: ExtentId, _other: ExtentId) {}

    /// A chunk that is not there is about to come, before room is made for it.
    fn miss(&mut self, _chunks: &Chunks, _at: ExtentId) {}

    /// Room for a chunk was taken.
    fn insert(&mut self, chunks: &mut Chunks, at: ExtentId);

    /// A chunk was written, or its room taken once more: part of the use that brought it.
    fn written(&mut self, _chunks: &mut Chunks, _at: ExtentId) {}

    /// The look-up that brought a chunk uses it: part of that one use, if the policy sees it so.
    fn used_first(&mut self, chunks: &mut Chunks, at: ExtentId) {
        self.written(chunks, at);
    }

    /// A chunk was used again.
    fn used(&mut self, chunks: &mut Chunks, at: ExtentId);

    /// `written` for each, the last one first.
    fn written_all(&mut self, chunks: &mut Chunks, extents: &[ExtentId]) {
        extents.iter().rev().for_each(|&at| self.written(chunks, at));
    }

    /// `used`, or `used_first` if it is that, for each that lies in a queue, the last one first.
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

    /// The chunk to go next, of those that are free; None: no chunk is. May set others back. `from`: the one that lay
    /// behind the last victim of the same eviction, or NONE; what lies before it in the same queue is not free.
    fn victim(&mut self, chunks: &mut Chunks, from: ExtentId) -> Option<ExtentId>;

    /// A chunk goes: evicted, or else given up by whoever brought it.
    fn remove(&mut self, chunks: &mut Chunks, at: ExtentId, evicted: bool);
}
