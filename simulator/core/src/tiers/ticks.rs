//! What levels drop by the clock, and where that goes.
//!
//! With Mooncake's offload on eviction, the level below gets a level's chunks before they may go. A tick that is to
//! drop some queues all that could go and lack a copy below, and these stay; of those that have one, it drops its
//! share. At its next heartbeat the client takes the queue, and writes chunk by chunk. It reads each chunk through a
//! look-up, which leases it once more, in the order of the master's table: here that of the chunks' hashes.

use super::level::Level;
use super::transfers::{Op, WriteDown};
use super::{Tiers, all_keys, id_and};
use crate::cache::Cache;
use crate::chunks::spans::Span;
use crate::chunks::{NEW, PromptCursor};
use crate::keys::{ChunkRange, Key};
use crate::time::{self, FOREVER, Ticks};

/// Chunks that a tick queued, and its moment.
type Queued = Vec<(Ticks, Vec<(Key, Span)>)>;

impl Tiers {
    #[cold]
    pub(super) fn tick_lower(&mut self, now: Ticks) {
        for lower in 0..self.lower.len() {
            if self.lower[lower].ticker.due > now {
                continue;
            }
            if self.config.offloads(lower + 1) {
                self.tick_offloading(now, lower + 1);
                continue;
            }
            let falls = self.lower.get(lower + 1).is_some_and(Level::takes_dropped);
            let (ticks, dropped) = self.lower[lower].run_ticks(now, falls);
            self.journal.note("tick below", || id_and(lower as u64 + 1, &id_and(ticks, &all_keys(&dropped))));
            if falls {
                dropped.into_iter().for_each(|(at, keys)| self.demote(at, 0, keys, lower + 1));
            }
        }
        self.lower_due = self.next_due();
    }

    /// When the next tick is due that lets chunks fall or concerns a lower level; FOREVER: there are no such ticks.
    pub(super) fn next_due(&self) -> Ticks {
        let falls = self.lower.first().is_some_and(Level::takes_dropped);
        let first = if falls { self.ticker.due } else { FOREVER };
        self.lower.iter().map(|level| level.ticker.due).fold(first, Ticks::min)
    }

    /// Runs the due ticks of a level whose chunks stay until the one below it has them. 0: the first level.
    pub(super) fn tick_offloading(&mut self, now: Ticks, level: usize) {
        let (above, below) = self.lower.split_at_mut(level);
        let Some(copies) = below.first() else { return };
        let copied = |key: Key| copies.holds(copies.find(&mut PromptCursor::new(), &[key], 0).at);
        let (mut queued, mut gone) = (Queued::new(), Vec::new());
        let drops = |cache: &mut Cache, at: Ticks, share: u64| {
            let (went, lacking) = cache.drop_copied(share, copied);
            let begins = !lacking.is_empty();
            queued.push((at, lacking));
            gone.extend(cache.take_gone());
            (went, begins)
        };
        let ticks = match above.last_mut() {
            None => self.ticker.run_with(now, &mut self.first, drops),
            Some(own) => {
                let ticks = own.run_ticks_with(now, drops);
                own.leave_page_cache(&gone);
                ticks
            }
        };
        match level {
            0 => self.journal.note("tick", || id_and(ticks, &gone)),
            _ => self.journal.note("tick below", || id_and(level as u64, &id_and(ticks, &gone))),
        }
        for (at, lacking) in queued {
            self.offload(at, level, lacking);
        }
    }

    /// Writes chunks to the level below at the next heartbeat. What that has no room for stays where it is.
    fn offload(&mut self, at: Ticks, lower: usize, mut lacking: Vec<(Key, Span)>) {
        let every = time::from_s(self.config.levels[lower + 1].offload_every_s).max(1);
        let heartbeat = at.div_ceil(every).saturating_mul(every);
        lacking.sort_unstable_by_key(|(key, _)| *key);
        for (key, span) in lacking {
            let (range, mut marks) = (ChunkRange::of(vec![key]), vec![Span::new(NEW, 1)]);
            let count = self.begin_write(lower, &range, &mut marks);
            let (above, further) = (vec![span], self.falling_from(lower));
            self.demote(at, 0, further, lower + 1);
            if count == 0 {
                self.end_offload(lower, &above, false);
                continue;
            }
            let end = self.issue_write(heartbeat, 0, lower, &range, &marks, count);
            self.begin(end, Op::WriteDown(WriteDown { lower, above, marks, ..WriteDown::default() }));
        }
    }

    /// The level above may drop these chunks from now on, if they were written.
    pub(super) fn end_offload(&mut self, lower: usize, above: &[Span], written: bool) {
        match lower.checked_sub(1) {
            None => self.first.end_offload(above, written),
            Some(index) => self.lower[index].end_offload(above, written),
        }
    }
}
