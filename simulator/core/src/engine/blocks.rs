//! The GPU's block pool with prefix caching, as in vLLM's block_pool.py: one free queue in eviction order, blocks
//! that stay findable by key until they are handed out again, and no merging of equal blocks.
//!
//! Blocks come, are used and go in runs, so the pool keeps extents: blocks in a row of one run that have the same
//! users and lie side by side in the free queue. `blocks_oracle.rs` says block by block what must come out.

use std::collections::hash_map::Entry;

use crate::journal::Journal;
use crate::keys::{BlockCursor, BlockRun, Key, KeyMap};

type ExtentId = u32;

const NONE: ExtentId = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Extent {
    /// None: blocks without a key, all alike.
    key: Option<Key>,
    /// The blocks are numbers `start` to `start + blocks - 1` of the key's run.
    start: u32,
    blocks: u32,
    users: u32,
    /// The index has it: of the extents of its key it stands first.
    leads: bool,
    /// Neighbours in the free queue; meaningful while users == 0. Within an extent the last block is next to go.
    before: ExtentId,
    after: ExtentId,
    /// The next extent of the same key; of equal blocks the one that came first to hold the key stands first.
    twin: ExtentId,
    /// What was split off its end, for those who hold both.
    rest: ExtentId,
}

/// Cached blocks in a row that lie in one extent, `skip` blocks behind its start.
#[derive(Clone, Copy, Debug)]
struct Span {
    extent: ExtentId,
    skip: u32,
    blocks: u32,
}

/// What the pool holds of a prompt. Good until the pool changes.
#[derive(Clone, Debug, Default)]
pub struct Cached {
    spans: Vec<Span>,
    pub end: BlockCursor,
    /// Blocks that nobody uses: taking them takes them out of the free queue.
    pub unused: u64,
}

/// The blocks that a request holds: findable ones first, then those without a key.
#[derive(Clone, Debug, Default)]
pub struct Held {
    spans: Vec<(ExtentId, u32)>,
    pub findable: BlockCursor,
    plain: u64,
}

impl Held {
    /// Makes room for what a request of these runs will hold.
    pub fn expect(&mut self, runs: &[BlockRun]) {
        self.spans.reserve(runs.len());
    }

    pub fn len(&self) -> u64 {
        self.findable.blocks + self.plain
    }
}

#[derive(Debug)]
pub struct BlockPool {
    extents: Vec<Extent>,
    spare: Vec<ExtentId>,
    first: KeyMap<ExtentId>,
    head: ExtentId,
    tail: ExtentId,
    free: u64,
    blocks: u64,
    /// "evicted": a run's key, and which of its blocks.
    pub journal: Journal,
}

impl BlockPool {
    pub fn new(count: u32, journal: Journal) -> Self {
        let mut pool = Self {
            extents: Vec::new(),
            spare: Vec::new(),
            first: KeyMap::default(),
            head: NONE,
            tail: NONE,
            free: 0,
            blocks: u64::from(count),
            journal,
        };
        pool.reset();
        pool
    }

    pub fn free(&self) -> u64 {
        self.free
    }

    pub fn len(&self) -> u64 {
        self.blocks
    }

    /// The longest prefix of the runs' first `most` blocks that is cached.
    pub fn find(&self, runs: &[BlockRun], most: u64) -> Cached {
        let mut cached = Cached::default();
        while cached.end.blocks < most && cached.end.run < runs.len() {
            let at = cached.end.run;
            let Some(&first) = self.first.get(&runs[at].key) else { break };
            if at == 0 {
                cached.spans.reserve(runs.len());
            }
            let wanted = u64::from(runs[at].blocks).min(most - cached.end.blocks) as u32;
            self.find_in_run(first, wanted, runs, &mut cached);
            if cached.end.run == at {
                break;
            }
        }
        cached
    }

    /// The first `wanted` blocks of the run whose extents begin with `first`, as far as they are cached.
    fn find_in_run(&self, first: ExtentId, wanted: u32, runs: &[BlockRun], cached: &mut Cached) {
        let (mut at, mut from) = (0, first);
        while at < wanted {
            // Where an extent that stands before the one that is found begins, that one answers.
            let (mut id, mut stop) = (from, wanted);
            let extent = loop {
                if id == NONE {
                    return;
                }
                let extent = &self.extents[id as usize];
                if extent.start > at {
                    stop = stop.min(extent.start);
                } else if at < extent.start + extent.blocks {
                    break extent;
                }
                id = extent.twin;
            };
            // Those passed over end before `at` and need not be looked at again, unless one begins behind it.
            from = if stop == wanted { extent.twin } else { first };
            stop = stop.min(extent.start + extent.blocks);
            cached.spans.push(Span { extent: id, skip: at - extent.start, blocks: stop - at });
            cached.unused += if extent.users == 0 { u64::from(stop - at) } else { 0 };
            cached.end.advance(runs, stop - at);
            at = stop;
        }
    }

