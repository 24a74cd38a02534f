//! The engine: continuous batching in virtual time, as a state machine that never sleeps.
//!
//! At any moment, events (arrivals, ends of transfers) come first, then the end of the step in flight, then the next
//! schedule. `schedule.rs` decides what a step computes, `decode.rs` takes many decode steps at once.

mod ahead;
pub mod arrivals;
pub mod blocks;
#[cfg(test)]
mod check;
pub mod config;
pub mod cost;
mod decode;
mod free_queue;
mod front_end;
mod intake;
mod jitter;
mod lifecycle;
pub mod live_tokens;
mod node_ids;
mod nodes;
mod outgoing;
mod polls;
mod prefills_first;
pub mod request;
mod schedule;
mod step;

use std::{array, collections::VecDeque};

use hashbrown::HashSet;

use crate::journal::{Journal, Note};
use crate::keys::Key;
use crate::tiers::server::Server;
use crate::tiers::{Ended, Slot, TierCounters, Tiers, config::MOST_LEVELS};
use crate::time::{FOREVER, Ticks};
use arrivals::Arrivals;
use blocks::BlockPool;
use config::EngineConfig;
use cost::Cost;
use front_end::FrontEnd;
use prefills_first::Door;
use request::{Completion, Request, Status, Submission};
use step::{Batch, Step};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    pub computed_tokens: u64,
    pub gpu_hit_tokens: u64,
    pub level_tokens: [u64; MOST_LEVELS],
    pub tiers: TierCounters,
}

impl Counters {
    pub fn plus(self, other: Self) -> Self {
        Self {
            computed_tokens: self.computed_tokens + other.computed_tokens,
            gpu_hit_tokens: self.gpu_hit_tokens + other.gpu_hit_tokens,
            level_tokens: array::from_fn(|level| self.level_tokens[level] + other.level_tokens[level]),
            tiers: self.tiers.plus(other.tiers),
        }
    }
}

pub struct Engine {
    config: EngineConfig,
    cost: Cost,
    now: Ticks,
    pool: BlockPool,
    server: Option<Box<Server>>,
    /// Several engines share the server: it adds this to the slots of this engine's requests, and the cluster tells
    /// this engine when transfers end.
    slot_base: Option<Slot>,
    /// Other engines look at the lower levels that this engine's server writes to.
    shares_lower: bool,
    requests: Vec<Request>,
    spare: Vec<Slot>,
    running: Vec<Slot>,
    waiting: VecDeque<Slot>,
    /// Waiting requests that hold blocks, with their load in flight or done: the scheduler considers them first.
    holding: VecDeque<Slot>,
    door: Door,
    questions: ahead::Questions,
    polls: polls::Polls,
    /// Requests that prefill or load: the blocks that they still lack are reserved.
    prefilling: Vec<Slot>,
    counters: Counters,
    /// The block that would lengthen the hit of the request that waits for blocks: its run's key, its number in the
    /// run.
    watched: Option<(Key, u32)>,
    /// The next schedule would decide what the last one did, until an event comes or a request ends.
    steady: bool,
    step: Option<Step>,
    /// Scratch memory: slots to go through, and the keys of a prompt's chunks.
    slots: Vec<Slot>,
    keys: Vec<Key>,
    /// Requests that will be sent, and requests on their way to the scheduler behind the front end.
    sends: Arrivals,
    arrivals: Arrivals,
    front_end: FrontEnd,
    submitted: u64,
    /// Finished requests whose stores still hold their blocks: other requests may wait for those blocks.
    retiring: u64,
    /// Until when the engine's own thread copies what requests load.
    loading_until: Ticks,
    unfinished: u64,
    /// Ids of the unfinished requests that came by `submit`.
    ids: HashSet<String>,
    completed: Vec<Completion>,
}

