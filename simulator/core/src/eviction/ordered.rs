//! FIFO and LRU: one queue, whose oldest chunk goes. Under LRU a use moves a chunk to the new end; under FIFO the chunk
//! that came first goes, used or not.

use super::Eviction;
use super::queue::Queue;
use crate::chunks::{Chunks, ExtentId};

#[derive(Debug)]
pub struct Ordered<const USES_COUNT: bool>(Queue);

pub type Fifo = Ordered<false>;
pub type Lru = Ordered<true>;

impl<const USES_COUNT: bool> Ordered<USES_COUNT> {
    pub fn new() -> Self {
        Self(Queue::new(0))
    }
}

impl<const USES_COUNT: bool> Eviction for Ordered<USES_COUNT> {
    fn one_by_one(&self) -> bool {
        false
    }
    fn cut(&mut self, chunks: &mut Chunks, at: ExtentId, other: ExtentId) {
        self.0.cut(chunks, at, other);
    }
    fn insert(&mut self, chunks: &mut Chunks, at: ExtentId) {
        self.0.push(chunks, at);
    }
    fn written(&mut self, chunks: &mut Chunks, at: ExtentId) {
        self.used(chunks, at);
    }
    fn used(&mut self, chunks: &mut Chunks, at: ExtentId) {
        if USES_COUNT {
            self.0.renew(chunks, at);
        }
    }
    fn written_all(&mut self, chunks: &mut Chunks, extents: &[ExtentId]) {
        self.used_all(chunks, extents);
    }
    fn used_all(&mut self, chunks: &mut Chunks, extents: &[ExtentId]) {
        // A first use counts like any other.
        if USES_COUNT {
            self.0.renew_all(chunks, extents);
        }
    }
    fn victim(&mut self, chunks: &mut Chunks, from: ExtentId) -> Option<ExtentId> {
        self.0.free_from(chunks, from)
    }
    fn remove(&mut self, chunks: &mut Chunks, at: ExtentId, _evicted: bool) {
        self.0.take(chunks, at);
    }
}
