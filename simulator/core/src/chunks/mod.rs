//! Chunks that a tier knows.
//!
//! What is stored together is mostly used together and goes together, so chunks in a row of a prompt that are in the same
//! state and lie side by side in a queue, the last of them next to go, are one extent. It is cut where only a range of it
//! is concerned. An extent lies in one queue at most; its state and its links share one place. A chunk's key tells all
//! that comes before it in its prompt, so a prompt is walked along, extent by extent: only an extent's first chunk is in
//! the index. No extent reaches from one row into the next, so that a cursor to any chunk begins not far before it.

mod extent;
mod groups;
pub mod spans;

use std::ops::{Index, IndexMut};

use hashbrown::HashTable;

use crate::keys::{ChunkRange, Key};
use crate::memory::fetch;

pub use extent::{Extent, ExtentId, FRESH, NEW, NONE, PASSED, RESIDENT, STORING, TEMPORARY};
use extent::{NO_QUEUE, QUEUE_BIT};
use groups::{GROUP, GroupCounts};
use spans::Span;

/// Extents end before each chunk of a prompt whose number divides by this.
const ROW: usize = 16;

/// Where a chunk of a prompt lies: `skip` chunks behind the first one of an extent, or NONE. So many chunks from it on
/// lie in the same extent, or nowhere; more of those may follow.
#[derive(Clone, Copy, Debug)]
pub struct Found {
    pub at: ExtentId,
    pub skip: usize,
    pub len: usize,
}

/// Up to where a prompt has been walked along: an extent that has the next chunk begins with it.
#[derive(Clone, Copy, Debug)]
pub struct PromptCursor(usize);

impl PromptCursor {
    pub fn new() -> Self {
        Self(usize::MAX)
    }
}

/// An extent by its first chunk. `tag` is a range of its key: those that differ are told apart without a look at it.
#[derive(Clone, Copy, Debug)]
struct First {
    tag: u32,
    at: ExtentId,
}

impl First {
    fn new(key: Key, at: ExtentId) -> Self {
        Self { tag: (key >> 24) as u32, at }
    }

    /// A table takes its places from the low bits and its marks from the high ones.
    fn hash(&self) -> u64 {
        u64::from(self.tag) << 32 | u64::from(self.tag)
    }
}

#[derive(Debug)]
pub struct Chunks {
    /// Each chunk is an extent by itself, and may be named without its prompt.
    single: bool,
    groups: GroupCounts,
    /// By their tags, so that no extent has to be looked at when the table is made anew.
    index: HashTable<First>,
    places: Vec<Extent>,
    spare: Vec<ExtentId>,
}

impl Chunks {
    pub fn new(single: bool) -> Self {
        let (index, places, spare) = (HashTable::new(), Vec::new(), Vec::new());
        Self { single, groups: GroupCounts::default(), index, places, spare }
    }

    /// Where the chunk of that number of a prompt lies.
    #[inline(always)]
    pub fn find(&self, cursor: &mut PromptCursor, keys: &[Key], number: usize) -> Found {
        let begins = self.single || cursor.0 == number;
        let mut from = if begins { number } else { number - number % ROW };
        loop {
            let at = self.first(keys[from]);
            let len = if at == NONE { self.absent(keys, from) } else { self.alike(at, &keys[from..]) };
            let beyond = from + len;
            if beyond > number {
                cursor.0 = beyond;
                return Found { at, skip: number - from, len: beyond - number };
            }
            from = beyond;
        }
    }

    /// The extent that begins with that chunk.
    #[inline(always)]
    fn first(&self, key: Key) -> ExtentId {
        let sought = First::new(key, NONE);
        let same = |first: &First| first.tag == sought.tag && self[first.at].key == key;
        self.index.find(sought.hash(), same).map_or(NONE, |first| first.at)
    }

    /// How many chunks from that one on, with which no extent begins, are the first one of none.
    #[inline(always)]
    fn absent(&self, keys: &[Key], number: usize) -> usize {
        match self.groups.is_empty(GroupCounts::group_of(keys, number)) {
            true => (GROUP - number % GROUP).min(keys.len() - number),
            false => 1,
        }
    }

    /// How many of the keys, the first of which is that of its first chunk, are those of an extent's chunks. Where two
    /// agree, those before them do too.
    #[inline(always)]
    fn alike(&self, at: ExtentId, keys: &[Key]) -> usize {
        let ours = self[at].keys();
        let most = ours.len().min(keys.len());
        if ours[most - 1] == keys[most - 1] {
            return most;
        }
        ours.iter().zip(keys).take_while(|(ours, theirs)| ours == theirs).count()
    }

    /// What dropping that extent, and then the next one of its queue, will look at is fetched meanwhile.
    #[inline(always)]
    pub fn expect(&self, at: ExtentId) {
        let Some(extent) = self.places.get(at as usize) else { return };
        if let Some(prompt) = &extent.prompt {
            // Its count of users stands before the keys.
            fetch(prompt.as_ptr().wrapping_sub(2));
        }
        if let Some(next) = self.places.get(extent.newer as usize) {
            fetch(next);
        }
    }

    /// The extents that a span's chunks lie in.
    #[inline(always)]
    pub fn lie_in(&self, span: Span) -> impl Iterator<Item = ExtentId> {
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

    /// Gives places to those of a range's chunks that are to have NEW ones.
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

    /// An extent of a prompt's chunks from that number on, up to `end` or the end of its row.
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
        let first = First::new(key, at);
        self.index.insert_unique(first.hash(), first, First::hash);
        at
    }

    /// Keeps most groups in places of their own.
    fn count_groups(&mut self) {
        const PLACES_PER_EXTENT: usize = 4;
        if self.single || self.places.len() * PLACES_PER_EXTENT / 2 <= self.groups.len() {
            return;
        }
        let groups = self.index.iter().map(|first| self.places[first.at as usize].group);
        self.groups = GroupCounts::of(self.places.len() * PLACES_PER_EXTENT, groups);
    }

    /// Cuts an extent behind its first `len` chunks, and returns the other range, which lies in no queue yet.
    pub fn cut(&mut self, at: ExtentId, len: usize) -> ExtentId {
        let whole = self[at].clone();
        let first = whole.first + len as u32;
        let group = whole.prompt.as_deref().map_or(0, |prompt| GroupCounts::group_of(prompt, first as usize));
        let range = Extent { key: whole.keys()[len], group, first, len: whole.len - len as u16, ..whole };
        let other = self.keep(range);
        self[other].lies_in(None);
        (self[at].len, self[at].rest) = (len as u16, other);
        other
    }

    /// Takes the last chunks off an extent that has more than so many.
    pub fn shorten(&mut self, at: ExtentId, count: u64) {
        self[at].len -= count as u16;
    }

    #[inline(always)]
    pub fn remove(&mut self, at: ExtentId) {
        let extent = &mut self[at];
        extent.prompt = None;
        let (first, group) = (First::new(extent.key, at), extent.group);
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

    /// Where all extents lie.
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
