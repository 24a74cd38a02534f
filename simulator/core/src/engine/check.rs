//! What tests see of an engine, and what must hold at any moment.

use super::Engine;
use super::blocks::{BlockPool, Extent, Held, NONE};
use super::node_ids::NO_NODE;
use super::request::Lookup;
use crate::keys::Key;
use crate::tiers::server::Server;
use crate::tiers::{Hit, Tiers};

impl Engine {
    /// Panics unless every block is free or held by a request, and the tiers' books agree with the requests' hits.
    pub fn check(&self) {
        self.pool.check(self.requests.iter().map(|request| &request.blocks));
        if let Some(tiers) = self.tiers_if_any() {
            let hits = self.requests.iter().filter_map(|request| match &request.lookup {
                Lookup::Answered(hit) | Lookup::Untold(hit) => Some(hit),
                _ => None,
            });
            tiers.check(&hits.collect::<Vec<&Hit>>());
        }
    }

    /// As `check`, without the books: no tier holds more than it has room for.
    pub fn check_capacities(&self) {
        self.pool.check(self.requests.iter().map(|request| &request.blocks));
        self.tiers_if_any().into_iter().for_each(Tiers::check_capacities);
    }

    /// Panics unless all blocks are free and nothing is in flight.
    pub fn check_idle(&self) {
        assert!(self.idle());
        assert_eq!(self.pool.free(), self.pool.len());
        self.tiers_if_any().into_iter().for_each(Tiers::check_idle);
    }

    pub fn tiers_if_any(&self) -> Option<&Tiers> {
        self.server.as_ref().map(|server| &server.tiers)
    }

    /// The GPU's free queue.
    pub fn free_queue(&self) -> Vec<Option<(Key, u32)>> {
        self.pool.queue()
    }

    /// The same engine with tiers whose chunks are all extents by themselves.
    pub fn loose(mut self) -> Self {
        self.server = self.server.take().map(|server| Box::new(Server::new(server.tiers.loose())));
        self
    }
}

impl BlockPool {
    /// The contents of the blocks in the free queue, in the order in which the pool hands them out.
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
        self.check_nodes();
        assert_eq!(self.queue().len() as u64, self.free);
        assert_eq!(self.free + in_use + plain, self.blocks);
    }

    /// Panics unless each node has as many blocks as its extents.
    fn check_nodes(&self) {
        let Some(nodes) = &self.nodes else { return };
        let mut left = nodes.blocks.clone();
        for (id, extent) in (0..).zip(&self.extents) {
            if extent.node != NO_NODE && !self.spare.contains(&id) {
                left[extent.node as usize] -= extent.blocks;
            }
        }
        assert!(left.iter().all(|&blocks| blocks == 0), "a node that lost a block");
    }
}
