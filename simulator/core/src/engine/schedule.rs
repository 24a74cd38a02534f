//! What one step computes: vLLM's Scheduler.schedule.
//!
//! Running requests first, each as many tokens as it lacks and the budget allows; for want of blocks the last one
//! is preempted. Then, if none was, waiting requests, until one does not fit.

use std::ops::Range;

use super::Engine;
use super::blocks::{Adds, Cached};
use super::request::{Lookup, Sources, Status};
use super::step::Batch;
use crate::keys::{BlockRun, Key};
use crate::tiers::config::MOST_LEVELS;
use crate::tiers::{Hit, Slot};

/// What the scheduler decides about a waiting request.
pub(super) enum Verdict {
    /// The request runs in this step, with so many tokens.
    Run(u64),
    /// The request waits for a transfer; the next one may go ahead of it.
    Skip,
    /// The request waits for blocks, and so do all behind it.
    Block,
}

/// The cached prefix that a waiting request would start with.
pub(super) struct Prefix {
    pub local: Cached,
    pub local_tokens: u64,
    /// Tokens that the tiers hold beyond the GPU's, and load.
    pub external_tokens: u64,
}

impl Engine {
    pub(super) fn schedule(&mut self) -> Batch {
        if self.config.reads_ahead {
            self.take_answers();
        }
        let mut batch = match self.config.prefills_first {
            true => self.schedule_prefill_or_decode(),
            false => self.schedule_running_first(),
        };
        if self.config.reads_ahead {
            batch.steady &= !self.end_pass();
        }
        batch.pass.follows = self.polls.computed;
        self.polls.idle = batch.only_polls() && self.loading_until <= self.now;
        batch
    }

    fn schedule_running_first(&mut self) -> Batch {
        let slots = std::mem::take(&mut self.slots);
        let mut batch = Batch { slots, steady: true, ..Batch::default() };
        self.watched = None;
        let mut budget = self.config.max_num_batched_tokens;
        let mut index = 0;
        while index < self.running.len() && budget > 0 {
            let slot = self.running[index];
            let request = &self.requests[slot];
            let tokens = (request.tokens_known() - request.computed).min(budget);
            let stays = request.stays_in_block(tokens, self.config.block_tokens);
            if !stays && !self.grow(slot, tokens, &mut batch.preempted) {
                break;
            }
            self.compute(slot, tokens, &mut batch);
            budget -= tokens;
            index += 1;
        }
        batch.steady &= !batch.preempted && index == self.running.len();
        if !batch.preempted {
            self.schedule_waiting(budget, &mut batch);
        }
        batch
    }

    /// Gets a running request the blocks for more tokens. False: it had to preempt this request itself.
    pub(super) fn grow(&mut self, slot: Slot, tokens: u64, preempted: &mut bool) -> bool {
        let end = self.requests[slot].computed + tokens;
        loop {
            let lacking = self.lacking(slot, end);
            if lacking <= self.pool.free() {
                if lacking > 0 {
                    self.allocate(slot, lacking);
                }
                self.register(slot, end);
                return true;
            }
            *preempted = true;
            match self.running.pop() {
                Some(victim) => {
                    self.preempt(victim);
                    if victim == slot {
                        return false;
                    }
                }
                None => return false,
            }
        }
    }

    fn preempt(&mut self, slot: Slot) {
        let request = &mut self.requests[slot];
        self.pool.journal.name("preempted", &request.id, Vec::new);
        self.pool.release(&mut request.blocks);
        request.computed = 0;
        request.preemptions += 1;
        request.lookup = Lookup::NotAsked;
        request.status = Status::Waiting;
        self.door.full = false;
        self.note_prefilling(slot, false);
        self.waiting.push_front(slot);
    }

    fn schedule_waiting(&mut self, mut budget: u64, batch: &mut Batch) {
        let (mut skipped, mut skipped_holding) = (Vec::new(), Vec::new());
        while budget > 0 && (self.running.len() as u64) < self.config.max_num_seqs {
            let from_holding = !self.holding.is_empty();
            let queue = if from_holding { &self.holding } else { &self.waiting };
            let Some(&slot) = queue.front() else { break };
            let verdict = self.consider(slot, budget, batch);
            if matches!(verdict, Verdict::Block) {
                break;
            }
            if from_holding {
                self.holding.pop_front()
            } else {
                self.waiting.pop_front()
            };
            match verdict {
                Verdict::Run(tokens) => {
                    budget -= tokens;
                    batch.steady = false;
                    self.running.push(slot);
                    batch.work.add_host(self.cost.begin(self.requests[slot].computed));
                    self.compute(slot, tokens, batch);
                }
                _ if from_holding || self.requests[slot].status == Status::Loading => {
                    skipped_holding.push(slot)
                }
                _ => skipped.push(slot),
            }
        }
        skipped_holding.into_iter().rev().for_each(|slot| self.holding.push_front(slot));
        skipped.into_iter().rev().for_each(|slot| self.waiting.push_front(slot));
    }

