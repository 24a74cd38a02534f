//! Reads ahead of a request's turn: lower levels to the first one, where a later look-up finds the chunks.

use std::ops::Range;

use super::Tiers;
use super::transfers::{Asked, Ended, Hit, LevelId, Op, ReadAhead, Slot};
use crate::chunks::PromptCursor;
use crate::chunks::spans::Span;
use crate::keys::ChunkRange;
use crate::time::Ticks;

impl Tiers {
    /// Begins to read into the first level what only lower levels hold of a prompt, for a look-up to come. True:
    /// `Ended::Ahead` follows, unless `stop_ahead` comes before.
    pub fn read_ahead(&mut self, now: Ticks, slot: Slot, range: &ChunkRange) -> bool {
        if self.lower.is_empty() || range.is_empty() {
            return false;
        }
        self.tick(now);
        if self.prefetching >= self.config.policy.prefetches() {
            self.waiting_lookups.push_back(Asked { slot, range: range.clone(), at: now, ahead: true });
            return true;
        }
        self.start(now, (slot, range), now, true).is_none()
    }

    /// Ends a read ahead with what has arrived, if it has had its time. None: the engine has to wait.
    pub fn stop_ahead(&mut self, now: Ticks, slot: Slot) -> Option<ReadAhead> {
        let queued = self.waiting_lookups.iter().position(|asked| asked.ahead && asked.slot == slot);
        if let Some(index) = queued {
            let over = self.deadline(self.waiting_lookups[index].at, 0) <= now;
            return over.then(|| self.waiting_lookups.remove(index)).map(|_| ReadAhead::new());
        }
        let id = self.transfers.ahead_of(slot)?;
        if !matches!(self.transfers.get(id), Some(Op::Prefetch(read, _)) if read.deadline <= now) {
            return None;
        }
        let Some(Op::Prefetch(prefetch, read)) = self.transfers.take(id) else { return None };
        let end = self.read_ended(now, read).err();
        match self.cut_off(now, *prefetch, read, end) {
            Ended::Ahead(_, read) => Some(read),
            _ => None,
        }
    }

    /// The prefix of a prompt's chunks that the first level holds. `read`: chunks that a read ahead brought for this
    /// request, and the level that each lay in.
    pub fn lookup_first(
        &mut self,
        now: Ticks,
        slot: Slot,
        range: &ChunkRange,
        read: &[(Range<usize>, LevelId)],
    ) -> Hit {
        self.tick(now);
        let mut hit = self.find_first(range);
        self.first.lock(hit.spans.iter().copied());
        for (chunks, level) in read {
            self.relabel(&mut hit, chunks.clone(), *level);
        }
        self.answered(slot, &hit);
        hit
    }

    /// How many leading chunks of a prompt the first level holds.
    pub fn first_holds(&self, range: &ChunkRange) -> u64 {
        let (mut cursor, prompt, mut number) = (PromptCursor::new(), range.prompt(), 0);
        while number < prompt.len() {
            let found = self.first.find(&mut cursor, prompt, number);
            if !self.first.holds(found.at) {
                break;
            }
            number += found.len;
        }
        number as u64
    }

    /// The prefix that the first level holds.
    fn find_first(&mut self, range: &ChunkRange) -> Hit {
        let (mut hit, mut cursor, prompt) = (Hit::default(), PromptCursor::new(), range.prompt());
        let mut number = 0;
        while number < prompt.len() {
            let found = self.first.find(&mut cursor, prompt, number);
            if !self.first.holds(found.at) {
                break;
            }
            hit.push(Span::new(self.first.cut(found, found.len), found.len), 0);
            number += found.len;
        }
        if number > 0 {
            hit.range = range.slice(0..number);
        }
        hit
    }

    /// Says of some chunks of a hit in which level they lay before the tiers read them into the first one.
    fn relabel(&mut self, hit: &mut Hit, chunks: Range<usize>, level: LevelId) {
        let end = chunks.end.min(hit.range.len());
        if chunks.start < end {
            let (from, to) = (self.divide(hit, chunks.start, true), self.divide(hit, end, true));
            (from..to).for_each(|index| hit.set_level(index, level));
        }
    }
}
