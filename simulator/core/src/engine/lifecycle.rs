//! A request from its arrival at the scheduler to its completion.

use std::mem;

use super::Engine;
use super::prefills_first::MOST_RESERVED;
use super::request::{Completion, Request, Status, Submission};
use super::step::Step;
use crate::keys::{ChunkRange, Segment, keys_and_runs};
use crate::tiers::Slot;

impl Engine {
    /// The next request reaches the scheduler.
    #[inline(never)]
    pub(super) fn take_arrival(&mut self) {
        let Some((at, submission)) = self.arrivals.pop() else { return };
        if let Some(server) = &mut self.server {
            server.tiers.tick(at);
        }
        self.arrive(submission);
        self.invalidate_schedule(at);
    }

    /// A request reaches the scheduler. One that can never be served completes with an error.
    fn arrive(&mut self, submission: Submission) {
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
        // The memory of the request that had this slot before is used again.
        let (mut runs, mut blocks) = (mem::take(&mut request.runs), mem::take(&mut request.blocks));
        let reply = Segment { hash_id: reply_id, tokens: output_tokens };
        let chunk_tokens = self.config.chunk_tokens;
        let chunks = (self.server.is_some().then_some(chunk_tokens), &mut self.keys);
        let blocks_of = (self.config.block_tokens, &mut runs);
        let prompts = keys_and_runs((&prompt, reply), chunks, blocks_of, self.config.stores_replies);
        blocks.expect(&runs);
        *request = Request {
            id,
            owner: reply_id,
            prompt: prompt.iter().map(|segment| segment.tokens).sum(),
            output: output_tokens,
            blocks,
            runs,
            chunks: ChunkRange::of(&self.keys[..]).slice(0..prompts),
            ..Request::default()
        };
        self.keys.clear();
        self.waiting.push_back(slot);
        if self.config.reads_ahead {
            self.came(slot);
        }
    }

    /// Why the engine can never serve a request; None: it can.
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
        let blocks = self.pool.len();
        let kept = prompt.saturating_add(output.min(MOST_RESERVED)).saturating_add(self.config.block_tokens);
        if self.config.prefills_first && kept >= blocks.saturating_mul(self.config.block_tokens) {
            let least = kept / self.config.block_tokens + 1;
            return Some(format!("{least} blocks are needed and the GPU has {blocks}: it can never fit"));
        }
        // The engine never needs the last token's KV.
        let needed = (prompt + output - 1).div_ceil(self.config.block_tokens);
        (needed > blocks)
            .then(|| format!("{needed} blocks are needed and the GPU has {blocks}: it can never fit"))
    }

    /// A step that has just ended gave a request its first or last token: the front end passes it on.
    pub(super) fn answer(&mut self, slot: Slot) {
        if !self.cost.answers_take_time() {
            self.requests[slot].first_token.get_or_insert(self.now);
            return;
        }
        self.requests[slot].answers += 1;
        let stores = self.requests[slot].stores_in_flight > 0;
        let work = self.cost.vary(self.cost.answer(stores));
        let request = &self.requests[slot];
        let first = if request.generated > 1 { 0 } else { self.cost.first_answer(request.prompt) };
        self.front_end.add_answer(self.now, work, self.cost.vary(first), slot);
    }

    /// The engine has just begun what comes next: its own work on that goes ahead of the front end's.
    pub(super) fn hold_front_end(&mut self) {
        let pass = match &self.step {
            None => return,
            Some(Step::Batch { batch, .. }) if batch.slots.is_empty() => Some(batch.pass),
            Some(Step::Batch { .. } | Step::Decode(_)) => None,
        };
        match pass {
            Some(pass) if self.front_end.is_busy() && !self.config.cost.shared_core => {
                let work = self.cost.vary(self.cost.own_work(pass));
                self.front_end.hold(work);
            }
            None if self.front_end.awaits_step() => {
                let work = self.cost.vary(self.cost.response_next);
                self.front_end.hold_answers(work);
            }
            _ => {}
        }
    }

    /// A request has all of its tokens.
    pub(super) fn finish(&mut self, slot: Slot) {
        (self.steady, self.door.full) = (false, false);
        if self.config.prefills_first {
            self.insert(slot, self.requests[slot].computed);
            self.pool.touch(&self.requests[slot].blocks);
            self.store_chunks(slot);
            self.pool.release_plain(&mut self.requests[slot].blocks);
        }
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

    /// Begins to store the whole chunks that the GPU has computed and that were neither stored nor loaded.
    pub(super) fn store_chunks(&mut self, slot: Slot) {
        let (name, count) = (self.server_slot(slot), self.chunks_to_store(slot));
        let Some(server) = self.server.as_mut().filter(|_| count > 0) else { return };
        let request = &mut self.requests[slot];
        let end = request.stored_chunks + count;
        let range = request.chunks.slice(request.stored_chunks as usize..end as usize);
        request.stores_in_flight += u64::from(server.tiers.store(self.now, name, range));
        request.stored_chunks = end;
    }

    /// Stores what a step has computed, and makes it findable if the pool gets it then.
    #[inline(always)]
    pub(super) fn keep_computed(&mut self, slot: Slot) {
        if self.config.prefills_first {
            self.insert_prompt(slot);
        }
        if self.config.stores_replies || self.requests[slot].lacks_stores() {
            self.store_chunks(slot);
        }
    }

    /// Makes what a step has computed of a prompt findable.
    fn insert_prompt(&mut self, slot: Slot) {
        let request = &self.requests[slot];
        if request.blocks.findable.blocks < request.prompt / self.config.block_tokens {
            self.insert(slot, request.computed);
        }
    }

    /// Frees a finished request's blocks: the stores that read from them have ended.
    pub(super) fn retire(&mut self, slot: Slot) {
        self.pool.release(&mut self.requests[slot].blocks);
        if self.requests[slot].answers == 0 {
            self.spare.push(slot);
        }
    }

    /// The front end has passed on a request's first or last token.
    pub(super) fn answer_passed(&mut self, slot: Slot) {
        self.record_tokens();
        let request = &mut self.requests[slot];
        request.answers -= 1;
        if request.first_token.is_none() {
            // Tokens that waited for the front end with the first one come together with it.
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

    /// The front end has passed on all of a finished request's tokens.
    fn complete(&mut self, slot: Slot) {
        let request = &mut self.requests[slot];
        self.ids.remove(&request.id);
        self.unfinished -= 1;
        self.completed.push(request.finish());
    }
}
