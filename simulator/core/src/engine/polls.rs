//! When the engine's connector sees what a cache server answers: vLLM asks again at each schedule.
//!
//! The server takes one question after another, each as long as its chunks take. Until it has taken a question, no
//! schedule brings its answer nearer; what the engine computes meanwhile costs nothing more.
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
use crate::time::Ticks;

/// So often, at most, an engine asks again during what is left of a question: its polls may be as short as a fit says.
const MOST_POLLS: Ticks = 32;

#[derive(Debug, Default)]
pub(super) struct Polls {
    /// The last schedule gave the engine nothing to do but to ask again.
    pub idle: bool,
    /// How many requests wait for an answer.
    awaiting: u64,
    /// When the server will have taken all questions so far.
    taken_until: Ticks,
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
            // Of a question that storage is read for, the chunks count once that has come.
            if !request.reading {
                self.take_question(slot);
            }
        } else if let Lookup::Pending = request.lookup {
            return false;
        } else if std::mem::take(&mut request.reading) {
            batch.steady = false;
            self.take_question(slot);
        } else if request.taken_at > 0 && self.now <= request.taken_at {
            // From that very moment on, schedules count.
            request.taken_at = if self.now < request.taken_at { request.taken_at } else { 0 };
        } else if request.wake_polls_left > 0 && self.polls.idle {
            request.wake_polls_left -= 1;
        } else if request.polls_left > 0 {
            request.wake_polls_left = 0;
            request.polls_left -= 1;
            self.polls.awaiting -= u64::from(request.polls_left == 0);
        }
        let request = &self.requests[slot];
        let answered = matches!(request.lookup, Lookup::Answered(_));
        if answered && (request.polls_left > 0 || self.now < request.taken_at) {
            (batch.steady, batch.polls) = (false, true);
            match self.now < request.taken_at {
                true => batch.awaits(request.taken_at),
                false => batch.counts = true,
            }
            return false;
        }
        answered
    }

    /// When an engine asks again that has nothing to compute; 0: it has. Where it can get no answer before the server has
    /// taken the next question, no later than that.
    pub(super) fn asks_again_at(&mut self, batch: &Batch) -> Ticks {
        if !batch.only_polls() {
            return 0;
        }
        let poll = self.cost.vary(self.cost.poll);
        if batch.counts || batch.taken_at == 0 {
            return self.now + poll;
        }
        // Until then only an event can change what it finds. Of a server that engines share, the cluster has the events.
        let event = match self.slot_base {
            None => self.next_arrival().min(self.next_end(true)),
            Some(_) => self.now + (batch.taken_at - self.now).div_ceil(MOST_POLLS),
        };
        batch.taken_at.min(event.max(self.now + poll))
    }

    /// Whether the server takes longer for more chunks, rather than the front end before the scheduler.
    pub(super) fn server_takes_chunks(&self) -> bool {
        self.server.is_some() && self.config.lookup_polls > 0 && !self.config.reads_ahead
    }

    fn take_question(&mut self, slot: Slot) {
        if !self.server_takes_chunks() {
            return;
        }
        let chunks = self.requests[slot].prompt / self.config.chunk_tokens;
        let takes = self.cost.vary(self.cost.question(chunks));
        let until = self.polls.taken_until.max(self.now).saturating_add(takes);
        self.polls.taken_until = until;
        self.requests[slot].taken_at = if until > self.now { until } else { 0 };
    }
}
