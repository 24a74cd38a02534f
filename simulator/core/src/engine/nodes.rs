//! Blocks that are evicted as a whole, as the nodes of SGLang's radix tree (unified_tree_core.py).
//!
//! What one insertion adds is one node. A prefix that ends inside of a node cuts it in two, and the other part counts as
//! used then (_split_node). A node's blocks so always have the same users, and are neighbours in the free queue.

use super::blocks::{Adds, BlockPool, ExtentId, Held, NONE};
use super::node_ids::NO_NODE;
use crate::keys::{BlockRun, Key};

impl BlockPool {
    /// As `register`, in nodes.
    #[inline(never)]
    pub(super) fn register_nodes(&mut self, runs: &[BlockRun], end: u64, held: &mut Held, adds: Adds) {
        if adds != Adds::ToReply {
            held.node = None;
        }
        while held.findable.blocks < end {
            let ((key, mut blocks), mut ends) = (held.next_of_run(runs, end), false);
            if adds <= Adds::Chunk {
                if self.adopt(key, held) {
                    held.findable.advance(runs, 1);
                    continue;
                }
                (blocks, ends) = self.until_end_of_node(key, blocks, held);
            }
            let node = self.nodes.as_mut().map_or(NO_NODE, |nodes| nodes.add(&mut held.node, blocks));
            self.add(key, blocks, node, held);
            held.findable.advance(runs, blocks);
            if ends && adds == Adds::Loaded {
                held.node = None;
            }
        }
    }

    /// A request's cached prefix may end inside of a node: cuts that node, and makes its other part the newest.
    pub(super) fn part_node(&mut self, held: &Held) {
        if self.nodes.is_none() {
            return;
        }
        let mut ours = self.extents_held(held);
        let Some(&last) = ours.last() else { return };
        let node = self.extents[last as usize].node;
        let others = ours.iter().rposition(|&id| self.extents[id as usize].node != node);
        ours.drain(..others.map_or(0, |index| index + 1));
        let blocks: u32 = ours.iter().map(|&id| self.extents[id as usize].blocks).sum();
        let Some(nodes) = &mut self.nodes else { return };
        if nodes.blocks[node as usize] == blocks {
            return;
        }
        nodes.take(node, blocks);
        let part = nodes.add(&mut None, blocks);
        ours.iter().for_each(|&id| self.extents[id as usize].node = part);
        if self.extents[last as usize].users > 1 {
            return;
        }
        // No request used the node: its rest stood before our part in the free queue, its last blocks first.
        let (mut rest, mut at) = (Vec::new(), self.extents[last as usize].before);
        while at != NONE && self.extents[at as usize].node == node {
            rest.push(at);
            at = self.extents[at as usize].before;
        }
        for &id in rest.iter().rev() {
            self.unlink(id);
            self.append(id);
        }
    }

    /// The extents of a request's findable blocks, in their order.
    fn extents_held(&self, held: &Held) -> Vec<ExtentId> {
        let mut ids = Vec::new();
        for &(first, blocks) in &held.spans {
            let (mut id, mut left) = (first, blocks);
            while left > 0 {
                ids.push(id);
                left -= self.extents[id as usize].blocks;
                id = self.extents[id as usize].rest;
            }
        }
        ids
    }

    /// Gives a request the block that another has registered under that key in the place of the one it has computed.
    /// False: there is none.
    pub(super) fn adopt(&mut self, key: Key, held: &mut Held) -> bool {
        let number = held.findable.offset;
        let mut id = self.first.get(&key).copied().unwrap_or(NONE);
        while id != NONE && !self.extents[id as usize].holds(number) {
            id = self.extents[id as usize].twin;
        }
        if id == NONE {
            return false;
        }
        let skip = number - self.extents[id as usize].start;
        if skip > 0 {
            id = self.split(id, skip);
        }
        if self.extents[id as usize].blocks > 1 {
            self.split(id, 1);
        }
        if self.extents[id as usize].users == 0 {
            self.unlink(id);
        }
        self.extents[id as usize].users += 1;
        held.spans.push((id, 1));
        held.plain -= 1;
        self.part_node(held);
        self.prepend_plain(1);
        true
    }

    /// How many of these blocks of a run a request may add at once: to where a node ended, or one if the pool has some
    /// of the run already. Then: whether a node of its own follows.
    pub(super) fn until_end_of_node(&mut self, key: Key, blocks: u32, held: &Held) -> (u32, bool) {
        let Some(nodes) = &mut self.nodes else { return (blocks, false) };
        let start = held.findable.offset;
        let blocks = if self.first.contains_key(&key) { 1 } else { blocks };
        if nodes.ended.is_empty() {
            return (blocks, false);
        }
        let end = (start..start + blocks).find(|&number| nodes.ended.remove(&(key, number)));
        (end.map_or(blocks, |number| number + 1 - start), end.is_some())
    }

    /// What a request loads ends with its prefix, which may end inside of a node: the rest is a node of its own.
    pub(super) fn loaded_to(&mut self, held: &Held) {
        let last = held.spans.last().map(|&(id, _)| self.extents[id as usize]);
        if let (Some(nodes), Some(extent)) = (&mut self.nodes, last) {
            nodes.ended.extend(extent.key.map(|key| (key, extent.start + extent.blocks - 1)));
        }
    }

    /// Evicts the node at the head of the free queue: its blocks become blocks without a key.
    pub(super) fn evict_node(&mut self) {
        let node = self.extents[self.head as usize].node;
        let last = self.extents[self.head as usize];
        let (mut blocks, mut noted) = (0, Vec::new());
        while self.head != NONE && self.extents[self.head as usize].node == node {
            let id = self.head;
            let extent = self.extents[id as usize];
            if let (Some(key), true) = (extent.key, self.journal.on()) {
                noted.extend((extent.start..extent.start + extent.blocks).rev().map(|number| (key, number)));
            }
            blocks += extent.blocks;
            self.unlink(id);
            self.forget(id);
            self.spare.push(id);
        }
        // A node's first block first, as SGLang tells it.
        for (key, number) in noted.into_iter().rev() {
            self.journal.note("evicted", || vec![key, u64::from(number)]);
        }
        if let Some(nodes) = &mut self.nodes {
            nodes.take(node, blocks);
            nodes.ended.extend(last.key.map(|key| (key, last.start + last.blocks - 1)));
        }
        self.prepend_plain(blocks);
    }
}
