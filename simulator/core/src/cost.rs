//! What a step of the engine costs.
//!
//! step = t0 + a Σq + b Σq²/2 + e Σqc + d Σc, with q the new tokens of a sequence in this step and c its context before
//! it. Attention among new tokens (b) and against what the KV cache holds (e) have costs of their own: the one reads what
//! was just computed, the other reads pages. d is the reading of a sequence's context, which a single new token waits for
//! as much as thousands do.

use crate::time::{self, Ticks};

/// Seconds: per step, per new token, per pair of new tokens attended, per pair of a new token and one of its context, per
/// token of a sequence's context. Before the scheduler sees a request, the front end, which takes requests one after another (HTTP, parsing), spends
/// request_s and per prompt token request_token_s; then request_wait_s and per prompt chunk request_chunk_s pass beside
/// other requests (messages between processes, look-ups).
#[derive(Clone, Copy, Debug, Default)]
#[cfg_attr(feature = "python", derive(pyo3::FromPyObject))]
pub struct CostConfig {
    pub step_s: f64,
    pub token_s: f64,
    pub attention_s: f64,
    pub attention_context_s: f64,
    pub context_s: f64,
    pub request_s: f64,
    pub request_token_s: f64,
    pub request_wait_s: f64,
    pub request_chunk_s: f64,
    /// The engine's own thread copies what is loaded, one request after another, and no step runs meanwhile.
    pub synchronous_loads: bool,
}

#[derive(Clone, Copy, Debug)]
pub struct Cost {
    step: Ticks,
    token: Ticks,
    /// Half of b, so that b q²/2 stays whole.
    half_attention: Ticks,
    attention_context: Ticks,
    context: Ticks,
    request: Ticks,
    request_token: Ticks,
    request_wait: Ticks,
    request_chunk: Ticks,
    pub synchronous_loads: bool,
}

/// The sums that a step's cost depends on.
#[derive(Clone, Copy, Debug, Default)]
pub struct Work {
    new_tokens: u128,
    new_pairs_twice: u128,
    context_pairs: u128,
    context: u128,
}

impl Work {
    pub fn add(&mut self, new_tokens: u64, context: u64) {
        let (q, c) = (u128::from(new_tokens), u128::from(context));
        self.new_tokens += q;
        self.new_pairs_twice += q * q;
        self.context_pairs += q * c;
        self.context += c;
    }
}

impl Cost {
    pub fn new(config: &CostConfig) -> Self {
        Self {
            step: time::from_s(config.step_s),
            token: time::from_s(config.token_s),
            half_attention: time::from_s(config.attention_s / 2.0),
            attention_context: time::from_s(config.attention_context_s),
            context: time::from_s(config.context_s),
            request: time::from_s(config.request_s),
            request_token: time::from_s(config.request_token_s),
            request_wait: time::from_s(config.request_wait_s),
            request_chunk: time::from_s(config.request_chunk_s),
            synchronous_loads: config.synchronous_loads,
        }
    }

    pub fn step(&self, work: &Work) -> Ticks {
        self.step
            + self.token * work.new_tokens
            + self.half_attention * work.new_pairs_twice
            + self.attention_context * work.context_pairs
            + self.context * work.context
    }

    /// Time of `steps` decode steps in a row of `sequences` whose contexts sum up to `context` at the first.
    pub fn decode(&self, sequences: u64, context: u64, steps: u64) -> Ticks {
        let (n, c, k) = (u128::from(sequences), u128::from(context), u128::from(steps));
        let first = Work { new_tokens: n, new_pairs_twice: n, context_pairs: c, context: c };
        let growth = n * (self.attention_context + self.context);
        // k(k-1)/2 is written so that no step wraps for k = 0.
        self.step(&first) * k + growth * (k * k.saturating_sub(1) / 2)
    }

    /// Time that the front end spends on a request, before it turns to the next one.
    pub fn front_end(&self, prompt_tokens: u64) -> Ticks {
        self.request + self.request_token * u128::from(prompt_tokens)
    }

    /// Time between the front end and the scheduler, which requests pass beside each other.
    pub fn wait(&self, prompt_chunks: u64) -> Ticks {
        self.request_wait + self.request_chunk * u128::from(prompt_chunks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_of_decode_steps_costs_exactly_its_steps() {
        let config = CostConfig {
            step_s: 0.003,
            token_s: 1.7e-4,
            attention_s: 1.8e-9,
            attention_context_s: 2.9e-9,
            context_s: 3.1e-8,
            ..CostConfig::default()
        };
        let cost = Cost::new(&config);
        let mut contexts = [5u64, 1_000, 77_777];
        let closed = cost.decode(3, contexts.iter().sum(), 1_000);
        let mut total = 0;
        for _ in 0..1_000 {
            let mut work = Work::default();
            for context in &mut contexts {
                work.add(1, *context);
                *context += 1;
            }
            total += cost.step(&work);
        }
        assert_eq!(closed, total);
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
