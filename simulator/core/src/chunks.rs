//! Chunks that a tier knows.
//!
//! What is stored together is mostly used together and goes together, so chunks in a row of a prompt that are in the same
//! state and lie side by side in a queue, the last of them next to go, are one extent. It is cut where only a part of it
//! is concerned. An extent lies in one queue at most; its state and its links share one place. A chunk's key tells all
//! that comes before it in its prompt, so a prompt is walked along, extent by extent: only an extent's first chunk is in
//! the index. No extent reaches from one row into the next, so that a walk to any chunk begins not far before it.

use std::ops::{Index, IndexMut};
use std::slice;
use std::sync::Arc;

use hashbrown::HashTable;

use crate::fetch::fetch;
use crate::keys::{Key, Part};
use crate::pieces::Piece;

/// An extent's place in `Chunks`.
pub type At = u32;

/// No place.
pub const NONE: At = At::MAX;
/// A place that is yet to be given.
pub const NEW: At = At::MAX - 1;
/// Extents end before each chunk of a prompt whose number divides by this.
const ROW: usize = 16;
/// Chunks of a prompt by so many, of which `Begins` knows whether an extent begins with one of them. A row has whole
/// groups.
const GROUP: usize = 8;

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

/// A cache line of the processor each, for in a large tier most lie in none of its caches.
#[derive(Clone, Debug)]
#[repr(align(64))]
pub struct Extent {
    /// Its first chunk's.
    pub key: Key,
    /// Where the others' keys are, if it has others: a prompt's, and the number of the first chunk in that.
    prompt: Option<Arc<[Key]>>,
    first: u32,
    len: u16,
    /// Writes in flight, each with room of its own; at most one of them is a store, so MOST_PREFETCHES bounds them.
    pub staged: u16,
    pub readers: u32,
    /// Its neighbours in its queue.
    pub older: At,
    pub newer: At,
    /// What was cut off its end, for those who hold both.
    rest: At,
    /// The name in `Begins` of the group that its first chunk is of.
    group: u32,
    /// The policy's own note.
    pub uses: u8,
    state: u8,
}

impl Extent {
    pub fn is(&self, what: u8) -> bool {
        self.state & what != 0
    }

    pub fn set(&mut self, what: u8, on: bool) {
        self.state = if on { self.state | what } else { self.state & !what };
    }

    /// What was cut off its end.
    pub fn rest(&self) -> At {
        self.rest
    }

    /// How many chunks it has.
    pub fn chunks(&self) -> u64 {
        u64::from(self.len)
    }

    pub fn keys(&self) -> &[Key] {
        match &self.prompt {
            Some(prompt) => &prompt[self.first as usize..self.first as usize + self.len as usize],
            None => slice::from_ref(&self.key),
        }
    }

    pub fn queue(&self) -> u8 {
        self.state >> QUEUE_BIT
    }

    pub fn queued(&self) -> bool {
        self.queue() != NO_QUEUE
    }

    /// In that queue from now on; None: in none.
    pub fn lies_in(&mut self, queue: Option<u8>) {
        let queue = queue.unwrap_or(NO_QUEUE);
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

    /// How many of its chunks are settled: all or none.
    pub fn settled_chunks(&self) -> u64 {
        if self.settled() { self.chunks() } else { 0 }
    }

    /// May be picked to go.
    pub fn free(&self) -> bool {
        self.state & (RESIDENT | PASSED) == RESIDENT && self.readers == 0
    }
}

/// Where a chunk of a prompt lies: `skip` chunks behind the first one of an extent, or NONE. So many chunks from it on
/// lie in the same extent, or nowhere; more of those may follow.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    pub at: At,
    pub skip: usize,
    pub len: usize,
}

/// Up to where a prompt has been walked along: an extent that has the next chunk begins with it.
pub struct Walk(usize);

impl Walk {
    pub fn new() -> Self {
        Self(usize::MAX)
    }
}

/// An extent by its first chunk. `tag` is a part of its key: those that differ are told apart without a look at it.
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

/// How many extents begin in each group, which is named by its own first chunk's key; where groups share a place, in
/// all of theirs. So a look or two tell of a row of chunks that they lie nowhere, as most of a prompt do when they are
/// stored. A count that has come to its limit stays there. Empty: nothing is counted.
#[derive(Debug, Default)]
struct Begins(Vec<u8>);

