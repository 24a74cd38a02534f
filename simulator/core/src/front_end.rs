//! The front end: parses requests and passes answers on, one after another, on its own core or on the engine's.
//!
//! With one core between them, each gets half of it while both have work, as Linux shares a core out between two
//! processes. Of requests that are sent together the first is computed while the others are parsed: a short step takes
//! twice as long for it, a long one as much longer as the parsing takes.

use std::collections::VecDeque;
use std::mem;

use crate::engine::{Engine, Step};
use crate::request::{Status, Submission};
use crate::tiers::Slot;
use crate::time::{FOREVER, Ticks};

enum Task {
    /// The first half of a request's parsing, after which others have their turn: a front end is a loop of events.
    Read(Submission),
    Parse(Submission),
    /// First and last tokens of the step that ended then, which come in one message.
    Answers(Ticks, Vec<Slot>),
}

/// Work is counted in halves of ticks, so that half a core's share of any time is whole.
#[derive(Default)]
pub struct FrontEnd {
    /// Until when it is busy, where nothing but its own requests holds it up.
    until: Ticks,
    /// Until when work is accounted for; of meaning while there is any, as is `step_left`.
    at: Ticks,
    /// What is to be done, and what is left to do of it.
    queue: VecDeque<(Ticks, Task)>,
    /// What is left of the step in flight on the same core; 0: there is none.
    step_left: Ticks,
    /// Requests that it has parsed.
    parsed: u64,
}

impl FrontEnd {
    fn rate(&self) -> Ticks {
        if self.step_left > 0 { 1 } else { 2 }
    }

    /// When it will be through with what it does, unless a step begins or ends before.
    fn next_passed(&self) -> Ticks {
        self.queue.front().map_or(FOREVER, |(left, _)| self.at.saturating_add(left.div_ceil(self.rate())))
    }

    fn work_until(&mut self, now: Ticks) {
        let done = (now - self.at).saturating_mul(self.rate());
        self.at = now;
        self.step_left = self.step_left.saturating_sub(done);
        if let Some((left, _)) = self.queue.front_mut() {
            *left = left.saturating_sub(done);
        }
    }

    /// `step_left` of the step that then shares the core, of meaning if it had nothing to do.
    fn take(&mut self, now: Ticks, work: Ticks, task: Task, step_left: Ticks) {
        if self.queue.is_empty() {
            (self.at, self.step_left) = (now, step_left);
        }
        self.queue.push_back((work.saturating_mul(2), task));
    }
}

impl Engine {
    /// When the next request is sent, the front end is through with something, or a request arrives.
    pub(crate) fn next_arrival(&self) -> Ticks {
        self.sends.next_at().min(self.arrivals.next_at()).min(self.front_end.next_passed())
    }

    /// Brings the front end, and the step that shares its core, to this moment.
    pub(crate) fn pass_front_end(&mut self) {
        if !self.config.cost.shared_core && self.cost.response == 0 {
            return self.pass_undisturbed();
        }
        let mut front_end = mem::take(&mut self.front_end);
        let was_busy = !front_end.queue.is_empty();
        if was_busy {
            front_end.work_until(self.now);
        }
        while self.sends.next_at() <= self.now
            && let Some((_, submission)) = self.sends.pop()
        {
            let begins = front_end.queue.is_empty() && self.config.cost.shared_core;
            let step_left = if begins { 2 * self.begins_to_share() } else { 0 };
            front_end.take(self.now, self.parsing(&submission) / 2, Task::Read(submission), step_left);
        }
        while front_end.queue.front().is_some_and(|(left, _)| *left == 0)
            && let Some((_, task)) = front_end.queue.pop_front()
        {
            match task {
                Task::Read(submission) => {
                    let work = self.parsing(&submission).div_ceil(2);
                    let step_left = front_end.step_left;
                    front_end.take(self.now, work, Task::Parse(submission), step_left);
                }
                Task::Parse(submission) => {
                    front_end.parsed += 1;
                    self.arrivals.push(
                        self.now.saturating_add(self.cost.wait()),
                        front_end.parsed,
                        submission,
                    );
                }
                Task::Answers(_, slots) => slots.into_iter().for_each(|slot| self.answered(slot)),
            }
        }
        if self.config.cost.shared_core && (was_busy || !front_end.queue.is_empty()) {
            let rate = if front_end.queue.is_empty() { 2 } else { 1 };
            self.step_ends_at(self.now.saturating_add(front_end.step_left.div_ceil(rate)));
        }
        self.front_end = front_end;
    }

