//! What a step of the engine costs.
//!
//! step = t0 + a Σq + b Σq²/2 + e Σqc + d Σc + r n + h Σk + w Σs, with q the new tokens of a sequence in this step and c
//! its context before it, n the requests that the step begins, k the cached tokens with which such a request begins, and
//! s the tokens of a sequence that it stores. Attention among new tokens (b) and against the KV cache (e) have costs of
//! their own: the first reads fresh values, the second reads pages. d is the time to read a sequence's context, the same
//! for one new token and for thousands. r is what the engine's own thread spends on a request that it begins, and h what
//! a token costs that it need not compute. w is what it spends to copy a token's KV to the tier behind the GPU; 0 where
//! stores pass beside the steps.
//!
//! Where an engine's thread launches the kernels of a step one by one, and the device computes beside it, the terms up to
//! d take as long as the launches at least (l): max(l, t0 + … + d Σc).

use super::jitter::Jitter;
use crate::time::{self, Ticks};

/// What an idle engine sleeps of a poll (vLLM, v1/engine/core.py, _process_engine_step).
const IDLE_SLEEP_S: f64 = 1e-3;

/// What sets one step that only polls apart from others.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pass {
    /// It has just asked a server that sleeps.
    pub wakes: bool,
    /// It goes behind a step that computed.
    pub follows: bool,
    /// How many loads it begins.
    pub loads: u64,
}

/// Seconds: per step, per new token, per pair of new tokens, per pair of a new token and a token of its context, per
/// token of a sequence's context, per request that a step begins, per cached token of those, per token that a step
/// stores. launch_s: the least that a step takes before what the engine's own thread adds; 0: no such bound.
/// The front end does one task after another. For each request it spends request_s (HTTP) and request_token_s a prompt
/// token (parsing). Then request_wait_s passes, for all requests at once (messages between processes), until the
/// scheduler sees the request. A cache server spends request_chunk_s a prompt chunk on the question about it; without
/// one, the front end does. The front end spends response_s on a first and on a last token; those between count in the
/// steps. A first token takes response_token_s more a prompt token, for each request that gets one in the same step. Such
/// tokens take longer where the engine's own work goes ahead of them: response_next_s where a step begins before they
/// have passed, and response_store_s where a store of the request is under way. poll_s: what a step takes on
/// average that only asks for an answer, of the three that a lone question takes an idle engine. Of each of those, the
/// engine sleeps 1 ms, and for the rest the front end waits; only where response_next_s says that they share a core.
/// read_pass_s: how long the passes of a scheduler that waits for reads ahead hold each chunk of them up, for each request
/// that waits for its own.
/// host_spread: the standard deviation over its mean of each task of the front end, of that wait and of a poll; `seed`
/// says which of those times come (jitter.rs).
#[derive(Clone, Copy, Debug, Default)]
#[cfg_attr(feature = "python", derive(pyo3::FromPyObject))]
pub struct CostConfig {
    pub step_s: f64,
    pub token_s: f64,
    pub attention_s: f64,
    pub attention_context_s: f64,
    pub context_s: f64,
    pub launch_s: f64,
    pub step_request_s: f64,
    pub hit_token_s: f64,
    pub store_token_s: f64,
    pub request_s: f64,
    pub request_token_s: f64,
    pub request_wait_s: f64,
    pub request_chunk_s: f64,
    pub response_s: f64,
    pub response_token_s: f64,
    pub response_next_s: f64,
    pub response_store_s: f64,
    pub poll_s: f64,
    pub read_pass_s: f64,
    pub host_spread: f64,
    pub seed: u64,
    /// The engine's own thread copies what requests load, one request after another, and no step runs meanwhile.
    pub synchronous_loads: bool,
    /// The front end shares the engine's core: while both have work, each gets half.
    pub shared_core: bool,
    /// The front end shares the scheduler's core, and goes ahead of passes that wait for storage.
    pub yields_core: bool,
}

#[derive(Clone, Copy, Debug)]
pub struct Cost {
    step: Ticks,
    token: Ticks,
    /// Half of b, so that b q²/2 stays whole.
    half_attention: Ticks,
    attention_context: Ticks,
    context: Ticks,
    launch: Ticks,
    step_request: Ticks,
    hit_token: Ticks,
    store_token: Ticks,
    request: Ticks,
    request_token: Ticks,
    request_wait: Ticks,
    request_chunk: Ticks,
    response: Ticks,
    response_token: Ticks,
    /// More on tokens on their way when a step begins that computes.
    pub response_next: Ticks,
    response_store: Ticks,
    pub poll: Ticks,
    /// Passes hold a chunk that is read ahead up so long for each request that waits for its read.
    pub read_pass: Ticks,
    pub synchronous_loads: bool,
    jitter: Jitter,
}

/// The sums that a step's cost depends on.
#[derive(Clone, Copy, Debug, Default)]
pub struct Work {
    new_tokens: u128,
    new_pairs_twice: u128,
    context_pairs: u128,
    context: u128,
    /// What the engine's own thread does beside the model's forward pass.
    host: Ticks,
}

