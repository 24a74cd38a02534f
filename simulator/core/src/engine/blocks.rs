//! The GPU's block pool with prefix caching, as in vLLM's block_pool.py. It has one free queue in eviction order.
//! Blocks stay findable by key until the pool hands them out again. It does not merge equal blocks.
//!
//! Requests take, use and release blocks in runs. So the pool keeps extents: blocks in a row of one run that have the
//! same users and are neighbours in the free queue. `tests/blocks_oracle.rs` does the same block by block; tests
//! compare.

use std::collections::hash_map::Entry;
use std::mem;

use super::node_ids::{NO_NODE, NodeId, Nodes};
use crate::journal::Journal;
use crate::keys::{BlockCursor, BlockRun, Key, KeyMap};

pub(super) type ExtentId = u32;

pub(super) const NONE: ExtentId = u32::MAX;

#[derive(Clone, Copy, Debug)]
pub(super) struct Extent {
    /// None: blocks without a key, which are all alike.
    pub key: Option<Key>,
    /// The blocks are numbers `start` to `start + blocks - 1` of the key's run.
    pub start: u32,
    pub blocks: u32,
    pub users: u32,
    /// What is evicted as a whole with these blocks, and when it was last used.
    pub node: NodeId,
    pub used: u64,
    /// The index has this extent: it is the first one of its key.
    pub leads: bool,
    /// Neighbours in the free queue, valid while users == 0. Of an extent, the pool hands out the last block first.
    pub before: ExtentId,
    pub after: ExtentId,
    /// The next extent of the same key. Of equal blocks, the first to get the key stands first.
    pub twin: ExtentId,
    /// The extent that was split off this one's end: earlier holders have both.
    pub rest: ExtentId,
}

impl Extent {
    pub fn holds(&self, number: u32) -> bool {
        self.start <= number && number < self.start + self.blocks
    }
}

/// Cached blocks in a row of one extent, `skip` blocks behind its start.
#[derive(Clone, Copy, Debug)]
struct Span {
    extent: ExtentId,
    skip: u32,
    blocks: u32,
}

/// The cached prefix of a prompt. Valid until the pool changes.
#[derive(Clone, Debug, Default)]
pub struct Cached {
    spans: Vec<Span>,
    pub end: BlockCursor,
    /// Blocks without users: `take` takes them out of the free queue.
    pub unused: u64,
}

/// The blocks that a request holds: findable ones first, then those without a key.
#[derive(Clone, Debug, Default)]
pub struct Held {
    pub(super) spans: Vec<(ExtentId, u32)>,
    pub findable: BlockCursor,
    pub(super) plain: u64,
    /// What the request adds next belongs to the node of what it added last.
    pub(super) node: Option<NodeId>,
}

impl Held {
    /// Reserves memory for what a request of these runs will hold.
    pub fn expect(&mut self, runs: &[BlockRun]) {
        self.spans.reserve(runs.len());
    }

    pub fn len(&self) -> u64 {
        self.findable.blocks + self.plain
    }

    /// The key of the run whose blocks become findable next, and how many do if `end` are to be.
    #[inline(always)]
    pub(super) fn next_of_run(&self, runs: &[BlockRun], end: u64) -> (Key, u32) {
        let run = runs[self.findable.run];
        let left = u64::from(run.blocks - self.findable.offset);
        (run.key, left.min(end - self.findable.blocks) as u32)
    }
}

/// What a request makes findable: what it has loaded from the first level, or what a read ahead has brought there for it,
/// or what it has computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Adds {
    Loaded,
    Fetched,
    Computed,
}

