//! The chunks of one level, as extents.
//!
//! Requests mostly store, use and lose chunks together. So chunks in a row of a prompt that have the same state and are
//! neighbours in a queue are one extent; its last chunk goes first. The level cuts an extent where an operation
//! concerns only a part of it. An extent is in one queue at most; its state and its links are in one record. A chunk's
//! key depends on all chunks before it in its prompt. So a search goes along the prompt, extent by extent, and the
//! index has only the first chunk of each extent. No extent crosses the border of a row, so that a search for any chunk
//! starts close to it.

mod extent;
mod groups;
pub mod spans;

use std::ops::{Index, IndexMut};

use hashbrown::HashTable;

use crate::keys::{ChunkRange, Key};
use crate::memory::fetch;

pub use extent::{Extent, ExtentId, FRESH, NEW, NONE, OFFLOADED, PASSED, RESIDENT, STORING, TEMPORARY};
use extent::{NO_QUEUE, QUEUE_BIT};
use groups::{GROUP, GroupCounts};
use spans::Span;

/// Chunks of a prompt in a row: extents end at the rows' borders.
const ROW: usize = 16;

/// Where a level has a chunk of a prompt: `skip` chunks behind the first one of the extent `at`; NONE: it lacks the
/// chunk. The same holds for `len` chunks from this one on, and maybe for more.
#[derive(Clone, Copy, Debug)]
pub struct Found {
    pub at: ExtentId,
    pub skip: usize,
    pub len: usize,
}

/// How far a search along a prompt has come: an extent that has the next chunk begins with it.
#[derive(Clone, Copy, Debug)]
pub struct PromptCursor(usize);

impl PromptCursor {
    pub fn new() -> Self {
        Self(usize::MAX)
    }
}

/// An entry of the index: an extent by its first chunk. `tag` is a part of the key: it mostly tells keys apart without
/// a look at the extent.
#[derive(Clone, Copy, Debug)]
struct IndexEntry {
    tag: u32,
    at: ExtentId,
}

impl IndexEntry {
    fn new(key: Key, at: ExtentId) -> Self {
        Self { tag: (key >> 24) as u32, at }
    }

    /// The table takes positions from the low bits and control bytes from the high ones.
    fn hash(&self) -> u64 {
        u64::from(self.tag) << 32 | u64::from(self.tag)
    }
}

#[derive(Debug)]
pub struct Chunks {
    /// Each chunk is an extent by itself, and callers may name it without its prompt.
    single: bool,
    groups: GroupCounts,
    /// Hashed by tag, so that the table grows without a look at the extents.
    index: HashTable<IndexEntry>,
    places: Vec<Extent>,
    spare: Vec<ExtentId>,
}

impl Chunks {
    pub fn new(single: bool) -> Self {
        let (index, places, spare) = (HashTable::new(), Vec::new(), Vec::new());
        Self { single, groups: GroupCounts::default(), index, places, spare }
    }

    /// Where the level has the chunk of that number of a prompt.
    #[inline(always)]
    pub fn find(&self, cursor: &mut PromptCursor, keys: &[Key], number: usize) -> Found {
        let begins = self.single || cursor.0 == number;
        let mut from = if begins { number } else { number - number % ROW };
        loop {
            let lacking = self.lacking(keys, from);
            let at = if lacking > 0 { NONE } else { self.first(keys[from]) };
            let len = if at == NONE { lacking.max(1) } else { self.alike(at, &keys[from..]) };
            let beyond = from + len;
            if beyond > number {
                cursor.0 = beyond;
                return Found { at, skip: number - from, len: beyond - number };
            }
            from = beyond;
        }
    }

    /// How many chunks of a prompt the level lacks from that number on, up to `end`. It lacks the one before.
    #[inline(always)]
    pub fn lacks(&self, cursor: &mut PromptCursor, keys: &[Key], number: usize, end: usize) -> usize {
        let mut beyond = number;
        while beyond < end {
            match self.lacking(keys, beyond) {
                0 if self.first(keys[beyond]) != NONE => break,
                lacking => beyond += lacking.max(1),
            }
        }
        cursor.0 = beyond.min(end);
        cursor.0 - number
    }

    /// The extent that begins with that chunk.
    #[inline(always)]
    fn first(&self, key: Key) -> ExtentId {
        let sought = IndexEntry::new(key, NONE);
        let same = |first: &IndexEntry| first.tag == sought.tag && self[first.at].key == key;
        self.index.find(sought.hash(), same).map_or(NONE, |first| first.at)
    }

    /// How many chunks from that one on begin no extent, as far as one look tells; 0: it may begin one.
    #[inline(always)]
    fn lacking(&self, keys: &[Key], number: usize) -> usize {
        match self.groups.is_empty(GroupCounts::group_of(keys, number)) {
            true => (GROUP - number % GROUP).min(keys.len() - number),
            false => 0,
        }
    }

    /// How many of the keys are those of the extent's chunks; the first one is. Where two keys agree, those before them
    /// do too.
    #[inline(always)]
    fn alike(&self, at: ExtentId, keys: &[Key]) -> usize {
        let ours = self[at].keys();
        let most = ours.len().min(keys.len());
        if ours[most - 1] == keys[most - 1] {
            return most;
        }
        ours.iter().zip(keys).take_while(|(ours, theirs)| ours == theirs).count()
    }

