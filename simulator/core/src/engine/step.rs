//! What the GPU computes now: one scheduled batch, or many decode steps at once.

use super::cost::{Pace, Pass, Work, largest};
use crate::tiers::Slot;
use crate::time::Ticks;

/// The step in flight.
pub enum Step {
    Batch { end: Ticks, batch: Batch },
    Decode(Decode),
}

impl Step {
    pub fn end(&self) -> Ticks {
        match self {
            Step::Batch { end, .. } => *end,
            Step::Decode(decode) => decode.end,
        }
    }
}

/// What one scheduled step computes.
#[derive(Debug, Default)]
pub struct Batch {
    pub slots: Vec<Slot>,
    pub work: Work,
    /// All running requests decode, and the next schedule would decide the same.
    pub steady: bool,
    pub preempted: bool,
    /// Until when what its requests load by layer is on its way.
    pub loads_until: Ticks,
    /// The scheduler will ask again for a look-up's answer.
    pub polls: bool,
    /// What its time depends on where it only polls.
    pub pass: Pass,
    /// When an answer comes that it waits for; 0: it waits for none whose moment is known.
    pub told_at: Ticks,
}

impl Batch {
    /// The step computes nothing; the scheduler only asks for the answers to look-ups.
    pub fn only_polls(&self) -> bool {
        self.slots.is_empty() && self.polls
    }
}

/// Decode steps in a row that are scheduled alike.
pub struct Decode {
    start: Ticks,
    end: Ticks,
    steps: u64,
    pace: Pace,
    /// By how much the last step takes longer than its work.
    delay: Ticks,
    /// For how many of the steps the requests have their blocks.
    pub blocks_given: u64,
    /// For how many of the steps the requests have their tokens.
    pub tokens_given: u64,
    /// No event has come that the next schedule must take into account.
    pub steady: bool,
}

impl Decode {
    pub fn new(start: Ticks, steps: u64, pace: Pace) -> Self {
        let end = start + pace.steps(steps);
        Self { start, end, steps, pace, delay: 0, blocks_given: 0, tokens_given: 0, steady: true }
    }

    pub fn end(&self) -> Ticks {
        self.end
    }

    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// How many of the steps have begun before `at`; the first one always has.
    pub fn steps_begun(&self, at: Ticks) -> u64 {
        self.pace.within(at.saturating_sub(self.start), self.steps - 1) + 1
    }

    /// How many of the steps have ended by `now`.
    pub fn steps_ended(&self, now: Ticks) -> u64 {
        largest(self.steps, |steps| steps == 0 || self.end_of(steps) <= now)
    }

    /// When the first `steps` steps have ended.
    pub fn end_of(&self, steps: u64) -> Ticks {
        self.start + self.pace.steps(steps) + if steps == self.steps { self.delay } else { 0 }
    }

    /// Sets the end of the last step, which shares its core and takes longer than its work.
    pub fn set_end(&mut self, end: Ticks) {
        self.end = end;
        self.delay = end - self.start - self.pace.steps(self.steps);
    }

    /// Takes back all but the first `steps` steps.
    pub fn cut(&mut self, steps: u64) {
        self.steps = steps;
        self.end = self.end_of(steps);
        self.steady = false;
    }
}
