//! What tests see of an engine, and what must hold at any moment.

use super::Engine;
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
                Lookup::Answered(hit) => Some(hit),
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
