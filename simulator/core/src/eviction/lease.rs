//! Mooncake's order: a use leases a chunk for a while. Of the chunks without a lease, the one goes whose lease ran out
//! first. A write gives a lease of length 0.

use std::collections::BTreeMap;

use super::Eviction;
use super::queue::Queue;
use crate::chunks::{Chunks, ExtentId, FRESH};
use crate::keys::{Key, KeyMap};
use crate::time::Ticks;

/// When a lease runs out, and a number that orders leases of one moment, the first granted first.
type End = (Ticks, u64);

#[derive(Debug)]
pub struct Lease {
    lease: Ticks,
    now: Ticks,
    next: u64,
    all: Queue,
    by_end: BTreeMap<End, ExtentId>,
    ends: KeyMap<End>,
}

impl Lease {
    pub fn new(lease: Ticks) -> Self {
        let (by_end, ends) = (BTreeMap::new(), KeyMap::default());
        Self { lease, now: 0, next: 0, all: Queue::new(0), by_end, ends }
    }

    fn grant(&mut self, key: Key, at: ExtentId, lease: Ticks) {
        let before = self.ends.get(&key).copied();
        let end = before.map_or(0, |(end, _)| end).max(self.now.saturating_add(lease));
        if let Some(before) = before {
            self.by_end.remove(&before);
        }
        self.by_end.insert((end, self.next), at);
        self.ends.insert(key, (end, self.next));
        self.next += 1;
    }
}

impl Eviction for Lease {
    fn clock(&mut self, now: Ticks) {
        self.now = self.now.max(now);
    }
    fn next_change(&self) -> Option<Ticks> {
        self.by_end.range((self.now + 1, 0)..).next().map(|((end, _), _)| *end)
    }
    fn ready(&self, chunks: &Chunks) -> Option<u64> {
        let over = self.by_end.range(..(self.now + 1, 0)).filter(|&(_, &at)| chunks[at].settled());
        Some(over.count() as u64)
    }
    fn insert(&mut self, chunks: &mut Chunks, at: ExtentId) {
        self.all.push(chunks, at);
        self.grant(chunks[at].key, at, 0);
    }
    fn written(&mut self, chunks: &mut Chunks, at: ExtentId) {
        self.grant(chunks[at].key, at, 0);
    }
    fn used(&mut self, chunks: &mut Chunks, at: ExtentId) {
        self.grant(chunks[at].key, at, self.lease);
    }
    /// The master grants leases in the order of the keys that it is asked for: a prompt's first chunk runs out first.
    fn written_all(&mut self, chunks: &mut Chunks, extents: &[ExtentId]) {
        extents.iter().for_each(|&at| self.written(chunks, at));
    }
    fn used_all(&mut self, chunks: &mut Chunks, extents: &[ExtentId]) {
        for &at in extents.iter().filter(|&&at| chunks[at].queued()).collect::<Vec<_>>() {
            let first = chunks[at].is(FRESH);
            chunks[at].set(FRESH, false);
            if first { self.written(chunks, at) } else { self.used(chunks, at) }
        }
    }
    fn victim(&mut self, chunks: &mut Chunks, _from: ExtentId) -> Option<ExtentId> {
        let over = self.by_end.iter().take_while(|((end, _), _)| *end <= self.now);
        over.map(|(_, &at)| at).find(|&at| chunks[at].free())
    }
    fn remove(&mut self, chunks: &mut Chunks, at: ExtentId, _evicted: bool) {
        self.all.take(chunks, at);
        if let Some(end) = self.ends.remove(&chunks[at].key) {
            self.by_end.remove(&end);
        }
    }
}
