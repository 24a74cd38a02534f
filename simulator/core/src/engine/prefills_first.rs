//! SGLang's schedule without overlap: a step prefills, or it decodes. Prefill goes first.
//!
//! A prefill step matches its requests one after another, and holds their cached prefixes, before it takes room for what
//! it computes (managers/scheduler.py, _get_new_batch_prefill_raw; mem_cache/allocation.py, alloc_for_extend). A request
//! begins if the GPU has room for its rest and its reply beside what running requests have yet to write
//! (managers/schedule_policy.py, PrefillAdder; requests that ignore the end of text count with all of their reply).

use std::mem;

use super::Engine;
use super::request::Status;
use super::schedule::{Prefix, Verdict};
use super::step::Batch;
use crate::tiers::Slot;

/// Each so many prefill passes, so many waiting requests' prefixes are made the newest, the first one's last
/// (schedule_policy.py, WAITING_PREFIX_REFRESH_INTERVAL and WAITING_QUEUE_PREFIX_MATCH_MAX).
const REFRESH_INTERVAL: u64 = 32;
const MOST_REFRESHED: usize = 128;

/// Of a reply, room is kept for so many tokens at most (CLIP_MAX_NEW_TOKENS).
pub(super) const MOST_RESERVED: u64 = 4096;

/// What the scheduler keeps from one step to the next.
#[derive(Debug, Default)]
pub(super) struct Door {
    /// A request did not fit. None is asked again until one that runs ends (batch_is_full).
    pub full: bool,
    /// Prefill passes that had requests to choose from.
    passes: u64,
}

/// Tokens that a prefill step may compute yet, and those for which room is promised: running requests' replies, and
/// whole blocks for what the step computes, one more for each request.
struct Budget {
    compute: u64,
    promised: u64,
    computed: u64,
}

impl Engine {
    pub(super) fn schedule_prefill_or_decode(&mut self) -> Batch {
        let slots = mem::take(&mut self.slots);
        let mut batch = Batch { slots, ..Batch::default() };
        self.watched = None;
        self.prefill(&mut batch);
        if batch.slots.is_empty() {
            self.decode(&mut batch);
        }
        batch
    }

    fn prefill(&mut self, batch: &mut Batch) {
        let (goes_on, decoding) =
            (self.prefilling.first().copied(), self.running.len() - self.prefilling.len());
        self.door.full &= decoding > 0;
        if goes_on.is_none() {
            if self.door.full || self.waiting.is_empty() {
                return;
            }
            if self.running.len() as u64 >= self.config.max_num_seqs {
                self.door.full = true;
                return;
            }
        }
        self.refresh_waiting();
        let replies = self.running.iter().filter(|slot| !self.prefilling.contains(slot));
        let promised = replies.map(|&slot| self.reply_left(slot)).sum();
        let mut budget = Budget { compute: self.config.max_num_batched_tokens, promised, computed: 0 };
        if let Some(slot) = goes_on {
            let request = &self.requests[slot];
            let tokens = (request.tokens_known() - request.computed).min(budget.compute);
            self.compute_promised(slot, tokens, &mut budget, batch);
        }
        self.begin_waiting(&mut budget, batch);
        if !batch.slots.is_empty() {
            // SGLang forgets it with the batch that a finished prefill joins, and when one goes on.
            self.door.full &= decoding > 0 && self.prefilling.is_empty();
            self.take_room(budget.computed, batch);
        }
    }

    fn refresh_waiting(&mut self) {
        if self.waiting.is_empty() {
            return;
        }
        let due = self.door.passes.is_multiple_of(REFRESH_INTERVAL);
        self.door.passes += 1;
        if !due {
            return;
        }
        for index in (0..self.waiting.len().min(MOST_REFRESHED)).rev() {
            let slot = self.waiting[index];
            self.use_prefix(slot, self.requests[slot].tokens_known());
        }
    }

    pub(super) fn touch_in_tiers(&mut self, slot: Slot) {
        if let Some(server) = &mut self.server {
            server.tiers.touch(&self.requests[slot].chunks);
        }
    }

    fn begin_waiting(&mut self, budget: &mut Budget, batch: &mut Batch) {
        let mut skipped = Vec::new();
        while let Some(&slot) = self.waiting.front() {
            if budget.compute == 0 && self.unpromised(budget) > 0 {
                break;
            }
            if self.running.len() as u64 >= self.config.max_num_seqs {
                self.door.full = true;
                break;
            }
            match self.begin(slot, budget, batch) {
                Verdict::Block => break,
                Verdict::Skip => skipped.extend(self.waiting.pop_front()),
                Verdict::Run(tokens) => {
                    self.waiting.pop_front();
                    self.running.push(slot);
                    batch.work.add_host(self.cost.begin(self.requests[slot].computed));
                    self.compute_promised(slot, tokens, budget, batch);
                    if self.unpromised(budget) == 0 {
                        self.door.full = true;
                        break;
                    }
                }
            }
        }
        skipped.into_iter().rev().for_each(|slot| self.waiting.push_front(slot));
    }

