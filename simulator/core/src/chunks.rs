//! Chunks that a tier knows, and the queues that eviction policies keep them in.
//!
//! A chunk lies in one queue at most. Its state and its links share one place. A chunk's key tells all that comes before
//! it in its prompt, so chunks that were brought together are chained, and a prompt is walked along: only a chain's
//! first chunk is in the index. No chain is longer than a row, so that a walk to any chunk begins not far before it.

use std::ops::{Index, IndexMut};

use hashbrown::HashTable;

use crate::keys::Key;

/// A chunk's place in `Chunks`.
pub type At = u32;

/// No place.
pub const NONE: At = At::MAX;
/// A place that is yet to be given.
pub const NEW: At = At::MAX - 1;
/// Chains begin anew at each chunk of a prompt whose number divides by this.
const ROW: usize = 16;

/// What a chunk is, bit by bit.
pub const RESIDENT: u8 = 1;
/// Gone with its last reader.
pub const TEMPORARY: u8 = 2;
pub const STORING: u8 = 4;
/// Brought in by a look-up that has not been answered yet.
pub const FRESH: u8 = 8;
/// Not to be picked again by the eviction that goes on.
pub const PASSED: u8 = 16;
/// From this bit on: which of its policy's queues it lies in.
const QUEUE_BIT: u32 = 5;
const NO_QUEUE: u8 = 3;

/// Half a line of the processor's caches: there are many, and those that one event concerns lie far apart.
#[derive(Clone, Copy, Debug)]
#[repr(align(32))]
pub struct Chunk {
    pub key: Key,
    pub readers: u32,
    /// Writes in flight, each with room of its own; at most one of them is a store, so MOST_PREFETCHES bounds them.
    pub staged: u16,
    /// The policy's own note.
    pub uses: u8,
    state: u8,
    older: At,
    newer: At,
    /// Its neighbours in the chain.
    before: At,
    after: At,
}

impl Chunk {
    pub fn is(&self, what: u8) -> bool {
        self.state & what != 0
    }

    pub fn set(&mut self, what: u8, on: bool) {
        self.state = if on { self.state | what } else { self.state & !what };
    }

    /// The next one in its queue, or NONE.
    pub fn newer(&self) -> At {
        self.newer
    }

    pub fn queue(&self) -> u8 {
        self.state >> QUEUE_BIT
    }

    pub fn queued(&self) -> bool {
        self.queue() != NO_QUEUE
    }

    fn lie_in(&mut self, queue: u8) {
        self.state = (self.state & !(NO_QUEUE << QUEUE_BIT)) | (queue << QUEUE_BIT);
    }

    /// Ends one write. True: it became resident by it.
    pub fn admit(&mut self, temporary: bool) -> bool {
        let comes = !self.is(RESIDENT);
        self.staged -= 1;
        if comes {
            self.set(RESIDENT, true);
            self.set(TEMPORARY, temporary);
        }
        comes
    }

    /// Resident, read by nobody and not being written once more.
    pub fn settled(&self) -> bool {
        self.is(RESIDENT) && self.readers == 0 && self.staged == 0
    }

    /// May be picked to go.
    pub fn free(&self) -> bool {
        self.state & (RESIDENT | PASSED) == RESIDENT && self.readers == 0
    }
}

/// The mark of a chunk that is to come to where it lies, if that is anywhere.
pub fn new_if_none(at: At) -> At {
    if at == NONE { NEW } else { at }
}

/// The places of marked chunks.
pub fn marked(marks: &[At]) -> impl DoubleEndedIterator<Item = At> {
    marks.iter().copied().filter(|&at| at != NONE)
}

/// How far a prompt has been walked along.
pub struct Walk {
    next: usize,
    at: At,
    /// Where the chunk before the one that was found first lies, if it can be chained to that.
    before: Option<At>,
}

impl Walk {
    pub fn new() -> Self {
        Self { next: 0, at: NONE, before: None }
    }

    /// Before what was found first; NONE if nothing was.
    pub fn before(&self) -> At {
        self.before.unwrap_or(NONE)
    }
}

/// The first chunk of a chain. `tag` is a part of its key: those that differ are told apart without a look at the chunk.
#[derive(Clone, Copy, Debug)]
struct First {
    tag: u32,
    at: At,
}

