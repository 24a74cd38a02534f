//! When the engine's connector sees what a cache server answers: vLLM asks again at each schedule.
//!
//! The server sleeps while no request waits for its answer. To wake up takes it longer than an engine that has nothing to
//! compute takes to ask again, and less than a step that computes. So of prompts that are sent together the second one
//! has its answer as early as the first.

use super::Engine;
use super::request::Lookup;
use super::step::Batch;
use crate::tiers::Slot;

#[derive(Debug, Default)]
pub(super) struct Polls {
    /// The last schedule gave the engine nothing to do but to ask again.
    pub idle: bool,
    /// How many requests wait for an answer.
    awaiting: u64,
}

impl Engine {
    /// Asks the tiers once; later schedules ask for their answer. False: there is none yet.
    pub(super) fn looked_up(&mut self, slot: Slot, batch: &mut Batch) -> bool {
        let name = self.server_slot(slot);
        let Some(server) = &mut self.server else { return true };
        let request = &mut self.requests[slot];
        if let Lookup::NotAsked = request.lookup {
            batch.steady = false;
            request.lookup = match server.tiers.lookup(self.now, name, &request.chunks) {
                Some(hit) => Lookup::Answered(hit),
                None => Lookup::Pending,
            };
            request.polls_left = self.config.lookup_polls;
            request.wake_polls_left = if self.polls.awaiting == 0 { self.config.wake_polls } else { 0 };
            self.polls.awaiting += u64::from(request.polls_left > 0);
        } else if request.wake_polls_left > 0 && self.polls.idle {
            request.wake_polls_left -= 1;
        } else if request.polls_left > 0 {
            request.wake_polls_left = 0;
            request.polls_left -= 1;
            self.polls.awaiting -= u64::from(request.polls_left == 0);
        }
        if request.polls_left > 0 {
            (batch.steady, batch.polls) = (false, true);
            return false;
        }
        matches!(request.lookup, Lookup::Answered(_))
    }
}
