//! An extent: chunks in a row of a prompt that have the same state and are neighbours in the same queue.

use std::slice;
use std::sync::Arc;

use crate::keys::Key;

/// The name of an extent in `Chunks`.
pub type ExtentId = u32;

/// No extent.
pub const NONE: ExtentId = ExtentId::MAX;
/// An extent that is yet to be made.
pub const NEW: ExtentId = ExtentId::MAX - 1;
/// A chunk's state, bit by bit: the level holds it.
pub const RESIDENT: u8 = 1;
/// The chunk goes with its last reader.
pub const TEMPORARY: u8 = 2;
/// A store is writing the chunk.
pub const STORING: u8 = 4;
/// A look-up brought the chunk in and has not been answered yet.
pub const FRESH: u8 = 8;
/// The eviction that goes on has passed the chunk over.
pub const PASSED: u8 = 16;
/// The level below has got the chunk, so that it may go, whatever became of the copy since.
pub const OFFLOADED: u8 = 128;
/// From this bit on: which of the policy's queues has the chunk.
pub(super) const QUEUE_BIT: u32 = 5;
pub(super) const NO_QUEUE: u8 = 3;

/// One cache line each: in a large level, most extents are in none of the processor's caches.
#[derive(Clone, Debug)]
#[repr(align(64))]
pub struct Extent {
    /// The first chunk's key.
    pub key: Key,
    /// If the extent has further chunks: the prompt's keys, and the number of the first chunk among them.
    pub(super) prompt: Option<Arc<[Key]>>,
    pub(super) first: u32,
    pub(super) len: u16,
    /// Writes in flight, each with its own room. At most one is a store, so MOST_PREFETCHES bounds their number.
    pub staged: u16,
    pub readers: u32,
    /// The neighbours in the queue.
    pub older: ExtentId,
    pub newer: ExtentId,
    /// The extent that was cut off this one's end: a span that was made before has both.
    pub(super) rest: ExtentId,
    /// The first chunk's group in `GroupCounts`.
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

    /// The extent that was cut off this one's end.
    pub fn rest(&self) -> ExtentId {
        self.rest
    }

    /// The number of chunks.
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
        (self.state >> QUEUE_BIT) & NO_QUEUE
    }

    pub fn queued(&self) -> bool {
        self.queue() != NO_QUEUE
    }

    /// Notes the queue that has the extent from now on; None: none has.
    pub fn set_queue(&mut self, queue: Option<u8>) {
        let queue = queue.unwrap_or(NO_QUEUE);
        self.state = (self.state & !(NO_QUEUE << QUEUE_BIT)) | (queue << QUEUE_BIT);
    }

    /// Ends one write. True: this made the extent resident.
    pub fn admit(&mut self, temporary: bool) -> bool {
        let comes = !self.is(RESIDENT);
        self.staged -= 1;
        if comes {
            self.set(RESIDENT, true);
            self.set(TEMPORARY, temporary);
        }
        comes
    }

    /// Resident, without readers, and without another write in flight.
    pub fn settled(&self) -> bool {
        self.is(RESIDENT) && self.readers == 0 && self.staged == 0
    }

    /// How many chunks are settled: all or none.
    pub fn settled_chunks(&self) -> u64 {
        if self.settled() { self.chunks() } else { 0 }
    }

    /// An eviction may pick the extent.
    pub fn free(&self) -> bool {
        self.state & (RESIDENT | PASSED) == RESIDENT && self.readers == 0
    }
}
