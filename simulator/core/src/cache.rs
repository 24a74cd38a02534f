//! What one tier holds, with LMCache's bookkeeping (l1_manager.py): what is resident, being written or being read. In
//! which order it goes, the eviction policy says; that loop is here, once.
//!
//! The policy knows a key from the moment at which room for it is reserved. Counts of chunks stand for bytes.

use crate::chunks::{At, Chunk, Chunks};
use crate::eviction::{Eviction, EvictionKind};
use crate::keys::Key;
use crate::time::Ticks;

#[derive(Debug)]
pub struct Cache {
    capacity: u64,
    used: u64,
    tracked: u64,
    /// Chunks that are settled.
    evictable: u64,
    chunks: Chunks,
    eviction: Box<dyn Eviction>,
}

impl Cache {
    pub fn new(capacity: u64, eviction: EvictionKind, lease: Ticks) -> Self {
        let eviction = eviction.make(capacity, lease);
        Self { capacity, used: 0, tracked: 0, evictable: 0, chunks: Chunks::default(), eviction }
    }

    pub fn clock(&mut self, now: Ticks) {
        self.eviction.clock(now);
    }

    pub fn contains(&self, key: Key) -> bool {
        self.chunks.find(key).is_some_and(|at| self.chunks[at].resident)
    }

    /// Held or reserved, as a share of what there is room for.
    pub fn usage(&self) -> f64 {
        if self.capacity == 0 { 0.0 } else { self.used as f64 / self.capacity as f64 }
    }

    pub fn used(&self) -> u64 {
        self.used
    }

    /// Keys in the order of eviction.
    pub fn tracked(&self) -> u64 {
        self.tracked
    }

    /// A store would not write this key: it is resident or being stored.
    pub fn has(&self, key: Key) -> bool {
        self.chunks.find(key).is_some_and(|at| self.chunks[at].resident || self.chunks[at].storing)
    }

    /// Chunks that could come, if `evicts` in the place of others.
    pub fn room(&self, evicts: bool) -> u64 {
        let ready = || self.eviction.ready(&self.chunks).unwrap_or(self.evictable);
        self.capacity.saturating_sub(self.used) + if evicts { ready() } else { 0 }
    }

    /// Room for all of the keys or for none of them, if `evicts` in the place of others. Some: the keys that went.
    pub fn reserve(&mut self, keys: &[Key], storing: bool, evicts: bool) -> Option<Vec<Key>> {
        if keys.len() as u64 > self.room(evicts) {
            return None;
        }
        let mut gone = Vec::new();
        for &key in keys.iter().rev() {
            self.eviction.miss(key);
            self.evict(&mut gone, |cache, _| cache.used < cache.capacity);
            self.used += 1;
            let at = self.chunks.find_or_add(key);
            self.change(at, |chunk| {
                chunk.staged += 1;
                chunk.storing |= storing;
            });
            self.written(at);
        }
        Some(gone)
    }

    /// Ends a store. Returns the keys that became resident; the others were so already, and their room is given back.
    pub fn admit_stored(&mut self, keys: &[Key]) -> Vec<Key> {
        let mut admitted = Vec::with_capacity(keys.len());
        for &key in keys.iter().rev() {
            let Some(at) = self.chunks.find(key) else { continue };
            self.change(at, |chunk| chunk.storing = false);
            if self.admit(at, false) {
                admitted.push(key);
            }
        }
        admitted.reverse();
        admitted
    }

    /// Ends a read from below; each of the keys has one more reader.
    pub fn admit_loaded(&mut self, keys: &[Key], temporary: bool) {
        for &key in keys.iter().rev() {
            let Some(at) = self.chunks.find(key) else { continue };
            self.change(at, |chunk| chunk.readers += 1);
            if self.admit(at, temporary) {
                self.chunks[at].fresh = true;
            }
        }
    }

    /// Ends writes that brought nothing.
    pub fn give_up(&mut self, keys: &[Key]) {
        for &key in keys {
            let Some(at) = self.chunks.find(key) else { continue };
            self.change(at, |chunk| chunk.staged -= 1);
            self.used -= 1;
            if self.chunks[at].staged == 0 && !self.chunks[at].resident {
                self.forget(at, false);
            }
        }
    }

    /// Ends a store that brought nothing.
    pub fn give_up_stored(&mut self, keys: &[Key]) {
        for &key in keys {
            if let Some(at) = self.chunks.find(key) {
                self.change(at, |chunk| chunk.storing = false);
            }
        }
        self.give_up(keys);
    }

    /// One more reader for this key, if it is there.
    pub fn lock(&mut self, key: Key) {
        if let Some(at) = self.chunks.find(key) {
            self.change(at, |chunk| chunk.readers += 1);
        }
    }

    pub fn unlock(&mut self, key: Key) {
        let Some(at) = self.chunks.find(key) else { return };
        self.change(at, |chunk| chunk.readers = chunk.readers.saturating_sub(1));
        let chunk = &self.chunks[at];
        if chunk.temporary && chunk.resident && chunk.readers == 0 {
            self.remove(at, false);
        }
    }

    /// Counts a use of those of the keys that are known, the first as the last use.
    pub fn touch(&mut self, keys: &[Key]) {
        for &key in keys.iter().rev() {
            let Some(at) = self.chunks.find(key).filter(|&at| self.chunks[at].queued()) else { continue };
            if std::mem::take(&mut self.chunks[at].fresh) {
                self.eviction.used_first(&mut self.chunks, at);
            } else {
                self.eviction.used(&mut self.chunks, at);
            }
        }
    }