    fn consider(&mut self, slot: Slot, budget: u64, batch: &mut Batch) -> Verdict {
        match self.requests[slot].status {
            Status::Loading => Verdict::Skip,
            Status::Loaded => match self.knows_loaded(slot, batch) {
                true => self.resume_loaded(slot, budget),
                false => Verdict::Skip,
            },
            _ => {
                if !self.answered(slot, batch) {
                    return Verdict::Skip;
                }
                let prefix = self.prefix(slot);
                if prefix.external_tokens > 0 {
                    let verdict = self.admit_load(slot, prefix);
                    let blocked = matches!(verdict, Verdict::Block);
                    batch.steady &= blocked;
                    batch.pass.loads += u64::from(!blocked);
                    verdict
                } else {
                    self.admit(slot, prefix, budget)
                }
            }
        }
    }

    /// Whether the tiers have said what they hold of a waiting request's prompt.
    pub(super) fn answered(&mut self, slot: Slot, batch: &mut Batch) -> bool {
        match self.config.reads_ahead {
            true => self.looked_up_ahead(slot, batch),
            false => self.looked_up(slot, batch),
        }
    }

    pub(super) fn prefix(&self, slot: Slot) -> Prefix {
        let request = &self.requests[slot];
        let findable = (request.tokens_known() - 1) / self.config.block_tokens;
        let local = self.pool.find(&request.runs, findable);
        let local_tokens = local.end.blocks * self.config.block_tokens;
        let hit_tokens = match &request.lookup {
            Lookup::Answered(hit) => hit.chunks() * self.config.chunk_tokens,
            _ => 0,
        };
        // A full hit still computes the last token, for its logits, or the block that it ends.
        let most = match self.config.prefills_first {
            true => findable * self.config.block_tokens,
            false => request.tokens_known() - 1,
        };
        let beyond = hit_tokens.min(most).saturating_sub(local_tokens);
        let external_tokens = if beyond < self.config.min_load_tokens { 0 } else { beyond };
        Prefix { local, local_tokens, external_tokens }
    }

    /// Tokens of the longest prefix that this engine holds now: whole blocks on the GPU, or whole chunks in the tiers.
    pub(crate) fn held_tokens(&mut self, runs: &[BlockRun], chunk_keys: &[Key]) -> u64 {
        self.catch_up();
        self.give_blocks_now();
        let blocks = self.pool.find(runs, u64::MAX).end.blocks;
        let chunks = self.server.as_ref().map_or(0, |server| server.tiers.held(chunk_keys));
        (blocks * self.config.block_tokens).max(chunks * self.config.chunk_tokens)
    }

    /// Whether the GPU has blocks for all known tokens beside `local`, and for those up to `end` besides `reserved`
    /// ones.
    fn fits(&mut self, slot: Slot, local: &Cached, end: u64, reserved: u64) -> bool {
        let request = &self.requests[slot];
        let held = request.blocks.len() + local.end.blocks;
        let lacking =
            |tokens: u64| tokens.div_ceil(self.config.block_tokens).saturating_sub(held) + local.unused;
        let fits = lacking(request.tokens_known()) <= self.pool.free()
            && lacking(end) + reserved <= self.pool.free();
        if !fits {
            let findable = (request.tokens_known() - 1) / self.config.block_tokens;
            self.watched = if local.end.blocks < findable { local.end.next(&request.runs) } else { None };
        }
        fits
    }

    fn admit(&mut self, slot: Slot, prefix: Prefix, budget: u64) -> Verdict {
        let tokens = (self.requests[slot].tokens_known() - prefix.local_tokens).min(budget);
        let end = prefix.local_tokens + tokens;
        if !self.fits(slot, &prefix.local, end, 0) {
            return Verdict::Block;
        }
        self.adopt(slot, &prefix);
        self.release_hit(slot);
        self.run_from(slot, prefix.local_tokens, tokens)
    }

