//! What one tier holds, with LMCache's bookkeeping (l1_manager.py): what is resident, being written or being read. In
//! which order it goes, the eviction policy says; that loop is here, once.
//!
//! The policy knows a key from the moment at which room for it is reserved. Counts of chunks stand for bytes.

use crate::chunks::{
    At, Chunk, Chunks, FRESH, NEW, NONE, PASSED, RESIDENT, STORING, TEMPORARY, Walk, marked,
};
use crate::eviction::{Eviction, EvictionKind, Policy};
use crate::keys::{Key, Part};
use crate::time::Ticks;

#[derive(Debug)]
pub struct Cache {
    capacity: u64,
    used: u64,
    tracked: u64,
    /// Chunks that are settled.
    evictable: u64,
    chunks: Chunks,
    eviction: Policy,
    /// Keys that went, until somebody takes them out.
    pub gone: Vec<Key>,
    /// Kept for their memory only.
    touched: Vec<At>,
    passed: Vec<At>,
}

impl Cache {
    /// loose: its chunks can be found without the prompt that they belong to.
    pub fn new(capacity: u64, eviction: EvictionKind, lease: Ticks, loose: bool) -> Self {
        let (eviction, chunks) = (eviction.make(capacity, lease), Chunks::new(loose));
        let (gone, touched, passed) = (Vec::new(), Vec::new(), Vec::new());
        Self { capacity, used: 0, tracked: 0, evictable: 0, chunks, eviction, gone, touched, passed }
    }

    pub fn clock(&mut self, now: Ticks) {
        self.eviction.clock(now);
    }

    /// Where the chunk of that number of a prompt is held or reserved, or NONE.
    #[inline(always)]
    pub fn find(&self, walk: &mut Walk, prompt: &[Key], number: usize) -> At {
        self.chunks.find(walk, prompt, number)
    }

    pub fn key(&self, at: At) -> Key {
        self.chunks[at].key
    }

