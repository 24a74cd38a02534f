//! A front end and an engine with one core between them: while both have work, each gets half of it.
//!
//! As Linux shares a core out between two processes. Of requests that are sent together the first is computed while the
//! others are parsed: a short step takes twice as long for it, a long one as much longer as the parsing takes.

use std::collections::VecDeque;

use crate::engine::{Engine, Step};
use crate::request::Submission;
use crate::time::{FOREVER, Ticks};

/// Work is counted in halves of ticks, so that half a core's share of any time is whole.
#[derive(Default)]
pub struct SharedCore {
    /// Until when work is accounted for; of meaning while the front end has any, as is `step_left`.
    at: Ticks,
    /// Requests at the front end, and what is left to do for each.
    queue: VecDeque<(Ticks, Submission)>,
    /// What is left of the step in flight; 0: there is none.
    step_left: Ticks,
}

impl SharedCore {
    fn rate(&self) -> Ticks {
        if self.step_left > 0 { 1 } else { 2 }
    }

    /// When the front end will be through with its first request, unless a step begins or ends before.
    pub fn next_passed(&self) -> Ticks {
        self.queue.front().map_or(FOREVER, |(left, _)| self.at.saturating_add(left.div_ceil(self.rate())))
    }

    fn work_until(&mut self, now: Ticks) {
        let done = (now - self.at).saturating_mul(self.rate());
        self.at = now;
        self.step_left = self.step_left.saturating_sub(done);
        if let Some((left, _)) = self.queue.front_mut() {
            *left = left.saturating_sub(done);
        }
    }
}

impl Engine {
    /// Brings front end and step to this moment.
    pub(crate) fn pass_shared_core(&mut self) {
        let Some(mut core) = self.shared_core.take() else { return };
        let was_busy = !core.queue.is_empty();
        if was_busy {
            core.work_until(self.now);
        }
        while self.sends.next_at() <= self.now
            && let Some((_, submission)) = self.sends.pop()
        {
            if core.queue.is_empty() {
                core.at = self.now;
                core.step_left = 2 * self.begins_to_share();
            }
            core.queue.push_back((self.front_end_work(&submission).saturating_mul(2), submission));
        }
        while core.queue.front().is_some_and(|(left, _)| *left == 0)
            && let Some((_, submission)) = core.queue.pop_front()
        {
            self.arrives_after(self.now, submission);
        }
        if was_busy || !core.queue.is_empty() {
            let rate = if core.queue.is_empty() { 2 } else { 1 };
            self.step_ends_at(self.now.saturating_add(core.step_left.div_ceil(rate)));
        }
        self.shared_core = Some(core);
    }

    /// What the step that begins now and has the core for itself until `end` is to be at, with a front end beside it.
    pub(crate) fn shares_core(&mut self, end: Ticks) -> Ticks {
        match &mut self.shared_core {
            Some(core) if !core.queue.is_empty() => {
                core.step_left = 2 * (end - self.now);
                self.now + core.step_left
            }
            _ => end,
        }
    }

    pub(crate) fn front_end_shares(&self) -> bool {
        self.shared_core.as_ref().is_some_and(|core| !core.queue.is_empty())
    }

    /// No more than the step under way is left of the steps in flight. Returns its time left.
    fn begins_to_share(&mut self) -> Ticks {
        self.cut_decode_short();
        self.step.as_ref().map_or(0, |step| step.end().saturating_sub(self.now))
    }

    fn step_ends_at(&mut self, at: Ticks) {
        match &mut self.step {
            Some(Step::Batch { end, .. }) if *end > self.now => *end = at,
            Some(Step::Decode(decode)) if decode.end > self.now => decode.end_at(at),
            _ => {}
        }
    }

    fn cut_decode_short(&mut self) {
        if matches!(self.step, Some(Step::Decode(_))) {
            self.cut_decode(self.now);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::cost::CostConfig;
    use crate::engine::{Engine, EngineConfig};
    use crate::tests::{ask, config};
    use crate::time::{FOREVER, Ticks, from_s};

    /// About a millisecond, and whole in ticks.
    const MS: f64 = 1.0 / 1024.0;

    /// First tokens of two requests of one token, in the order of sending. The front end takes 1 ms, a step 2 ms.
    fn first_tokens(shared_core: bool, sent_ms: [f64; 2]) -> [Ticks; 2] {
        let cost = CostConfig { step_s: 2.0 * MS, request_s: MS, shared_core, ..CostConfig::default() };
        let mut engine =
            Engine::new(EngineConfig { cost, ..config(400, None) }).expect("a good configuration");
        for (id, at_ms) in ["0", "1"].into_iter().zip(sent_ms) {
            engine.submit(ask(id, &[(1, 1)], 1), from_s(at_ms * MS)).expect("taken");
        }
        let mut found = [0; 2];
        for _ in 0..2 {
            for done in engine.advance(FOREVER).expect("no dead end") {
                found[usize::from(done.id == "1")] = done.first_token.expect("a token");
            }
        }
        found
    }

    #[test]
    fn a_step_and_the_front_end_have_half_of_their_core_each() {
        let ms = |first: f64, second: f64| [first * MS, second * MS].map(from_s);
        assert_eq!(first_tokens(false, [0.0, 0.0]), ms(3.0, 5.0));
        // From 1 ms on the first one's step shares the core with the second one's parsing, which takes 2 ms so.
        assert_eq!(first_tokens(true, [0.0, 0.0]), ms(4.0, 6.0));
        assert_eq!(first_tokens(false, [0.0, 2.5]), ms(3.0, 5.5));
        // The half of a millisecond that the step lacks takes a whole one, and then the parsing the core for itself.
        assert_eq!(first_tokens(true, [0.0, 2.5]), ms(3.5, 6.0));
        assert_eq!(first_tokens(true, [0.0, 3.0]), ms(3.0, 6.0));
    }
}