impl Engine {
    /// Errors: a configuration that could serve nothing, in one line.
    pub fn new(config: EngineConfig) -> Result<Self, String> {
        if let Some(error) = config.refusal() {
            return Err(error);
        }
        let config = config.settled();
        let new_pool = if config.prefills_first { BlockPool::of_nodes } else { BlockPool::new };
        let pool = new_pool(config.gpu_blocks - config.null_blocks, Journal::new(config.journal));
        let tiers = config.tiers.clone().map(|tiers| Tiers::new(tiers, config.journal));
        Ok(Self {
            cost: Cost::new(&config.cost),
            now: 0,
            pool,
            server: tiers.map(|tiers| Box::new(Server::new(tiers))),
            slot_base: None,
            shares_lower: false,
            requests: Vec::new(),
            spare: Vec::new(),
            running: Vec::new(),
            waiting: VecDeque::new(),
            holding: VecDeque::new(),
            door: Door::default(),
            questions: ahead::Questions::default(),
            polls: polls::Polls::default(),
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

    /// True if no request is unfinished and no transfer is in flight.
    pub fn idle(&self) -> bool {
        self.unfinished == 0 && self.server.as_ref().is_none_or(|server| server.tiers.idle())
    }

    pub fn counters(&self) -> Counters {
        let tiers = self.server.as_ref().map(|server| server.tiers.counters());
        Counters { tiers: tiers.unwrap_or_default(), ..self.counters }
    }

    /// Notes since the last call: of the GPU's blocks and of preemptions, and of the tiers.
    pub fn take_journal(&mut self) -> (Vec<Note>, Vec<Note>) {
        let tiers = self.server.as_mut().map(|server| server.tiers.take_journal());
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
    /// complete or nothing is left to do. Error: requests wait for blocks that nothing will free.
    pub fn advance(&mut self, until: Ticks) -> Result<Vec<Completion>, String> {
        loop {
            self.run_due();
            if !self.completed.is_empty() {
                return Ok(std::mem::take(&mut self.completed));
            }
            self.begin_step();
            let next = self.next_event_at();
            if next > until || next == FOREVER {
                self.now = if until == FOREVER { self.now } else { self.now.max(until) };
                self.catch_up();
                let stuck = next == FOREVER && self.has_unfinished() && !self.awaits_external_io();
                return if stuck { Err(self.stuck()) } else { Ok(Vec::new()) };
            }
            self.now = self.now.max(next);
        }
    }

    /// Empties "gpu", levels by their names, and what the "page_cache" holds. A tier that the engine lacks changes
    /// nothing. Error: requests or transfers are in flight.
    pub fn reset(&mut self, names: &[&str]) -> Result<(), String> {
        if !self.idle() {
            return Err("a reset needs an idle engine: drain it first".to_string());
        }
        if names.contains(&"gpu") {
            self.pool.reset();
        }
        if names.contains(&"cpu") {
            self.pool.forget_nodes_of_host();
        }
        if let Some(server) = &mut self.server {
            server.tiers.reset(names);
            if names.contains(&"page_cache") {
                server.tiers.reset_page_cache();
            }
        }
        Ok(())
    }

    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// The slots of this engine's requests get this base at the server that it shares.
    pub(crate) fn set_slot_base(&mut self, base: Slot) {
        self.slot_base = Some(base);
    }

    pub(crate) fn set_shares_lower(&mut self) {
        self.shares_lower = true;
    }

    pub(crate) fn set_now(&mut self, now: Ticks) {
        self.now = now;
    }

    pub(crate) fn has_unfinished(&self) -> bool {
        self.unfinished > 0
    }

    pub(crate) fn has_step(&self) -> bool {
        self.step.is_some()
    }

    /// The engine's own server, or what a cluster lends it.
    pub(crate) fn server_mut(&mut self) -> &mut Option<Box<Server>> {
        &mut self.server
    }

    pub(crate) fn take_completed(&mut self) -> impl Iterator<Item = Completion> {
        self.completed.drain(..)
    }

    /// The next moment at which this engine acts if nothing is submitted before.
    pub(crate) fn next_event_at(&self) -> Ticks {
        match &self.step {
            Some(step) if self.shares_lower => step.end().min(self.next_arrival()).min(self.next_end(true)),
            Some(step) => step.end().min(self.next_stop()),
            None => self.next_answer().min(self.next_arrival()).min(self.next_end(true)),
        }
    }

    /// The next event that could change what a step decides.
    fn next_stop(&self) -> Ticks {
        self.next_arrival().min(self.next_end(self.retiring > 0))
    }

    fn next_end(&self, any: bool) -> Ticks {
        match &self.server {
            Some(server) if self.slot_base.is_none() => server.next_at(any),
            _ => FOREVER,
        }
    }

    /// The server's name for a request.
    fn server_slot(&self, slot: Slot) -> Slot {
        self.slot_base.unwrap_or(0) | slot
    }

    /// Runs all events that are due, and ends the step in flight if it is due.
    pub(crate) fn run_due(&mut self) {
        self.run_events();
        if self.step.as_ref().is_some_and(|step| step.end() <= self.now) {
            self.end_step();
        }
    }

    /// Brings what callers can see to this moment, which lies between two events.
    pub(crate) fn catch_up(&mut self) {
        self.run_events();
        self.record_tokens();
    }

    fn run_events(&mut self) {
        loop {
            self.run_front_end();
            let (arrival, end) = (self.arrivals.next_at(), self.next_end(true));
            if end <= arrival && end <= self.now {
                let Some((at, ended)) = self.server.as_mut().and_then(|server| server.end_next(end)) else {
                    return;
                };
                self.name_owners();
                self.transfer_ended(at, ended);
                continue;
            }
            let due = arrival.min(self.now);
            if self.server.as_mut().is_some_and(|server| server.tick_lower(due)) {
                continue;
            }
            if arrival > self.now {
                return;
            }
            self.take_arrival();
        }
    }

    /// A transfer of one of this engine's requests ended at `at`. True: the next schedule may decide otherwise.
    pub(crate) fn transfer_ended(&mut self, at: Ticks, ended: Ended) -> bool {
        match ended {
            Ended::Lookup(slot, hit) => self.found(at, slot, hit, 0),
            Ended::Ahead(slot, read) => self.read_was_ahead(slot, read),
            Ended::Overdue(_) => {}
            Ended::Load(slot) if self.requests[slot].status == Status::Loading => {
                self.load_ended(slot);
            }
            Ended::Load(_) => return false, // It came by layer: the request runs already.
            Ended::Store(slot) => {
                self.requests[slot].stores_in_flight -= 1;
                if !self.requests[slot].retires() {
                    return false;
                }
                // The steps under way got their blocks before these blocks came free.
                self.invalidate_schedule(at);
                self.retire(slot);
                self.retiring -= 1;
            }
            Ended::Nothing => return false,
        }
        self.invalidate_schedule(at);
        true
    }

    /// The next schedule may decide otherwise than the last: takes back decode steps that have not begun by `at`.
    pub(super) fn invalidate_schedule(&mut self, at: Ticks) {
        self.steady = false;
        match &mut self.step {
            Some(Step::Batch { batch, .. }) => batch.steady = false,
            Some(Step::Decode(_)) => self.cut_decode(at),
            None => {}
        }
    }

    /// Begins a step, or many, unless one is in flight or there is nothing to compute.
    #[inline(always)]
    pub(crate) fn begin_step(&mut self) {
        if self.step.is_none() {
            self.begin_next_step();
            self.hold_front_end();
        }
    }

    fn begin_next_step(&mut self) {
        if let Some(decode) = self.plan_decode() {
            (self.polls.computed, self.step) = (true, Some(Step::Decode(decode)));
            return;
        }
        let mut batch = self.schedule();
        // An engine with nothing else to do asks again at once. So does one whose only running request preempted itself: an
        // empty step takes no time.
        while (batch.only_polls() && self.cost.poll == 0 && self.loading_until <= self.now)
            || (batch.slots.is_empty() && batch.preempted)
        {
            self.slots = batch.slots;
            batch = self.schedule();
        }
        self.note_transfers();
        self.polls.computed = !batch.slots.is_empty();
        let polled = self.polled_at(&batch);
        let start = self.now.max(self.loading_until).max(polled);
        if !batch.slots.is_empty() {
            let end = (start + self.cost.step(&batch.work)).max(batch.loads_until);
            let end = self.end_on_shared_core(end);
            self.step = Some(Step::Batch { end, batch });
        } else if start > self.now {
            self.step = Some(Step::Batch { end: self.end_on_shared_core(start), batch });
        }
    }

    /// Ends the step in flight.
    #[inline(never)]
    fn end_step(&mut self) {
        if let Some(server) = &mut self.server {
            server.tiers.tick(self.now);
        }
        match self.step.take() {
            Some(Step::Batch { batch, .. }) => self.end_batch(batch),
            Some(Step::Decode(decode)) => self.end_decode(decode),
            None => {}
        }
        self.take_in();
        self.note_transfers();
    }

    /// Gives requests their tokens, begins stores, and finishes requests.
    fn end_batch(&mut self, batch: Batch) {
        self.steady = batch.steady;
        let mut slots = batch.slots;
        for slot in slots.drain(..) {
            let prefills = self.requests[slot].computed < self.requests[slot].tokens_known();
            if prefills && self.config.prefills_first {
                continue;
            }
            self.keep_computed(slot);
            if prefills {
                continue;
            }
            let request = &mut self.requests[slot];
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

    pub(crate) fn stuck(&self) -> String {
        let waiting = self.waiting.len() + self.holding.len();
        format!("{waiting} requests wait for blocks that nothing will free: raise gpu_blocks")
    }
}
