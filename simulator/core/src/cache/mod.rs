//! What one level holds, with LMCache's bookkeeping (l1_manager.py): chunks that are resident, being written or being
//! read. The one loop that evicts is here; the eviction policy says which chunk goes next.
//!
//! The policy knows a key from the moment at which the cache reserves room for it. Counts of chunks stand for bytes.

#[cfg(test)]
mod check;
mod counts;
mod marks;
mod offload;

use crate::chunks::spans::{Span, count, marked};
use crate::chunks::{
    Chunks, Extent, ExtentId, FRESH, Found, NEW, NONE, PASSED, PromptCursor, RESIDENT, STORING, TEMPORARY,
};
use crate::eviction::Eviction;
use crate::eviction::kind::{EvictionKind, Policy};
use crate::keys::{ChunkRange, Key};
use crate::time::Ticks;

#[derive(Debug)]
pub struct Cache {
    capacity: u64,
    used: u64,
    tracked: u64,
    /// Room of writes in flight.
    staged: u64,
    /// Settled chunks: resident, without readers or further writes.
    evictable: u64,
    chunks: Chunks,
    eviction: Policy,
    /// Keys that went since the caller last took them, if `notes_gone`.
    gone: Vec<Key>,
    notes_gone: bool,
    /// Scratch memory.
    gathered: Vec<ExtentId>,
    passed: Vec<ExtentId>,
}

impl Cache {
    /// loose: callers name chunks without the prompt that they belong to.
    pub fn new(capacity: u64, eviction: EvictionKind, lease: Ticks, loose: bool, notes_gone: bool) -> Self {
        let eviction = eviction.make(capacity, lease);
        let chunks = Chunks::new(loose || eviction.one_by_one());
        let (gone, gathered, passed) = (Vec::new(), Vec::new(), Vec::new());
        let (used, tracked, staged, evictable) = (0, 0, 0, 0);
        Self {
            capacity,
            used,
            tracked,
            staged,
            evictable,
            chunks,
            eviction,
            gone,
            notes_gone,
            gathered,
            passed,
        }
    }

    pub fn clock(&mut self, now: Ticks) {
        self.eviction.clock(now);
    }

    /// Where the cache holds the chunk of that number of a prompt, or has reserved room for it.
    #[inline(always)]
    pub fn find(&self, cursor: &mut PromptCursor, prompt: &[Key], number: usize) -> Found {
        self.chunks.find(cursor, prompt, number)
    }

    /// For how many chunks, `most` at most, the cache goes on as it was found to at that number. `find` tells the end of
    /// what the cache lacks bit by bit.
    #[inline(always)]
    pub fn alike(
        &self,
        cursor: &mut PromptCursor,
        prompt: &[Key],
        number: usize,
        found: Found,
        most: usize,
    ) -> usize {
        if found.at != NONE || found.len >= most {
            return found.len.min(most);
        }
        found.len + self.chunks.lacks(cursor, prompt, number + found.len, number + most)
    }

    /// Makes an extent of the first chunks of what `find` found, `most` at most.
    #[inline(always)]
    pub fn cut(&mut self, place: Found, most: usize) -> ExtentId {
        let (mut at, len) = (place.at, place.len.min(most));
        if place.skip > 0 {
            at = self.cut_one(at, place.skip);
        }
        if self.chunks[at].chunks() > len as u64 {
            self.cut_one(at, len);
        }
        at
    }

    fn cut_one(&mut self, at: ExtentId, len: usize) -> ExtentId {
        let other = self.chunks.cut(at, len);
        if self.chunks[at].queued() {
            self.eviction.cut(&mut self.chunks, at, other);
        }
        other
    }

    /// The keys of a span's chunks.
    pub fn keys(&self, span: Span) -> impl Iterator<Item = Key> {
        self.chunks.extents_of(span).flat_map(move |at| self.chunks[at].keys().iter().copied())
    }

    pub fn holds(&self, at: ExtentId) -> bool {
        at != NONE && self.chunks[at].is(RESIDENT)
    }

    /// Keys of chunks that went since the caller last took or cleared them, if the cache notes them.
    pub fn gone(&self) -> &[Key] {
        &self.gone
    }

    pub fn take_gone(&mut self) -> impl Iterator<Item = Key> {
        self.gone.drain(..)
    }

    pub fn clear_gone(&mut self) {
        self.gone.clear();
    }

    /// The chunk is resident, or a store is writing it: another store would not.
    pub fn has(&self, at: ExtentId) -> bool {
        at != NONE && (self.chunks[at].is(RESIDENT | STORING))
    }

