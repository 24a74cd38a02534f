//! Mooncake's order: a use leases a chunk for a while. Of the chunks without a lease, the one goes whose lease ran out
//! first. A write gives a lease of length 0.
//!
//! With shards, an eviction takes of each shard its share, so that not the oldest of all go. Chunks have their shards by
//! bits of their keys that look random.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::mem;

use super::Eviction;
use super::queue::Queue;
use crate::chunks::{Chunks, ExtentId, FRESH};
use crate::keys::{Key, KeyMap, numbered};
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
    /// 1: an eviction picks among all chunks.
    shards: usize,
    /// How many evictions by shards took something: how many are due that can take nothing depends on when others look.
    evictions: u64,
    /// An eviction by shards is on, and has taken nothing yet.
    begins: bool,
    /// What it has yet to take; None: no more.
    going: VecDeque<Option<ExtentId>>,
}

/// kNumShards (mooncake-store/include/master_service.h).
pub const SHARDS: usize = 1024;

/// The least that goes at an eviction, of what is to go (EvictionThreadFunc, evict_ratio_lowerbound).
const LEAST: f64 = 0.5;

impl Lease {
    pub fn new(lease: Ticks, shards: usize) -> Self {
        let (by_end, ends) = (BTreeMap::new(), KeyMap::default());
        let (evictions, begins, going) = (0, false, VecDeque::new());
        Self { lease, now: 0, next: 0, all: Queue::new(0), by_end, ends, shards, evictions, begins, going }
    }

    /// What an eviction of `count` chunks takes (MasterService::BatchEvict): shard after shard, from any one on, as many
    /// as are to go of those seen so far. Where leases leave less than half of that, the oldest others go too.
    fn pick(&self, chunks: &Chunks, count: u64) -> Vec<ExtentId> {
        let mut shards = vec![Vec::new(); self.shards];
        for (&(end, _), &at) in &self.by_end {
            shards[shard_of(chunks[at].key, self.shards)].push((end, at));
        }
        let share = count as f64 / self.by_end.len().max(1) as f64;
        let first = shard_of(self.evictions, self.shards);
        let (mut going, mut seen) = (Vec::new(), 0);
        for shard in shards[first..].iter().chain(&shards[..first]) {
            seen += shard.len();
            let ideal = (seen as f64 * share).ceil() as usize;
            let may_go = shard.iter().filter(|&&(end, at)| end <= self.now && chunks[at].free());
            going.extend(may_go.take(ideal.saturating_sub(going.len())).map(|&(_, at)| at));
        }
        let least = (self.by_end.len() as f64 * share * LEAST).ceil() as usize;
        if going.len() < least {
            let picked: HashSet<_> = going.iter().copied().collect();
            let over = self.by_end.iter().take_while(|((end, _), _)| *end <= self.now).map(|(_, &at)| at);
            let others = over.filter(|&at| chunks[at].free() && !picked.contains(&at));
            going.extend(others.take(least - going.len()).collect::<Vec<_>>());
        }
        going
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

pub fn shard_of(key: Key, shards: usize) -> usize {
    (numbered(key) % shards as u64) as usize
}

impl Eviction for Lease {
    fn begin(&mut self, chunks: &Chunks, count: u64) {
        if self.shards > 1 {
            let picked = self.pick(chunks, count);
            let no_more = (picked.len() < count as usize).then_some(None);
            self.going = picked.into_iter().map(Some).chain(no_more).collect();
            self.begins = true;
        }
    }
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
        if let Some(next) = self.going.pop_front() {
            return next;
        }
        self.begins = false;
        let over = self.by_end.iter().take_while(|((end, _), _)| *end <= self.now);
        over.map(|(_, &at)| at).find(|&at| chunks[at].free())
    }
    fn remove(&mut self, chunks: &mut Chunks, at: ExtentId, evicted: bool) {
        self.evictions += u64::from(evicted && mem::take(&mut self.begins));
        self.all.take(chunks, at);
        if let Some(end) = self.ends.remove(&chunks[at].key) {
            self.by_end.remove(&end);
        }
    }
}
