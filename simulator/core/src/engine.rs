//! The engine: continuous batching in virtual time, as a state machine that never sleeps.
//!
//! Events (arrivals, ends of transfers) come first at any moment, then the end of the step in flight, then the next
//! schedule. `schedule.rs` decides what a step computes, `decode.rs` takes many decode steps at once.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, HashSet, VecDeque};

use crate::blocks::BlockPool;
use crate::cost::{Cost, CostConfig};
use crate::journal::{Journal, Note};
use crate::keys::{Key, Segment, block_keys, block_runs};
use crate::request::{Completion, Lookup, Request, Status, Submission};
use crate::schedule::Batch;
use crate::tier_config::TierConfig;
use crate::tiers::{Begun, Ended, IoId, Slot, TierCounters, Tiers};
use crate::time::{FOREVER, Ticks};

#[derive(Clone, Debug)]
#[cfg_attr(feature = "python", derive(pyo3::FromPyObject))]
pub struct EngineConfig {
    /// Blocks as the engine counts them; `null_blocks` of them hold no request's tokens.
    pub gpu_blocks: u32,
    pub null_blocks: u32,
    pub block_tokens: u64,
    pub chunk_tokens: u64,
    pub max_num_batched_tokens: u64,
    pub max_num_seqs: u64,
    pub max_model_len: u64,
    pub record_token_times: bool,
    pub macro_steps: bool,
    /// Keep notes of evictions, preemptions and what the tiers did.
    pub journal: bool,
    pub cost: CostConfig,
    pub tiers: Option<TierConfig>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    pub computed_tokens: u64,
    pub gpu_hit_tokens: u64,
    pub external_tokens: u64,
    pub tiers: TierCounters,
}

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Arrival(usize),
    IoDone(IoId),
}

pub struct Engine {
    pub(crate) config: EngineConfig,
    pub(crate) cost: Cost,
    pub(crate) now: Ticks,
    pub(crate) pool: BlockPool,
    pub(crate) tiers: Option<Tiers>,
    pub(crate) requests: Vec<Request>,
    spare: Vec<Slot>,
    pub(crate) running: Vec<Slot>,
    pub(crate) waiting: VecDeque<Slot>,
    /// Waiting requests that hold blocks (their load is in flight or done): looked at before all others.
    pub(crate) holding: VecDeque<Slot>,
    /// Requests that are prefilling or loading: the blocks that they still lack are spoken for.
    pub(crate) prefilling: BTreeSet<Slot>,
    pub(crate) counters: Counters,
    /// The block that would lengthen the hit of the request that waits for blocks: its run's key, its number there.
    pub(crate) watched: Option<(Key, u32)>,
    /// The last schedule would be made again and again until an event or a request's end.
    pub(crate) steady: bool,
    pub(crate) step: Option<(Ticks, Batch)>,
    events: BinaryHeap<Reverse<(Ticks, u64, Event)>>,
    /// Ends of transfers that no request waits for. Decode steps may pass them: each is dealt with before anything
    /// looks at the tiers, as of its own time.
    quiet: BinaryHeap<Reverse<(Ticks, u64, IoId)>>,
    /// Finished requests whose stores still hold their blocks: for those blocks, requests may well wait.
    retiring: u64,
    next_event: u64,
    arriving: Vec<Option<Submission>>,
    spare_arrivals: Vec<usize>,
    ids: HashSet<String>,
    completed: Vec<Completion>,
}

