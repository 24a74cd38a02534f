//! Blocks that are evicted as a whole, as the nodes of SGLang's radix tree (unified_tree_core.py).
//!
//! What one insertion adds is one node. A prefix that ends inside of a node cuts it in two, and the other part counts as
//! used then (_split_node). A node's blocks so always have the same users, and are neighbours in the free queue.

use std::mem;
use std::ops::Range;

use super::blocks::{Adds, BlockPool, ExtentId, Held, NONE};
use super::node_ids::{NO_NODE, Nodes};
use crate::keys::{BlockRun, Key};

impl BlockPool {
    /// As `register`, in nodes.
    #[inline(never)]
    pub(super) fn register_nodes(&mut self, runs: &[BlockRun], end: u64, held: &mut Held, adds: Adds) {
        held.node = None;
        let mut adopted = false;
        while held.findable.blocks < end {
            let (key, blocks) = held.next_of_run(runs, end);
            let there = self.adopt(key, blocks, held);
            if there > 0 {
                adopted = true;
                held.findable.advance(runs, there);
                continue;
            }
            if mem::take(&mut adopted) {
                self.part_node(held);
            }
            let (blocks, ends) = self.until_end_of_node(key, blocks, held, adds);
            let node = self.nodes.as_mut().map_or(NO_NODE, |nodes| nodes.add(&mut held.node, blocks));
            self.add(key, blocks, node, held);
            held.findable.advance(runs, blocks);
            if ends {
                held.node = None;
            }
        }
        if adopted {
            self.part_node(held);
        }
        self.touch(held);
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
        let used = nodes.tick();
        for &id in rest.iter().rev() {
            self.unlink(id);
            self.extents[id as usize].used = used;
            self.append(id);
        }
    }

    /// Makes the nodes of a request's findable blocks the newest. They come to stand there once no request uses them.
    pub(super) fn touch(&mut self, held: &Held) {
        let Some(used) = self.nodes.as_mut().map(Nodes::tick) else { return };
        for id in self.extents_held(held) {
            self.extents[id as usize].used = used;
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

    /// Gives a request, of `most` blocks of a run, those that another has registered, in the place of the ones that it
    /// has computed. Returns how many.
    pub(super) fn adopt(&mut self, key: Key, most: u32, held: &mut Held) -> u32 {
        let number = held.findable.offset;
        let mut id = self.first.get(&key).copied().unwrap_or(NONE);
        while id != NONE && !self.extents[id as usize].holds(number) {
            id = self.extents[id as usize].twin;
        }
        if id == NONE {
            return 0;
        }
        let skip = number - self.extents[id as usize].start;
        if skip > 0 {
            id = self.split(id, skip);
        }
        let blocks = most.min(self.extents[id as usize].blocks);
        if blocks < self.extents[id as usize].blocks {
            self.split(id, blocks);
        }
        if self.extents[id as usize].users == 0 {
            self.unlink(id);
        }
        self.extents[id as usize].users += 1;
        held.spans.push((id, blocks));
        held.plain -= u64::from(blocks);
        self.prepend_plain(blocks);
        blocks
    }

    /// How many of these blocks of a run a request may add at once: to where a node ended, or one if the pool has some
    /// of the run already. Then: whether a node of its own follows.
    pub(super) fn until_end_of_node(
        &mut self,
        key: Key,
        blocks: u32,
        held: &Held,
        adds: Adds,
    ) -> (u32, bool) {
        let Some(nodes) = &mut self.nodes else { return (blocks, false) };
        let start = held.findable.offset;
        let blocks = if self.first.contains_key(&key) { 1 } else { blocks };
        if !nodes.has_ends() {
            return (blocks, false);
        }
        for number in start..start + blocks {
            let (cut, ended) = (nodes.cut.remove(&(key, number)), nodes.ended.remove(&(key, number)));
            if cut || ended {
                // What is computed, the first level has lost since, and with it where its nodes ended.
                let ends = adds == Adds::Loaded || (adds == Adds::Fetched && cut);
                return (number + 1 - start, ends);
            }
        }
        (blocks, false)
    }

    /// The host may hold what was a node of its own.
    pub(super) fn knows_ends(&self) -> bool {
        self.nodes.as_ref().is_some_and(Nodes::has_ends)
    }

    /// A match ended behind this block of a prompt, which the host holds and the GPU does not: a node ends there.
    pub fn cut_on_host(&mut self, runs: &[BlockRun], block: u64) {
        let (Some(nodes), mut left) = (&mut self.nodes, block) else { return };
        for run in runs {
            if left < u64::from(run.blocks) {
                nodes.cut.insert((run.key, left as u32));
                return;
            }
            left -= u64::from(run.blocks);
        }
    }

    /// The host has got these blocks of a prompt anew, as one node: where it was cut before counts no more.
    pub fn read_into_host(&mut self, runs: &[BlockRun], blocks: Range<u64>) {
        let Some(nodes) = &mut self.nodes else { return };
        let mut first = 0;
        for run in runs {
            let numbers = blocks.start.max(first)..blocks.end.min(first + u64::from(run.blocks));
            for number in numbers {
                let last = (run.key, (number - first) as u32);
                nodes.cut.remove(&last);
                nodes.ended.remove(&last);
            }
            first += u64::from(run.blocks);
        }
    }

    /// The host has lost all: what comes back from below it is one node.
    pub(super) fn forget_nodes_of_host(&mut self) {
        if let Some(nodes) = &mut self.nodes {
            nodes.cut.clear();
            nodes.ended.clear();
        }
    }

    /// What a request loads ends with its prefix, which may end inside of a node: the rest is a node of its own.
    pub(super) fn loaded_to(&mut self, held: &Held) {
        let last = held.spans.last().map(|&(id, _)| self.extents[id as usize]);
        if let (Some(nodes), Some(extent)) = (&mut self.nodes, last) {
            nodes.cut.extend(extent.key.map(|key| (key, extent.start + extent.blocks - 1)));
        }
    }

    /// Evicts the oldest nodes until `count` blocks hold nothing, or nothing is left to evict.
    pub(super) fn make_room(&mut self, count: u64) {
        loop {
            let (mut empty, mut oldest) = (0, self.head);
            if oldest != NONE && self.extents[oldest as usize].key.is_none() {
                let extent = &self.extents[oldest as usize];
                (empty, oldest) = (u64::from(extent.blocks), extent.after);
            }
            if empty >= count || oldest == NONE {
                return;
            }
            self.evict_node(oldest);
        }
    }

    /// Evicts the oldest node, whose last blocks stand first in the free queue: they become blocks without a key.
    pub(super) fn evict_node(&mut self, first: ExtentId) {
        let (last, mut id) = (self.extents[first as usize], first);
        let node = last.node;
        let (mut blocks, mut noted) = (0, Vec::new());
        while id != NONE && self.extents[id as usize].node == node {
            let extent = self.extents[id as usize];
            if let (Some(key), true) = (extent.key, self.journal.on()) {
                noted.extend((extent.start..extent.start + extent.blocks).rev().map(|number| (key, number)));
            }
            blocks += extent.blocks;
            self.unlink(id);
            self.forget(id);
            self.spare.push(id);
            id = extent.after;
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
