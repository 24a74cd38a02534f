//! What the disk tier holds, and what of it the page cache holds too.

use crate::cache::{Cache, keep_first};
use crate::chunks::{At, NONE, Walk, marked, new_if_none};
use crate::eviction::EvictionKind;
use crate::keys::{Key, KeyMap, Part};
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
    /// Chunks can be found without the prompt that they belong to.
    pub loose: bool,
}

#[derive(Debug)]
pub struct Disk {
    rules: DiskRules,
    held: Cache,
    in_page_cache: KeyMap<()>,
}

impl Disk {
    pub fn new(rules: DiskRules) -> Self {
        let held = Cache::new(rules.chunks, rules.eviction, rules.lease, rules.loose);
        Self { rules, held, in_page_cache: KeyMap::default() }
    }

    pub fn clock(&mut self, now: Ticks) {
        self.held.clock(now);
    }

    /// Where the chunk of that number of a prompt is held or reserved, or NONE.
    #[inline(always)]
    pub fn find(&self, walk: &mut Walk, prompt: &[Key], number: usize) -> At {
        self.held.find(walk, prompt, number)
    }

    pub fn holds(&self, at: At) -> bool {
        self.held.holds(at)
    }

    /// Held or being written.
    pub fn has(&self, at: At) -> bool {
        self.held.has(at)
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

    /// Marks those of the marked chunks of a part that the disk lacks and has room for, as being written. Returns their
    /// number.
    pub fn begin_write(&mut self, part: &Part, marks: &mut Vec<At>) -> u64 {
        let evicts = self.rules.evicts;
        self.held.gone.clear();
        if !evicts && self.held.room(false) == 0 {
            marks.clear();
            return 0;
        }
        let mut walk = Walk::new();
        for (number, mark) in (part.first()..).zip(marks.iter_mut()).filter(|(_, mark)| **mark != NONE) {
            let at = self.held.find(&mut walk, part.prompt(), number);
            *mark = if self.held.has(at) { NONE } else { new_if_none(at) };
        }
        let mut count = marked(marks).count() as u64;
        if evicts && self.held.used() + count > self.rules.watermark {
            self.held.shrink(self.rules.target.saturating_sub(count));
        }
        let room = self.held.room(evicts);
        if count > room {
            count = keep_first(marks, room);
        }
        self.held.reserve(part, (walk.before(), &mut marks[..]), true, evicts);
        for key in self.held.gone.iter().filter(|_| !self.rules.odirect) {
            self.in_page_cache.remove(key);
        }
        count
    }

    /// The keys that went for the last write.
    pub fn gone(&self) -> &[Key] {
        &self.held.gone
    }

    pub fn key(&self, at: At) -> Key {
        self.held.key(at)
    }

    /// These writes have failed.
    pub fn give_up(&mut self, marks: &[At]) {
        self.held.give_up_stored(marks);
    }

    pub fn end_write(&mut self, marks: &mut [At]) {
        if !self.rules.odirect {
            self.in_page_cache.extend(marked(marks).map(|at| (self.held.key(at), ())));
        }
        self.held.admit_stored(marks);
    }

    /// Uses chunks that are locked. Returns how many of them the page cache held; it holds all of them now.
    pub fn begin_read(&mut self, marks: &[At]) -> u64 {
        let mut warm = 0;
        self.held.touch_at(marks);
        for at in marked(marks) {
            let key = self.held.key(at);
            warm += u64::from(!self.rules.odirect && self.in_page_cache.insert(key, ()).is_some());
        }
        warm
    }

    pub fn lock(&mut self, at: At) {
        self.held.lock(at);
    }

    pub fn unlock(&mut self, at: At) {
        self.held.unlock(at);
    }
}

#[cfg(test)]
impl Disk {
    pub fn contains(&self, key: Key) -> bool {
        self.held.contains(key)
    }

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