impl Engine {
    /// Errors: a configuration that could serve nothing, in one line.
    pub fn new(config: EngineConfig) -> Result<Self, String> {
        let needed = [
            ("block_tokens", config.block_tokens),
            ("chunk_tokens", config.chunk_tokens),
            ("max_num_batched_tokens", config.max_num_batched_tokens),
            ("max_num_seqs", config.max_num_seqs),
        ];
        if let Some((name, _)) = needed.iter().find(|(_, value)| *value == 0) {
            return Err(format!("{name} must be at least 1, not 0"));
        }
        if config.max_model_len > u64::from(u32::MAX) {
            return Err(format!("max_model_len {} is more than {}", config.max_model_len, u32::MAX));
        }
        if config.gpu_blocks <= config.null_blocks {
            return Err(format!(
                "gpu_blocks must be more than {}, not {}",
                config.null_blocks, config.gpu_blocks
            ));
        }
        let tiers = config.tiers.as_ref();
        if let Some(error) = tiers.and_then(|tiers| tiers.refusal(config.block_tokens)) {
            return Err(error);
        }
        let mut pool = BlockPool::new(config.gpu_blocks - config.null_blocks);
        pool.journal = Journal::new(config.journal);
        Ok(Self {
            cost: Cost::new(&config.cost),
            now: 0,
            pool,
            tiers: config.tiers.clone().map(|tiers| Tiers::new(tiers, config.journal)),
            requests: Vec::new(),
            spare: Vec::new(),
            running: Vec::new(),
            waiting: VecDeque::new(),
            holding: VecDeque::new(),
            prefilling: BTreeSet::new(),
            counters: Counters::default(),
            watched: None,
            steady: false,
            step: None,
            events: BinaryHeap::new(),
            quiet: BinaryHeap::new(),
            retiring: 0,
            next_event: 0,
            arriving: Vec::new(),
            spare_arrivals: Vec::new(),
            ids: HashSet::new(),
            completed: Vec::new(),
            config,
        })
    }

    pub fn now(&self) -> Ticks {
        self.now
    }

    /// Nothing is asked, computed or transferred.
    pub fn idle(&self) -> bool {
        self.ids.is_empty() && self.tiers.as_ref().is_none_or(Tiers::idle)
    }

    pub fn counters(&self) -> Counters {
        Counters { tiers: self.tiers.as_ref().map(Tiers::counters).unwrap_or_default(), ..self.counters }
    }

    /// Notes since the last call: of the GPU's blocks and of preemptions, and of the tiers.
    pub fn take_journal(&mut self) -> (Vec<Note>, Vec<Note>) {
        let tiers = self.tiers.as_mut().map(|tiers| tiers.journal.take());
        (self.pool.journal.take(), tiers.unwrap_or_default())
    }

    /// Takes a request that is sent at `at`. A request that can never be served completes with an error.
    pub fn submit(&mut self, submission: Submission, at: Ticks) -> Result<(), String> {
        if at < self.now {
            return Err(format!("request {:?} is submitted for a moment that has passed", submission.id));
        }
        if !self.ids.insert(submission.id.clone()) {
            return Err(format!("request id {:?} is in flight already: ids must be unique", submission.id));
        }
        let tokens = submission.prompt_tokens().unwrap_or(0).min(self.config.max_model_len);
        let arrives = at.saturating_add(self.cost.arrival(tokens));
        let index = self.spare_arrivals.pop().unwrap_or(self.arriving.len());
        if index == self.arriving.len() {
            self.arriving.push(None);
        }
        self.arriving[index] = Some(submission);
        self.push_event(arrives, Event::Arrival(index));
        Ok(())
    }

    /// Runs until `until` or the first moment at which requests complete, and returns those. FOREVER: until requests
    /// complete or nothing is left to do. Error: requests wait for what can never come.
    pub fn advance(&mut self, until: Ticks) -> Result<Vec<Completion>, String> {
        loop {
            self.take_events();
            self.end_step();
            if !self.completed.is_empty() {
                return Ok(std::mem::take(&mut self.completed));
            }
            if self.step.is_none() {
                self.decode_ahead(until.min(self.next_stop_at()));
                if self.next_event_at() <= self.now {
                    continue;
                }
                self.begin_step();
            }
            let step_end = self.step.as_ref().map_or(FOREVER, |(end, _)| *end);
            let next = step_end.min(self.next_event_at());
            if next > until || next == FOREVER {
                self.now = if until == FOREVER { self.now } else { self.now.max(until) };
                let stuck = next == FOREVER && !self.ids.is_empty();
                return if stuck { Err(self.stuck()) } else { Ok(Vec::new()) };
            }
            self.now = self.now.max(next);
        }
    }

