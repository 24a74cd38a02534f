//! When the engine's connector sees what a cache server answers: vLLM asks again at each schedule.
//!
//! The server sleeps while no request waits for its answer. To wake up takes it longer than an engine that has nothing to
//! compute takes to ask again, and less than a step that computes. So of prompts that are sent together the second one
//! has its answer as early as the first.
//!
//! A server that reads storage first begins when it has woken up, and the engine asks it for its progress every second
//! time. That takes as long as if all the asking came after the read (LMCache 0.5.6, vllm_multi_process_adapter.py,
//! check_lookup_result).

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
            request.reading = matches!(request.lookup, Lookup::Pending);
            self.polls.awaiting += u64::from(request.polls_left > 0);
        } else if let Lookup::Pending = request.lookup {
            return false;
        } else if std::mem::take(&mut request.reading) {
            batch.steady = false;
        } else if request.wake_polls_left > 0 && self.polls.idle {
            request.wake_polls_left -= 1;
        } else if request.polls_left > 0 {
            request.wake_polls_left = 0;
            request.polls_left -= 1;
            self.polls.awaiting -= u64::from(request.polls_left == 0);
        }
        let answered = matches!(request.lookup, Lookup::Answered(_));
        if request.polls_left > 0 && answered {
            (batch.steady, batch.polls) = (false, true);
            return false;
        }
        answered
    }
}
