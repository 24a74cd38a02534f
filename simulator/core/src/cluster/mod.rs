//! Several engines of one kind on one clock, a router in front of them, and cache tiers of their own or shared.
//!
//! Of the events of one moment, transfers end and requests arrive first; then the router routes the requests sent; then
//! steps end; then steps begin. Within each kind, the order is that of beginning or submission, or of the instances.

mod next_events;
mod routing;

use hashbrown::{HashMap, HashSet};

use crate::engine::arrivals::Arrivals;
use crate::engine::config::EngineConfig;
use crate::engine::{Counters, Engine};
use crate::keys::{block_keys, block_runs};

use crate::engine::request::{Completion, Submission};
use crate::tiers::config::TierConfig;
use crate::tiers::server::Server;
use crate::tiers::{Ended, INSTANCE_BIT, Slot, Tiers};
use crate::time::{FOREVER, Ticks};
use next_events::NextEvents;
pub use routing::Routing;

/// The tiers that the instances share. A shared tier is one tier on one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    Nothing,
    /// All levels but the first one.
    Lower,
    /// One cache server with all levels.
    All,
}

impl Sharing {
    pub const ALL: [(&str, Self); 3] =
        [("nothing", Self::Nothing), ("lower", Self::Lower), ("all", Self::All)];
}

pub struct Cluster {
    engines: Vec<Engine>,
    routing: Routing,
    sharing: Sharing,
    now: Ticks,
    sends: Arrivals,
    submitted: u64,
    routed: u64,
    /// Unfinished requests of each instance.
    loads: Vec<u64>,
    next_events: NextEvents,
    /// Instances that have acted at this moment and may begin a step.
    acted: Vec<usize>,
    /// The server that all instances share. The cluster lends it to the instance that acts.
    server: Option<Box<Server>>,
    /// Which instance has the shared lower levels now.
    lower_at: usize,
    ids: HashSet<String>,
    /// Instances of pinned requests that are not routed yet.
    pins: HashMap<String, usize>,
    completed: Vec<(usize, Completion)>,
}

impl Cluster {
    /// Errors: a configuration that could serve nothing, in one line.
    pub fn new(
        config: EngineConfig,
        instances: usize,
        routing: Routing,
        sharing: Sharing,
    ) -> Result<Self, String> {
        if instances == 0 {
            return Err("instances must be at least 1, not 0".to_string());
        }
        let has_lower = config.tiers.as_ref().is_some_and(TierConfig::has_lower);
        if sharing != Sharing::Nothing && !has_lower && (sharing == Sharing::Lower || config.tiers.is_none())
        {
            return Err("a tier cannot be shared that is not there".to_string());
        }
        let (mut own, mut server) = (config, None);
        if sharing == Sharing::All {
            let journal = own.journal;
            server = own.tiers.take().map(|tiers| Box::new(Server::new(Tiers::new(tiers, journal))));
        }
        let mut engines = Vec::with_capacity(instances);
        for instance in 0..instances {
            let mut engine = Engine::new(own.clone())?;
            own.cost.seed = own.cost.seed.wrapping_add(1);
            if server.is_some() {
                engine.set_slot_base(instance << INSTANCE_BIT);
            }
            if sharing == Sharing::Lower {
                engine.set_shares_lower();
                engine.server_mut().iter_mut().for_each(|server| server.tiers.set_instance(instance));
            }
            engines.push(engine);
        }
        Ok(Self {
            engines,
            routing,
            sharing,
            now: 0,
            sends: Arrivals::default(),
            submitted: 0,
            routed: 0,
            loads: vec![0; instances],
            next_events: NextEvents::new(instances),
            acted: Vec::new(),
            server,
            lower_at: 0,
            ids: HashSet::new(),
            pins: HashMap::new(),
            completed: Vec::new(),
        })
    }

    pub fn now(&self) -> Ticks {
        self.now
    }

    /// True if no request is unfinished and no transfer is in flight.
    pub fn idle(&self) -> bool {
        self.ids.is_empty()
            && self.engines.iter().all(Engine::idle)
            && self.server.as_ref().is_none_or(|server| server.tiers.idle())
    }

    /// By instance: requests that run, and that wait to run or for a transfer.
    pub fn queues(&self) -> Vec<(usize, usize)> {
        self.engines.iter().map(Engine::queues).collect()
    }

    /// Totals over all instances.
    pub fn counters(&mut self) -> Counters {
        (0..self.engines.len()).for_each(|instance| self.with_shared_tiers(instance, Engine::catch_up));
        let shared = self.server.as_ref().map(|server| server.tiers.counters());
        let shared = Counters { tiers: shared.unwrap_or_default(), ..Counters::default() };
        self.engines.iter().map(Engine::counters).fold(shared, Counters::plus)
    }

    /// Totals of one instance. What a server that all share has counted is in none.
    pub fn counters_of(&mut self, instance: usize) -> Option<Counters> {
        (instance < self.engines.len()).then(|| self.with_shared_tiers(instance, Engine::catch_up))?;
        Some(self.engines[instance].counters())
    }

