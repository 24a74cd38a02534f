//! Chunks that a tier knows, by key, and the queues that eviction policies keep them in.
//!
//! A chunk lies in one queue at most. Its state and its links share one place, so that a key is hashed once.

use std::ops::{Index, IndexMut};

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;

use crate::keys::Key;

/// A chunk's place in `Chunks`.
pub type At = u32;

const NONE: At = At::MAX;
const NO_QUEUE: u8 = u8::MAX;

#[derive(Clone, Copy, Debug)]
pub struct Chunk {
    pub key: Key,
    pub readers: u32,
    /// Writes in flight, each with room of its own; at most one of them is a store, so MOST_PREFETCHES bounds them.
    pub staged: u16,
    /// The policy's own count of uses.
    pub uses: u32,
    /// Which of its policy's queues it lies in.
    pub queue: u8,
    pub resident: bool,
    /// Gone with its last reader.
    pub temporary: bool,
    pub storing: bool,
    /// Brought in by a look-up that has not been answered yet.
    pub fresh: bool,
    /// Not to be picked again by the eviction that goes on.
    pub passed: bool,
    older: At,
    newer: At,
}

impl Chunk {
    pub fn queued(&self) -> bool {
        self.queue != NO_QUEUE
    }

    /// Resident, read by nobody and not being written once more.
    pub fn settled(&self) -> bool {
        self.resident && self.readers == 0 && self.staged == 0
    }

    /// May be picked to go.
    pub fn free(&self) -> bool {
        self.resident && self.readers == 0 && !self.passed
    }
}

#[derive(Debug, Default)]
pub struct Chunks {
    /// Places only, by their chunks' keys, which are hashes already: a third of the memory of a map from keys.
    index: HashTable<At>,
    places: Vec<Chunk>,
    spare: Vec<At>,
}

impl Chunks {
    pub fn find(&self, key: Key) -> Option<At> {
        self.index.find(key, |&at| self[at].key == key).copied()
    }

    pub fn find_or_add(&mut self, key: Key) -> At {
        let (places, spare) = (&mut self.places, &mut self.spare);
        let same = |&at: &At| places[at as usize].key == key;
        let vacant = match self.index.entry(key, same, |&at| places[at as usize].key) {
            Entry::Occupied(found) => return *found.get(),
            Entry::Vacant(vacant) => vacant,
        };
        let at = spare.pop().unwrap_or(places.len() as At);
        vacant.insert(at);
        let chunk = Chunk {
            key,
            readers: 0,
            staged: 0,
            uses: 0,
            queue: NO_QUEUE,
            resident: false,
            temporary: false,
            storing: false,
            fresh: false,
            passed: false,
            older: NONE,
            newer: NONE,
        };
        match places.get_mut(at as usize) {
            Some(place) => *place = chunk,
            None => places.push(chunk),
        }
        at
    }

    pub fn remove(&mut self, at: At) {
        let key = self[at].key;
        if let Ok(found) = self.index.find_entry(key, |&other| other == at) {
            found.remove();
        }
        self.spare.push(at);
    }

    pub fn places(&self) -> Vec<At> {
        self.index.iter().copied().collect()
    }

    #[cfg(test)]
    pub fn iter(&self) -> impl Iterator<Item = &Chunk> {
        self.index.iter().map(|&at| &self[at])
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
    pub fn push(&mut self, chunks: &mut Chunks, at: At) {
        let previous = self.newest;
        let chunk = &mut chunks[at];
        (chunk.older, chunk.newer, chunk.queue) = (previous, NONE, self.id);
        match previous {
            NONE => self.oldest = at,
            other => chunks[other].newer = at,
        }
        self.newest = at;
        self.len += 1;
    }

    /// Takes out a chunk that lies in this queue.
    pub fn take(&mut self, chunks: &mut Chunks, at: At) {
        let Chunk { older, newer, .. } = chunks[at];
        chunks[at].queue = NO_QUEUE;
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
        if self.newest != at {
            self.take(chunks, at);
            self.push(chunks, at);
        }
    }

    /// The oldest chunk that may go.
    pub fn first_free(&self, chunks: &Chunks) -> Option<At> {
        let mut at = self.oldest;
        while at != NONE && !chunks[at].free() {
            at = chunks[at].newer;
        }
        (at != NONE).then_some(at)
    }
}
