//! FIFO: the chunk that came first goes.

use super::Eviction;
use super::queue::Queue;
use crate::chunks::{Chunks, ExtentId};

#[derive(Debug)]
pub struct Fifo(Queue);

impl Fifo {
    pub fn new() -> Self {
        Self(Queue::new(0))
    }
}

impl Eviction for Fifo {
    fn one_by_one(&self) -> bool {
        false
    }
    fn cut(&mut self, chunks: &mut Chunks, at: ExtentId, other: ExtentId) {
        self.0.cut(chunks, at, other);
    }
    fn insert(&mut self, chunks: &mut Chunks, at: ExtentId) {
        self.0.push(chunks, at);
    }
    fn used(&mut self, _chunks: &mut Chunks, _at: ExtentId) {}
    fn victim(&mut self, chunks: &mut Chunks, from: ExtentId) -> Option<ExtentId> {
        self.0.free_from(chunks, from)
    }
    fn remove(&mut self, chunks: &mut Chunks, at: ExtentId, _evicted: bool) {
        self.0.take(chunks, at);
    }
}