    pub fn holds(&self, at: At) -> bool {
        at != NONE && self.chunks[at].is(RESIDENT)
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

    /// A store would not write this chunk: it is resident or being stored.
    pub fn has(&self, at: At) -> bool {
        at != NONE && (self.chunks[at].is(RESIDENT | STORING))
    }

    /// Chunks that could come, if `evicts` in the place of others.
    pub fn room(&self, evicts: bool) -> u64 {
        let ready = || self.eviction.ready(&self.chunks).unwrap_or(self.evictable);
        self.capacity.saturating_sub(self.used) + if evicts { ready() } else { 0 }
    }

    /// Room for the marked chunks of a part, all of them or none, if `evicts` in the place of others. True: all marked
    /// chunks have their places now. `before`: where the chunk before the first marked one was.
    pub fn reserve(
        &mut self,
        part: &Part,
        (before, marks): (At, &mut [At]),
        storing: bool,
        evicts: bool,
    ) -> bool {
        let count = marked(marks).count() as u64;
        if count > self.room(evicts) {
            return false;
        }
        if !self.eviction.one_by_one() {
            self.evict(|cache, _| cache.used + count <= cache.capacity);
        }
        self.chunks.add(part.prompt(), part.first(), before, marks);
        for at in marked(marks).rev() {
            self.eviction.miss(&self.chunks, at);
            if self.used >= self.capacity {
                self.evict(|cache, _| cache.used < cache.capacity);
            }
            self.used += 1;
            // It is not resident, so not settled either, before or after.
            let chunk = &mut self.chunks[at];
            chunk.staged += 1;
            if storing {
                chunk.set(STORING, true);
            }
            self.written(at);
        }
        true
    }

    /// Ends a store. Chunks stay marked that became resident; the others were so already, and their room is given back.
    pub fn admit_stored(&mut self, marks: &mut [At]) {
        let mut queued = true;
        for mark in marks.iter_mut().filter(|mark| **mark != NONE) {
            let chunk = &mut self.chunks[*mark];
            chunk.set(STORING, false);
            queued &= chunk.queued();
            let comes = chunk.admit(false);
            self.evictable += u64::from(chunk.settled());
            if !comes {
                self.used -= 1;
                *mark = NONE;
            }
        }
        if queued {
            return self.eviction.written_all(&mut self.chunks, marks);
        }
        marked(marks).rev().for_each(|at| self.written(at));
    }

    /// Ends a read from below; each of the chunks has one more reader.
    pub fn admit_loaded(&mut self, marks: &[At], temporary: bool) {
        for at in marked(marks).rev() {
            // It is read from now on, so not settled.
            let chunk = &mut self.chunks[at];
            chunk.readers += 1;
            if chunk.admit(temporary) {
                self.written(at);
                self.chunks[at].set(FRESH, true);
            } else {
                self.used -= 1;
            }
        }
    }

    /// Ends writes that brought nothing.
    pub fn give_up(&mut self, marks: &[At]) {
        for at in marked(marks) {
            self.change(at, |chunk| chunk.staged -= 1);
            self.used -= 1;
            if self.chunks[at].staged == 0 && !self.chunks[at].is(RESIDENT) {
                self.forget(at);
            }
        }
    }

    /// Ends a store that brought nothing.
    pub fn give_up_stored(&mut self, marks: &[At]) {
        for at in marked(marks) {
            self.chunks[at].set(STORING, false);
        }
        self.give_up(marks);
    }

    /// One more reader for a chunk that is there.
    pub fn lock(&mut self, at: At) {
        let chunk = &mut self.chunks[at];
        self.evictable -= u64::from(chunk.settled());
        chunk.readers += 1;
    }

    #[inline(always)]
    pub fn unlock(&mut self, at: At) {
        let chunk = &mut self.chunks[at];
        self.evictable -= u64::from(chunk.settled());
        chunk.readers = chunk.readers.saturating_sub(1);
        self.evictable += u64::from(chunk.settled());
        if chunk.is(TEMPORARY) {
            self.drop_read(at);
        }
    }

    /// Drops a temporary chunk with its last reader.
    #[inline(never)]
    fn drop_read(&mut self, at: At) {
        let chunk = &self.chunks[at];
        if chunk.is(RESIDENT) && chunk.readers == 0 {
            self.remove(at);
        }
    }

    /// Counts a use of those of the chunks that are known, the first as the last use.
    pub fn touch(&mut self, part: &Part) {
        let (mut walk, mut touched) = (Walk::new(), std::mem::take(&mut self.touched));
        let numbers = part.first()..part.prompt().len();
        touched.extend(numbers.map(|number| self.find(&mut walk, part.prompt(), number)));
        self.touch_at(&touched);
        touched.clear();
        self.touched = touched;
    }

    pub fn touch_at(&mut self, marks: &[At]) {
        self.eviction.used_all(&mut self.chunks, marks);
    }

    /// Picks up to `count` of the resident keys that nobody reads, and drops them. One that is being written once more
    /// is picked and stays.
    pub fn drop_some(&mut self, count: u64) {
        self.evict(|_, picked| picked >= count);
    }

    /// Evicts until no more than so many are held, as far as it can.
    pub fn shrink(&mut self, most: u64) {
        self.evict(|cache, _| cache.used <= most);
    }

    /// Drops everything. What the policy remembers of chunks that are not there stays, as in LMCache's clear.
    pub fn clear(&mut self) {
        for at in self.chunks.places().collect::<Vec<_>>() {
            if self.chunks[at].queued() {
                self.eviction.remove(&mut self.chunks, at, false);
            }
        }
        self.chunks.clear();
        (self.used, self.tracked, self.evictable) = (0, 0, 0);
    }

    /// When a chunk that may not go now may, by time alone.
    pub fn next_change(&self) -> Option<Ticks> {
        self.eviction.next_change()
    }

    /// Evicts until it is enough, told how many were picked, or nothing is left that may go.
    fn evict(&mut self, enough: impl Fn(&Self, u64) -> bool) {
        let (mut picked, mut next) = (0, NONE);
        while !enough(self, picked)
            && let Some(at) = self.eviction.victim(&mut self.chunks, next)
        {
            picked += 1;
            let chunk = &mut self.chunks[at];
            next = chunk.newer();
            if chunk.staged > 0 {
                chunk.set(PASSED, true);
                self.passed.push(at);
                continue;
            }
            // What may go and is not being written is settled, and lies in a queue.
            chunk.set(RESIDENT | TEMPORARY | FRESH, false);
            self.gone.push(chunk.key);
            (self.used, self.tracked, self.evictable) = (self.used - 1, self.tracked - 1, self.evictable - 1);
            self.eviction.remove(&mut self.chunks, at, true);
            self.chunks.remove(at);
        }
        self.passed.drain(..).for_each(|at| self.chunks[at].set(PASSED, false));
    }

    #[inline(always)]
    fn written(&mut self, at: At) {
        if self.chunks[at].queued() {
            self.eviction.written(&mut self.chunks, at);
        } else {
            self.eviction.insert(&mut self.chunks, at);
            self.tracked += 1;
        }
    }

    /// Takes the resident copy away, and the key out of the order even if a write to it is in flight.
    fn remove(&mut self, at: At) {
        self.used -= 1;
        self.change(at, |chunk| chunk.set(RESIDENT | TEMPORARY | FRESH, false));
        self.forget(at);
    }

    fn forget(&mut self, at: At) {
        if self.chunks[at].queued() {
            self.eviction.remove(&mut self.chunks, at, false);
            self.tracked -= 1;
        }
        if self.chunks[at].staged == 0 {
            self.chunks.remove(at);
        }
    }

    #[inline(always)]
    fn change(&mut self, at: At, change: impl FnOnce(&mut Chunk)) {
        let chunk = &mut self.chunks[at];
        self.evictable -= u64::from(chunk.settled());
        change(chunk);
        self.evictable += u64::from(chunk.settled());
    }
}

/// Leaves no more than the first `most` of the marks, and says how many those are.
pub fn keep_first(marks: &mut [At], most: u64) -> u64 {
    let mut kept = 0;
    for mark in marks.iter_mut().filter(|mark| **mark != NONE) {
        if kept == most {
            *mark = NONE;
        } else {
            kept += 1;
        }
    }
    kept
}

#[cfg(test)]
impl Cache {
    pub fn readers(&self, key: Key) -> u32 {
        self.chunks.iter().find(|chunk| chunk.key == key).map_or(0, |chunk| chunk.readers)
    }