#[derive(Debug)]
pub struct BlockPool {
    pub(super) extents: Vec<Extent>,
    pub(super) spare: Vec<ExtentId>,
    pub(super) first: KeyMap<ExtentId>,
    pub(super) head: ExtentId,
    pub(super) tail: ExtentId,
    pub(super) free: u64,
    pub(super) blocks: u64,
    /// None: the pool evicts block by block.
    pub(super) nodes: Option<Nodes>,
    /// "evicted": a run's key, and the block's number in the run.
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
            nodes: None,
            journal,
        };
        pool.reset();
        pool
    }

    /// A pool that evicts what was registered together as a whole, and keeps no equal blocks.
    pub fn of_nodes(count: u32, journal: Journal) -> Self {
        Self { nodes: Some(Nodes::default()), ..Self::new(count, journal) }
    }

    pub fn free(&self) -> u64 {
        self.free
    }

    pub fn len(&self) -> u64 {
        self.blocks
    }

    /// The longest cached prefix of the runs' first `most` blocks.
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

    /// Adds the first `wanted` blocks of the run whose extents begin with `first`, as far as they are cached.
    fn find_in_run(&self, first: ExtentId, wanted: u32, runs: &[BlockRun], cached: &mut Cached) {
        let (mut at, mut from) = (0, first);
        while at < wanted {
            // An earlier extent answers from where it begins.
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
            // The extents passed over end before `at`: the next search skips them, unless one begins behind it.
            from = if stop == wanted { extent.twin } else { first };
            stop = stop.min(extent.start + extent.blocks);
            cached.spans.push(Span { extent: id, skip: at - extent.start, blocks: stop - at });
            cached.unused += if extent.users == 0 { u64::from(stop - at) } else { 0 };
            cached.end.advance(runs, stop - at);
            at = stop;
        }
    }

    /// Gives cached blocks one more user: they become a request's first blocks.
    pub fn take(&mut self, cached: &Cached, held: &mut Held) {
        for &Span { extent, mut skip, blocks } in &cached.spans {
            let mut id = extent;
            // A span before this one may have split the extent.
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
        self.part_node(held);
        self.touch(held);
    }

    /// Hands out up to `count` blocks from the head of the free queue, and drops their contents. Returns how many.
    pub fn allocate(&mut self, count: u64, held: &mut Held) -> u64 {
        let count = count.min(self.free);
        let mut left = count;
        while left > 0 {
            let id = self.head;
            if self.extents[id as usize].node != NO_NODE {
                self.evict_node(id);
                continue;
            }
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
    pub fn register(&mut self, runs: &[BlockRun], end: u64, held: &mut Held, adds: Adds) {
        if self.nodes.is_some() {
            return self.register_nodes(runs, end, held, adds);
        }
        while held.findable.blocks < end {
            let (key, blocks) = held.next_of_run(runs, end);
            self.add(key, blocks, NO_NODE, held);
            held.findable.advance(runs, blocks);
        }
    }

    /// Gives these blocks without a key, the request's next ones, that key and node.
    #[inline(always)]
    pub(super) fn add(&mut self, key: Key, blocks: u32, node: NodeId, held: &mut Held) {
        let start = held.findable.offset;
        held.plain -= u64::from(blocks);
        if let Some((id, length)) = held.spans.last_mut() {
            let extent = &mut self.extents[*id as usize];
            let follows =
                extent.key == Some(key) && extent.blocks == *length && extent.start + *length == start;
            let alone = extent.users == 1 && extent.leads && extent.twin == NONE;
            if follows && alone && extent.node == node {
                extent.blocks += blocks;
                *length += blocks;
                return;
            }
        }
        let id = self.keep(Extent { key: Some(key), start, blocks, users: 1, node, ..PLAIN });
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

    /// Takes one user from each block of a request. The request's tail goes first in the free queue; blocks without a
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
        self.release_plain(held);
        (held.findable, held.node) = (BlockCursor::default(), None);
    }

    /// Takes from a request its blocks without a key.
    pub fn release_plain(&mut self, held: &mut Held) {
        if held.plain > 0 {
            self.prepend_plain(mem::take(&mut held.plain) as u32);
        }
    }

    /// Drops all contents. All blocks must be free.
    pub fn reset(&mut self) {
        self.first.clear();
        self.extents.clear();
        self.spare.clear();
        self.nodes = self.nodes.take().map(|_| Nodes::default());
        (self.head, self.tail, self.free) = (NONE, NONE, 0);
        if self.blocks > 0 {
            self.prepend_plain(self.blocks as u32);
        }
    }

    pub(super) fn keep(&mut self, extent: Extent) -> ExtentId {
        if let Some(id) = self.spare.pop() {
            self.extents[id as usize] = extent;
            return id;
        }
        self.extents.push(extent);
        (self.extents.len() - 1) as ExtentId
    }

    /// Cuts an extent behind its first `blocks` blocks. Returns the other part.
    pub(super) fn split(&mut self, id: ExtentId, blocks: u32) -> ExtentId {
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
    #[inline(always)]
    pub(super) fn forget(&mut self, id: ExtentId) {
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
        if extent.users == 0 {
            self.append(id);
        }
    }
}

pub(super) const PLAIN: Extent = Extent {
    key: None,
    start: 0,
    blocks: 0,
    users: 0,
    node: NO_NODE,
    used: 0,
    leads: false,
    before: NONE,
    after: NONE,
    twin: NONE,
    rest: NONE,
};