    /// Picks up to `count` of the resident keys that nobody reads, and drops them. One that is being written once more
    /// is picked and stays.
    pub fn drop_some(&mut self, count: u64) -> Vec<Key> {
        let mut gone = Vec::new();
        self.evict(&mut gone, |_, picked| picked >= count);
        gone
    }

    /// Evicts until no more than so many are held, as far as it can.
    pub fn shrink(&mut self, most: u64) -> Vec<Key> {
        let mut gone = Vec::new();
        self.evict(&mut gone, |cache, _| cache.used <= most);
        gone
    }

    /// Drops everything. What the policy remembers of chunks that are not there stays, as in LMCache's clear.
    pub fn clear(&mut self) {
        for at in self.chunks.places() {
            if self.chunks[at].queued() {
                self.eviction.remove(&mut self.chunks, at, false);
            }
        }
        self.chunks = Chunks::default();
        (self.used, self.tracked, self.evictable) = (0, 0, 0);
    }

    /// When a chunk that may not go now may, by time alone.
    pub fn next_change(&self) -> Option<Ticks> {
        self.eviction.next_change()
    }

    /// Evicts until it is enough, told how many were picked, or nothing is left that may go.
    fn evict(&mut self, gone: &mut Vec<Key>, enough: impl Fn(&Self, u64) -> bool) {
        let (mut picked, mut passed) = (0, Vec::new());
        while !enough(self, picked)
            && let Some(at) = self.eviction.victim(&mut self.chunks)
        {
            picked += 1;
            if self.chunks[at].staged > 0 {
                self.chunks[at].passed = true;
                passed.push(at);
            } else {
                gone.push(self.chunks[at].key);
                self.remove(at, true);
            }
        }
        passed.into_iter().for_each(|at| self.chunks[at].passed = false);
    }

    /// Ends one write. True: the key became resident by it.
    fn admit(&mut self, at: At, temporary: bool) -> bool {
        let resident = self.chunks[at].resident;
        self.change(at, |chunk| {
            chunk.staged -= 1;
            chunk.temporary = if resident { chunk.temporary } else { temporary };
            chunk.resident = true;
        });
        if resident {
            self.used -= 1;
        } else {
            self.written(at);
        }
        !resident
    }

    fn written(&mut self, at: At) {
        if self.chunks[at].queued() {
            self.eviction.written(&mut self.chunks, at);
        } else {
            self.eviction.insert(&mut self.chunks, at);
            self.tracked += 1;
        }
    }

    /// Takes the resident copy away, and the key out of the order even if a write to it is in flight.
    fn remove(&mut self, at: At, evicted: bool) {
        self.used -= 1;
        self.change(at, |chunk| (chunk.resident, chunk.temporary, chunk.fresh) = (false, false, false));
        self.forget(at, evicted);
    }

    fn forget(&mut self, at: At, evicted: bool) {
        if self.chunks[at].queued() {
            self.eviction.remove(&mut self.chunks, at, evicted);
            self.tracked -= 1;
        }
        if self.chunks[at].staged == 0 {
            self.chunks.remove(at);
        }
    }

    fn change(&mut self, at: At, change: impl FnOnce(&mut Chunk)) {
        let chunk = &mut self.chunks[at];
        self.evictable -= u64::from(chunk.settled());
        change(chunk);
        self.evictable += u64::from(chunk.settled());
    }
}

#[cfg(test)]
impl Cache {
    pub fn readers(&self, key: Key) -> u32 {
        self.chunks.find(key).map_or(0, |at| self.chunks[at].readers)
    }

    /// Resident or being written.
    pub fn keys(&self) -> Vec<Key> {
        self.chunks.iter().map(|chunk| chunk.key).collect()
    }

    /// What must hold at any moment.
    pub fn check(&self) {
        let count =
            |which: fn(&Chunk) -> bool| self.chunks.iter().filter(|chunk| which(chunk)).count() as u64;
        let staged: u64 = self.chunks.iter().map(|chunk| u64::from(chunk.staged)).sum();
        assert!(self.used <= self.capacity, "{} of {} chunks", self.used, self.capacity);
        assert_eq!(self.used, count(|chunk| chunk.resident) + staged);
        assert_eq!(self.tracked, count(Chunk::queued));
        assert_eq!(self.evictable, count(Chunk::settled));
        for chunk in self.chunks.iter() {
            assert!(chunk.resident || chunk.staged > 0, "a chunk that is nowhere");
            assert!(chunk.resident || chunk.readers == 0, "a chunk is read and not there");
            assert!(chunk.queued() || !chunk.resident, "a chunk that can never go");
            assert!(!chunk.storing || chunk.staged > 0);
            assert!(!chunk.temporary || chunk.readers > 0, "a temporary chunk without a reader");
            assert!(!chunk.passed);
        }
    }

    /// And once nothing is read or written.
    pub fn check_idle(&self) {
        self.check();
        assert!(self.chunks.iter().all(|chunk| chunk.staged == 0 && chunk.readers == 0));
    }
}

/// Which of these uses hit a cache of so many chunks that starts empty and takes each chunk that it lacks.
pub fn replay(eviction: EvictionKind, capacity: u64, keys: &[Key]) -> Vec<bool> {
    let mut cache = Cache::new(capacity, eviction, 0);
    keys.iter()
        .map(|&key| {
            let hit = cache.contains(key);
            if hit {
                cache.touch(&[key]);
            } else if cache.reserve(&[key], true, true).is_some() {
                cache.admit_stored(&[key]);
            }
            hit
        })
        .collect()
}
