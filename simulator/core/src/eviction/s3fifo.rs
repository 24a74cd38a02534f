//! S3-FIFO (Yang et al., SOSP 2023) with libCacheSim's definitions. The small queue has a tenth of the capacity,
//! rounded down; the ghost queue remembers nine tenths. Two uses in the small queue lead into the main one, which
//! counts up to three uses. Until the first eviction, chunks for which the small queue has no room go into the main
//! one.
//!
//! libCacheSim's small queue takes no object if its size is one, so below 20 chunks it never hits; here it takes one.

use super::Eviction;
use super::ghosts::Ghosts;
use super::queue::Queue;
use crate::chunks::{Chunks, ExtentId};
use crate::keys::Key;

const SMALL_SHARE: f64 = 0.1;
const GHOST_SHARE: f64 = 0.9;
const USES_TO_MAIN: u8 = 2;
const MOST_USES: u8 = 3;
const SMALL: u8 = 0;
const MAIN: u8 = 1;

#[derive(Debug)]
pub struct S3Fifo {
    small: Queue,
    main: Queue,
    ghosts: Ghosts,
    small_room: u64,
    main_room: u64,
    ghost_room: u64,
    has_evicted: bool,
    /// The key of the next chunk to come, if it was a ghost.
    returning: Option<Key>,
}

impl S3Fifo {
    pub fn new(capacity: u64) -> Self {
        let small_room = ((capacity as f64 * SMALL_SHARE) as u64).max(1);
        Self {
            small: Queue::new(SMALL),
            main: Queue::new(MAIN),
            ghosts: Ghosts::default(),
            small_room,
            main_room: capacity.saturating_sub(small_room),
            ghost_room: (capacity as f64 * GHOST_SHARE) as u64,
            has_evicted: false,
            returning: None,
        }
    }

    fn small_victim(&mut self, chunks: &mut Chunks) -> Option<ExtentId> {
        while let Some(at) = self.small.first_free(chunks) {
            if chunks[at].uses < USES_TO_MAIN {
                return Some(at);
            }
            self.small.take(chunks, at);
            chunks[at].uses = 0;
            self.main.push(chunks, at);
        }
        None
    }

    fn main_victim(&mut self, chunks: &mut Chunks) -> Option<ExtentId> {
        while let Some(at) = self.main.first_free(chunks) {
            let uses = chunks[at].uses;
            if uses == 0 {
                return Some(at);
            }
            chunks[at].uses = uses.min(MOST_USES) - 1;
            self.main.take(chunks, at);
            self.main.push(chunks, at);
        }
        None
    }
}

impl Eviction for S3Fifo {
    fn miss(&mut self, chunks: &Chunks, at: ExtentId) {
        let key = chunks[at].key;
        self.returning = self.ghosts.remove(key).then_some(key);
    }

    fn insert(&mut self, chunks: &mut Chunks, at: ExtentId) {
        let returns = self.returning.take() == Some(chunks[at].key);
        let overflows = !self.has_evicted && self.small.len() >= self.small_room;
        chunks[at].uses = 0;
        if returns || overflows { self.main.push(chunks, at) } else { self.small.push(chunks, at) }
    }

    fn used(&mut self, chunks: &mut Chunks, at: ExtentId) {
        chunks[at].uses = chunks[at].uses.saturating_add(1);
    }

    fn victim(&mut self, chunks: &mut Chunks, _from: ExtentId) -> Option<ExtentId> {
        self.has_evicted = true;
        let main_first = self.main.len() > self.main_room || self.small.len() == 0;
        let first = if main_first { self.main_victim(chunks) } else { None };
        first.or_else(|| self.small_victim(chunks)).or_else(|| self.main_victim(chunks))
    }

    fn remove(&mut self, chunks: &mut Chunks, at: ExtentId, evicted: bool) {
        if chunks[at].queue() == MAIN {
            return self.main.take(chunks, at);
        }
        self.small.take(chunks, at);
        if evicted && self.ghost_room > 0 {
            if self.ghosts.len() >= self.ghost_room {
                self.ghosts.forget_oldest();
            }
            self.ghosts.push(chunks[at].key);
        }
    }
}
