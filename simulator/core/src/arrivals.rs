//! From a submission to a request that waits, or to an error.

use std::collections::{BTreeMap, VecDeque};
use std::mem;

use crate::engine::{Engine, Step};
use crate::keys::{Part, Segment, keys_and_runs};
use crate::request::{Completion, Request, Submission};
use crate::time::{FOREVER, Ticks};

/// Submissions by a moment, such as when they reach the scheduler; of those of one moment, by their number.
#[derive(Default)]
pub struct Arrivals {
    /// Those that came in their order, as nearly all do.
    queue: VecDeque<(Ticks, u64, Submission)>,
    /// Those that came after a later one.
    others: BTreeMap<(Ticks, u64), Submission>,
}

impl Arrivals {
    pub fn push(&mut self, at: Ticks, number: u64, submission: Submission) {
        match self.queue.back() {
            Some((last, before, _)) if (*last, *before) > (at, number) => {
                self.others.insert((at, number), submission);
            }
            _ => self.queue.push_back((at, number, submission)),
        }
    }

    pub fn next_at(&self) -> Ticks {
        self.first().0
    }

    pub fn pop(&mut self) -> Option<(Ticks, Submission)> {
        let first = self.first();
        if self.queue.front().is_some_and(|(at, number, _)| (*at, *number) == first) {
            return self.queue.pop_front().map(|(at, _, submission)| (at, submission));
        }
        self.others.pop_first().map(|((at, _), submission)| (at, submission))
    }

    fn first(&self) -> (Ticks, u64) {
        let first = self.queue.front().map_or((FOREVER, u64::MAX), |(at, number, _)| (*at, *number));
        self.others.first_key_value().map_or(first, |(other, _)| first.min(*other))
    }
}

impl Engine {
    /// Takes a request that is sent at `at`; `number` orders those that arrive together.
    pub(crate) fn accept(&mut self, submission: Submission, at: Ticks, number: u64) {
        self.unfinished += 1;
        self.sends.push(at, number, submission);
    }

    /// When the next request is sent or arrives.
    pub(crate) fn next_arrival(&self) -> Ticks {
        self.sends.next_at().min(self.arrivals.next_at())
    }

    /// Lets what is sent by now through the front end, which takes one request after another.
    pub(crate) fn pass_front_end(&mut self) {
        while self.sends.next_at() <= self.now
            && let Some((at, submission)) = self.sends.pop()
        {
            let tokens = submission.prompt_tokens().unwrap_or(0).min(self.config.max_model_len);
            let front_end = self.cost.front_end(tokens, tokens / self.config.chunk_tokens);
            self.front_end_until = self.front_end_until.max(at).saturating_add(front_end);
            if self.cost.shared_core {
                self.delay_step(at, front_end);
            }
            self.passed += 1;
            let arrives = self.front_end_until.saturating_add(self.cost.wait());
            self.arrivals.push(arrives, self.passed, submission);
        }
    }

    /// When the front end leaves the core that it shares with the steps; FOREVER: no step waits for that.
    pub(crate) fn core_free_at(&self) -> Ticks {
        if self.cost.shared_core && self.now < self.front_end_until { self.front_end_until } else { FOREVER }
    }

    /// The front end takes the core `by` so long from the step that is in flight at `at`.
    fn delay_step(&mut self, at: Ticks, by: Ticks) {
        match &mut self.step {
            Some(Step::Batch { end, .. }) if *end > at => *end += by,
            Some(Step::Decode(decode)) if decode.end > at => self.delay_decode(at, by),
            _ => {}
        }
    }

