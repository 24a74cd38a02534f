//! What a server on the wall clock needs: tokens as they come, when to look again, and how long the queues are.
//!
//! `advance(until)` takes no step that ends after `until`, and a step that is under way is not changed by what arrives
//! later: tokens up to `until` are final.

use super::Engine;
use super::request::Request;
use crate::time::{FOREVER, Ticks};

/// A request's id, and how many tokens it got.
pub type Tokens = (String, usize);

impl Engine {
    /// The next moment at which anything can happen, if nothing is submitted before; None: nothing will. Between
    /// `advance`s that returned no completion.
    pub fn next_event(&self) -> Option<Ticks> {
        let next = self.next_event_at().min(self.next_token());
        (next != FOREVER).then_some(next)
    }

    /// How many tokens each unfinished request got since the last call: those that got their `first` among them, or the
    /// others. It needs `record_token_times`; those of a completion, which hold what was not counted here, go with it.
    pub fn take_tokens(&mut self, first: bool) -> Vec<Tokens> {
        let begins = |request: &Request| request.first_token == request.tokens.first().copied();
        let told = |request: &Request| request.first_token.is_some() && !request.tokens.is_empty();
        let fresh = self.requests.iter_mut().filter(|request| told(request));
        let asked = fresh.filter(|request| begins(request) == first);
        asked.map(|request| (request.id.clone(), std::mem::take(&mut request.tokens).len())).collect()
    }

    /// Requests that run, and that wait to (for a transfer, too).
    pub fn queues(&self) -> (usize, usize) {
        (self.running.len(), self.waiting.len() + self.holding.len())
    }
}