    /// As `submit`, for a request that this instance has to serve, whatever the routing.
    pub fn submit_to(&mut self, instance: i64, submission: Submission, at: Ticks) -> Result<(), String> {
        let chosen = usize::try_from(instance).ok().filter(|&chosen| chosen < self.engines.len());
        let Some(chosen) = chosen else {
            let (id, last) = (submission.id, self.engines.len() - 1);
            return Err(format!("request {id}: is pinned to instance {instance}; there are 0 to {last}"));
        };
        let id = submission.id.clone();
        self.submit(submission, at)?;
        self.pins.insert(id, chosen);
        Ok(())
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
        self.sends.push(at, self.submitted, submission);
        Ok(())
    }

    /// Runs until `until` or the first moment at which requests complete, and returns those, each with its instance.
    /// FOREVER: until requests complete or nothing is left to do. Error: requests wait for blocks that
    /// nothing will free.
    pub fn advance(&mut self, until: Ticks) -> Result<Vec<(usize, Completion)>, String> {
        loop {
            self.end_transfers();
            self.route_sends(self.now);
            self.run_due();
            if !self.completed.is_empty() {
                return Ok(std::mem::take(&mut self.completed));
            }
            self.begin_steps();
            let next = self.next_event_at();
            if next > until || next == FOREVER {
                self.now = if until == FOREVER { self.now } else { self.now.max(until) };
                let stuck = next == FOREVER && !self.ids.is_empty();
                return if stuck { Err(self.stuck()) } else { Ok(Vec::new()) };
            }
            self.now = self.now.max(next);
        }
    }

    /// Runs until `until`, completions or not, and gives `take` each completion in the order of `advance`.
    pub fn advance_all(
        &mut self,
        until: Ticks,
        mut take: impl FnMut(usize, Completion),
    ) -> Result<(), String> {
        if self.routing == Routing::RoundRobin && self.sharing == Sharing::Nothing {
            return self.advance_each(until, take);
        }
        loop {
            let some = self.advance(until)?;
            if some.is_empty() {
                return Ok(());
            }
            some.into_iter().for_each(|(instance, done)| take(instance, done));
        }
    }

    /// Runs instances that share nothing one after another: the data of each stays in the processor's caches, which
    /// halves the time. The result is that of one moment after another.
    fn advance_each(&mut self, until: Ticks, mut take: impl FnMut(usize, Completion)) -> Result<(), String> {
        for instance in std::mem::take(&mut self.acted) {
            self.next_events.set(instance, self.now);
        }
        self.route_sends(until);
        let (mut order, mut completions, mut last) = (Vec::new(), Vec::new(), self.now);
        for (instance, engine) in self.engines.iter_mut().enumerate() {
            let mut next = self.next_events.at(instance);
            // How often the instance has acted at one moment: all instances act once before any acts again.
            let mut turn = 0;
            while next <= until && next != FOREVER {
                turn = if next <= engine.now() { turn + 1 } else { 0 };
                engine.set_now(next.max(self.now));
                engine.run_due();
                let now = engine.now();
                for completion in engine.take_completed() {
                    self.loads[instance] -= 1;
                    order.push((now, turn, instance, completions.len()));
                    completions.push(Some(completion));
                }
                engine.begin_step();
                next = engine.next_event_at();
                last = last.max(engine.now());
            }
            self.next_events.set(instance, next);
        }
        // A loop of its own: the processor waits for many of these cache misses at once.
        completions.iter().flatten().for_each(|done| _ = self.ids.remove(&done.id));
        self.now = if until == FOREVER { last } else { last.max(until) };
        if until == FOREVER && !self.ids.is_empty() {
            return Err(self.stuck());
        }
        // Each instance's completions are in order, and this sort is fast for sorted runs.
        order.sort();
        for (_, _, instance, index) in order {
            completions[index].take().into_iter().for_each(|done| take(instance, done));
        }
        Ok(())
    }

    /// Empties tiers of all instances. Error: requests or transfers are in flight.
    pub fn reset(&mut self, names: &[&str]) -> Result<(), String> {
        if !self.idle() {
            return Err("a reset needs idle engines: drain them first".to_string());
        }
        (0..self.engines.len())
            .try_for_each(|instance| self.with_shared_tiers(instance, |engine| engine.reset(names)))
    }

    fn next_event_at(&self) -> Ticks {
        let transfer = self.server.as_ref().map_or(FOREVER, |server| server.next_at(true));
        self.next_events.first().0.min(self.sends.next_at()).min(transfer)
    }

    /// Calls `act` with an instance, which has the shared tiers meanwhile.
    fn with_shared_tiers<T>(&mut self, instance: usize, act: impl FnOnce(&mut Engine) -> T) -> T {
        if self.sharing == Sharing::Lower && self.lower_at != instance {
            if let Ok([holder, taker]) = self.engines.get_disjoint_mut([self.lower_at, instance])
                && let (Some(from), Some(to)) = (holder.server_mut(), taker.server_mut())
            {
                from.tiers.swap_lower(&mut to.tiers);
            }
            self.lower_at = instance;
        }
        let engine = &mut self.engines[instance];
        engine.set_now(self.now);
        if self.sharing != Sharing::All {
            return act(engine);
        }
        std::mem::swap(engine.server_mut(), &mut self.server);
        let result = act(engine);
        std::mem::swap(engine.server_mut(), &mut self.server);
        result
    }

