//! For a server on the wall clock: tokens as they come, the next event, and the queues.
//!
//! `advance(until)` ends no step after `until`, and later arrivals do not change a step under way: tokens up to `until`
//! are final.

use super::Engine;
use super::request::Request;
use crate::time::{FOREVER, Ticks};

/// A request's id, and how many tokens it got.
pub type Tokens = (String, usize);

impl Engine {
    /// The moment of the next event if nothing is submitted before; None: there is none. Valid once `advance` has
    /// returned no completion.
    pub fn next_event(&self) -> Option<Ticks> {
        let next = self.next_event_at().min(self.next_token());
        (next != FOREVER).then_some(next)
    }

    /// How many tokens each unfinished request got since the last call. `first`: the requests that got their first
    /// token among them; else the others. Needs `record_token_times`. A completion has the tokens after the last call.
    pub fn take_tokens(&mut self, first: bool) -> Vec<Tokens> {
        let begins = |request: &Request| request.first_token == request.tokens.first().copied();
        let unseen = |request: &Request| request.first_token.is_some() && !request.tokens.is_empty();
        let fresh = self.requests.iter_mut().filter(|request| unseen(request));
        let asked = fresh.filter(|request| begins(request) == first);
        asked.map(|request| (request.id.clone(), std::mem::take(&mut request.tokens).len())).collect()
    }

    /// Requests that run, and that wait to run or for a transfer.
    pub fn queues(&self) -> (usize, usize) {
        (self.running.len(), self.waiting.len() + self.holding.len())
    }
}