    pub fn contains(&self, key: Key) -> bool {
        self.chunks.iter().any(|chunk| chunk.key == key && chunk.is(RESIDENT))
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
        assert_eq!(self.used, count(|chunk| chunk.is(RESIDENT)) + staged);
        assert_eq!(self.tracked, count(Chunk::queued));
        assert_eq!(self.evictable, count(Chunk::settled));
        for chunk in self.chunks.iter() {
            assert!(chunk.is(RESIDENT) || chunk.staged > 0, "a chunk that is nowhere");
            assert!(chunk.is(RESIDENT) || chunk.readers == 0, "a chunk is read and not there");
            assert!(chunk.queued() || !chunk.is(RESIDENT), "a chunk that can never go");
            assert!(!chunk.is(STORING) || chunk.staged > 0);
            assert!(!chunk.is(TEMPORARY) || chunk.readers > 0, "a temporary chunk without a reader");
            assert!(!chunk.is(PASSED));
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
    let mut cache = Cache::new(capacity, eviction, 0, true);
    let mut use_one = |key| {
        let part = Part::of(vec![key]);
        let at = cache.find(&mut Walk::new(), part.prompt(), 0);
        if cache.holds(at) {
            cache.touch_at(&[at]);
            return true;
        }
        let mut marks = [NEW];
        if cache.reserve(&part, (NONE, &mut marks[..]), true, true) {
            cache.admit_stored(&mut marks);
        }
        cache.gone.clear();
        false
    };
    keys.iter().map(|&key| use_one(key)).collect()
}
