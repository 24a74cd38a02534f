//! From the sending of a request through the front end to the scheduler.

use std::mem;

use super::Engine;
use super::front_end::Task;
use super::request::Submission;
use super::step::Step;
use crate::time::{FOREVER, Ticks};

/// What part of a request's parsing comes before others of the front end's tasks get their turn: a third. vLLM 0.32 reads
/// a request in 0.8 ms, goes on to others that are there, and then takes 1.6 ms to make tokens and a message of it. SGLang
/// 0.5.23 goes on once it has sent the message (`parses_whole`).
const READING: Ticks = 3;

impl Engine {
    /// Takes a request that is sent at `at`; `number` orders those that arrive together.
    pub(crate) fn accept(&mut self, submission: Submission, at: Ticks, number: u64) {
        self.unfinished += 1;
        self.sends.push(at, number, submission);
    }

    /// When the next request is sent, the front end ends a task, a request reaches the scheduler, or the cache server has
    /// taken a question.
    pub(super) fn next_arrival(&self) -> Ticks {
        let asked = self.sends.next_at().min(self.arrivals.next_at());
        asked.min(self.front_end.next_at()).min(self.polls.next_at())
    }

    /// Brings the front end, the step that shares its core, and the cache server's answers to this moment.
    pub(super) fn run_front_end(&mut self) {
        self.tell_answers();
        let shared_core = self.config.cost.shared_core;
        if !shared_core && !self.cost.answers_take_time() {
            return self.run_front_end_alone();
        }
        let mut front_end = mem::take(&mut self.front_end);
        let was_busy = front_end.is_busy();
        if was_busy {
            front_end.work_until(self.now);
        }
        while self.sends.next_at() <= self.now
            && let Some((_, submission)) = self.sends.pop()
        {
            let begins = !front_end.is_busy() && shared_core;
            let step_left = if begins { 2 * self.step_left_once_cut() } else { 0 };
            let parsing = self.parsing(&submission);
            let (part, task) = match self.config.parses_whole {
                true => (parsing, Task::Parse(submission)),
                false => (parsing / READING, Task::Read(submission)),
            };
            let work = self.cost.vary(part);
            front_end.add(self.now, work, task, step_left);
        }
        while let Some(task) = front_end.pop_done() {
            match task {
                Task::Read(submission) => {
                    let parsing = self.parsing(&submission);
                    let work = self.cost.vary(parsing - parsing / READING);
                    front_end.add_second_half(self.now, work, submission);
                }
                Task::Parse(submission) => {
                    let at = self.now.saturating_add(self.cost.wait());
                    self.arrivals.push(at, front_end.count_parsed(), submission);
                }
                Task::Answers(answers) => answers.slots.into_iter().for_each(|slot| self.answer_passed(slot)),
            }
        }
        if shared_core && (was_busy || front_end.is_busy()) {
            self.set_step_end(front_end.step_end(self.now));
        }
        self.front_end = front_end;
    }

    /// A front end with a core of its own and no answers to pass on ends each request's parsing at a known moment.
    fn run_front_end_alone(&mut self) {
        while self.sends.next_at() <= self.now
            && let Some((at, submission)) = self.sends.pop()
        {
            self.sends.prefetch_next();
            let parsing = self.parsing(&submission);
            let work = self.cost.vary(parsing / READING) + self.cost.vary(parsing - parsing / READING);
            let until = self.front_end.parse_alone(at, work);
            let number = self.front_end.count_parsed();
            let wait = self.cost.wait();
            self.arrivals.push(until.saturating_add(wait), number, submission);
        }
    }

    /// The front end has requests to parse, or one that it has parsed is on its way to the scheduler.
    pub(super) fn front_end_parses(&self) -> bool {
        self.front_end.parses() || self.arrivals.next_at() < FOREVER
    }

    fn parsing(&self, submission: &Submission) -> Ticks {
        let tokens = submission.prompt_tokens().unwrap_or(0).min(self.config.max_model_len);
        let chunks = if self.config.asks_server() { 0 } else { tokens / self.config.chunk_tokens };
        self.cost.front_end(tokens) + self.cost.question(chunks)
    }

    /// When a step ends that begins now and would end at `end` on a core of its own.
    pub(super) fn end_on_shared_core(&mut self, end: Ticks) -> Ticks {
        if !self.shares_core_now() {
            return end;
        }
        self.front_end.begin_step(self.now, end - self.now)
    }

    /// The front end has work on the engine's core.
    pub(super) fn shares_core_now(&self) -> bool {
        self.config.cost.shared_core && self.front_end.is_busy()
    }

    /// Cuts decode steps in flight down to the one that runs now. Returns what is left of the step in flight.
    fn step_left_once_cut(&mut self) -> Ticks {
        if matches!(self.step, Some(Step::Decode(_))) {
            self.cut_decode(self.now);
        }
        self.step.as_ref().map_or(0, |step| step.end().saturating_sub(self.now))
    }

    fn set_step_end(&mut self, at: Ticks) {
        match &mut self.step {
            Some(Step::Batch { end, .. }) if *end > self.now => *end = at,
            Some(Step::Decode(decode)) if decode.end() > self.now => decode.set_end(at),
            _ => {}
        }
    }
}
