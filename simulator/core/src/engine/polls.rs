//! When the engine's connector sees what a cache server answers: vLLM asks again at each schedule.
//!
//! The server takes one question after another, each as long as its chunks take. What the engine computes meanwhile costs
//! nothing more. The chunks of a question that it reads storage for count after the read.
//!
//! An engine that has nothing to compute asks again sooner than the server answers, and so once more than one that
//! computes. The server sleeps while no request waits for its answer: then the engine's next poll is a long one, with
//! what it does for its first question, and some of that question's chunks cost nothing more. An answer also comes behind
//! the questions that were there before it.
//!
//! A server that reads storage first begins when it has woken up, and the engine asks it for its progress every second
//! time. That takes as long as if all the asking came after the read (LMCache 0.5.6, vllm_multi_process_adapter.py,
//! check_lookup_result).
//!
//! What it loads without waiting for it, the engine asks about as soon as it has begun a step (vLLM 0.32,
//! v1/worker/kv_connector_model_runner_mixin.py, get_transfer_results). So a load that ends during a step is known in
//! the next one, and is computed with in the one after that.

use std::collections::VecDeque;

use super::Engine;
use super::request::{Lookup, Status};
use super::step::{Batch, Step};
use crate::tiers::{Hit, Slot};
use crate::time::{FOREVER, Ticks};

/// What the server's own work on a question and on an answer takes, of a poll: a half and a quarter. Of four hits that
/// are sent together, the first one's answer comes 1.2 ms and more after the second one's question, or a poll later.
const QUESTION: Ticks = 2;
const ANSWER: Ticks = 4;
/// Of a first question's chunks, a server that has been woken up takes three quarters, and at most a quarter of a poll,
/// before the polls end that pass anyway: of lone questions about two to nine chunks, the engine sees four answers of
/// five at its third poll.
const HIDDEN: Ticks = 4;
/// So often, at most, an engine asks again until an answer comes: its polls may be as short as a fit says.
const MOST_POLLS: Ticks = 32;

#[derive(Debug, Default)]
pub(super) struct Polls {
    /// The last schedule gave the engine nothing to do but to ask again.
    pub idle: bool,
    /// The step before the one to come computed, and the engine has been busy since.
    pub computed: bool,
    /// How many requests wait for an answer.
    awaiting: u64,
    /// The server has been woken up, and no poll has passed since.
    wakes: bool,
    /// Questions that the server has not taken yet, in its order, each with the moment when it has.
    untold: VecDeque<(Ticks, Slot)>,
    /// When the server is done with all messages so far.
    busy_until: Ticks,
}

impl Polls {
    /// When the server has taken the next question.
    pub fn next_at(&self) -> Ticks {
        self.untold.front().map_or(FOREVER, |(at, _)| *at)
    }
}

