//! LMCache 0.5.6's ARC (lmcache/v1/distributed/eviction_policy/arc.py), which differs from the paper's.
//!
//! Ticks choose the victims, not the chunk that comes. The capacity is the largest number of chunks so far. A ghost
//! that returns shifts the target when the cache reserves room for it, and then counts as used once. A chosen chunk
//! leaves a ghost when it goes, for whatever reason.

use super::Eviction;
use super::ghosts::Ghosts;
use super::queue::Queue;
use crate::chunks::{Chunks, ExtentId, PASSED, RESIDENT};
use crate::keys::Key;

const ONCE: u8 = 0;
const AGAIN: u8 = 1;
/// In `Extent::uses`: the cache has reserved room, and the write has yet to end.
const AWAITED: u8 = 1;
/// In `Extent::uses`: the policy chose the chunk as a victim.
const CHOSEN: u8 = 2;

#[derive(Debug)]
pub struct LmcacheArc {
    capacity: u64,
    once: Queue,
    again: Queue,
    once_ghosts: Ghosts,
    again_ghosts: Ghosts,
    /// The target number of chunks used once.
    target: f64,
    /// Chunks used once that the current eviction chose and that stay, as another write of them is in flight.
    passed: Vec<ExtentId>,
}

impl LmcacheArc {
    pub fn new() -> Self {
        Self {
            capacity: 0,
            once: Queue::new(ONCE),
            again: Queue::new(AGAIN),
            once_ghosts: Ghosts::default(),
            again_ghosts: Ghosts::default(),
            target: 0.0,
            passed: Vec::new(),
        }
    }

    fn reserved(&mut self, chunks: &mut Chunks, at: ExtentId) {
        chunks[at].uses = AWAITED;
        self.returns(chunks[at].key);
        self.leave(chunks, at);
        self.once.push(chunks, at);
        self.grow();
    }

    fn admitted(&mut self, chunks: &mut Chunks, at: ExtentId) {
        let awaited = chunks[at].uses & AWAITED != 0;
        chunks[at].uses = 0;
        if awaited {
            return;
        }
        let known = self.leave(chunks, at) || self.returns(chunks[at].key);
        let queue = if known { &mut self.again } else { &mut self.once };
        queue.push(chunks, at);
        self.grow();
    }

    /// Shifts the target if the key is a ghost. True: it was one.
    fn returns(&mut self, key: Key) -> bool {
        let (once, again) = (self.once_ghosts.len() as f64, self.again_ghosts.len() as f64);
        if self.once_ghosts.remove(key) {
            self.target = (self.target + (again / once).max(1.0)).min(self.capacity as f64);
        } else if self.again_ghosts.remove(key) {
            self.target = (self.target - (once / again).max(1.0)).max(0.0);
        } else {
            return false;
        }
        true
    }

    /// Takes a chunk out of its queue, if it is in one.
    fn leave(&mut self, chunks: &mut Chunks, at: ExtentId) -> bool {
        let queued = chunks[at].queued();
        if queued {
            let queue = if chunks[at].queue() == ONCE { &mut self.once } else { &mut self.again };
            queue.take(chunks, at);
        }
        queued
    }

    fn grow(&mut self) {
        self.capacity = self.capacity.max(self.once.len() + self.again.len());
        self.trim();
    }

    fn trim(&mut self) {
        while self.once.len() + self.once_ghosts.len() > self.capacity && self.once_ghosts.len() > 0 {
            self.once_ghosts.forget_oldest();
        }
        let held = self.once.len() + self.again.len();
        while held + self.once_ghosts.len() + self.again_ghosts.len() > 2 * self.capacity {
            let ghosts =
                if self.again_ghosts.len() > 0 { &mut self.again_ghosts } else { &mut self.once_ghosts };
            ghosts.forget_oldest();
        }
    }
}

impl Eviction for LmcacheArc {
    fn insert(&mut self, chunks: &mut Chunks, at: ExtentId) {
        self.written(chunks, at);
    }

    fn written(&mut self, chunks: &mut Chunks, at: ExtentId) {
        if chunks[at].is(RESIDENT) { self.admitted(chunks, at) } else { self.reserved(chunks, at) }
    }

    fn used_first(&mut self, chunks: &mut Chunks, at: ExtentId) {
        self.used(chunks, at);
    }

    fn used(&mut self, chunks: &mut Chunks, at: ExtentId) {
        self.leave(chunks, at);
        self.again.push(chunks, at);
    }

    fn victim(&mut self, chunks: &mut Chunks, _from: ExtentId) -> Option<ExtentId> {
        self.passed.retain(|&at| chunks[at].is(PASSED));
        let once = self.once.len() - self.passed.len() as u64;
        let first = if once >= self.target as u64 { self.once.first_free(chunks) } else { None };
        let at = first.or_else(|| self.again.first_free(chunks)).or_else(|| self.once.first_free(chunks))?;
        chunks[at].uses |= CHOSEN;
        if chunks[at].staged > 0 && chunks[at].queue() == ONCE {
            self.passed.push(at);
        }
        Some(at)
    }

    fn remove(&mut self, chunks: &mut Chunks, at: ExtentId, _evicted: bool) {
        let ghosts = if chunks[at].queue() == ONCE { &mut self.once_ghosts } else { &mut self.again_ghosts };
        if chunks[at].uses & CHOSEN != 0 {
            ghosts.push(chunks[at].key);
        }
        chunks[at].uses = 0;
        self.leave(chunks, at);
        self.trim();
    }
}