    pub(crate) fn arrive(&mut self, submission: Submission) {
        if let Some(error) = self.refusal(&submission) {
            self.ids.remove(&submission.id);
            self.unfinished -= 1;
            let tokens = submission.prompt_tokens().unwrap_or(0);
            self.completed.push(Completion::failed(submission.id, tokens, error));
            return;
        }
        let Submission { id, prompt, output_tokens, reply_id } = submission;
        let slot = self.spare.pop().unwrap_or(self.requests.len());
        if slot == self.requests.len() {
            self.requests.push(Request::default());
        }
        let request = &mut self.requests[slot];
        // The memory of the one before it.
        let (mut runs, mut blocks) = (mem::take(&mut request.runs), mem::take(&mut request.blocks));
        let reply = Segment { hash_id: reply_id, tokens: output_tokens };
        let chunk_tokens = self.config.chunk_tokens;
        let chunks = (self.server.is_some().then_some(chunk_tokens), &mut self.keys);
        keys_and_runs((&prompt, reply), chunks, (self.config.block_tokens, &mut runs));
        blocks.expect(&runs);
        *request = Request {
            id,
            owner: reply_id,
            prompt: prompt.iter().map(|segment| segment.tokens).sum(),
            output: output_tokens,
            blocks,
            runs,
            chunks: Part::of(&self.keys[..]),
            ..Request::default()
        };
        self.keys.clear();
        self.waiting.push_back(slot);
    }

    /// Why a request can never be served; None: it can.
    pub fn refusal(&self, submission: &Submission) -> Option<String> {
        let output = submission.output_tokens;
        let prompt = submission.prompt_tokens().unwrap_or(u64::MAX);
        if prompt == 0 || output == 0 {
            return Some(format!(
                "a request needs tokens: this has {prompt} in its prompt and asks for {output}"
            ));
        }
        let limit = self.config.max_model_len;
        if prompt.saturating_add(output) > limit {
            return Some(format!(
                "{prompt} prompt and {output} output tokens exceed the model's {limit} positions"
            ));
        }
        // The last token's KV is never needed.
        let needed = (prompt + output - 1).div_ceil(self.config.block_tokens);
        let blocks = self.pool.len();
        (needed > blocks)
            .then(|| format!("{needed} blocks are needed and the GPU has {blocks}: it can never fit"))
    }
}

#[cfg(test)]
mod tests {
    use crate::cost::CostConfig;
    use crate::engine::{Engine, EngineConfig};
    use crate::tests::{ask, config};
    use crate::time::{FOREVER, Ticks, from_s};

    const MS: f64 = 1e-3;

    /// First tokens of two requests of one token, in the order of sending. The front end takes 1 ms, a step 2 ms.
    fn first_tokens(shared_core: bool, sent_ms: [f64; 2]) -> [Ticks; 2] {
        let cost = CostConfig { step_s: 2.0 * MS, request_s: MS, shared_core, ..CostConfig::default() };
        let mut engine =
            Engine::new(EngineConfig { cost, ..config(400, None) }).expect("a good configuration");
        for (id, at_ms) in ["0", "1"].into_iter().zip(sent_ms) {
            engine.submit(ask(id, &[(1, 1)], 1), from_s(at_ms * MS)).expect("taken");
        }
        let mut found = [0; 2];
        for _ in 0..2 {
            for done in engine.advance(FOREVER).expect("no dead end") {
                found[usize::from(done.id == "1")] = done.first_token.expect("a token");
            }
        }
        found
    }

    #[test]
    fn a_step_waits_for_a_front_end_on_its_core_and_stands_still_for_it() {
        let ms = |first: f64, second: f64| [first * MS, second * MS].map(from_s);
        assert_eq!(first_tokens(false, [0.0, 0.0]), ms(3.0, 5.0));
        assert_eq!(first_tokens(true, [0.0, 0.0]), ms(4.0, 4.0));
        assert_eq!(first_tokens(false, [0.0, 2.0]), ms(3.0, 5.0));
        assert_eq!(first_tokens(true, [0.0, 2.0]), ms(4.0, 6.0));
        // What is sent as a step ends does not keep it from ending.
        assert_eq!(first_tokens(true, [0.0, 3.0]), ms(3.0, 6.0));
    }
}
