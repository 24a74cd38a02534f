//! What a step of the engine costs.
//!
//! step = t0 + a Σq + b Σq(c + q/2) + d Σ(context of decoding sequences), with q the new tokens of a sequence in this
//! step and c its context before it.

use crate::time::{self, Ticks};

/// Seconds: per step, per new token, per pair of tokens attended, per token of a decoding sequence's context. Before
/// the scheduler sees a request, the front end, which takes requests one after another (HTTP, parsing), spends
/// request_s and per prompt token request_token_s; then request_wait_s and per prompt chunk request_chunk_s pass beside
/// other requests (messages between processes, look-ups).
#[derive(Clone, Copy, Debug, Default)]
#[cfg_attr(feature = "python", derive(pyo3::FromPyObject))]
pub struct CostConfig {
    pub step_s: f64,
    pub token_s: f64,
    pub attention_s: f64,
    pub decode_context_s: f64,
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
    /// Half of b, so that q(c + q/2) stays whole: b q (c + q/2) = b/2 q (2c + q).
    half_attention: Ticks,
    decode_context: Ticks,
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
    pairs_twice: u128,
    decode_context: u128,
}

impl Work {
    pub fn add(&mut self, new_tokens: u64, context: u64, decoding: bool) {
        let (q, c) = (u128::from(new_tokens), u128::from(context));
        self.new_tokens += q;
        self.pairs_twice += q * (2 * c + q);
        if decoding {
            self.decode_context += c;
        }
    }
}

impl Cost {
    pub fn new(config: &CostConfig) -> Self {
        Self {
            step: time::from_s(config.step_s),
            token: time::from_s(config.token_s),
            half_attention: time::from_s(config.attention_s / 2.0),
            decode_context: time::from_s(config.decode_context_s),
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
            + self.half_attention * work.pairs_twice
            + self.decode_context * work.decode_context
    }

    /// Time of `steps` decode steps in a row of `sequences` whose contexts sum up to `context` at the first.
    pub fn decode(&self, sequences: u64, context: u64, steps: u64) -> Ticks {
        let (n, c, k) = (u128::from(sequences), u128::from(context), u128::from(steps));
        let first = Work { new_tokens: n, pairs_twice: 2 * c + n, decode_context: c };
        let growth = n * (2 * self.half_attention + self.decode_context);
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
            decode_context_s: 3.1e-8,
            ..CostConfig::default()
        };
        let cost = Cost::new(&config);
        let mut contexts = [5u64, 1_000, 77_777];
        let closed = cost.decode(3, contexts.iter().sum(), 1_000);
        let mut total = 0;
        for _ in 0..1_000 {
            let mut work = Work::default();
            for context in &mut contexts {
                work.add(1, *context, true);
                *context += 1;
            }
            total += cost.step(&work);
        }
        assert_eq!(closed, total);
    }

    #[test]
    fn attention_does_not_depend_on_how_a_prompt_is_cut() {
        let cost = Cost::new(&CostConfig { attention_s: 2e-9, ..CostConfig::default() });
        let (mut whole, mut cut) = (Work::default(), Work::default());
        whole.add(4096, 0, false);
        cut.add(1000, 0, false);
        cut.add(3096, 1000, false);
        assert_eq!(cost.step(&whole), cost.step(&cut));
    }
}
