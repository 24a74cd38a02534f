//! A cache server: the chunk tiers, and the moments at which their transfers end.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use super::{Ended, IoId, Tiers};
use crate::keys::Key;
use crate::time::{FOREVER, Ticks};

/// Ids count up, so that transfers that end together end in the order of their beginning.
type End = (Ticks, IoId);

const NEVER: End = (FOREVER, IoId::MAX);

/// Ends of transfers to come.
struct Ends {
    next: End,
    /// Devices that serve one transfer after another end them in order. So nearly every new end is later than all ends
    /// of one lane.
    lanes: [VecDeque<End>; 2],
    others: BinaryHeap<Reverse<End>>,
}

impl Ends {
    fn new() -> Self {
        Self { next: NEVER, lanes: [VecDeque::new(), VecDeque::new()], others: BinaryHeap::new() }
    }

    fn push(&mut self, end: End) {
        self.next = self.next.min(end);
        // The lane whose last end is the closest: so each device gets a lane of its own.
        let fits = |lane: &&mut VecDeque<End>| lane.back().is_none_or(|last| *last < end);
        match self.lanes.iter_mut().filter(fits).max_by_key(|lane| lane.back().copied()) {
            Some(lane) => lane.push_back(end),
            None => self.others.push(Reverse(end)),
        }
    }

    /// Takes out the next end.
    fn pop(&mut self) {
        let next = self.next;
        match self.lanes.iter_mut().find(|lane| lane.front() == Some(&next)) {
            Some(lane) => lane.pop_front(),
            None => self.others.pop().map(|Reverse(end)| end),
        };
        let other = self.others.peek().map(|Reverse(end)| *end);
        self.next =
            self.lanes.iter().filter_map(|lane| lane.front().copied()).chain(other).min().unwrap_or(NEVER);
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
        Self { tiers, loud: Ends::new(), quiet: Ends::new() }
    }

    /// When the next transfer ends. `any`: also those that no request waits for.
    pub fn next_at(&self, any: bool) -> Ticks {
        if any { self.loud.next.0.min(self.quiet.next.0) } else { self.loud.next.0 }
    }

    /// Ends the next transfer if it is due. Returns when it ended, and what the engine has to know.
    pub fn end_next(&mut self, now: Ticks) -> Option<(Ticks, Ended)> {
        let ends = if self.quiet.next < self.loud.next { &mut self.quiet } else { &mut self.loud };
        let (at, id) = Some(ends.next).filter(|(at, _)| *at <= now)?;
        ends.pop();
        self.tiers.tick(at);
        let ended = self.tiers.io_done(at, id);
        self.take_begun();
        Some((at, ended))
    }

    /// Runs the lower levels' ticks up to `now`. True: what they dropped has been written elsewhere by then.
    #[inline(always)]
    pub fn tick_lower(&mut self, now: Ticks) -> bool {
        if !self.tiers.lower_tick_is_due(now) {
            return false;
        }
        self.tiers.tick(now);
        self.take_begun();
        self.next_at(true) <= now
    }

    /// Notes the ends of transfers that the tiers have begun since the last call.
    pub fn take_begun(&mut self) {
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
