//! The engine: continuous batching in virtual time, as a state machine that never sleeps.
//!
//! Events (arrivals, ends of transfers) come first at any moment, then the end of the step in flight, then the next
//! schedule. `schedule.rs` decides what a step computes, `decode.rs` takes many decode steps at once.

use std::collections::VecDeque;

use hashbrown::HashSet;

use crate::arrivals::Arrivals;
use crate::blocks::BlockPool;
use crate::cost::{Cost, CostConfig};
use crate::decode::Decode;
use crate::front_end::FrontEnd;
use crate::journal::{Journal, Note};
use crate::keys::Key;
use crate::request::{Completion, Lookup, Request, Status, Submission};
use crate::schedule::Batch;
use crate::server::Server;
use crate::tier_config::TierConfig;
use crate::tiers::{Ended, Slot, TierCounters, Tiers};
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

/// What the GPU computes now.
pub(crate) enum Step {
    Batch { end: Ticks, batch: Batch },
    Decode(Decode),
}

impl Step {
    pub(crate) fn end(&self) -> Ticks {
        match self {
            Step::Batch { end, .. } => *end,
            Step::Decode(decode) => decode.end,
        }
    }
}

pub struct Engine {
    pub(crate) config: EngineConfig,
    pub(crate) cost: Cost,
    pub(crate) now: Ticks,
    pub(crate) pool: BlockPool,
    pub(crate) server: Option<Box<Server>>,
    /// The server is shared: it knows this engine's requests by their slots beyond this, and is told to this engine by
    /// others when transfers end.
    pub(crate) slots_from: Option<Slot>,
    /// Others look at the disk that this engine's server writes to.
    pub(crate) shares_disk: bool,
    pub(crate) requests: Vec<Request>,
    pub(crate) spare: Vec<Slot>,
    pub(crate) running: Vec<Slot>,
    pub(crate) waiting: VecDeque<Slot>,
    /// Waiting requests that hold blocks (their load is in flight or done): looked at before all others.
    pub(crate) holding: VecDeque<Slot>,
    /// Requests that are prefilling or loading: the blocks that they still lack are spoken for.
    pub(crate) prefilling: Vec<Slot>,
    pub(crate) counters: Counters,
    /// The block that would lengthen the hit of the request that waits for blocks: its run's key, its number there.
    pub(crate) watched: Option<(Key, u32)>,
    /// The last schedule would be made again and again until an event or a request's end.
    pub(crate) steady: bool,
    pub(crate) step: Option<Step>,
    /// Slots to go through and a prompt's chunks, kept for their memory only.
    pub(crate) slots: Vec<Slot>,
    pub(crate) keys: Vec<Key>,
    /// Requests that have not been sent yet, and those that have, by when the front end and the way from there are
    /// behind them.
    pub(crate) sends: Arrivals,
    pub(crate) arrivals: Arrivals,
    pub(crate) front_end: FrontEnd,
    submitted: u64,
    /// Finished requests whose stores still hold their blocks: for those blocks, requests may well wait.
    pub(crate) retiring: u64,
    /// Until when the engine's own thread copies what is loaded.
    pub(crate) loading_until: Ticks,
    pub(crate) unfinished: u64,
    /// Of the unfinished requests that came by `submit`.
    pub(crate) ids: HashSet<String>,
    pub(crate) completed: Vec<Completion>,
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
        let tiers = config.tiers.clone().map(|tiers| Tiers::new(tiers, config.journal));
        Ok(Self {
            cost: Cost::new(&config.cost),
            now: 0,
            pool,
            server: tiers.map(|tiers| Box::new(Server::new(tiers))),
            slots_from: None,
            shares_disk: false,
            requests: Vec::new(),
            spare: Vec::new(),
            running: Vec::new(),
            waiting: VecDeque::new(),
            holding: VecDeque::new(),
            prefilling: Vec::new(),
            counters: Counters::default(),
            watched: None,
            steady: false,
            step: None,
            slots: Vec::new(),
            keys: Vec::new(),
            sends: Arrivals::default(),
            arrivals: Arrivals::default(),
            front_end: FrontEnd::default(),
            submitted: 0,
            retiring: 0,
            loading_until: 0,
            unfinished: 0,
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
        self.unfinished == 0 && self.server.as_ref().is_none_or(|server| server.tiers.idle())
    }

    pub fn counters(&self) -> Counters {
        let tiers = self.server.as_ref().map(|server| server.tiers.counters());
        Counters { tiers: tiers.unwrap_or_default(), ..self.counters }
    }

    /// Notes since the last call: of the GPU's blocks and of preemptions, and of the tiers.
    pub fn take_journal(&mut self) -> (Vec<Note>, Vec<Note>) {
        let tiers = self.server.as_mut().map(|server| server.tiers.journal.take());
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
        self.submitted += 1;
        self.accept(submission, at, self.submitted);
        Ok(())
    }

    /// Runs until `until` or the first moment at which requests complete, and returns those. FOREVER: until requests
    /// complete or nothing is left to do. Error: requests wait for what can never come.
    pub fn advance(&mut self, until: Ticks) -> Result<Vec<Completion>, String> {
        loop {
            self.act();
            if !self.completed.is_empty() {
                return Ok(std::mem::take(&mut self.completed));
            }
            self.begin_step();
            let next = self.next_moment();
            if next > until || next == FOREVER {
                self.now = if until == FOREVER { self.now } else { self.now.max(until) };
                self.settle();
                let stuck = next == FOREVER && self.unfinished > 0 && !self.owed();
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
        if let Some(server) = &mut self.server {
            server.reset(cpu, disk, page_cache);
        }
        Ok(())
    }

    /// The next moment at which this engine acts, whether or not anything is submitted to it before.
    pub(crate) fn next_moment(&self) -> Ticks {
        match &self.step {
            Some(step) if self.shares_disk => step.end().min(self.next_arrival()).min(self.next_end(true)),
            Some(step) => step.end().min(self.next_stop()),
            None => self.next_arrival().min(self.next_end(true)),
        }
    }

    /// The next event that could change what a step decides.
    pub(crate) fn next_stop(&self) -> Ticks {
        self.next_arrival().min(self.next_end(self.retiring > 0))
    }

    fn next_end(&self, any: bool) -> Ticks {
        match &self.server {
            Some(server) if self.slots_from.is_none() => server.next_at(any),
            _ => FOREVER,
        }
    }

    /// What the server calls a request.
    pub(crate) fn server_slot(&self, slot: Slot) -> Slot {
        self.slots_from.unwrap_or(0) | slot
    }

    /// Deals with all that is due, up to the end of the step in flight.
    pub(crate) fn act(&mut self) {
        self.take_events();
        self.end_step();
    }

    /// Brings what can be seen from outside to this moment, between two at which the engine acts.
    pub(crate) fn settle(&mut self) {
        self.take_events();
        self.tell_tokens();
    }

    fn take_events(&mut self) {
        loop {
            self.pass_front_end();
            let (arrival, end) = (self.arrivals.next_at(), self.next_end(true));
            if arrival.min(end) > self.now {
                return;
            }
            if end <= arrival {
                let Some((at, ended)) = self.server.as_mut().and_then(|server| server.end_next(end)) else {
                    return;
                };
                self.own_issued();
                self.hear(at, ended);
            } else if let Some((at, submission)) = self.arrivals.pop() {
                if let Some(server) = &mut self.server {
                    server.tiers.tick(at);
                }
                self.arrive(submission);
                self.unsettle(at);
            }
        }
    }

    /// Hears at `at` that a transfer of one of its requests has ended. True: the next schedule may decide otherwise.
    pub(crate) fn hear(&mut self, at: Ticks, ended: Ended) -> bool {
        match ended {
            Ended::Lookup(slot, hit) => self.requests[slot].lookup = Lookup::Answered(hit),
            Ended::Load(slot) => self.requests[slot].status = Status::Loaded,
            Ended::Store(slot) => {
                self.requests[slot].stores_in_flight -= 1;
                if !self.requests[slot].retires() {
                    return false;
                }
                // Steps under way got their blocks before these came free.
                self.unsettle(at);
                self.retire(slot);
                self.retiring -= 1;
            }
            Ended::Nothing => return false,
        }
        self.unsettle(at);
        true
    }

    /// The next schedule may decide otherwise than the last: decode steps that have not begun by `at` are off.
    fn unsettle(&mut self, at: Ticks) {
        self.steady = false;
        match &mut self.step {
            Some(Step::Batch { batch, .. }) => batch.steady = false,
            Some(Step::Decode(_)) => self.cut_decode(at),
            None => {}
        }
    }

    /// Begins a step, or many, unless one is in flight or there is nothing to compute.
    pub(crate) fn begin_step(&mut self) {
        if self.step.is_some() {
            return;
        }
        if let Some(decode) = self.plan_decode() {
            self.step = Some(Step::Decode(decode));
            return;
        }
        let mut batch = self.schedule();
        while batch.only_polls() && self.cost.poll == 0 && self.loading_until <= self.now {
            // An engine with nothing else to do asks again at once.
            self.slots = batch.slots;
            batch = self.schedule();
        }
        if batch.slots.is_empty() && batch.preempted {
            // The only running request preempted itself; a step of nothing takes no time.
            batch = self.schedule();
        }
        self.note_transfers();
        let polled = if batch.only_polls() { self.now + self.cost.poll } else { 0 };
        let start = self.now.max(self.loading_until).max(polled);
        if !batch.slots.is_empty() {
            let end = self.shares_core(start + self.cost.step(&batch.work));
            self.step = Some(Step::Batch { end, batch });
        } else if start > self.now {
            self.step = Some(Step::Batch { end: self.shares_core(start), batch });
        }
    }

    fn note_transfers(&mut self) {
        if let Some(server) = &mut self.server {
            server.take_begun();
            self.own_issued();
        }
    }

    /// Ends the step in flight if it is due.
    fn end_step(&mut self) {
        if self.step.as_ref().is_none_or(|step| step.end() > self.now) {
            return;
        }
        if let Some(server) = &mut self.server {
            server.tiers.tick(self.now);
        }
        match self.step.take() {
            Some(Step::Batch { batch, .. }) => self.end_batch(batch),
            Some(Step::Decode(decode)) => self.end_decode(decode),
            None => {}
        }
        self.note_transfers();
    }

    /// Tokens appear, chunks are stored, requests finish.
    fn end_batch(&mut self, batch: Batch) {
        self.steady = batch.steady;
        let mut slots = batch.slots;
        for slot in slots.drain(..) {
            if self.requests[slot].stored_chunks < self.requests[slot].chunks.len() as u64 {
                self.store_chunks(slot);
            }
            let request = &mut self.requests[slot];
            if request.computed < request.tokens_known() {
                continue;
            }
            request.generated += 1;
            request.last_token = Some(self.now);
            if self.config.record_token_times {
                request.tokens.push(self.now);
            }
            let (generated, output) = (request.generated, request.output);
            if generated == 1 {
                self.answer(slot);
            }
            if generated == output {
                self.finish(slot);
            }
        }
        self.slots = slots;
    }

    /// Begins to store the prompt's whole chunks that are computed and were not stored or loaded before.
    fn store_chunks(&mut self, slot: Slot) {
        let name = self.server_slot(slot);
        let Some(server) = &mut self.server else { return };
        let request = &mut self.requests[slot];
        let computed = request.computed.min(request.prompt) / self.config.chunk_tokens;
        if computed > request.stored_chunks {
            let part = request.chunks.part(request.stored_chunks as usize..computed as usize);
            request.stores_in_flight += u64::from(server.tiers.store(self.now, name, part));
            request.stored_chunks = computed;
        }
    }

    pub(crate) fn stuck(&self) -> String {
        let waiting = self.waiting.len() + self.holding.len();
        format!("{waiting} requests wait for blocks that nothing will free: raise gpu_blocks")
    }
}
