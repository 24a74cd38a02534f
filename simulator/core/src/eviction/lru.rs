//! LRU: the least recently used chunk goes.

use super::Eviction;
use super::queue::Queue;
use crate::chunks::{Chunks, ExtentId};

#[derive(Debug)]
pub struct Lru(Queue);

impl Lru {
    pub fn new() -> Self {
        Self(Queue::new(0))
    }
}

impl Eviction for Lru {
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
        self.0.renew(chunks, at);
    }
    fn used(&mut self, chunks: &mut Chunks, at: ExtentId) {
        self.0.renew(chunks, at);
    }
    fn written_all(&mut self, chunks: &mut Chunks, extents: &[ExtentId]) {
        self.0.renew_all(chunks, extents);
    }
    fn used_all(&mut self, chunks: &mut Chunks, extents: &[ExtentId]) {
        // LRU treats a first use like any other.
        self.0.renew_all(chunks, extents);
    }
    fn victim(&mut self, chunks: &mut Chunks, from: ExtentId) -> Option<ExtentId> {
        self.0.free_from(chunks, from)
    }
    fn remove(&mut self, chunks: &mut Chunks, at: ExtentId, _evicted: bool) {
        self.0.take(chunks, at);
    }
}
