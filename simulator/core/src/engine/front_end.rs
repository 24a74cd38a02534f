//! The front end's queue: it parses requests and passes answers on, one after another.
//!
//! The front end has its own core or shares the engine's. On a shared core, each gets half while both have work, as
//! Linux divides a core between two processes. Of requests that are sent together, the engine computes the first while
//! the front end parses the others: a short step then takes twice as long, a long one as much longer as the parsing
//! takes.

use std::collections::VecDeque;

use super::request::Submission;
use crate::tiers::Slot;
use crate::time::{FOREVER, Ticks};

pub enum Task {
    /// The first half of a request's parsing. Other tasks go ahead of the second half: a front end is an event loop.
    Read(Submission),
    Parse(Submission),
    /// First and last tokens of the step that ended at that moment: they come in one message.
    Answers(Answers),
}

#[derive(Debug)]
pub struct Answers {
    at: Ticks,
    pub slots: Vec<Slot>,
    /// A step that computes has gone ahead of them.
    held: bool,
}

/// Counts work in halves of ticks, so that half a core's share of any time is a whole number.
#[derive(Default)]
pub struct FrontEnd {
    /// With a core of its own and no answers to pass on: when the front end has parsed all requests so far.
    until: Ticks,
    /// Up to when the queue's work is accounted for. Like `step_left`, valid only while the queue has tasks.
    at: Ticks,
    /// Tasks, each with the work that is left of it.
    queue: VecDeque<(Ticks, Task)>,
    /// What is left of the step in flight on the same core; 0: there is none.
    step_left: Ticks,
    /// How many requests the front end has parsed.
    parsed: u64,
    /// How many messages with answers no step has gone ahead of.
    not_held: usize,
}

impl FrontEnd {
    pub fn is_busy(&self) -> bool {
        !self.queue.is_empty()
    }

    pub fn parses(&self) -> bool {
        self.queue.iter().any(|(_, task)| !matches!(task, Task::Answers(_)))
    }

    /// When the front end ends its task, unless a step begins or ends before.
    pub fn next_at(&self) -> Ticks {
        self.queue.front().map_or(FOREVER, |(left, _)| self.at.saturating_add(left.div_ceil(self.rate())))
    }

    pub fn work_until(&mut self, now: Ticks) {
        let done = (now - self.at).saturating_mul(self.rate());
        self.at = now;
        self.step_left = self.step_left.saturating_sub(done);
        if let Some((left, _)) = self.queue.front_mut() {
            *left = left.saturating_sub(done);
        }
    }

    /// Adds a task. `step_left`: what is left of the step that shares the core from now on; used if the queue was
    /// empty.
    pub fn add(&mut self, now: Ticks, work: Ticks, task: Task, step_left: Ticks) {
        if self.queue.is_empty() {
            (self.at, self.step_left) = (now, step_left);
        }
        self.queue.push_back((work.saturating_mul(2), task));
    }

    /// Adds a token that a step gave a request at `now`; tokens of one step are one task, which takes `work` and what
    /// `each` of them takes.
    pub fn add_answer(&mut self, now: Ticks, work: Ticks, each: Ticks, slot: Slot) {
        match self.queue.back_mut() {
            Some((left, Task::Answers(answers))) if answers.at == now => {
                answers.slots.push(slot);
                *left = left.saturating_add(each.saturating_mul(2));
            }
            _ => {
                self.not_held += 1;
                let work = work.saturating_add(each);
                self.add(now, work, Task::Answers(Answers { at: now, slots: vec![slot], held: false }), 0);
            }
        }
    }

    /// The engine's own work on a step that only polls goes ahead of what the front end does.
    pub fn hold(&mut self, work: Ticks) {
        if let Some((left, _)) = self.queue.front_mut() {
            *left = left.saturating_add(work.saturating_mul(2));
        }
    }

    /// Whether answers are on their way that no step has gone ahead of. The one that begins now does.
    pub fn awaits_step(&mut self) -> bool {
        std::mem::take(&mut self.not_held) > 0
    }

    /// The engine's own work on a step goes ahead of answers on their way, once.
    pub fn hold_answers(&mut self, work: Ticks) {
        let mut longer = work.saturating_mul(2);
        for (left, task) in &mut self.queue {
            if let Task::Answers(answers) = task
                && !std::mem::replace(&mut answers.held, true)
            {
                *left = left.saturating_add(std::mem::take(&mut longer));
            }
        }
    }

    /// Adds the second half of a request's parsing.
    pub fn add_second_half(&mut self, now: Ticks, work: Ticks, submission: Submission) {
        self.add(now, work, Task::Parse(submission), self.step_left);
    }

    /// Takes out the first task if its work is done.
    pub fn pop_done(&mut self) -> Option<Task> {
        let done = self.queue.front().is_some_and(|(left, _)| *left == 0);
        let task = if done { self.queue.pop_front().map(|(_, task)| task) } else { None };
        if let Some(Task::Answers(answers)) = &task {
            self.not_held -= usize::from(!answers.held);
        }
        task
    }

    /// The number of the request that the front end has parsed just now.
    pub fn count_parsed(&mut self) -> u64 {
        self.parsed += 1;
        self.parsed
    }

    /// Parses a request that was sent at `at` on a core of the front end's own: when the parsing ends.
    pub fn parse_alone(&mut self, at: Ticks, work: Ticks) -> Ticks {
        self.until = self.until.max(at).saturating_add(work);
        self.until
    }

    /// When the step in flight ends that shares the core with the front end as it is now.
    pub fn step_end(&self, now: Ticks) -> Ticks {
        let rate = if self.queue.is_empty() { 2 } else { 1 };
        now.saturating_add(self.step_left.div_ceil(rate))
    }

    /// A step begins now that would take `alone` on a core of its own: when it ends with half of the core.
    pub fn begin_step(&mut self, now: Ticks, alone: Ticks) -> Ticks {
        self.step_left = 2 * alone;
        now + self.step_left
    }

    fn rate(&self) -> Ticks {
        if self.step_left > 0 { 1 } else { 2 }
    }
}
