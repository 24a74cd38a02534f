//! Decode in macro-steps: while every step would be scheduled alike, many are taken at once.
//!
//! The result is that of single steps to the tick and to the block: times are integers, and blocks are evicted and equal
//! ones registered in the order of single steps, before anybody looks at them. What comes in between cuts the macro-step
//! short at the end of the step that is then under way.

use std::cmp::Reverse;
use std::mem;

use crate::cost::{Pace, largest};
use crate::engine::{Engine, Step};
use crate::time::{FOREVER, Ticks};

/// Decode steps in a row, in flight.
pub struct Decode {
    start: Ticks,
    pub end: Ticks,
    steps: u64,
    pace: Pace,
    /// By how much the last step takes longer than its work.
    delay: Ticks,
    /// Steps whose blocks the requests have.
    met: u64,
    /// Steps whose tokens the requests have.
    told: u64,
    /// Nothing has happened since that the next schedule would have to heed.
    steady: bool,
}

impl Decode {
    /// How many of the steps have begun before `at`; the first has.
    fn steps_begun(&self, at: Ticks) -> u64 {
        self.pace.within(at.saturating_sub(self.start), self.steps - 1) + 1
    }

    /// The last step ends then, for it does not have its core for itself.
    pub fn end_at(&mut self, end: Ticks) {
        self.end = end;
        self.delay = end - self.start - self.pace.steps(self.steps);
    }

    /// When so many of the steps have ended.
    fn end_of(&self, steps: u64) -> Ticks {
        self.start + self.pace.steps(steps) + if steps == self.steps { self.delay } else { 0 }
    }
}

impl Engine {
    /// As many decode steps as can be taken before a request finishes, anything that is known happens, or blocks run
    /// out. None: the next step has to be scheduled.
    pub(crate) fn plan_decode(&mut self) -> Option<Decode> {
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
        // Beside a front end on its core, a step's length is known step by step.
        let most = if self.front_end_shares() { most.min(1) } else { most };
        let room = self.next_stop().saturating_sub(self.now);
        let pace = self.cost.pace(sequences, context);
        let steps = self.undisturbed(most.min(pace.within(room, most) + 1));
        let (start, delay, met, told, steady) = (self.now, 0, 0, 0, true);
        let end = start + pace.steps(steps);
        let mut decode = Decode { start, end, steps, pace, delay, met, told, steady };
        decode.end_at(self.shares_core(end));
        (steps > 0).then_some(decode)
    }

    /// How many of the steps get all their blocks and leave the waiting request as hopeless as it was.
    fn undisturbed(&self, steps: u64) -> u64 {
        let lacking = |steps: u64| -> u64 {
            self.running.iter().map(|&slot| self.lacking(slot, self.requests[slot].computed + steps)).sum()
        };
        let steps = largest(steps, |steps| lacking(steps) <= self.pool.free());
        let Some(watched) = self.watched else { return steps };
        // The waiting request is looked at after the running ones, so the step that registers its block may admit it.
        let registered = self.running.iter().filter_map(|&slot| {
            let request = &self.requests[slot];
            let findable = request.blocks.findable;
            let further = findable.distance(&request.runs, watched)?;
            let filled = (findable.blocks + further + 1) * self.config.block_tokens;
            Some(filled - 1 - request.computed)
        });
        registered.fold(steps, u64::min)
    }

    /// Hands out and registers the blocks of the first `steps` of the steps.
    fn meet_needs(&mut self, decode: &mut Decode, steps: u64) {
        if steps <= decode.met {
            return;
        }
        let told = decode.told;
        let mut filling = mem::take(&mut self.slots);
        for &slot in &self.running {
            let end = self.requests[slot].computed + steps - told;
            let lacking = self.lacking(slot, end);
            let request = &mut self.requests[slot];
            if lacking > 0 {
                self.pool.allocate(lacking, &mut request.blocks);
            }
            if end >= (request.blocks.findable.blocks + 1).saturating_mul(self.config.block_tokens) {
                filling.push(slot);
            }
        }
        // Of requests with equal blocks, the one that is further on registers each of them first.
        filling.sort_by_key(|&slot| Reverse(self.requests[slot].computed));
        filling.drain(..).for_each(|slot| self.register(slot, self.requests[slot].computed + steps - told));
        self.slots = filling;
        decode.met = steps;
    }

    /// Hands out and registers the blocks of the steps that have begun.
    pub(crate) fn meet_needs_now(&mut self) {
        let Some(Step::Decode(mut decode)) = self.step.take_if(|step| matches!(step, Step::Decode(_))) else {
            return;
        };
        let steps = decode.steps_begun(self.now);
        self.meet_needs(&mut decode, steps);
        self.step = Some(Step::Decode(decode));
    }

    /// Takes back the steps that have not begun before `at`.
    pub(crate) fn cut_decode(&mut self, at: Ticks) {
        let Some(Step::Decode(mut decode)) = self.step.take() else { return };
        let steps = decode.steps_begun(at);
        decode.steps = steps;
        decode.end = decode.end_of(steps);
        decode.steady = false;
        self.meet_needs(&mut decode, steps);
        self.step = Some(Step::Decode(decode));
    }

    /// Gives the requests the tokens of the steps that have ended, where they are told one by one.
    pub(crate) fn tell_tokens(&mut self) {
        if !self.config.record_token_times {
            return;
        }
        let Some(Step::Decode(mut decode)) = self.step.take_if(|step| matches!(step, Step::Decode(_))) else {
            return;
        };
        let ended = largest(decode.steps, |steps| steps == 0 || decode.end_of(steps) <= self.now);
        self.tell(&mut decode, ended);
        self.step = Some(Step::Decode(decode));
    }

    fn tell(&mut self, decode: &mut Decode, steps: u64) {
        let more = steps - decode.told;
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
                request.tokens.extend((decode.told + 1..=steps).map(|step| decode.end_of(step)));
            }
        }
        decode.told = steps;
    }

    pub(crate) fn end_decode(&mut self, mut decode: Decode) {
        let steps = decode.steps;
        self.meet_needs(&mut decode, steps);
        self.tell(&mut decode, steps);
        self.steady = decode.steady;
        let mut finished = mem::take(&mut self.slots);
        let done = |slot: &usize| self.requests[*slot].generated == self.requests[*slot].output;
        finished.extend(self.running.iter().copied().filter(done));
        finished.drain(..).for_each(|slot| self.finish(slot));
        self.slots = finished;
    }

    /// When the next token appears that somebody is told of, within the steps in flight.
    pub(crate) fn next_token(&self) -> Ticks {
        match &self.step {
            Some(Step::Decode(decode)) if self.config.record_token_times => decode.end_of(decode.told + 1),
            _ => FOREVER,
        }
    }
}
