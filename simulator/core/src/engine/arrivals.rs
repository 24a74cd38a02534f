//! Submissions in the order of the moments at which they are sent, or at which they reach the scheduler.

use std::collections::{BTreeMap, VecDeque};

use super::request::Submission;
use crate::memory::fetch_all;
use crate::time::{FOREVER, Ticks};

/// Submissions by moment; those of one moment by their number.
pub struct Arrivals {
    /// The moment of the first submission; FOREVER: there is none.
    next_at: Ticks,
    /// Submissions that were pushed in order, as nearly all are.
    queue: VecDeque<(Ticks, u64, Submission)>,
    /// Submissions that were pushed after a later one.
    others: BTreeMap<(Ticks, u64), Submission>,
}

impl Default for Arrivals {
    fn default() -> Self {
        Self { next_at: FOREVER, queue: VecDeque::new(), others: BTreeMap::new() }
    }
}

impl Arrivals {
    pub fn push(&mut self, at: Ticks, number: u64, submission: Submission) {
        self.next_at = self.next_at.min(at);
        match self.queue.back() {
            Some((last, before, _)) if (*last, *before) > (at, number) => {
                self.others.insert((at, number), submission);
            }
            _ => self.queue.push_back((at, number, submission)),
        }
    }

    /// The moment of the first submission; FOREVER: there is none.
    pub fn next_at(&self) -> Ticks {
        self.next_at
    }

    pub fn pop(&mut self) -> Option<(Ticks, Submission)> {
        let popped = self.pop_first();
        self.next_at = self.first().0;
        popped
    }

    fn pop_first(&mut self) -> Option<(Ticks, Submission)> {
        let first = self.first();
        if self.queue.front().is_some_and(|(at, number, _)| (*at, *number) == first) {
            return self.queue.pop_front().map(|(at, _, submission)| (at, submission));
        }
        self.others.pop_first().map(|((at, _), submission)| (at, submission))
    }

    /// Has the processor fetch the next submission's prompt while other work goes on.
    pub fn prefetch_next(&self) {
        if let Some((_, _, next)) = self.queue.front() {
            fetch_all(&next.prompt);
        }
    }

    fn first(&self) -> (Ticks, u64) {
        let first = self.queue.front().map_or((FOREVER, u64::MAX), |(at, number, _)| (*at, *number));
        self.others.first_key_value().map_or(first, |(other, _)| first.min(*other))
    }
}
