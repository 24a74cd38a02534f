//! Extents: chunks in a row of a prompt that are in the same state and neighbours in the same queue.

use std::slice;
use std::sync::Arc;

use crate::keys::Key;

/// The name of an extent in `Chunks`.
pub type ExtentId = u32;

/// No extent.
pub const NONE: ExtentId = ExtentId::MAX;
/// An extent that is yet to be made.
pub const NEW: ExtentId = ExtentId::MAX - 1;
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
pub(super) const QUEUE_BIT: u32 = 5;
pub(super) const NO_QUEUE: u8 = 3;

/// A cache line of the processor each, for in a large tier most lie in none of its caches.
#[derive(Clone, Debug)]
#[repr(align(64))]
pub struct Extent {
    /// Its first chunk's.
    pub key: Key,
    /// Where the others' keys are, if it has others: a prompt's, and the number of the first chunk in that.
    pub(super) prompt: Option<Arc<[Key]>>,
    pub(super) first: u32,
    pub(super) len: u16,
    /// Writes in flight, each with room of its own; at most one of them is a store, so MOST_PREFETCHES bounds them.
    pub staged: u16,
    pub readers: u32,
    /// Its neighbours in its queue.
    pub older: ExtentId,
    pub newer: ExtentId,
    /// What was cut off its end, for those who hold both.
    pub(super) rest: ExtentId,
    /// The name in `GroupCounts` of the group that its first chunk is of.
    pub(super) group: u32,
    /// The policy's own note.
    pub uses: u8,
    pub(super) state: u8,
}

impl Extent {
    pub fn is(&self, what: u8) -> bool {
        self.state & what != 0
    }

    pub fn set(&mut self, what: u8, on: bool) {
        self.state = if on { self.state | what } else { self.state & !what };
    }

    /// What was cut off its end.
    pub fn rest(&self) -> ExtentId {
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