    /// Ends the shared tiers' transfers that are due, and tells the instances whose requests wait for them.
    fn end_transfers(&mut self) {
        let now = self.now;
        let next = |server: &mut Box<Server>| {
            server.end_next(now).or_else(|| server.tick_lower(now).then(|| server.end_next(now)).flatten())
        };
        while let Some((at, ended)) = self.server.as_mut().and_then(next) {
            let Some((instance, ended)) = addressed(ended) else { continue };
            let engine = &mut self.engines[instance];
            if engine.transfer_ended(at, ended) {
                // An instance without a step in flight may begin one now.
                let next = if engine.has_step() { engine.next_event_at() } else { self.now };
                self.next_events.bring_forward(instance, next);
            }
        }
    }

    /// Routes the requests sent up to `until`. The instances then know when these arrive.
    fn route_sends(&mut self, until: Ticks) {
        while self.sends.next_at() <= until
            && let Some((at, submission)) = self.sends.pop()
        {
            let pin = if self.pins.is_empty() { None } else { self.pins.remove(&submission.id) };
            let instance = pin.unwrap_or_else(|| self.choose(&submission));
            self.routed += 1;
            self.loads[instance] += 1;
            let engine = &mut self.engines[instance];
            engine.accept(submission, at, self.routed);
            self.next_events.bring_forward(instance, engine.next_event_at());
        }
    }

    fn choose(&mut self, submission: &Submission) -> usize {
        let least_loaded = || (0..self.loads.len()).min_by_key(|&instance| self.loads[instance]).unwrap_or(0);
        match self.routing {
            Routing::RoundRobin => (self.routed % self.engines.len() as u64) as usize,
            Routing::LeastLoaded => least_loaded(),
            // No instance can serve this request: its prefix does not matter.
            Routing::PrefixAware if self.engines[0].refusal(submission).is_some() => least_loaded(),
            Routing::PrefixAware => {
                let config = self.engines[0].config();
                let runs = block_runs(&submission.prompt, config.block_tokens);
                let keys = block_keys(&submission.prompt, config.chunk_tokens);
                let held: Vec<u64> = (0..self.engines.len())
                    .map(|instance| {
                        self.with_shared_tiers(instance, |engine| engine.held_tokens(&runs, &keys))
                    })
                    .collect();
                let lacking = |instance: usize| u64::MAX - held[instance];
                (0..held.len()).min_by_key(|&i| (lacking(i), self.loads[i])).unwrap_or(0)
            }
        }
    }

    /// Lets the instances act that are due, and takes their completions.
    fn run_due(&mut self) {
        while let (at, instance) = self.next_events.first()
            && at <= self.now
        {
            self.with_shared_tiers(instance, Engine::run_due);
            let engine = &self.engines[instance];
            // An instance begins no step while one is in flight, as it mostly is when transfers end.
            let next = if engine.has_step() { engine.next_event_at() } else { self.now };
            if next > self.now {
                self.next_events.set(instance, next);
            } else {
                self.next_events.set(instance, FOREVER);
                self.acted.push(instance);
            }
            for completion in self.engines[instance].take_completed() {
                self.loads[instance] -= 1;
                self.ids.remove(&completion.id);
                self.completed.push((instance, completion));
            }
        }
    }

    fn begin_steps(&mut self) {
        if self.acted.is_empty() {
            return;
        }
        // An instance is in here twice if it acted before the caller took completions, and again after.
        self.acted.sort_unstable();
        self.acted.dedup();
        let mut acted = std::mem::take(&mut self.acted);
        for instance in acted.drain(..) {
            self.with_shared_tiers(instance, Engine::begin_step);
            self.next_events.set(instance, self.engines[instance].next_event_at());
        }
        self.acted = acted;
    }

    fn stuck(&self) -> String {
        let waits = |engine: &&Engine| engine.has_unfinished();
        self.engines.iter().find(waits).map(Engine::stuck).unwrap_or_default()
    }
}

/// The instance that waits for the transfer, and the end with that instance's own slot.
fn addressed(ended: Ended) -> Option<(usize, Ended)> {
    let split = |slot: Slot| (slot >> INSTANCE_BIT, slot & ((1 << INSTANCE_BIT) - 1));
    match ended {
        Ended::Lookup(slot, hit) => Some((split(slot).0, Ended::Lookup(split(slot).1, hit))),
        Ended::Load(slot) => Some((split(slot).0, Ended::Load(split(slot).1))),
        Ended::Store(slot) => Some((split(slot).0, Ended::Store(split(slot).1))),
        Ended::Ahead(slot, read) => Some((split(slot).0, Ended::Ahead(split(slot).1, read))),
        Ended::Overdue(slot) => Some((split(slot).0, Ended::Overdue(split(slot).1))),
        Ended::Nothing => None,
    }
}
