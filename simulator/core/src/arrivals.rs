//! From a submission to a request that waits, or to an error.

use std::collections::{BTreeMap, VecDeque};
use std::mem;

use crate::engine::Engine;
use crate::fetch::fetch_all;
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

    /// The next one's prompt is fetched meanwhile.
    pub fn expect(&self) {
        if let Some((_, _, next)) = self.queue.front() {
            fetch_all(&next.prompt);
        }
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
