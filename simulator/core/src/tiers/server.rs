//! A cache server: the chunk tiers, and the moments at which their transfers end.

use std::collections::VecDeque;

use super::{Ended, IoId, Tiers};
use crate::keys::Key;
use crate::time::{FOREVER, Ticks};

/// Ids count up, so that transfers that end together end in the order of their beginning.
type End = (Ticks, IoId);

const NEVER: End = (FOREVER, IoId::MAX);

/// Ends of transfers to come, the next one first.
struct Ends(VecDeque<End>);

impl Ends {
    #[inline(always)]
    fn next(&self) -> End {
        self.0.front().copied().unwrap_or(NEVER)
    }

    /// A new end is mostly later than all others, or, on a faster device than theirs, sooner than most.
    #[inline(always)]
    fn push(&mut self, end: End) {
        match self.0.back() {
            Some(last) if *last > end => {
                let at = self.0.partition_point(|other| *other < end);
                self.0.insert(at, end);
            }
            _ => self.0.push_back(end),
        }
    }
}

pub struct Server {
    pub tiers: Tiers,
    loud: Ends,
    /// Ends of transfers that no request waits for. A step may run past them: the server handles each, as of its own
    /// time, before the engine next looks at the tiers.
    quiet: Ends,
}

impl Server {
    pub fn new(tiers: Tiers) -> Self {
        Self { tiers, loud: Ends(VecDeque::new()), quiet: Ends(VecDeque::new()) }
    }

    /// When the next transfer ends. `any`: also those that no request waits for.
    pub fn next_at(&self, any: bool) -> Ticks {
        let loud = self.loud.next().0;
        if any { loud.min(self.quiet.next().0) } else { loud }
    }

    /// Ends the next transfer if it is due. Returns when it ended, and what the engine has to know.
    pub fn end_next(&mut self, now: Ticks) -> Option<(Ticks, Ended)> {
        loop {
            // What a tick begins may end before what was the next.
            let at = self.next_at(true).min(now);
            if !self.tiers.lower_tick_is_due(at) {
                break;
            }
            self.tiers.tick_some(at);
            self.take_begun();
        }
        let ends = if self.quiet.next() < self.loud.next() { &mut self.quiet } else { &mut self.loud };
        let (at, id) = ends.0.pop_front_if(|(at, _)| *at <= now)?;
        self.tiers.tick(at);
        let ended = self.tiers.io_done(at, id);
        self.take_begun();
        Some((at, ended))
    }

    /// Runs the lower levels' ticks up to `now`. True: what they dropped has been written elsewhere by then.
    #[inline(always)]
    pub fn tick_lower(&mut self, now: Ticks) -> bool {
        while self.tiers.lower_tick_is_due(now) {
            self.tiers.tick_some(now);
            self.take_begun();
            if self.next_at(true) <= now {
                return true;
            }
        }
        false
    }

    /// Notes the ends of transfers that the tiers have begun since the last call.
    #[inline(always)]
    pub fn take_begun(&mut self) {
        if !self.tiers.begun.is_empty() {
            self.note_begun();
        }
    }

    fn note_begun(&mut self) {
        let (loud, quiet) = (&mut self.loud, &mut self.quiet);
        // The caller says when external transfers end (`complete_io`).
        for begun in self.tiers.take_begun().filter(|begun| begun.end != FOREVER) {
            let ends = if begun.quiet { &mut *quiet } else { &mut *loud };
            ends.push((begun.end, begun.id));
        }
    }

    /// The caller has answered an external transfer, which ends at that moment.
    pub fn complete_io(&mut self, id: IoId, end: Ticks, failed: Vec<Key>) {
        if self.tiers.answer(id, failed) {
            let ends = if self.tiers.is_quiet(id) { &mut self.quiet } else { &mut self.loud };
            ends.push((end, id));
        }
    }
}
