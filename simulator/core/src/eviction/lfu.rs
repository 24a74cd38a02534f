//! LFU: the least often used chunk goes; of several, the one with that number of uses for the longest time. The policy
//! forgets a chunk that went.

use std::collections::BTreeMap;

use super::Eviction;
use super::queue::Queue;
use crate::chunks::{Chunks, ExtentId};

#[derive(Debug, Default)]
pub struct Lfu {
    by_uses: BTreeMap<u32, Queue>,
    /// The number of uses, by extent.
    uses: Vec<u32>,
}

impl Lfu {
    fn push(&mut self, chunks: &mut Chunks, at: ExtentId, uses: u32) {
        let place = at as usize;
        self.uses.resize(self.uses.len().max(place + 1), 0);
        self.uses[place] = uses;
        self.by_uses.entry(uses).or_insert_with(|| Queue::new(0)).push(chunks, at);
    }
}

impl Eviction for Lfu {
    fn insert(&mut self, chunks: &mut Chunks, at: ExtentId) {
        self.push(chunks, at, 1);
    }
    fn used(&mut self, chunks: &mut Chunks, at: ExtentId) {
        let uses = self.uses[at as usize];
        self.remove(chunks, at, false);
        self.push(chunks, at, uses.saturating_add(1));
    }
    fn victim(&mut self, chunks: &mut Chunks, _from: ExtentId) -> Option<ExtentId> {
        self.by_uses.values().find_map(|queue| queue.first_free(chunks))
    }
    fn remove(&mut self, chunks: &mut Chunks, at: ExtentId, _evicted: bool) {
        let uses = self.uses[at as usize];
        if let Some(queue) = self.by_uses.get_mut(&uses) {
            queue.take(chunks, at);
            if queue.len() == 0 {
                self.by_uses.remove(&uses);
            }
        }
    }
}