    /// Empties tiers. Error: requests or transfers are in flight.
    pub fn reset(&mut self, gpu: bool, cpu: bool, disk: bool, page_cache: bool) -> Result<(), String> {
        if !self.idle() {
            return Err("a reset needs an idle engine: drain it first".to_string());
        }
        if gpu {
            self.pool.reset();
        }
        if let Some(tiers) = &mut self.tiers {
            if cpu {
                tiers.reset_cpu();
            }
            if disk {
                tiers.reset_disk();
            }
            if page_cache {
                tiers.reset_page_cache();
            }
        }
        Ok(())
    }

    pub(crate) fn next_event_at(&self) -> Ticks {
        let loud = self.events.peek().map_or(FOREVER, |Reverse((at, _, _))| *at);
        self.quiet.peek().map_or(loud, |Reverse((at, _, _))| loud.min(*at))
    }

    /// The next event that could change what a step decides.
    fn next_stop_at(&self) -> Ticks {
        match self.retiring {
            0 => self.events.peek().map_or(FOREVER, |Reverse((at, _, _))| *at),
            _ => self.next_event_at(),
        }
    }

    fn pop_event(&mut self) -> Option<(Ticks, Event)> {
        let loud = self.events.peek().map(|Reverse((at, number, _))| (*at, *number));
        let quiet = self.quiet.peek().map(|Reverse((at, number, _))| (*at, *number));
        if quiet.is_some_and(|quiet| loud.is_none_or(|loud| quiet < loud)) {
            return self.quiet.pop().map(|Reverse((at, _, id))| (at, Event::IoDone(id)));
        }
        self.unsettle();
        self.events.pop().map(|Reverse((at, _, event))| (at, event))
    }

    /// The next schedule may decide otherwise than the last.
    fn unsettle(&mut self) {
        self.steady = false;
        if let Some((_, batch)) = &mut self.step {
            batch.steady = false;
        }
    }

    fn push_event(&mut self, at: Ticks, event: Event) {
        self.events.push(Reverse((at, self.next_event, event)));
        self.next_event += 1;
    }

    /// Puts the ends of transfers that the tiers have begun among the events.
    fn take_begun(&mut self) {
        let begun = self.tiers.as_mut().map(Tiers::take_begun).unwrap_or_default();
        for Begun { end, id, quiet } in begun {
            if quiet {
                self.quiet.push(Reverse((end, self.next_event, id)));
                self.next_event += 1;
            } else {
                self.push_event(end, Event::IoDone(id));
            }
        }
    }

    fn take_events(&mut self) {
        while self.next_event_at() <= self.now {
            let Some((at, event)) = self.pop_event() else { return };
            if let Some(tiers) = &mut self.tiers {
                tiers.tick(at);
            }
            match event {
                Event::Arrival(index) => self.arrive(index),
                Event::IoDone(id) => self.io_done(at, id),
            }
        }
    }

    fn arrive(&mut self, index: usize) {
        self.spare_arrivals.push(index);
        let Some(submission) = self.arriving[index].take() else { return };
        if let Some(error) = self.refusal(&submission) {
            self.ids.remove(&submission.id);
            let tokens = submission.prompt_tokens().unwrap_or(0);
            self.completed.push(Completion::failed(submission.id, tokens, error));
            return;
        }
        let prompt: u64 = submission.prompt.iter().map(|segment| segment.tokens).sum();
        let chunk_keys = match self.tiers {
            Some(_) => block_keys(&submission.prompt, self.config.chunk_tokens),
            None => Vec::new(),
        };
        let mut recipe = submission.prompt;
        recipe.push(Segment { hash_id: submission.reply_id, tokens: submission.output_tokens });
        let request = Request {
            id: submission.id,
            prompt,
            output: submission.output_tokens,
            runs: block_runs(&recipe, self.config.block_tokens),
            chunk_keys,
            ..Request::default()
        };
        let slot = self.spare.pop().unwrap_or(self.requests.len());
        if slot == self.requests.len() {
            self.requests.push(request);
        } else {
            self.requests[slot] = request;
        }
        self.waiting.push_back(slot);
    }