    /// Reserves room for all marked chunks of a range or for none; `evicts`: also in the place of others. True: all
    /// marked chunks have their extents now.
    pub fn reserve(
        &mut self,
        range: &ChunkRange,
        marks: &mut Vec<Span>,
        storing: bool,
        evicts: bool,
    ) -> bool {
        let count = count(marks);
        if count > self.room(evicts) {
            return false;
        }
        let one_by_one = self.eviction.one_by_one();
        if !one_by_one {
            self.make_room(count);
        }
        self.chunks.add(range, marks);
        for &Span { at, len } in marks.iter().rev().filter(|mark| mark.at != NONE) {
            debug_assert_eq!(
                self.chunks[at].chunks(),
                u64::from(len),
                "a mark is one extent until its room is reserved"
            );
            if one_by_one {
                self.eviction.miss(&self.chunks, at);
                self.make_room(self.chunks[at].chunks());
            }
            // The chunk is not resident, so it is not settled, before or after.
            let extent = &mut self.chunks[at];
            self.used += extent.chunks();
            self.staged += extent.chunks();
            extent.staged += 1;
            if storing {
                extent.set(STORING, true);
            }
            self.written(at);
        }
        true
    }

    /// Ends a store. Chunks that became resident stay marked. The others were resident already: the cache frees their
    /// room.
    pub fn admit_stored(&mut self, marks: &mut Vec<Span>) {
        self.end_store(marks, true);
    }

    /// The same. `renews`: the chunks' place in the order of eviction is that of the store's end, not of its beginning.
    pub fn end_store(&mut self, marks: &mut Vec<Span>, renews: bool) {
        self.divide_as_cut(marks);
        let mut queued = true;
        for mark in marks.iter_mut().filter(|mark| mark.at != NONE) {
            let extent = &mut self.chunks[mark.at];
            extent.set(STORING, false);
            queued &= extent.queued();
            self.staged -= extent.chunks();
            let comes = extent.admit(false);
            self.evictable += extent.settled_chunks();
            if !comes {
                self.used -= extent.chunks();
                mark.at = NONE;
            }
        }
        let extents = self.gather(marked(marks));
        if queued && renews {
            self.eviction.written_all(&mut self.chunks, &extents);
        } else if !queued {
            let comes = |cache: &Self, at| renews || !cache.chunks[at].queued();
            extents.iter().rev().for_each(|&at| {
                if comes(self, at) {
                    self.written(at)
                }
            });
        }
        self.gathered = extents;
    }

    /// Ends a read from a lower level: each chunk has one more reader.
    pub fn admit_loaded(&mut self, marks: &[Span], temporary: bool) {
        let extents = self.gather(marked(marks));
        for &at in extents.iter().rev() {
            // The chunk has a reader from now on, so it is not settled.
            let extent = &mut self.chunks[at];
            extent.readers += 1;
            self.staged -= extent.chunks();
            if extent.admit(temporary) {
                self.written(at);
                self.chunks[at].set(FRESH, true);
            } else {
                self.used -= extent.chunks();
            }
        }
        self.gathered = extents;
    }

    /// Ends writes that failed.
    pub fn give_up(&mut self, marks: &[Span]) {
        let extents = self.gather(marked(marks));
        for &at in &extents {
            self.change(at, |extent| extent.staged -= 1);
            self.staged -= self.chunks[at].chunks();
            self.used -= self.chunks[at].chunks();
            if self.chunks[at].staged == 0 && !self.chunks[at].is(RESIDENT) {
                self.forget(at);
            }
        }
        self.gathered = extents;
    }

    /// Ends a store that failed.
    pub fn give_up_stored(&mut self, marks: &[Span]) {
        let extents = self.gather(marked(marks));
        extents.iter().for_each(|&at| self.chunks[at].set(STORING, false));
        self.gathered = extents;
        self.give_up(marks);
    }

    /// Gives resident chunks one more reader.
    pub fn lock(&mut self, spans: impl Iterator<Item = Span>) {
        let extents = self.gather(spans);
        for &at in &extents {
            let extent = &mut self.chunks[at];
            self.evictable -= extent.settled_chunks();
            extent.readers += 1;
        }
        self.gathered = extents;
    }

    pub fn unlock(&mut self, spans: impl Iterator<Item = Span>) {
        let extents = self.gather(spans);
        for &at in &extents {
            let extent = &mut self.chunks[at];
            self.evictable -= extent.settled_chunks();
            extent.readers = extent.readers.saturating_sub(1);
            self.evictable += extent.settled_chunks();
            // A temporary chunk goes with its last reader.
            if extent.is(TEMPORARY) && extent.is(RESIDENT) && extent.readers == 0 {
                self.remove(at);
            }
        }
        self.gathered = extents;
    }

    /// Uses the chunks of a range that the cache knows, the first chunk last.
    pub fn touch(&mut self, range: &ChunkRange) {
        let (mut cursor, mut extents) = (PromptCursor::new(), self.gather(std::iter::empty()));
        let mut number = range.first();
        while number < range.prompt().len() {
            let place = self.find(&mut cursor, range.prompt(), number);
            if place.at != NONE {
                extents.push(self.cut(place, place.len));
            }
            number += place.len;
        }
        self.eviction.used_all(&mut self.chunks, &extents);
        self.gathered = extents;
    }

    pub fn touch_at(&mut self, spans: impl Iterator<Item = Span>) {
        let extents = self.gather(spans);
        self.eviction.used_all(&mut self.chunks, &extents);
        self.gathered = extents;
    }

