//! A cache server: the chunk tiers, and the ends of the transfers that they have begun.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::tiers::{Begun, Ended, IoId, Tiers};
use crate::time::{FOREVER, Ticks};

/// Ids count up, so that transfers which end together end in the order in which they were begun.
type Ends = BinaryHeap<Reverse<(Ticks, IoId)>>;

pub struct Server {
    pub tiers: Tiers,
    loud: Ends,
    /// Ends of transfers that no request waits for. Steps may pass them: each is dealt with before anything looks at
    /// the tiers, as of its own time.
    quiet: Ends,
}

impl Server {
    pub fn new(tiers: Tiers) -> Self {
        Self { tiers, loud: Ends::new(), quiet: Ends::new() }
    }

    pub fn reset(&mut self, cpu: bool, disk: bool, page_cache: bool) {
        if cpu {
            self.tiers.reset_cpu();
        }
        if disk {
            self.tiers.reset_disk();
        }
        if page_cache {
            self.tiers.reset_page_cache();
        }
    }

    /// When the next transfer ends: any of them, or only of those that requests wait for.
    pub fn next_at(&self, any: bool) -> Ticks {
        let first = |ends: &Ends| ends.peek().map_or(FOREVER, |Reverse((at, _))| *at);
        if any { first(&self.loud).min(first(&self.quiet)) } else { first(&self.loud) }
    }

    /// Ends the next transfer if it is due: when it ended, and what became of it.
    pub fn end_next(&mut self, now: Ticks) -> Option<(Ticks, Ended)> {
        let first = |ends: &Ends| ends.peek().map_or((FOREVER, IoId::MAX), |Reverse(end)| *end);
        let ends = if first(&self.quiet) < first(&self.loud) { &mut self.quiet } else { &mut self.loud };
        let (at, id) = Some(first(ends)).filter(|(at, _)| *at <= now)?;
        ends.pop();
        self.tiers.tick(at);
        let ended = self.tiers.io_done(at, id);
        self.take_begun();
        Some((at, ended))
    }

    /// Notes when the transfers end that the tiers have begun since the last call.
    pub fn take_begun(&mut self) {
        let (loud, quiet) = (&mut self.loud, &mut self.quiet);
        // Others end at a moment that somebody else will tell (`ends`).
        for begun in self.tiers.take_begun().filter(|begun| begun.end != FOREVER) {
            let ends = if begun.quiet { &mut *quiet } else { &mut *loud };
            ends.push(Reverse((begun.end, begun.id)));
        }
    }

    /// A transfer ends at that moment.
    pub fn ends(&mut self, Begun { end, id, quiet }: Begun) {
        let ends = if quiet { &mut self.quiet } else { &mut self.loud };
        ends.push(Reverse((end, id)));
    }
}