impl Work {
    #[inline(always)]
    pub fn add(&mut self, new_tokens: u64, context: u64) {
        let (q, c) = (u128::from(new_tokens), u128::from(context));
        self.new_tokens += q;
        self.new_pairs_twice += q * q;
        self.context_pairs += q * c;
        self.context += c;
    }

    /// The step does this, too.
    pub fn add_host(&mut self, time: Ticks) {
        self.host += time;
    }
}

/// Decode steps in a row: what the first one computes, by how much each step computes longer than the one before, and
/// what each takes at least.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    first: Ticks,
    growth: Ticks,
    least: Ticks,
}

impl Pace {
    /// The time of the first `steps` steps.
    pub fn steps(&self, steps: u64) -> Ticks {
        let least = u128::from(steps).min(self.bound());
        let k = u128::from(steps) - least;
        // k(k-1)/2, without a wrap for k = 0.
        let computed = (self.first + self.growth * least) * k + self.growth * (k * k.saturating_sub(1) / 2);
        self.least * least + computed
    }

    /// How many of the first steps compute for less than a step takes at least.
    fn bound(&self) -> u128 {
        match self.least.saturating_sub(self.first) {
            0 => 0,
            lacking if self.growth > 0 => lacking.div_ceil(self.growth),
            _ => u128::MAX,
        }
    }

    /// How many steps, `most` at most, take less than `room`.
    pub fn within(&self, room: Ticks, most: u64) -> u64 {
        if most == 0 || self.steps(most) < room {
            return most;
        }
        let fits = |steps: u64| self.steps(steps) < room;
        if self.bound() > 0 {
            return largest(most, fits);
        }
        // Real numbers come close; integers correct the rest.
        let (half, room_real) = (self.growth as f64 / 2.0, room as f64);
        let rest = self.first as f64 - half;
        let guess = 2.0 * room_real / (rest + (rest * rest + 4.0 * half * room_real).sqrt());
        let guess = (guess as u64).min(most - 1);
        if (guess == 0 || fits(guess)) && !fits(guess + 1) {
            return guess;
        }
        largest(most, fits)
    }
}

/// The largest n up to `most` for which `holds`. It is true for 0; once false, it stays false.
pub fn largest(most: u64, holds: impl Fn(u64) -> bool) -> u64 {
    if most == 0 || holds(most) {
        return most;
    }
    let (mut low, mut high) = (0, most - 1);
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if holds(middle) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    low
}

impl Cost {
    pub fn new(config: &CostConfig) -> Self {
        Self {
            step: time::from_s(config.step_s),
            token: time::from_s(config.token_s),
            half_attention: time::from_s(config.attention_s / 2.0),
            attention_context: time::from_s(config.attention_context_s),
            context: time::from_s(config.context_s),
            launch: time::from_s(config.launch_s),
            step_request: time::from_s(config.step_request_s),
            hit_token: time::from_s(config.hit_token_s),
            store_token: time::from_s(config.store_token_s),
            request: time::from_s(config.request_s),
            request_token: time::from_s(config.request_token_s),
            request_wait: time::from_s(config.request_wait_s),
            request_chunk: time::from_s(config.request_chunk_s),
            response: time::from_s(config.response_s),
            response_token: time::from_s(config.response_token_s),
            response_next: time::from_s(config.response_next_s),
            response_store: time::from_s(config.response_store_s),
            poll: time::from_s(config.poll_s),
            read_pass: time::from_s(config.read_pass_s),
            synchronous_loads: config.synchronous_loads,
            jitter: Jitter::new(config.host_spread, config.seed),
        }
    }

    pub fn step(&self, work: &Work) -> Ticks {
        self.computes(work).max(self.launch) + work.host
    }

    fn computes(&self, work: &Work) -> Ticks {
        self.step
            + self.token * work.new_tokens
            + self.half_attention * work.new_pairs_twice
            + self.attention_context * work.context_pairs
            + self.context * work.context
    }

    /// What the engine's own thread spends on a request that begins with so many cached tokens.
    pub fn begin(&self, hit_tokens: u64) -> Ticks {
        self.step_request + self.hit_token * u128::from(hit_tokens)
    }

    /// What it spends on storing tokens.
    pub fn store(&self, tokens: u64) -> Ticks {
        self.store_token * u128::from(tokens)
    }

    /// Whether steps take time for what they store.
    pub fn stores_take_time(&self) -> bool {
        self.store_token > 0
    }

    /// The pace of decode steps of `sequences` sequences, whose contexts sum up to `context` at the first step.
    pub fn pace(&self, sequences: u64, context: u64) -> Pace {
        let (n, c) = (u128::from(sequences), u128::from(context));
        let first =
            Work { new_tokens: n, new_pairs_twice: n, context_pairs: c, context: c, ..Work::default() };
        let growth = n * (self.attention_context + self.context);
        Pace { first: self.computes(&first), growth, least: self.launch }
    }