    /// A front end with a core of its own and nothing to pass on: a request is through when it and those before it are.
    fn pass_undisturbed(&mut self) {
        while self.sends.next_at() <= self.now
            && let Some((at, submission)) = self.sends.pop()
        {
            self.sends.expect();
            let until = self.front_end.until.max(at).saturating_add(self.parsing(&submission));
            (self.front_end.until, self.front_end.parsed) = (until, self.front_end.parsed + 1);
            self.arrivals.push(until.saturating_add(self.cost.wait()), self.front_end.parsed, submission);
        }
    }

    fn parsing(&self, submission: &Submission) -> Ticks {
        let tokens = submission.prompt_tokens().unwrap_or(0).min(self.config.max_model_len);
        self.cost.front_end(tokens, tokens / self.config.chunk_tokens)
    }

    /// A request's first token, or its last, is there now that a step has ended: the front end has to pass it on.
    pub(crate) fn answer(&mut self, slot: Slot) {
        if self.cost.response == 0 {
            self.requests[slot].first_token.get_or_insert(self.now);
            return;
        }
        self.requests[slot].answers += 1;
        match self.front_end.queue.back_mut() {
            Some((_, Task::Answers(at, slots))) if *at == self.now => slots.push(slot),
            _ => self.front_end.take(self.now, self.cost.response, Task::Answers(self.now, vec![slot]), 0),
        }
    }

    pub(crate) fn finish(&mut self, slot: Slot) {
        self.steady = false;
        self.running.retain(|&other| other != slot);
        let request = &mut self.requests[slot];
        if let Some(server) = &mut self.server {
            server.tiers.end(&request.chunks);
        }
        request.status = Status::Finished;
        if request.generated > 1 {
            self.answer(slot);
        }
        if self.requests[slot].answers == 0 {
            self.complete(slot);
        }
        if self.requests[slot].retires() {
            self.retire(slot);
        } else {
            self.retiring += 1;
        }
    }

    /// Frees a finished request's blocks, which its stores read from, now that those have ended.
    pub(crate) fn retire(&mut self, slot: Slot) {
        self.pool.release(&mut self.requests[slot].blocks);
        if self.requests[slot].answers == 0 {
            self.spare.push(slot);
        }
    }

    fn answered(&mut self, slot: Slot) {
        self.tell_tokens();
        let request = &mut self.requests[slot];
        request.answers -= 1;
        if request.first_token.is_none() {
            // Tokens that have waited for the front end with the first come together with it.
            request.first_token = Some(self.now);
            request.tokens.iter_mut().for_each(|at| *at = self.now);
        }
        if request.answers > 0 || request.status != Status::Finished {
            return;
        }
        request.last_token = Some(self.now);
        request.tokens.last_mut().into_iter().for_each(|at| *at = self.now);
        self.complete(slot);
        if self.requests[slot].retires() {
            self.spare.push(slot);
        }
    }

    /// All of a finished request's tokens have been passed on.
    fn complete(&mut self, slot: Slot) {
        let request = &mut self.requests[slot];
        self.ids.remove(&request.id);
        self.unfinished -= 1;
        self.completed.push(request.finish());
    }

    /// What the step that begins now and has the core for itself until `end` is to be at, with a front end beside it.
    pub(crate) fn shares_core(&mut self, end: Ticks) -> Ticks {
        if !self.front_end_shares() {
            return end;
        }
        self.front_end.step_left = 2 * (end - self.now);
        self.now + self.front_end.step_left
    }

    pub(crate) fn front_end_shares(&self) -> bool {
        self.config.cost.shared_core && !self.front_end.queue.is_empty()
    }

    /// No more than the step under way is left of the steps in flight. Returns its time left.
    fn begins_to_share(&mut self) -> Ticks {
        self.cut_decode_short();
        self.step.as_ref().map_or(0, |step| step.end().saturating_sub(self.now))
    }

    fn step_ends_at(&mut self, at: Ticks) {
        match &mut self.step {
            Some(Step::Batch { end, .. }) if *end > self.now => *end = at,
            Some(Step::Decode(decode)) if decode.end > self.now => decode.end_at(at),
            _ => {}
        }
    }