    /// Gives the request its blocks and begins to load them. It waits meanwhile; others may run.
    fn admit_load(&mut self, slot: Slot, prefix: Prefix) -> Verdict {
        let end = prefix.local_tokens + prefix.external_tokens;
        let reserved = self.reserved_blocks();
        if !self.fits(slot, &prefix.local, end, reserved) {
            return Verdict::Block;
        }
        self.adopt(slot, &prefix);
        let lacking = self.lacking(slot, end);
        self.allocate(slot, lacking);
        let name = self.server_slot(slot);
        let request = &mut self.requests[slot];
        request.status = Status::Loading;
        request.computed = end;
        self.note_prefilling(slot, true);
        let request = &mut self.requests[slot];
        if let (Some(server), Lookup::Answered(hit)) = (&mut self.server, &mut request.lookup) {
            let first = prefix.local_tokens / self.config.chunk_tokens;
            let start = self.now.max(self.loading_until);
            let end = server.tiers.load(start, name, std::mem::take(hit), first as usize);
            if self.cost.synchronous_loads {
                self.loading_until = end;
            }
        }
        Verdict::Skip
    }

    fn resume_loaded(&mut self, slot: Slot, budget: u64) -> Verdict {
        let computed = self.requests[slot].computed;
        self.register_loaded(slot, computed);
        let tokens = (self.requests[slot].tokens_known() - computed).min(budget);
        if !self.fits(slot, &Cached::default(), computed + tokens, 0) {
            return Verdict::Block;
        }
        self.run_from(slot, computed, tokens)
    }

    fn run_from(&mut self, slot: Slot, computed: u64, tokens: u64) -> Verdict {
        let lacking = self.lacking(slot, computed + tokens);
        self.allocate(slot, lacking);
        self.register(slot, computed + tokens);
        let request = &mut self.requests[slot];
        request.computed = computed;
        request.status = Status::Running;
        Verdict::Run(tokens)
    }

    fn adopt(&mut self, slot: Slot, prefix: &Prefix) {
        self.pool.take(&prefix.local, &mut self.requests[slot].blocks);
        self.note_sources(slot, prefix);
    }

    /// Notes, at the first admission, where the prompt's tokens come from.
    pub(super) fn note_sources(&mut self, slot: Slot, prefix: &Prefix) {
        let chunk = self.config.chunk_tokens;
        let request = &mut self.requests[slot];
        let (mut levels, mut loaded_before) = ([0; MOST_LEVELS], 0);
        if let Lookup::Answered(hit) = &request.lookup {
            request.stored_chunks = hit.chunks();
            request.fetched = tokens_below_first(hit, chunk);
            let end = prefix.local_tokens + prefix.external_tokens;
            // What was read ahead for a request counts as read, also if another has loaded it to the GPU since.
            let from = if self.config.reads_ahead { 0 } else { prefix.local_tokens };
            let overlap = |chunks: &Range<usize>, from: u64, to: u64| {
                let (start, beyond) = (chunks.start as u64 * chunk, chunks.end as u64 * chunk);
                to.min(beyond).saturating_sub(from.max(start))
            };
            for (chunks, level) in hit.ranges().filter(|(_, level)| *level > 0) {
                levels[level as usize] += overlap(&chunks, from, end);
                loaded_before += overlap(&chunks, from, prefix.local_tokens);
            }
        }
        if request.preemptions == 0 {
            let external = prefix.external_tokens + loaded_before;
            levels[0] = external - levels.iter().sum::<u64>();
            request.sources = Sources {
                computed: request.prompt - prefix.local_tokens - prefix.external_tokens,
                gpu: prefix.local_tokens - loaded_before,
                levels,
            };
            self.counters.computed_tokens += request.sources.computed;
            self.counters.gpu_hit_tokens += request.sources.gpu;
            for (all, own) in self.counters.level_tokens.iter_mut().zip(levels) {
                *all += own;
            }
        }
    }

    pub(super) fn release_hit(&mut self, slot: Slot) {
        let request = &mut self.requests[slot];
        if let (Some(server), Lookup::Answered(hit)) = (&mut self.server, &mut request.lookup) {
            server.tiers.release(&std::mem::take(hit));
        }
    }

    /// Blocks that prefilling and loading requests still need for their known tokens.
    fn reserved_blocks(&self) -> u64 {
        self.prefilling.iter().map(|&slot| self.lacking(slot, self.requests[slot].tokens_known())).sum()
    }

    /// Blocks that a request lacks to hold `end` tokens.
    #[inline(always)]
    pub(super) fn lacking(&self, slot: Slot, end: u64) -> u64 {
        let held = self.requests[slot].blocks.len();
        // Every step asks this of every request, and divisions are slow.
        match end <= held.saturating_mul(self.config.block_tokens) {
            true => 0,
            false => end.div_ceil(self.config.block_tokens) - held,
        }
    }

