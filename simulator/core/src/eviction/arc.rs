//! ARC (Megiddo and Modha, FAST 2003): chunks used once and chunks used again, with a ghost list of each. Ghosts that
//! return shift the capacity's share for chunks used once. The share is a real number, as in libCacheSim.

use super::Eviction;
use super::ghosts::Ghosts;
use super::queue::Queue;
use crate::chunks::{Chunks, ExtentId};
use crate::keys::Key;

const ONCE: u8 = 0;
const AGAIN: u8 = 1;

#[derive(Clone, Copy, Debug, PartialEq)]
struct Returning {
    key: Key,
    from_again: bool,
}

#[derive(Debug)]
pub struct Arc {
    capacity: u64,
    once: Queue,
    again: Queue,
    once_ghosts: Ghosts,
    again_ghosts: Ghosts,
    /// The paper's p: the target number of chunks used once.
    target: f64,
    returning: Option<Returning>,
    /// The victim that leaves no ghost.
    forgotten: Option<ExtentId>,
}

impl Arc {
    pub fn new(capacity: u64) -> Self {
        Self {
            capacity,
            once: Queue::new(ONCE),
            again: Queue::new(AGAIN),
            once_ghosts: Ghosts::default(),
            again_ghosts: Ghosts::default(),
            target: 0.0,
            returning: None,
            forgotten: None,
        }
    }

    /// The paper's REPLACE.
    fn replace(&self, chunks: &Chunks) -> Option<ExtentId> {
        let once = self.once.len() as f64;
        let tie = once == self.target && self.returning.is_some_and(|ghost| ghost.from_again);
        let from_once = (once > 0.0 && (once > self.target || tie)) || self.again.len() == 0;
        let (first, other) = if from_once { (&self.once, &self.again) } else { (&self.again, &self.once) };
        first.first_free(chunks).or_else(|| other.first_free(chunks))
    }
}

impl Eviction for Arc {
    fn miss(&mut self, chunks: &Chunks, at: ExtentId) {
        let key = chunks[at].key;
        let (once, again) = (self.once_ghosts.len() as f64, self.again_ghosts.len() as f64);
        self.returning = None;
        if self.once_ghosts.remove(key) {
            self.target = (self.target + (again / once).max(1.0)).min(self.capacity as f64);
            self.returning = Some(Returning { key, from_again: false });
        } else if self.again_ghosts.remove(key) {
            self.target = (self.target - (once / again).max(1.0)).max(0.0);
            self.returning = Some(Returning { key, from_again: true });
        }
    }

    fn insert(&mut self, chunks: &mut Chunks, at: ExtentId) {
        let returns = self.returning.take().is_some_and(|ghost| ghost.key == chunks[at].key);
        if returns { self.again.push(chunks, at) } else { self.once.push(chunks, at) }
    }

    fn used(&mut self, chunks: &mut Chunks, at: ExtentId) {
        let queue = if chunks[at].queue() == ONCE { &mut self.once } else { &mut self.again };
        queue.take(chunks, at);
        self.again.push(chunks, at);
    }

    fn victim(&mut self, chunks: &mut Chunks, _from: ExtentId) -> Option<ExtentId> {
        self.forgotten = None;
        if self.returning.is_some() {
            return self.replace(chunks);
        }
        let once = self.once.len() + self.once_ghosts.len();
        if once >= self.capacity && self.once_ghosts.len() == 0 {
            self.forgotten = self.once.first_free(chunks);
            return self.forgotten.or_else(|| self.again.first_free(chunks));
        }
        if once >= self.capacity {
            self.once_ghosts.forget_oldest();
        } else if once + self.again.len() + self.again_ghosts.len() >= 2 * self.capacity {
            self.again_ghosts.forget_oldest();
        }
        self.replace(chunks)
    }

    fn remove(&mut self, chunks: &mut Chunks, at: ExtentId, evicted: bool) {
        let ghost = evicted && self.forgotten.take() != Some(at);
        let (queue, ghosts) = if chunks[at].queue() == ONCE {
            (&mut self.once, &mut self.once_ghosts)
        } else {
            (&mut self.again, &mut self.again_ghosts)
        };
        queue.take(chunks, at);
        if ghost {
            ghosts.push(chunks[at].key);
        }
    }
}
