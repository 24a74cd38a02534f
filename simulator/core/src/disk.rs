//! What the disk tier holds, and what of it the page cache holds too.

use crate::cache::Cache;
use crate::eviction::EvictionKind;
use crate::keys::{Key, KeyMap};
use crate::time::Ticks;

#[derive(Clone, Copy, Debug)]
pub struct DiskRules {
    pub chunks: u64,
    /// A full disk drops chunks; otherwise it takes no more.
    pub evicts: bool,
    /// A write beyond the first count of chunks empties the disk down to the second one, if it evicts.
    pub watermark: u64,
    pub target: u64,
    /// Reads bypass the page cache.
    pub odirect: bool,
    pub eviction: EvictionKind,
    pub lease: Ticks,
}

#[derive(Debug)]
pub struct Disk {
    rules: DiskRules,
    held: Cache,
    in_page_cache: KeyMap<()>,
}

impl Disk {
    pub fn new(rules: DiskRules) -> Self {
        let held = Cache::new(rules.chunks, rules.eviction, rules.lease);
        Self { rules, held, in_page_cache: KeyMap::default() }
    }

    pub fn clock(&mut self, now: Ticks) {
        self.held.clock(now);
    }

    pub fn contains(&self, key: Key) -> bool {
        self.held.contains(key)
    }

    /// Held or being written.
    pub fn has(&self, key: Key) -> bool {
        self.held.has(key)
    }

    /// Chunks held and being written.
    #[cfg(test)]
    pub fn used(&self) -> u64 {
        self.held.used()
    }

    pub fn reset(&mut self) {
        *self = Self::new(self.rules);
    }

    pub fn reset_page_cache(&mut self) {
        self.in_page_cache.clear();
    }

    /// Those of the keys that the disk lacks and has room for, marked as being written; and those that went for them.
    pub fn begin_write(&mut self, keys: &[Key]) -> (Vec<Key>, Vec<Key>) {
        let evicts = self.rules.evicts;
        if !evicts && self.held.room(false) == 0 {
            return (Vec::new(), Vec::new());
        }
        let mut writes: Vec<Key> = keys.iter().filter(|key| !self.held.has(**key)).copied().collect();
        let mut gone = Vec::new();
        if evicts && self.held.used() + writes.len() as u64 > self.rules.watermark {
            gone = self.held.shrink(self.rules.target.saturating_sub(writes.len() as u64));
        }
        writes.truncate(self.held.room(evicts).min(writes.len() as u64) as usize);
        gone.extend(self.held.reserve(&writes, true, evicts).unwrap_or_default());
        for key in &gone {
            self.in_page_cache.remove(key);
        }
        (writes, gone)
    }

    /// These writes have failed.
    pub fn give_up(&mut self, keys: &[Key]) {
        self.held.give_up_stored(keys);
    }

    pub fn end_write(&mut self, keys: &[Key]) {
        self.held.admit_stored(keys);
        if !self.rules.odirect {
            self.in_page_cache.extend(keys.iter().map(|&key| (key, ())));
        }
    }

    /// Uses chunks that are locked. Returns how many of them the page cache held; it holds all of them now.
    pub fn begin_read(&mut self, keys: &[Key]) -> u64 {
        let mut warm = 0;
        self.held.touch(keys);
        for &key in keys {
            warm += u64::from(!self.rules.odirect && self.in_page_cache.insert(key, ()).is_some());
        }
        warm
    }

    pub fn lock(&mut self, key: Key) {
        self.held.lock(key);
    }

    pub fn unlock(&mut self, key: Key) {
        self.held.unlock(key);
    }
}

#[cfg(test)]
impl Disk {
    pub fn check(&self) {
        self.held.check();
        assert!(self.in_page_cache.keys().all(|&key| self.held.contains(key)));
    }

    /// Held or being written.
    pub fn keys(&self) -> Vec<Key> {
        self.held.keys()
    }

    pub fn check_idle(&self) {
        self.held.check_idle();
    }
}