    /// One more user for cached blocks: a request's first ones.
    pub fn take(&mut self, cached: &Cached, held: &mut Held) {
        for &Span { extent, mut skip, blocks } in &cached.spans {
            let mut id = extent;
            // A piece before this one may have split the extent.
            while skip > 0 && skip >= self.extents[id as usize].blocks {
                skip -= self.extents[id as usize].blocks;
                id = self.extents[id as usize].rest;
            }
            if skip > 0 {
                id = self.split(id, skip);
            }
            if blocks < self.extents[id as usize].blocks {
                self.split(id, blocks);
            }
            if self.extents[id as usize].users == 0 {
                self.unlink(id);
            }
            self.extents[id as usize].users += 1;
            held.spans.push((id, blocks));
        }
        held.findable = cached.end;
    }

    /// Hands out up to `count` blocks from the head of the free queue, and says how many. What they held is gone.
    pub fn allocate(&mut self, count: u64, held: &mut Held) -> u64 {
        let count = count.min(self.free);
        let mut left = count;
        while left > 0 {
            let id = self.head;
            let extent = &mut self.extents[id as usize];
            let taken = u64::from(extent.blocks).min(left);
            extent.blocks -= taken as u32;
            if let (Some(key), true) = (extent.key, self.journal.on()) {
                let (start, end) =
                    (extent.start + extent.blocks, extent.start + extent.blocks + taken as u32);
                (start..end).rev().for_each(|i| self.journal.note("evicted", || vec![key, u64::from(i)]));
            }
            self.free -= taken;
            left -= taken;
            if extent.blocks == 0 {
                self.unlink(id);
                self.forget(id);
                self.spare.push(id);
            }
        }
        held.plain += count;
        count
    }

    /// Makes a request's first `end` blocks findable.
    #[inline(never)]
    pub fn register(&mut self, runs: &[BlockRun], end: u64, held: &mut Held) {
        while held.findable.blocks < end {
            let run = runs[held.findable.run];
            let left = u64::from(run.blocks - held.findable.offset);
            let blocks = left.min(end - held.findable.blocks) as u32;
            self.add(run.key, held.findable.offset, blocks, held);
            held.plain -= u64::from(blocks);
            held.findable.advance(runs, blocks);
        }
    }

    fn add(&mut self, key: Key, start: u32, blocks: u32, held: &mut Held) {
        if let Some((id, length)) = held.spans.last_mut() {
            let extent = &mut self.extents[*id as usize];
            let follows =
                extent.key == Some(key) && extent.blocks == *length && extent.start + *length == start;
            if follows && extent.users == 1 && extent.leads && extent.twin == NONE {
                extent.blocks += blocks;
                *length += blocks;
                return;
            }
        }
        let id = self.keep(Extent { key: Some(key), start, blocks, users: 1, ..PLAIN });
        held.spans.push((id, blocks));
        let mut last = match self.first.entry(key) {
            Entry::Vacant(vacant) => {
                vacant.insert(id);
                self.extents[id as usize].leads = true;
                return;
            }
            Entry::Occupied(first) => *first.get(),
        };
        while self.extents[last as usize].twin != NONE {
            last = self.extents[last as usize].twin;
        }
        self.extents[last as usize].twin = id;
    }

    /// One user less for each block of a request. The request's tail comes first in the free queue; blocks without a
    /// key go to its front.
    pub fn release(&mut self, held: &mut Held) {
        for (first, blocks) in held.spans.drain(..).rev() {
            if self.extents[first as usize].blocks == blocks {
                self.leave(first);
                continue;
            }
            let (mut ids, mut id, mut left) = (Vec::new(), first, blocks);
            while left > 0 {
                ids.push(id);
                left -= self.extents[id as usize].blocks;
                id = self.extents[id as usize].rest;
            }
            ids.into_iter().rev().for_each(|id| self.leave(id));
        }
        if held.plain > 0 {
            self.prepend_plain(held.plain as u32);
        }
        (held.findable, held.plain) = (BlockCursor::default(), 0);
    }

    /// Forgets all contents. All blocks must be free.
    pub fn reset(&mut self) {
        self.first.clear();
        self.extents.clear();
        self.spare.clear();
        (self.head, self.tail, self.free) = (NONE, NONE, 0);
        if self.blocks > 0 {
            self.prepend_plain(self.blocks as u32);
        }
    }