impl First {
    fn new(key: Key, at: At) -> Self {
        Self { tag: (key >> 24) as u32, at }
    }

    /// A table takes its places from the low bits and its marks from the high ones.
    fn hash(&self) -> u64 {
        u64::from(self.tag) << 32 | u64::from(self.tag)
    }
}

#[derive(Debug)]
pub struct Chunks {
    /// Every chunk is in the index: for callers that know a chunk's key and not its prompt.
    loose: bool,
    /// By their tags, so that no chunk has to be looked at when the table is made anew.
    index: HashTable<First>,
    places: Vec<Chunk>,
    spare: Vec<At>,
}

impl Chunks {
    pub fn new(loose: bool) -> Self {
        Self { loose, index: HashTable::new(), places: Vec::new(), spare: Vec::new() }
    }

    /// Where the chunk of that number of a prompt lies, or NONE.
    #[inline(always)]
    pub fn find(&self, walk: &mut Walk, keys: &[Key], number: usize) -> At {
        if self.loose {
            return self.first(keys[number]);
        }
        if walk.next != number || number.is_multiple_of(ROW) {
            self.approach(walk, keys, number);
        }
        walk.at = self.behind(walk.at, keys[number]);
        walk.next = number + 1;
        walk.at
    }

    /// Walks to the chunk before that one, from where the walk is or from where its chain may begin.
    #[inline(never)]
    fn approach(&self, walk: &mut Walk, keys: &[Key], number: usize) {
        let row = number - number % ROW;
        if walk.next <= row || walk.next > number {
            (walk.next, walk.at) = (row, NONE);
        }
        for &key in &keys[walk.next..number] {
            walk.at = self.behind(walk.at, key);
        }
        walk.before.get_or_insert(walk.at);
    }

    /// The first of a chain.
    #[inline(never)]
    fn first(&self, key: Key) -> At {
        let sought = First::new(key, NONE);
        let same = |first: &First| first.tag == sought.tag && self[first.at].key == key;
        self.index.find(sought.hash(), same).map_or(NONE, |first| first.at)
    }

    #[inline(always)]
    fn behind(&self, at: At, key: Key) -> At {
        if at != NONE {
            let after = self[at].after;
            if after != NONE && self[after].key == key {
                return after;
            }
        }
        self.first(key)
    }

    /// Gives a place to each of a prompt's chunks from number `first` on that is to have a NEW one. `before`: where the
    /// chunk before the first marked one was.
    pub fn add(&mut self, keys: &[Key], first: usize, before: At, marks: &mut [At]) {
        let (mut before, mut passed) = (before, false);
        for (number, mark) in (first..).zip(marks) {
            if *mark == NEW {
                let chained = !number.is_multiple_of(ROW) && self.lies(before, keys[number - 1], passed);
                *mark = self.add_one(keys[number], if chained { before } else { NONE });
            }
            passed |= *mark != NONE;
            before = if passed { *mark } else { before };
        }
    }

    /// The chunk of that key lies there still, which is certain of one that was `passed`.
    #[inline(always)]
    fn lies(&self, at: At, key: Key, passed: bool) -> bool {
        passed || at != NONE && self[at].key == key && (self[at].is(RESIDENT) || self[at].staged > 0)
    }

    #[inline(always)]
    fn add_one(&mut self, key: Key, before: At) -> At {
        let chained = !self.loose && before != NONE && self[before].after == NONE;
        let chunk = Chunk {
            key,
            readers: 0,
            staged: 0,
            uses: 0,
            state: NO_QUEUE << QUEUE_BIT,
            older: NONE,
            newer: NONE,
            before: if chained { before } else { NONE },
            after: NONE,
        };
        let at = match self.spare.pop() {
            Some(at) => {
                self[at] = chunk;
                at
            }
            None => {
                self.places.push(chunk);
                (self.places.len() - 1) as At
            }
        };
        if chained {
            self[before].after = at;
        } else {
            self.index_first(at);
        }
        at
    }

    #[inline(always)]
    pub fn remove(&mut self, at: At) {
        let Chunk { key, before, after, .. } = self[at];
        if before != NONE {
            self[before].after = NONE;
        } else if let Ok(found) = self.index.find_entry(First::new(key, at).hash(), |other| other.at == at) {
            found.remove();
        }
        if after != NONE {
            self[after].before = NONE;
            self.index_first(after);
        }
        self.spare.push(at);
    }