impl Begins {
    /// The name of the group of the chunk of that number.
    fn name(prompt: &[Key], number: usize) -> u32 {
        (prompt[number - number % GROUP] >> 24) as u32
    }

    fn place(&self, group: u32) -> usize {
        group as usize & self.0.len().wrapping_sub(1)
    }

    /// Surely no extent begins with a chunk of that group.
    fn none(&self, group: u32) -> bool {
        self.0.get(self.place(group)) == Some(&0)
    }

    fn add(&mut self, group: u32) {
        let place = self.place(group);
        if let Some(count) = self.0.get_mut(place) {
            *count = count.saturating_add(1);
        }
    }

    fn remove(&mut self, group: u32) {
        let place = self.place(group);
        if let Some(count) = self.0.get_mut(place).filter(|count| **count < u8::MAX) {
            *count -= 1;
        }
    }
}

#[derive(Debug)]
pub struct Chunks {
    /// Each chunk is an extent by itself, and may be named without its prompt.
    single: bool,
    begins: Begins,
    /// By their tags, so that no extent has to be looked at when the table is made anew.
    index: HashTable<First>,
    places: Vec<Extent>,
    spare: Vec<At>,
}

impl Chunks {
    pub fn new(single: bool) -> Self {
        let (index, places, spare) = (HashTable::new(), Vec::new(), Vec::new());
        Self { single, begins: Begins::default(), index, places, spare }
    }

    /// Where the chunk of that number of a prompt lies.
    #[inline(always)]
    pub fn find(&self, walk: &mut Walk, keys: &[Key], number: usize) -> Place {
        let begins = self.single || walk.0 == number;
        let mut from = if begins { number } else { number - number % ROW };
        loop {
            let at = self.first(keys[from]);
            let len = if at == NONE { self.absent(keys, from) } else { self.alike(at, &keys[from..]) };
            let beyond = from + len;
            if beyond > number {
                walk.0 = beyond;
                return Place { at, skip: number - from, len: beyond - number };
            }
            from = beyond;
        }
    }

    /// The extent that begins with that chunk.
    #[inline(always)]
    fn first(&self, key: Key) -> At {
        let sought = First::new(key, NONE);
        let same = |first: &First| first.tag == sought.tag && self[first.at].key == key;
        self.index.find(sought.hash(), same).map_or(NONE, |first| first.at)
    }

    /// How many chunks from that one on, with which no extent begins, are the first one of none.
    #[inline(always)]
    fn absent(&self, keys: &[Key], number: usize) -> usize {
        match self.begins.none(Begins::name(keys, number)) {
            true => (GROUP - number % GROUP).min(keys.len() - number),
            false => 1,
        }
    }

    /// How many of the keys, the first of which is that of its first chunk, are those of an extent's chunks. Where two
    /// agree, those before them do too.
    #[inline(always)]
    fn alike(&self, at: At, keys: &[Key]) -> usize {
        let ours = self[at].keys();
        let most = ours.len().min(keys.len());
        if ours[most - 1] == keys[most - 1] {
            return most;
        }
        ours.iter().zip(keys).take_while(|(ours, theirs)| ours == theirs).count()
    }

    /// What dropping that extent, and then the next one of its queue, will look at is fetched meanwhile.
    #[inline(always)]
    pub fn expect(&self, at: At) {
        let Some(extent) = self.places.get(at as usize) else { return };
        if let Some(prompt) = &extent.prompt {
            // Its count of users stands before the keys.
            fetch(prompt.as_ptr().wrapping_sub(2));
        }
        if let Some(next) = self.places.get(extent.newer as usize) {
            fetch(next);
        }
    }

    /// The extents that a piece's chunks lie in.
    #[inline(always)]
    pub fn lie_in(&self, piece: Piece) -> impl Iterator<Item = At> {
        let (mut at, mut left) = (piece.at, piece.len);
        std::iter::from_fn(move || {
            if left == 0 {
                return None;
            }
            let (this, extent) = (at, &self[at]);
            (at, left) = (extent.rest, left - u32::from(extent.len));
            Some(this)
        })
    }