    fn keep(&mut self, extent: Extent) -> ExtentId {
        if let Some(id) = self.spare.pop() {
            self.extents[id as usize] = extent;
            return id;
        }
        self.extents.push(extent);
        (self.extents.len() - 1) as ExtentId
    }

    /// Cuts an extent behind its first `blocks` blocks, and returns the other part.
    fn split(&mut self, id: ExtentId, blocks: u32) -> ExtentId {
        let whole = self.extents[id as usize];
        let (start, left) = (whole.start + blocks, whole.blocks - blocks);
        let part = Extent { start, blocks: left, leads: false, ..whole };
        let other = self.keep(part);
        let extent = &mut self.extents[id as usize];
        (extent.blocks, extent.twin, extent.rest) = (blocks, other, other);
        if whole.users == 0 {
            extent.before = other;
            self.extents[other as usize].after = id;
            match whole.before {
                NONE => self.head = other,
                before => self.extents[before as usize].after = other,
            }
        }
        other
    }

    /// Takes an extent out of the index.
    fn forget(&mut self, id: ExtentId) {
        let Extent { key, twin, .. } = self.extents[id as usize];
        let Some(key) = key else { return };
        let Entry::Occupied(mut first) = self.first.entry(key) else { return };
        if *first.get() == id {
            match twin {
                NONE => drop(first.remove()),
                other => {
                    *first.get_mut() = other;
                    self.extents[other as usize].leads = true;
                }
            }
            return;
        }
        let mut at = *first.get();
        while self.extents[at as usize].twin != id {
            at = self.extents[at as usize].twin;
        }
        self.extents[at as usize].twin = twin;
    }

    fn leave(&mut self, id: ExtentId) {
        let extent = &mut self.extents[id as usize];
        extent.users -= 1;
        if extent.users > 0 {
            return;
        }
        (extent.before, extent.after) = (self.tail, NONE);
        self.free += u64::from(extent.blocks);
        match self.tail {
            NONE => self.head = id,
            other => self.extents[other as usize].after = id,
        }
        self.tail = id;
    }

    fn prepend_plain(&mut self, blocks: u32) {
        self.free += u64::from(blocks);
        let head = self.head;
        if head != NONE && self.extents[head as usize].key.is_none() {
            self.extents[head as usize].blocks += blocks;
            return;
        }
        let id = self.keep(Extent { blocks, after: head, ..PLAIN });
        match head {
            NONE => self.tail = id,
            other => self.extents[other as usize].before = id,
        }
        self.head = id;
    }

    fn unlink(&mut self, id: ExtentId) {
        let Extent { before, after, blocks, .. } = self.extents[id as usize];
        match before {
            NONE => self.head = after,
            other => self.extents[other as usize].after = after,
        }
        match after {
            NONE => self.tail = before,
            other => self.extents[other as usize].before = before,
        }
        self.free -= u64::from(blocks);
    }
}

const PLAIN: Extent = Extent {
    key: None,
    start: 0,
    blocks: 0,
    users: 0,
    leads: false,
    before: NONE,
    after: NONE,
    twin: NONE,
    rest: NONE,
};

#[cfg(test)]
impl BlockPool {
    /// What the blocks in the free queue hold, next to be handed out first.
    pub fn queue(&self) -> Vec<Option<(Key, u32)>> {
        let (mut blocks, mut at) = (Vec::new(), self.head);
        while at != NONE {
            let Extent { key, start, blocks: count, after, .. } = self.extents[at as usize];
            blocks.extend((start..start + count).rev().map(|i| key.map(|key| (key, i))));
            at = after;
        }
        blocks
    }

    /// Panics unless every block is free or held by as many requests as it has users.
    pub fn check<'a>(&self, requests: impl Iterator<Item = &'a Held>) {
        let mut users = vec![0; self.extents.len()];
        let mut plain = 0;
        for held in requests {
            plain += held.plain;
            let mut findable = 0;
            for &(first, blocks) in &held.spans {
                let (mut id, mut left) = (first, blocks);
                while left > 0 {
                    users[id as usize] += 1;
                    left -= self.extents[id as usize].blocks;
                    id = self.extents[id as usize].rest;
                }
                findable += u64::from(blocks);
            }
            assert_eq!(findable, held.findable.blocks);
        }
        let used = users.iter().zip(&self.extents).filter(|(users, _)| **users > 0);
        let in_use: u64 = used
            .map(|(users, extent)| {
                assert_eq!(*users, extent.users);
                u64::from(extent.blocks)
            })
            .sum();
        assert_eq!(self.queue().len() as u64, self.free);
        assert_eq!(self.free + in_use + plain, self.blocks);
    }
}