    fn cut_decode_short(&mut self) {
        if matches!(self.step, Some(Step::Decode(_))) {
            self.cut_decode(self.now);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::cost::CostConfig;
    use crate::engine::{Engine, EngineConfig};
    use crate::request::Completion;
    use crate::tests::{ask, config};
    use crate::time::{FOREVER, Ticks, from_s, to_s};

    /// About a millisecond, and whole in ticks.
    const MS: f64 = 1.0 / 1024.0;

    /// Requests that are sent at such ms and ask for so many tokens, in that order.
    fn served(cost: CostConfig, sent: &[(f64, u64)]) -> Vec<Completion> {
        let mut engine =
            Engine::new(EngineConfig { cost, ..config(400, None) }).expect("a good configuration");
        for (id, &(at_ms, tokens)) in sent.iter().enumerate() {
            let request = ask(&id.to_string(), &[(1 + id as i64, 1)], tokens);
            engine.submit(request, from_s(at_ms * MS)).expect("taken");
        }
        let mut done = Vec::new();
        while done.len() < sent.len() {
            done.extend(engine.advance(FOREVER).expect("no dead end"));
        }
        done.sort_by(|one, other| one.id.cmp(&other.id));
        done
    }

    /// First tokens of two requests of one token, in the order of sending. The front end takes 1 ms, a step 2 ms.
    fn first_tokens(shared_core: bool, sent_ms: [f64; 2]) -> [Ticks; 2] {
        let cost = CostConfig { step_s: 2.0 * MS, request_s: MS, shared_core, ..CostConfig::default() };
        let done = served(cost, &sent_ms.map(|at_ms| (at_ms, 1)));
        [0, 1].map(|id: usize| done[id].first_token.expect("a token"))
    }

    #[test]
    fn a_step_and_the_front_end_have_half_of_their_core_each() {
        let ms = |first: f64, second: f64| [first * MS, second * MS].map(from_s);
        assert_eq!(first_tokens(false, [0.0, 0.0]), ms(3.0, 5.0));
        // From 1 ms on the first one's step shares the core with the second one's parsing, which takes 2 ms so.
        assert_eq!(first_tokens(true, [0.0, 0.0]), ms(4.0, 6.0));
        assert_eq!(first_tokens(false, [0.0, 2.5]), ms(3.0, 5.5));
        // The half of a millisecond that the step lacks takes a whole one, and then the parsing the core for itself.
        assert_eq!(first_tokens(true, [0.0, 2.5]), ms(3.5, 6.0));
        assert_eq!(first_tokens(true, [0.0, 3.0]), ms(3.0, 6.0));
    }

    /// First and last tokens of requests that are sent at once, in ms.
    fn answers(cost: CostConfig, output_tokens: &[u64]) -> Vec<(f64, f64)> {
        let sent: Vec<_> = output_tokens.iter().map(|&tokens| (0.0, tokens)).collect();
        let ms = |at: Option<Ticks>| to_s(at.expect("a token")) / MS;
        served(cost, &sent).iter().map(|done| (ms(done.first_token), ms(done.last_token))).collect()
    }

    #[test]
    fn a_first_token_and_a_last_pass_the_front_end_and_those_of_one_step_together() {
        let cost = CostConfig { step_s: 2.0 * MS, response_s: MS, ..CostConfig::default() };
        assert_eq!(answers(cost, &[1]), [(3.0, 3.0)]);
        assert_eq!(answers(cost, &[1, 1]), [(3.0, 3.0), (3.0, 3.0)]);
        assert_eq!(answers(cost, &[3]), [(3.0, 7.0)]);
        // The second step shares its core with the first token's answer, and takes 1 ms longer.
        let shared = CostConfig { shared_core: true, ..cost };
        assert_eq!(answers(shared, &[3]), [(4.0, 8.0)]);
        assert_eq!(answers(shared, &[1, 2]), [(4.0, 4.0), (4.0, 6.0)]);
    }

    #[test]
    fn tokens_that_wait_for_the_front_end_come_together() {
        let cost = CostConfig { step_s: MS, response_s: 5.0 * MS, ..CostConfig::default() };
        assert_eq!(answers(cost, &[2]), [(6.0, 11.0)]);
        assert_eq!(answers(cost, &[1, 3]), [(6.0, 6.0), (6.0, 11.0)]);
    }

    #[test]
    fn a_front_end_turns_to_others_in_the_midst_of_parsing() {
        let cost = CostConfig { step_s: MS, request_s: 4.0 * MS, ..CostConfig::default() };
        let shared = CostConfig { shared_core: true, ..cost };
        // Read until 2 and 4 ms, parsed until 6 and 8; the first one's step shares the core with the latter.
        assert_eq!(answers(shared, &[1, 1]), [(8.0, 8.0), (10.0, 10.0)]);
        assert_eq!(answers(cost, &[1, 1]), [(5.0, 5.0), (9.0, 9.0)]);
    }
}