impl Engine {
    /// Asks the tiers once; later schedules ask for their answer. False: there is none yet.
    pub(super) fn looked_up(&mut self, slot: Slot, batch: &mut Batch) -> bool {
        let name = self.server_slot(slot);
        let Some(server) = &mut self.server else { return true };
        let request = &mut self.requests[slot];
        if let Lookup::NotAsked = request.lookup {
            batch.steady = false;
            let found = server.tiers.lookup(self.now, name, &request.chunks);
            request.polls_left = self.config.lookup_polls;
            request.wake_polls_left = self.config.wake_polls;
            let slept = self.polls.awaiting == 0;
            self.polls.wakes |= slept;
            (request.lookup, request.reading, request.told_at) = (Lookup::Pending, found.is_none(), None);
            self.polls.awaiting += u64::from(request.polls_left > 0);
            if let Some(hit) = found {
                self.found(self.now, slot, hit, if slept { self.cost.poll / HIDDEN } else { 0 });
            }
        } else if let Lookup::Pending | Lookup::Untold(_) = request.lookup {
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
        let request = &self.requests[slot];
        let answered = matches!(request.lookup, Lookup::Answered(_));
        let told_at = if answered && request.polls_left == 0 { self.told_at(slot) } else { 0 };
        if answered && (self.requests[slot].polls_left > 0 || self.now < told_at) {
            (batch.steady, batch.polls) = (false, true);
            batch.pass.wakes |= std::mem::take(&mut self.polls.wakes);
            batch.told_at = batch.told_at.max(told_at);
            return false;
        }
        answered
    }

    /// The server has found at `at` what it holds for a request, and answers once it has taken the question. `hidden`: what
    /// of that passes beside polls at most.
    pub(super) fn found(&mut self, at: Ticks, slot: Slot, hit: Hit, hidden: Ticks) {
        let request = &mut self.requests[slot];
        let chunks = if self.config.asks_server() { request.prompt / self.config.chunk_tokens } else { 0 };
        let mean = self.cost.question(chunks);
        if self.config.lookup_polls > 0 {
            let takes = self.cost.vary(mean + self.cost.poll / QUESTION);
            self.polls.busy_until = self.polls.busy_until.max(at).saturating_add(takes);
        }
        if mean == 0 {
            request.lookup = Lookup::Answered(hit);
            return;
        }
        request.lookup = Lookup::Untold(hit);
        let free_at = self.polls.untold.back().map_or(at, |(until, _)| at.max(*until));
        let takes = self.cost.vary(mean);
        let takes = takes - hidden.min(takes - takes / HIDDEN);
        self.polls.untold.push_back((free_at.saturating_add(takes), slot));
    }

    /// Gives the answers to questions that the server has taken by now.
    pub(super) fn tell_answers(&mut self) {
        while self.polls.next_at() <= self.now
            && let Some((at, slot)) = self.polls.untold.pop_front()
        {
            let request = &mut self.requests[slot];
            if let Lookup::Untold(hit) = std::mem::take(&mut request.lookup) {
                request.lookup = Lookup::Answered(hit);
            }
            // The schedule of an engine that waits for this comes at once, and is the last that does not count.
            request.reading = self.step.is_none();
            self.invalidate_schedule(at);
        }
    }

    /// When the engine may see an answer: it comes behind the questions that were there before.
    fn told_at(&mut self, slot: Slot) -> Ticks {
        // An engine that asks all the time waits for nothing else.
        let poll = self.cost.poll;
        let told_at = if poll == 0 { 0 } else { self.polls.busy_until + poll / ANSWER };
        *self.requests[slot].told_at.get_or_insert(told_at)
    }

    /// When a step ends that only asks; 0: it computes.
    pub(super) fn polled_at(&mut self, batch: &Batch) -> Ticks {
        if !batch.only_polls() {
            return 0;
        }
        let poll = self.cost.vary(self.cost.pass(batch.pass));
        self.now + poll.max(batch.told_at.saturating_sub(self.now) / MOST_POLLS)
    }

    pub(super) fn load_ended(&mut self, slot: Slot) {
        let request = &mut self.requests[slot];
        request.status = Status::Loaded;
        request.polls_left = if self.cost.synchronous_loads { 0 } else { self.config.load_polls };
        if request.polls_left > 0 && self.step.is_none() {
            // An engine that waits for loads alone asks about them all the time.
            self.polls.computed = false;
            let end = self.now.saturating_add(self.cost.rest_of_poll());
            self.step = Some(Step::Batch { end: self.end_on_shared_core(end), batch: Batch::default() });
        }
    }

    /// Whether the engine knows that a load has ended; each schedule brings it nearer.
    pub(super) fn knows_loaded(&mut self, slot: Slot, batch: &mut Batch) -> bool {
        let request = &mut self.requests[slot];
        let knows = request.polls_left == 0;
        if !knows {
            request.polls_left -= 1;
            (batch.steady, batch.polls) = (false, true);
        }
        knows
    }
}