    /// Gives places to those of a part's chunks that are to have NEW ones.
    pub fn add(&mut self, part: &Part, marks: &mut Vec<Piece>) {
        let (mut number, mut index) = (part.first(), 0);
        while index < marks.len() {
            let Piece { at, len } = marks[index];
            if at == NEW {
                let piece = self.add_row(part, number, number + len as usize);
                marks[index] = piece;
                if piece.len < len {
                    marks.insert(index + 1, Piece { at, len: len - piece.len });
                }
            }
            number += marks[index].len as usize;
            index += 1;
        }
    }

    /// An extent of a prompt's chunks from that number on, up to `end` or the end of its row.
    #[inline(always)]
    fn add_row(&mut self, part: &Part, number: usize, end: usize) -> Piece {
        let len = if self.single { 1 } else { (end - number).min(ROW - number % ROW) };
        let extent = Extent {
            key: part.prompt()[number],
            prompt: if len > 1 { part.shared() } else { None },
            first: number as u32,
            len: len as u16,
            staged: 0,
            readers: 0,
            older: NONE,
            newer: NONE,
            rest: NONE,
            group: Begins::name(part.prompt(), number),
            uses: 0,
            state: NO_QUEUE << QUEUE_BIT,
        };
        Piece::new(self.keep(extent), len)
    }

    #[inline(always)]
    fn keep(&mut self, extent: Extent) -> At {
        let key = extent.key;
        let at = match self.spare.pop() {
            Some(at) => {
                self[at] = extent;
                at
            }
            None => {
                self.places.push(extent);
                self.count_begins();
                (self.places.len() - 1) as At
            }
        };
        self.begins.add(self[at].group);
        let first = First::new(key, at);
        self.index.insert_unique(first.hash(), first, First::hash);
        at
    }

    /// Keeps most groups in places of their own.
    fn count_begins(&mut self) {
        const PLACES_PER_EXTENT: usize = 4;
        if self.single || self.places.len() * PLACES_PER_EXTENT / 2 <= self.begins.0.len() {
            return;
        }
        self.begins = Begins(vec![0; (self.places.len() * PLACES_PER_EXTENT).next_power_of_two()]);
        let groups = self.index.iter().map(|first| self.places[first.at as usize].group);
        groups.for_each(|group| self.begins.add(group));
    }

    /// Cuts an extent behind its first `len` chunks, and returns the other part, which lies in no queue yet.
    pub fn cut(&mut self, at: At, len: usize) -> At {
        let whole = self[at].clone();
        let first = whole.first + len as u32;
        let group = whole.prompt.as_deref().map_or(0, |prompt| Begins::name(prompt, first as usize));
        let part = Extent { key: whole.keys()[len], group, first, len: whole.len - len as u16, ..whole };
        let other = self.keep(part);
        self[other].lies_in(None);
        (self[at].len, self[at].rest) = (len as u16, other);
        other
    }

    /// Takes the last chunks off an extent that has more than so many.
    pub fn shorten(&mut self, at: At, count: u64) {
        self[at].len -= count as u16;
    }

    #[inline(always)]
    pub fn remove(&mut self, at: At) {
        let extent = &mut self[at];
        extent.prompt = None;
        let (first, group) = (First::new(extent.key, at), extent.group);
        self.begins.remove(group);
        if let Ok(found) = self.index.find_entry(first.hash(), |other| other.at == at) {
            found.remove();
        }
        self.spare.push(at);
    }

    /// Forgets all chunks.
    pub fn clear(&mut self) {
        self.index.clear();
        self.begins.0.fill(0);
        self.places.clear();
        self.spare.clear();
    }

    /// Where all extents lie.
    pub fn places(&self) -> impl Iterator<Item = At> {
        self.index.iter().map(|first| first.at)
    }

    #[cfg(test)]
    pub fn iter(&self) -> impl Iterator<Item = &Extent> {
        self.places().map(|at| &self[at])
    }
}

impl Index<At> for Chunks {
    type Output = Extent;
    fn index(&self, at: At) -> &Extent {
        &self.places[at as usize]
    }
}

impl IndexMut<At> for Chunks {
    fn index_mut(&mut self, at: At) -> &mut Extent {
        &mut self.places[at as usize]
    }
}
