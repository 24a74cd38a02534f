//! Decode in macro-steps: while the scheduler would schedule every step alike, the engine takes many at once.
//!
//! The result is that of single steps to the tick and to the block. Times are integers. The engine evicts blocks and
//! registers equal ones in the order of single steps, before anything looks at them. An event cuts the macro-step short
//! at the end of the step that is then under way.

use std::cmp::Reverse;
use std::mem;

use super::Engine;
use super::cost::largest;
use super::step::{Decode, Step};
use crate::tiers::Slot;
use crate::time::{FOREVER, Ticks};

impl Engine {
    /// As many decode steps as fit before a request finishes, a known event comes, or blocks run out. None: the
    /// scheduler has to decide the next step.
    pub(super) fn plan_decode(&mut self) -> Option<Decode> {
        let nothing_else = self.waiting.is_empty() && self.holding.is_empty() && self.prefilling.is_empty();
        let alike = nothing_else && self.running.len() as u64 <= self.config.max_num_batched_tokens;
        if !self.config.macro_steps || self.running.is_empty() || !(self.steady || alike) {
            return None;
        }
        if !self.steady {
            self.watched = None;
        }
        let sequences = self.running.len() as u64;
        let requests = self.running.iter().map(|&slot| &self.requests[slot]);
        let context = requests.clone().map(|request| request.computed).sum();
        let most = requests.map(|request| request.output - request.generated).min().unwrap_or(0);
        let fills = self.config.stores_replies && !self.config.prefills_first;
        let most = if fills { most.min(self.before_stores()) } else { most };
        // While a front end shares the core, the engine knows a step's length only once it begins.
        let most = if self.shares_core_now() { most.min(1) } else { most };
        let room = self.next_stop().saturating_sub(self.now);
        let pace = self.cost.pace(sequences, context);
        let steps = self.undisturbed(most.min(pace.within(room, most) + 1));
        let mut decode = Decode::new(self.now, steps, pace);
        decode.set_end(self.end_on_shared_core(decode.end()));
        (steps > 0).then_some(decode)
    }

    /// How many decode steps fill no chunk that the tiers store.
    fn before_stores(&self) -> u64 {
        let size = self.config.chunk_tokens;
        let left = |&slot: &Slot| size - 1 - self.requests[slot].computed % size;
        self.running.iter().map(left).min().filter(|_| self.server.is_some()).unwrap_or(u64::MAX)
    }

    /// How many of the steps get all their blocks and bring the request that waits for blocks no longer hit.
    fn undisturbed(&self, steps: u64) -> u64 {
        let lacking = |steps: u64| -> u64 {
            self.running.iter().map(|&slot| self.lacking(slot, self.requests[slot].computed + steps)).sum()
        };
        let steps = largest(steps, |steps| lacking(steps) <= self.pool.free());
        let Some(watched) = self.watched else { return steps };
        // The scheduler considers the waiting request after the running ones: the step that registers its block may
        // admit it.
        let registered = self.running.iter().filter_map(|&slot| {
            let request = &self.requests[slot];
            let findable = request.blocks.findable;
            let further = findable.distance(&request.runs, watched)?;
            let filled = (findable.blocks + further + 1) * self.config.block_tokens;
            Some(filled - 1 - request.computed)
        });
        registered.fold(steps, u64::min)
    }

    /// Hands out and registers the blocks of the first `steps` steps.
    fn give_blocks(&mut self, decode: &mut Decode, steps: u64) {
        if steps <= decode.blocks_given {
            return;
        }
        let given = decode.tokens_given;
        if self.config.prefills_first {
            self.make_room_for_steps(steps, given);
        }
        let mut filling = mem::take(&mut self.slots);
        for &slot in &self.running {
            let end = self.requests[slot].computed + steps - given;
            let lacking = self.lacking(slot, end);
            let request = &mut self.requests[slot];
            if lacking > 0 {
                self.pool.allocate(lacking, &mut request.blocks);
            }
            if !self.config.prefills_first
                && end >= (request.blocks.findable.blocks + 1).saturating_mul(self.config.block_tokens)
            {
                filling.push(slot);
            }
        }
        // Of requests with equal blocks, the one that has computed more registers each block first.
        filling.sort_by_key(|&slot| Reverse(self.requests[slot].computed));
        filling.drain(..).for_each(|slot| self.register(slot, self.requests[slot].computed + steps - given));
        self.slots = filling;
        decode.blocks_given = steps;
    }

    /// Hands out and registers the blocks of the steps that have begun.
    pub(super) fn give_blocks_now(&mut self) {
        let Some(Step::Decode(mut decode)) = self.step.take_if(|step| matches!(step, Step::Decode(_))) else {
            return;
        };
        let steps = decode.steps_begun(self.now);
        self.give_blocks(&mut decode, steps);
        self.step = Some(Step::Decode(decode));
    }

    /// Takes back the steps that have not begun before `at`.
    pub(super) fn cut_decode(&mut self, at: Ticks) {
        let Some(Step::Decode(mut decode)) = self.step.take() else { return };
        let steps = decode.steps_begun(at);
        decode.cut(steps);
        self.give_blocks(&mut decode, steps);
        self.step = Some(Step::Decode(decode));
    }

    /// Gives the requests the tokens of the steps that have ended, if the settings ask for each token's time.
    pub(super) fn record_tokens(&mut self) {
        if !self.config.record_token_times {
            return;
        }
        let Some(Step::Decode(mut decode)) = self.step.take_if(|step| matches!(step, Step::Decode(_))) else {
            return;
        };
        let ended = decode.steps_ended(self.now);
        self.give_tokens(&mut decode, ended);
        self.step = Some(Step::Decode(decode));
    }

    fn give_tokens(&mut self, decode: &mut Decode, steps: u64) {
        let more = steps - decode.tokens_given;
        if more == 0 {
            return;
        }
        let last = decode.end_of(steps);
        for &slot in &self.running {
            let request = &mut self.requests[slot];
            request.computed += more;
            request.generated += more;
            request.last_token = Some(last);
            if self.config.record_token_times {
                request.tokens.extend((decode.tokens_given + 1..=steps).map(|step| decode.end_of(step)));
            }
        }
        decode.tokens_given = steps;
    }

    pub(super) fn end_decode(&mut self, mut decode: Decode) {
        let steps = decode.steps();
        self.give_blocks(&mut decode, steps);
        self.give_tokens(&mut decode, steps);
        self.steady = decode.steady;
        let mut finished = mem::take(&mut self.slots);
        let done = |slot: &usize| self.requests[*slot].generated == self.requests[*slot].output;
        finished.extend(self.running.iter().copied().filter(done));
        finished.drain(..).for_each(|slot| self.finish(slot));
        self.slots = finished;
    }

    /// When the next token appears within the decode steps in flight, if the settings ask for each token's time.
    pub(super) fn next_token(&self) -> Ticks {
        match &self.step {
            Some(Step::Decode(decode)) if self.config.record_token_times => {
                decode.end_of(decode.tokens_given + 1)
            }
            _ => FOREVER,
        }
    }
}
