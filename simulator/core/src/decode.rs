//! Decode in macro-steps: while every step would be scheduled alike, many are taken at once.
//!
//! The result is that of single steps to the tick and to the block: times are integers, and blocks are handed out and
//! registered in the order in which single steps would have done it.

use crate::engine::Engine;
use crate::time::Ticks;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Need {
    Allocate,
    Register,
}

impl Engine {
    /// Takes as many whole decode steps as end by `until`, before anything else can happen; often none.
    pub(crate) fn decode_ahead(&mut self, until: Ticks) {
        if !(self.config.macro_steps && self.steady) || self.running.is_empty() {
            return;
        }
        let sequences = self.running.len() as u64;
        let context: u64 = self.running.iter().map(|&slot| self.requests[slot].computed).sum();
        // The step in which the first request finishes is left to the ordinary way.
        let left =
            self.running.iter().map(|&slot| self.requests[slot].output - self.requests[slot].generated);
        let most = left.min().unwrap_or(0).saturating_sub(1);
        let room = until.saturating_sub(self.now);
        let steps = largest(most, |steps| self.cost.decode(sequences, context, steps) <= room);
        let steps = self.fill_blocks(steps);
        if steps == 0 {
            return;
        }
        let start = self.now;
        self.now += self.cost.decode(sequences, context, steps);
        for index in 0..self.running.len() {
            let request = &mut self.requests[self.running[index]];
            request.computed += steps;
            request.generated += steps;
            request.last_token = Some(self.now);
            if self.config.record_token_times {
                let ends = (1..=steps).map(|step| start + self.cost.decode(sequences, context, step));
                request.tokens.extend(ends);
            }
        }
    }

    /// Allocates and registers what the running requests need in up to `steps` decode steps. Returns how many of the
    /// steps got all their blocks and leave the waiting request as hopeless as it was.
    fn fill_blocks(&mut self, mut steps: u64) -> u64 {
        for (step, index, need) in self.block_needs(steps) {
            if step >= steps {
                break;
            }
            let slot = self.running[index];
            match need {
                Need::Allocate => match self.pool.allocate() {
                    Some(id) => self.requests[slot].blocks.push(id),
                    None => steps = step,
                },
                Need::Register => {
                    let request = &self.requests[slot];
                    // The waiting request is looked at after the running ones, so this very step may admit it.
                    if self.watched == Some(request.block_keys[request.registered]) {
                        steps = step;
                    }
                    let end = (request.registered as u64 + 1) * self.config.block_tokens;
                    self.register(slot, end);
                }
            }
        }
        steps
    }

    /// (step, index in `running`, what) in the order in which single steps would come to it.
    fn block_needs(&self, steps: u64) -> Vec<(u64, usize, Need)> {
        let size = self.config.block_tokens;
        let mut needs = Vec::new();
        for (index, &slot) in self.running.iter().enumerate() {
            let request = &self.requests[slot];
            let end = request.computed + steps;
            // Step i computes the token at computed + i: it needs a block for it, and fills the block that it ends.
            let first = request.blocks.len() as u64 * size;
            let begun = (first..end).step_by(size as usize);
            needs.extend(begun.map(|token| (token - request.computed, index, Need::Allocate)));
            let first = (request.registered as u64 + 1) * size - 1;
            let filled = (first..end).step_by(size as usize);
            needs.extend(filled.map(|token| (token - request.computed, index, Need::Register)));
        }
        needs.sort_unstable();
        needs
    }
}

/// The largest n up to `most` for which `holds`, which is true of 0 and, once false, stays so.
fn largest(most: u64, holds: impl Fn(u64) -> bool) -> u64 {
    let (mut low, mut high) = (0, most);
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