    /// Why a request can never be served; None: it can.
    fn refusal(&self, submission: &Submission) -> Option<String> {
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

    fn io_done(&mut self, at: Ticks, id: IoId) {
        let Some(tiers) = &mut self.tiers else { return };
        match tiers.io_done(at, id) {
            Ended::Lookup(slot, hit) => self.requests[slot].lookup = Lookup::Answered(hit),
            Ended::Load(slot) => self.requests[slot].status = Status::Loaded,
            Ended::Store(slot) => {
                self.requests[slot].stores_in_flight -= 1;
                if self.retire_if_done(slot) {
                    self.retiring -= 1;
                    self.unsettle();
                }
            }
            Ended::Nothing => {}
        }
        self.take_begun();
    }

    fn begin_step(&mut self) {
        let mut batch = self.schedule();
        if batch.slots.is_empty() && batch.preempted {
            // The only running request preempted itself; a step of nothing takes no time.
            batch = self.schedule();
        }
        self.take_begun();
        if !batch.slots.is_empty() {
            let end = self.now + self.cost.step(&batch.work);
            self.step = Some((end, batch));
        }
    }

    /// Ends the step in flight if it is due: tokens appear, chunks are stored, requests finish.
    fn end_step(&mut self) {
        if self.step.as_ref().is_none_or(|(end, _)| *end > self.now) {
            return;
        }
        let Some((_, batch)) = self.step.take() else { return };
        self.steady = batch.steady;
        if let Some(tiers) = &mut self.tiers {
            tiers.tick(self.now);
        }
        for slot in batch.slots {
            self.store_chunks(slot);
            let request = &mut self.requests[slot];
            if request.computed < request.tokens_known() {
                continue;
            }
            request.generated += 1;
            request.first_token.get_or_insert(self.now);
            request.last_token = Some(self.now);
            if self.config.record_token_times {
                request.tokens.push(self.now);
            }
            if request.generated == request.output {
                self.finish(slot);
            }
        }
        self.take_begun();
    }

    /// Begins to store the prompt's whole chunks that are computed and were not stored or loaded before.
    fn store_chunks(&mut self, slot: Slot) {
        let Some(tiers) = &mut self.tiers else { return };
        let request = &mut self.requests[slot];
        let computed = request.computed.min(request.prompt) / self.config.chunk_tokens;
        if computed > request.stored_chunks {
            let keys = &request.chunk_keys[request.stored_chunks as usize..computed as usize];
            request.stores_in_flight += u64::from(tiers.store(self.now, slot, keys));
            request.stored_chunks = computed;
        }
    }

    fn finish(&mut self, slot: Slot) {
        self.steady = false;
        self.running.retain(|&other| other != slot);
        let request = &mut self.requests[slot];
        if let Some(tiers) = &mut self.tiers {
            tiers.end(&request.chunk_keys);
        }
        self.ids.remove(&request.id);
        let stores_in_flight = request.stores_in_flight;
        let kept = Request {
            status: Status::Finished,
            blocks: std::mem::take(&mut request.blocks),
            stores_in_flight,
            ..Request::default()
        };
        self.completed.push(std::mem::replace(request, kept).into_completion());
        if !self.retire_if_done(slot) {
            self.retiring += 1;
        }
    }

    /// Frees a finished request's blocks, which its stores read from, once those have ended.
    fn retire_if_done(&mut self, slot: Slot) -> bool {
        let request = &mut self.requests[slot];
        let done = request.status == Status::Finished && request.stores_in_flight == 0;
        if done {
            self.pool.release(std::mem::take(&mut request.blocks));
            self.spare.push(slot);
        }
        done
    }

    fn stuck(&self) -> String {
        let waiting = self.waiting.len() + self.holding.len();
        format!("{waiting} requests wait for blocks that nothing will free: raise gpu_blocks")
    }
}