    /// Has the processor fetch what the next eviction will read: this extent's prompt, and the next extent of its
    /// queue.
    #[inline(always)]
    pub fn prefetch(&self, at: ExtentId) {
        let Some(extent) = self.places.get(at as usize) else { return };
        if let Some(prompt) = &extent.prompt {
            // The prompt's reference count stands before the keys.
            fetch(prompt.as_ptr().wrapping_sub(2));
        }
        if let Some(next) = self.places.get(extent.newer as usize) {
            fetch(next);
        }
    }

    /// The extents that have a span's chunks.
    #[inline(always)]
    pub fn extents_of(&self, span: Span) -> impl Iterator<Item = ExtentId> {
        let (mut at, mut left) = (span.at, span.len);
        std::iter::from_fn(move || {
            if left == 0 {
                return None;
            }
            let (this, extent) = (at, &self[at]);
            (at, left) = (extent.rest, left - u32::from(extent.len));
            Some(this)
        })
    }

    /// Makes extents for the chunks of a range that are marked NEW.
    pub fn add(&mut self, range: &ChunkRange, marks: &mut Vec<Span>) {
        let (mut number, mut index) = (range.first(), 0);
        while index < marks.len() {
            let Span { at, len } = marks[index];
            if at == NEW {
                let span = self.add_row(range, number, number + len as usize);
                marks[index] = span;
                if span.len < len {
                    marks.insert(index + 1, Span { at, len: len - span.len });
                }
            }
            number += marks[index].len as usize;
            index += 1;
        }
    }

    /// Makes an extent of a prompt's chunks from that number on, up to `end` or the end of the row.
    #[inline(always)]
    fn add_row(&mut self, range: &ChunkRange, number: usize, end: usize) -> Span {
        let len = if self.single { 1 } else { (end - number).min(ROW - number % ROW) };
        let extent = Extent {
            key: range.prompt()[number],
            prompt: if len > 1 { range.shared() } else { None },
            first: number as u32,
            len: len as u16,
            staged: 0,
            readers: 0,
            older: NONE,
            newer: NONE,
            rest: NONE,
            group: GroupCounts::group_of(range.prompt(), number),
            uses: 0,
            state: NO_QUEUE << QUEUE_BIT,
        };
        Span::new(self.keep(extent), len)
    }

    #[inline(always)]
    fn keep(&mut self, extent: Extent) -> ExtentId {
        let key = extent.key;
        let at = match self.spare.pop() {
            Some(at) => {
                self[at] = extent;
                at
            }
            None => {
                self.places.push(extent);
                self.count_groups();
                (self.places.len() - 1) as ExtentId
            }
        };
        self.groups.add(self[at].group);
        let first = IndexEntry::new(key, at);
        self.index.insert_unique(first.hash(), first, IndexEntry::hash);
        at
    }

    /// Grows the group counts with the extents, so that few groups share a count.
    fn count_groups(&mut self) {
        const PLACES_PER_EXTENT: usize = 4;
        if self.single || self.places.len() * PLACES_PER_EXTENT / 2 <= self.groups.len() {
            return;
        }
        let groups = self.index.iter().map(|first| self.places[first.at as usize].group);
        self.groups = GroupCounts::of(self.places.len() * PLACES_PER_EXTENT, groups);
    }

    /// Cuts an extent behind its first `len` chunks. Returns the other part, which is in no queue yet.
    pub fn cut(&mut self, at: ExtentId, len: usize) -> ExtentId {
        let whole = self[at].clone();
        let first = whole.first + len as u32;
        let group = whole.prompt.as_deref().map_or(0, |prompt| GroupCounts::group_of(prompt, first as usize));
        let rest = Extent { key: whole.keys()[len], group, first, len: whole.len - len as u16, ..whole };
        let other = self.keep(rest);
        self[other].set_queue(None);
        (self[at].len, self[at].rest) = (len as u16, other);
        other
    }

    /// Takes the last `count` chunks off an extent that has more.
    pub fn shorten(&mut self, at: ExtentId, count: u64) {
        self[at].len -= count as u16;
    }

    #[inline(always)]
    pub fn remove(&mut self, at: ExtentId) {
        let extent = &mut self[at];
        extent.prompt = None;
        let (first, group) = (IndexEntry::new(extent.key, at), extent.group);
        self.groups.remove(group);
        if let Ok(found) = self.index.find_entry(first.hash(), |other| other.at == at) {
            found.remove();
        }
        self.spare.push(at);
    }

    /// Forgets all chunks.
    pub fn clear(&mut self) {
        self.index.clear();
        self.groups.clear();
        self.places.clear();
        self.spare.clear();
    }

    /// The names of all extents.
    pub fn places(&self) -> impl Iterator<Item = ExtentId> {
        self.index.iter().map(|first| first.at)
    }

    #[cfg(test)]
    pub fn iter(&self) -> impl Iterator<Item = &Extent> {
        self.places().map(|at| &self[at])
    }
}

impl Index<ExtentId> for Chunks {
    type Output = Extent;
    fn index(&self, at: ExtentId) -> &Extent {
        &self.places[at as usize]
    }
}

impl IndexMut<ExtentId> for Chunks {
    fn index_mut(&mut self, at: ExtentId) -> &mut Extent {
        &mut self.places[at as usize]
    }
}