    /// Picks up to `count` resident chunks without readers, and drops them. It picks, but does not drop, a chunk with
    /// another write in flight. Returns how many went.
    pub fn drop_some(&mut self, count: u64) -> u64 {
        let used = self.used;
        self.eviction.begin(&self.chunks, count);
        self.evict(|_, picked| count - picked.min(count));
        used - self.used
    }

    /// Evicts, as far as it can, until it holds `most` chunks.
    pub fn shrink(&mut self, most: u64) {
        self.evict(|cache, _| cache.used.saturating_sub(most));
    }

    /// Drops everything. The policy keeps what it remembers of chunks that went, as in LMCache's clear.
    pub fn clear(&mut self) {
        for at in self.chunks.places().collect::<Vec<_>>() {
            if self.chunks[at].queued() {
                self.eviction.remove(&mut self.chunks, at, false);
            }
        }
        self.chunks.clear();
        (self.used, self.tracked, self.staged, self.evictable) = (0, 0, 0, 0);
    }

    #[inline(always)]
    fn make_room(&mut self, count: u64) {
        if self.used + count <= self.capacity {
            return;
        }
        self.evict(|cache, _| (cache.used + count).saturating_sub(cache.capacity));
    }

    /// Evicts until no chunk may go or `lacking` is 0. `lacking` gets the number of picked chunks.
    fn evict(&mut self, lacking: impl Fn(&Self, u64) -> u64) {
        let (mut picked, mut next) = (0, NONE);
        loop {
            let most = lacking(self, picked);
            if most == 0 {
                break;
            }
            let Some(at) = self.eviction.victim(&mut self.chunks, next) else { break };
            let extent = &mut self.chunks[at];
            next = extent.newer;
            picked += extent.chunks();
            if extent.staged > 0 {
                self.pass_over(at);
                continue;
            }
            // A victim without a write in flight is settled and in a queue.
            let count = extent.chunks().min(most);
            if self.notes_gone {
                self.gone.extend(extent.keys().iter().rev().take(count as usize));
            }
            (self.used, self.tracked, self.evictable) =
                (self.used - count, self.tracked - count, self.evictable - count);
            if count < extent.chunks() {
                self.chunks.shorten(at, count);
                break;
            }
            extent.set(RESIDENT | TEMPORARY | FRESH, false);
            self.eviction.remove(&mut self.chunks, at, true);
            self.chunks.remove(at);
        }
        self.chunks.prefetch(next);
        self.end_search();
    }

    /// The search for victims that goes on does not look at an extent again.
    fn pass_over(&mut self, at: ExtentId) {
        self.chunks[at].set(PASSED, true);
        self.passed.push(at);
    }

    /// What a search has passed over, the next one looks at.
    fn end_search(&mut self) {
        self.passed.drain(..).for_each(|at| self.chunks[at].set(PASSED, false));
    }

    #[inline(always)]
    fn written(&mut self, at: ExtentId) {
        if self.chunks[at].queued() {
            self.eviction.written(&mut self.chunks, at);
        } else {
            self.eviction.insert(&mut self.chunks, at);
            self.tracked += self.chunks[at].chunks();
        }
    }

    /// Removes the resident copy, and removes the key from the eviction order even while a write to it is in flight.
    #[inline(never)]
    fn remove(&mut self, at: ExtentId) {
        self.used -= self.chunks[at].chunks();
        self.change(at, |extent| extent.set(RESIDENT | TEMPORARY | FRESH, false));
        self.forget(at);
    }

    fn forget(&mut self, at: ExtentId) {
        if self.chunks[at].queued() {
            self.eviction.remove(&mut self.chunks, at, false);
            self.tracked -= self.chunks[at].chunks();
        }
        if self.chunks[at].staged == 0 {
            self.chunks.remove(at);
        }
    }

    #[inline(always)]
    fn change(&mut self, at: ExtentId, change: impl FnOnce(&mut Extent)) {
        let extent = &mut self.chunks[at];
        self.evictable -= extent.settled_chunks();
        change(extent);
        self.evictable += extent.settled_chunks();
    }
}

/// Which of these uses hit a cache of `capacity` chunks that starts empty and takes each chunk that it lacks.
pub fn replay(eviction: EvictionKind, capacity: u64, keys: &[Key]) -> Vec<bool> {
    let mut cache = Cache::new(capacity, eviction, 0, true, false);
    let mut marks = Vec::new();
    let mut use_one = |key| {
        let range = ChunkRange::of(vec![key]);
        let at = cache.find(&mut PromptCursor::new(), range.prompt(), 0).at;
        if cache.holds(at) {
            cache.touch_at(std::iter::once(Span::new(at, 1)));
            return true;
        }
        marks.clear();
        marks.push(Span::new(NEW, 1));
        if cache.reserve(&range, &mut marks, true, true) {
            cache.admit_stored(&mut marks);
        }
        false
    };
    keys.iter().map(|&key| use_one(key)).collect()
}
