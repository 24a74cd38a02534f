//! A queue of extents, oldest first, for eviction policies.

use crate::chunks::{Chunks, Extent, ExtentId, NONE};

#[derive(Clone, Copy, Debug)]
pub struct Queue {
    id: u8,
    oldest: ExtentId,
    newest: ExtentId,
    len: u64,
}

impl Queue {
    pub fn new(id: u8) -> Self {
        Self { id, oldest: NONE, newest: NONE, len: 0 }
    }

    pub fn len(&self) -> u64 {
        self.len
    }

    /// Appends an extent that is in no queue at the new end.
    #[inline(always)]
    pub fn push(&mut self, chunks: &mut Chunks, at: ExtentId) {
        let previous = self.newest;
        let chunk = &mut chunks[at];
        (chunk.older, chunk.newer) = (previous, NONE);
        chunk.set_queue(Some(self.id));
        match previous {
            NONE => self.oldest = at,
            other => chunks[other].newer = at,
        }
        self.newest = at;
        self.len += 1;
    }

    /// Takes out an extent of this queue.
    #[inline(always)]
    pub fn take(&mut self, chunks: &mut Chunks, at: ExtentId) {
        let Extent { older, newer, .. } = chunks[at];
        chunks[at].set_queue(None);
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

    /// `other` was cut off the end of an extent of this queue: it goes right before that extent.
    pub fn cut(&mut self, chunks: &mut Chunks, at: ExtentId, other: ExtentId) {
        let older = chunks[at].older;
        match older {
            NONE => self.oldest = other,
            before => chunks[before].newer = other,
        }
        (chunks[other].older, chunks[other].newer) = (older, at);
        chunks[at].older = other;
        chunks[other].set_queue(Some(self.id));
        self.len += 1;
    }

    pub fn renew(&mut self, chunks: &mut Chunks, at: ExtentId) {
        self.renew_row(chunks, at, at);
    }

    /// Moves the extents to the new end, the last one first; skips extents that are in no queue. Extents that came
    /// together are neighbours and move at once.
    pub fn renew_all(&mut self, chunks: &mut Chunks, extents: &[ExtentId]) {
        let (mut first, mut last) = (NONE, NONE);
        for &at in extents.iter().rev() {
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

    /// Moves the neighbours from `first` to `last` to the new end, in their order.
    #[inline(always)]
    fn renew_row(&mut self, chunks: &mut Chunks, first: ExtentId, last: ExtentId) {
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

    /// The oldest free extent.
    pub fn first_free(&self, chunks: &Chunks) -> Option<ExtentId> {
        self.free_from(chunks, self.oldest)
    }

    /// The oldest free extent from `at` on; NONE: from the oldest on.
    #[inline(always)]
    pub fn free_from(&self, chunks: &Chunks, at: ExtentId) -> Option<ExtentId> {
        let mut at = if at == NONE { self.oldest } else { at };
        while at != NONE && !chunks[at].free() {
            at = chunks[at].newer;
        }
        (at != NONE).then_some(at)
    }
}