    /// Matches a waiting request, which makes its prefix the newest, and holds the prefix if the request can run.
    fn begin(&mut self, slot: Slot, budget: &Budget, batch: &mut Batch) -> Verdict {
        if !self.answered(slot, batch) {
            return Verdict::Skip;
        }
        let prefix = self.prefix(slot);
        self.pool.take(&prefix.local, &mut self.requests[slot].blocks);
        self.touch_in_tiers(slot);
        let Some(tokens) = self.chosen(slot, &prefix, budget) else {
            self.pool.release(&mut self.requests[slot].blocks);
            self.cut_on_host(slot, prefix.local.end.blocks);
            self.look_again(slot);
            return Verdict::Block;
        };
        self.note_sources(slot, &prefix);
        let computed = prefix.local_tokens + prefix.external_tokens;
        if prefix.external_tokens > 0 {
            self.load_by_layer(slot, &prefix, batch);
        } else {
            self.release_hit(slot);
        }
        let request = &mut self.requests[slot];
        (request.computed, request.status) = (computed, Status::Running);
        Verdict::Run(tokens)
    }

    /// How many tokens of a request the step computes; None: none, for want of room or of budget.
    fn chosen(&mut self, slot: Slot, prefix: &Prefix, budget: &Budget) -> Option<u64> {
        let (request, block) = (&self.requests[slot], self.config.block_tokens);
        let lacking = request.tokens_known() - prefix.local_tokens;
        if lacking.saturating_add(self.reply_left(slot)).saturating_add(block) >= self.unpromised(budget) {
            self.door.full = !self.running.is_empty();
            return None;
        }
        let rest = lacking - prefix.external_tokens;
        if self.whole(rest) <= budget.compute {
            return Some(rest);
        }
        let start = request.tokens_known() - rest;
        let end = start.saturating_add(budget.compute) / block * block;
        end.checked_sub(start).filter(|&tokens| tokens > 0)
    }

    /// As many tokens as the blocks of these have.
    fn whole(&self, tokens: u64) -> u64 {
        tokens.div_ceil(self.config.block_tokens).saturating_mul(self.config.block_tokens)
    }

    /// Tokens of a request's reply for which room is kept.
    fn reply_left(&self, slot: Slot) -> u64 {
        let request = &self.requests[slot];
        (request.output - request.generated).min(MOST_RESERVED)
    }

    /// Tokens for which the GPU has room, or blocks to evict, that no request is promised.
    fn unpromised(&self, budget: &Budget) -> u64 {
        self.pool.free().saturating_mul(self.config.block_tokens).saturating_sub(budget.promised)
    }

    fn compute_promised(&mut self, slot: Slot, tokens: u64, budget: &mut Budget, batch: &mut Batch) {
        let request = &self.requests[slot];
        let ends = request.computed + tokens == request.tokens_known();
        let reply = if ends { request.output.min(MOST_RESERVED) } else { 0 };
        let whole = self.whole(tokens);
        budget.compute = budget.compute.saturating_sub(whole);
        for more in [whole, self.config.block_tokens, reply] {
            budget.promised = budget.promised.saturating_add(more);
        }
        budget.computed += tokens;
        self.compute(slot, tokens, batch);
    }

    /// Makes room for all that a prefill step computes, and a block for each request, before any of them gets its own.
    fn take_room(&mut self, computed: u64, batch: &Batch) {
        self.pool.make_room(computed.div_ceil(self.config.block_tokens) + batch.slots.len() as u64);
        for &slot in &batch.slots {
            let lacking = self.lacking(slot, self.requests[slot].computed);
            debug_assert!(lacking <= self.pool.free(), "room that was promised is there");
            self.allocate(slot, lacking);
        }
    }

    /// A token for each running request. A block for each is free before any gets its own.
    fn decode(&mut self, batch: &mut Batch) {
        self.pool.make_room(self.running.len() as u64);
        batch.steady = true;
        let mut index = 0;
        while index < self.running.len() {
            let slot = self.running[index];
            if !self.grow(slot, 1, &mut batch.preempted) {
                break;
            }
            self.compute(slot, 1, batch);
            index += 1;
        }
        // Else the next pass matches waiting requests again.
        let alone = self.waiting.is_empty() || self.door.full;
        batch.steady &= !batch.preempted && index == self.running.len() && alone;
    }

    /// Makes the room that decode steps make one by one: before each, a block for each request is free.
    pub(super) fn make_room_for_steps(&mut self, steps: u64, given: u64) {
        let before = |slot: &Slot| self.lacking(*slot, self.requests[*slot].computed + steps - 1 - given);
        let taken: u64 = self.running.iter().map(before).sum();
        self.pool.make_room(taken + self.running.len() as u64);
    }
}
