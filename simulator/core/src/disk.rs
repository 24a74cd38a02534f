//! What the disk tier holds, and what of it the page cache holds too.

use crate::keys::{Key, KeyMap};
use crate::lru::Lru;

#[derive(Debug)]
pub struct Disk {
    chunks: u64,
    /// A full disk drops its least recently used chunks; otherwise it takes no more.
    evicts: bool,
    /// Reads bypass the page cache.
    odirect: bool,
    held: Lru,
    writing: KeyMap<()>,
    in_page_cache: KeyMap<()>,
}

impl Disk {
    pub fn new(chunks: u64, evicts: bool, odirect: bool) -> Self {
        let (writing, in_page_cache) = (KeyMap::default(), KeyMap::default());
        Self { chunks, evicts, odirect, held: Lru::default(), writing, in_page_cache }
    }

    pub fn contains(&self, key: Key) -> bool {
        self.held.contains(key)
    }

    /// Held, or being written.
    pub fn has(&self, key: Key) -> bool {
        self.held.contains(key) || self.writing.contains_key(&key)
    }

    /// Chunks held and being written.
    pub fn used(&self) -> u64 {
        self.held.len() + self.writing.len() as u64
    }

    pub fn reset(&mut self) {
        self.held = Lru::default();
        self.reset_page_cache();
    }

    pub fn reset_page_cache(&mut self) {
        self.in_page_cache.clear();
    }

    /// Those of the keys that the disk lacks and has room for, marked as being written.
    pub fn begin_write(&mut self, keys: &[Key]) -> Vec<Key> {
        let mut writes = Vec::new();
        for &key in keys {
            if self.held.contains(key) || self.writing.contains_key(&key) {
                continue;
            }
            if self.used() >= self.chunks && self.evicts {
                for gone in self.held.drop_oldest(1) {
                    self.in_page_cache.remove(&gone);
                }
            }
            if self.used() >= self.chunks {
                break;
            }
            self.writing.insert(key, ());
            writes.push(key);
        }
        writes
    }

    pub fn end_write(&mut self, keys: &[Key]) {
        for &key in keys.iter().rev() {
            self.writing.remove(&key);
            self.held.use_key(key);
            if !self.odirect {
                self.in_page_cache.insert(key, ());
            }
        }
    }

    /// Locks chunks to read them. Returns how many of them the page cache held; it holds all of them now.
    pub fn begin_read(&mut self, keys: &[Key]) -> u64 {
        let mut warm = 0;
        for &key in keys.iter().rev() {
            self.held.use_key(key);
            self.held.lock(key);
            warm += u64::from(!self.odirect && self.in_page_cache.insert(key, ()).is_some());
        }
        warm
    }

    pub fn end_read(&mut self, keys: &[Key]) {
        keys.iter().for_each(|&key| self.held.unlock(key));
    }
}