    pub(super) fn allocate(&mut self, slot: Slot, count: u64) {
        self.pool.allocate(count, &mut self.requests[slot].blocks);
    }

    /// Makes a request's whole blocks up to `end` tokens findable, unless the pool gets them once they are computed.
    #[inline(always)]
    pub(super) fn register(&mut self, slot: Slot, end: u64) {
        if !self.config.prefills_first {
            self.insert(slot, end);
        }
    }

    #[inline(always)]
    pub(super) fn insert(&mut self, slot: Slot, end: u64) {
        let findable = self.requests[slot].blocks.findable.blocks;
        if end >= (findable + 1).saturating_mul(self.config.block_tokens) {
            let end = end / self.config.block_tokens;
            let held = if self.pool.knows_ends() { self.first_holds(slot, end) } else { 0 };
            let request = &mut self.requests[slot];
            if held > findable {
                self.pool.register(&request.runs, held, &mut request.blocks, Adds::Loaded);
            }
            self.pool.register(&request.runs, end, &mut request.blocks, Adds::Computed);
        }
    }

    /// How many of a request's first `blocks` the first level holds: they are in the tree as the nodes that they were.
    fn first_holds(&self, slot: Slot, blocks: u64) -> u64 {
        let (request, chunk, block) =
            (&self.requests[slot], self.config.chunk_tokens, self.config.block_tokens);
        let chunks = match self.config.stores_replies {
            true => (blocks * block / chunk) as usize,
            false => request.chunks.len(),
        };
        let Some(server) = &self.server else { return 0 };
        blocks.min(server.tiers.first_holds(&request.chunks.slice(0..chunks)) * chunk / block)
    }

    /// As `register`, of what the tiers have brought.
    pub(super) fn register_loaded(&mut self, slot: Slot, computed: u64) {
        let request = &mut self.requests[slot];
        let Range { start, end: fetched } = request.fetched;
        for (end, adds) in [(start, Adds::Loaded), (fetched, Adds::Fetched), (u64::MAX, Adds::Loaded)] {
            let blocks = end.min(computed) / self.config.block_tokens;
            if blocks > request.blocks.findable.blocks {
                self.pool.register(&request.runs, blocks, &mut request.blocks, adds);
            }
        }
        self.pool.loaded_to(&request.blocks);
    }

    #[inline(always)]
    pub(super) fn compute(&mut self, slot: Slot, tokens: u64, batch: &mut Batch) {
        let request = &mut self.requests[slot];
        batch.steady &= request.decoding();
        batch.work.add(tokens, request.computed);
        batch.slots.push(slot);
        request.computed += tokens;
        let prefills = request.computed < request.tokens_known();
        if self.cost.stores_take_time() && (self.config.stores_replies || request.lacks_stores()) {
            batch.work.add_host(self.cost.store(self.chunks_to_store(slot) * self.config.chunk_tokens));
        }
        self.note_prefilling(slot, prefills);
    }

    /// The whole chunks that the GPU will have computed, this step too, and that were neither stored nor loaded.
    pub(super) fn chunks_to_store(&self, slot: Slot) -> u64 {
        let request = &self.requests[slot];
        let replies = self.config.stores_replies
            && (!self.config.prefills_first || request.generated == request.output);
        let stores = if replies { request.computed } else { request.computed.min(request.prompt) };
        let computed = stores / self.config.chunk_tokens;
        if self.server.is_some() { computed.saturating_sub(request.stored_chunks) } else { 0 }
    }

    /// Notes whether a request prefills. Few do at a time.
    #[inline(always)]
    fn note_prefilling(&mut self, slot: Slot, prefills: bool) {
        match (self.prefilling.iter().position(|&other| other == slot), prefills) {
            (None, true) => self.prefilling.push(slot),
            (Some(index), false) => {
                self.prefilling.swap_remove(index);
            }
            _ => {}
        }
    }
}

/// Which of a hit's tokens no first level held.
fn tokens_below_first(hit: &Hit, chunk_tokens: u64) -> Range<u64> {
    let mut lower = hit.ranges().filter(|(_, level)| *level > 0).map(|(chunks, _)| chunks);
    let first = lower.next().unwrap_or_default();
    let end = lower.last().map_or(first.end, |chunks| chunks.end);
    first.start as u64 * chunk_tokens..end as u64 * chunk_tokens
}