    /// The time that the front end spends on a request.
    pub fn front_end(&self, prompt_tokens: u64) -> Ticks {
        self.request + self.request_token * u128::from(prompt_tokens)
    }

    /// The time that questions about so many chunks take.
    pub fn question(&self, prompt_chunks: u64) -> Ticks {
        self.request_chunk * u128::from(prompt_chunks)
    }

    /// The time that the front end spends on passing a token on.
    pub fn answer(&self, stores: bool) -> Ticks {
        self.response + if stores { self.response_store } else { 0 }
    }

    /// The time that a first token takes more, for its prompt.
    pub fn first_answer(&self, prompt_tokens: u64) -> Ticks {
        self.response_token * u128::from(prompt_tokens)
    }

    /// Whether the front end takes time to pass tokens on.
    pub fn answers_take_time(&self) -> bool {
        self.response > 0 || self.response_token > 0 || self.response_next > 0 || self.response_store > 0
    }

    /// The time on the way to the scheduler, which requests spend at once.
    pub fn wait(&mut self) -> Ticks {
        self.vary(self.request_wait)
    }

    /// What a poll takes on average. The first one that asks a server that sleeps takes longer, and others less.
    pub fn poll(&self, wakes: bool) -> Ticks {
        if wakes { self.poll * 4 / 3 } else { self.poll * 5 / 6 }
    }

    /// What a step takes on average that only polls. Behind one that computed, the engine has its own work on a step to do
    /// before it sleeps, and half as much for each load that it begins.
    pub fn pass(&self, of: Pass) -> Ticks {
        let poll = self.poll(of.wakes);
        if poll == 0 || self.response_next == 0 {
            return poll;
        }
        let behind =
            if of.follows && !of.wakes { time::from_s(IDLE_SLEEP_S) + self.response_next } else { 0 };
        poll.max(behind) + self.begins(of.loads)
    }

    /// What the engine's own thread does for loads that it begins.
    fn begins(&self, loads: u64) -> Ticks {
        self.response_next / 2 * Ticks::from(loads)
    }

    /// What the engine's own thread does of a step that only polls, where the front end waits for it.
    pub fn own_work(&self, of: Pass) -> Ticks {
        let most = self.response_next + self.begins(of.loads);
        self.pass(of).saturating_sub(time::from_s(IDLE_SLEEP_S)).min(most)
    }

    /// What is left of a poll at some moment.
    pub fn rest_of_poll(&mut self) -> Ticks {
        self.jitter.within(self.poll(false) / 2)
    }

    /// What a task of the host takes this time whose mean that is.
    pub fn vary(&mut self, mean: Ticks) -> Ticks {
        self.jitter.of(mean)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_of_decode_steps_costs_exactly_its_steps() {
        // Launches bound no step, the first 600 and more, and all.
        for launch_s in [0.0, 0.006_25, 1.0] {
            costs_exactly_its_steps(&CostConfig {
                step_s: 0.003,
                token_s: 1.7e-4,
                attention_s: 1.8e-9,
                attention_context_s: 2.9e-9,
                context_s: 3.1e-8,
                launch_s,
                ..CostConfig::default()
            });
        }
    }

    fn costs_exactly_its_steps(config: &CostConfig) {
        let cost = Cost::new(config);
        let mut contexts = [5u64, 1_000, 77_777];
        let pace = cost.pace(3, contexts.iter().sum());
        let mut total = 0;
        for _ in 0..1_000 {
            let mut work = Work::default();
            for context in &mut contexts {
                work.add(1, *context);
                *context += 1;
            }
            total += cost.step(&work);
        }
        assert_eq!(pace.steps(1_000), total);
        for room in [0, 1, pace.steps(1), pace.steps(1) + 1, pace.steps(17), pace.steps(999) + 1, Ticks::MAX]
        {
            let within = (1..=1_000).take_while(|&steps| pace.steps(steps) < room).count() as u64;
            assert_eq!(pace.within(room, 1_000), within);
        }
    }

    #[test]
    fn a_step_takes_its_launches_or_what_it_computes_and_then_what_the_engines_thread_adds() {
        let cost =
            Cost::new(&CostConfig { step_s: 0.005, token_s: 1e-5, launch_s: 0.02, ..CostConfig::default() });
        let step = |tokens: u64| {
            let mut work = Work::default();
            work.add(tokens, 0);
            work.add_host(time::from_s(0.001));
            (time::to_s(cost.step(&work)) * 1e6).round()
        };
        assert_eq!((step(1), step(1_500), step(4_000)), (21_000.0, 21_000.0, 46_000.0));
    }

    #[test]
    fn attention_that_costs_the_same_everywhere_does_not_depend_on_how_a_prompt_is_cut() {
        let both = CostConfig { attention_s: 2e-9, attention_context_s: 2e-9, ..CostConfig::default() };
        let cost = Cost::new(&both);
        let (mut whole, mut cut) = (Work::default(), Work::default());
        whole.add(4096, 0);
        cut.add(1000, 0);
        cut.add(3096, 1000);
        assert_eq!(cost.step(&whole), cost.step(&cut));
    }
}