    #[inline(never)]
    fn index_first(&mut self, at: At) {
        let first = First::new(self[at].key, at);
        self.index.insert_unique(first.hash(), first, First::hash);
    }

    /// Forgets all chunks.
    pub fn clear(&mut self) {
        self.index.clear();
        self.places.clear();
        self.spare.clear();
    }

    /// Where all chunks lie, chain by chain.
    pub fn places(&self) -> impl Iterator<Item = At> {
        let next = |&at: &At| Some(self[at].after).filter(|&after| after != NONE);
        self.index.iter().flat_map(move |first| std::iter::successors(Some(first.at), next))
    }

    #[cfg(test)]
    pub fn iter(&self) -> impl Iterator<Item = &Chunk> {
        self.places().map(|at| &self[at])
    }
}

impl Index<At> for Chunks {
    type Output = Chunk;
    fn index(&self, at: At) -> &Chunk {
        &self.places[at as usize]
    }
}

impl IndexMut<At> for Chunks {
    fn index_mut(&mut self, at: At) -> &mut Chunk {
        &mut self.places[at as usize]
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Queue {
    id: u8,
    oldest: At,
    newest: At,
    len: u64,
}

impl Queue {
    pub fn new(id: u8) -> Self {
        Self { id, oldest: NONE, newest: NONE, len: 0 }
    }

    pub fn len(&self) -> u64 {
        self.len
    }

    /// Puts a chunk that lies in no queue at the new end.
    #[inline(always)]
    pub fn push(&mut self, chunks: &mut Chunks, at: At) {
        let previous = self.newest;
        let chunk = &mut chunks[at];
        (chunk.older, chunk.newer) = (previous, NONE);
        chunk.lie_in(self.id);
        match previous {
            NONE => self.oldest = at,
            other => chunks[other].newer = at,
        }
        self.newest = at;
        self.len += 1;
    }

    /// Takes out a chunk that lies in this queue.
    #[inline(always)]
    pub fn take(&mut self, chunks: &mut Chunks, at: At) {
        let Chunk { older, newer, .. } = chunks[at];
        chunks[at].lie_in(NO_QUEUE);
        match older {
            NONE => self.oldest = newer,
            other => chunks[other].newer = newer,
        }
        match newer {
            NONE => self.newest = older,
            other => chunks[other].older = older,
        }
        self.len -= 1;
    }

    pub fn renew(&mut self, chunks: &mut Chunks, at: At) {
        self.renew_row(chunks, at, at);
    }

    /// Renews the marked chunks, the last one first; those that lie in no queue are passed over. What was brought
    /// together lies together, and moves at once.
    pub fn renew_all(&mut self, chunks: &mut Chunks, marks: &[At]) {
        let (mut first, mut last) = (NONE, NONE);
        for at in marked(marks).rev() {
            if !chunks[at].queued() {
                continue;
            }
            if last == NONE || chunks[last].newer != at {
                self.renew_row(chunks, first, last);
                first = at;
            }
            last = at;
        }
        self.renew_row(chunks, first, last);
    }

    /// Moves the chunks from `first` to `last`, as they lie, to the new end.
    #[inline(always)]
    fn renew_row(&mut self, chunks: &mut Chunks, first: At, last: At) {
        if last == NONE || last == self.newest {
            return;
        }
        let (older, newer) = (chunks[first].older, chunks[last].newer);
        match older {
            NONE => self.oldest = newer,
            other => chunks[other].newer = newer,
        }
        chunks[newer].older = older;
        (chunks[first].older, chunks[last].newer) = (self.newest, NONE);
        chunks[self.newest].newer = first;
        self.newest = last;
    }

    /// The oldest chunk that may go.
    pub fn first_free(&self, chunks: &Chunks) -> Option<At> {
        self.free_from(chunks, self.oldest)
    }

    /// The oldest chunk that may go of those from `at` on; from the oldest on, if that is NONE.
    #[inline(always)]
    pub fn free_from(&self, chunks: &Chunks, at: At) -> Option<At> {
        let mut at = if at == NONE { self.oldest } else { at };
        while at != NONE && !chunks[at].free() {
            at = chunks[at].newer;
        }
        (at != NONE).then_some(at)
    }
}
