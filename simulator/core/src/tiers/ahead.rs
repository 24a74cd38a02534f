//! Reads ahead of a request's turn: lower levels to the first one, where a later look-up finds the chunks.

use std::ops::Range;

use super::Tiers;
use super::lookup::Wanted;
use super::transfers::{Ended, Hit, LevelId, Op, ReadAhead, Slot};
use crate::chunks::PromptCursor;
use crate::chunks::spans::Span;
use crate::keys::ChunkRange;
use crate::time::Ticks;

impl Tiers {
    /// Below the first level there is another one.
    pub fn has_lower(&self) -> bool {
        !self.lower.is_empty()
    }

    /// So many tokens are enough to ask the lower levels for them.
    pub fn reads(&self, tokens: u64) -> bool {
        tokens >= self.config.policy.min_prefetch_tokens.max(1)
    }

    /// When the wait ends for what lower levels hold of so many tokens; it began at `asked_at`.
    pub fn waits_until(&self, asked_at: Ticks, tokens: u64) -> Ticks {
        self.deadline(asked_at, tokens / self.config.chunk_tokens)
    }

    /// How many leading chunks of a prompt the levels hold together. It uses those that only a lower level holds.
    pub fn look_below(&mut self, now: Ticks, range: &ChunkRange) -> usize {
        self.tick(now);
        let (hit, _) = self.find(range);
        for (level, lower) in (1..).zip(&mut self.lower) {
            lower.touch(hit.spans_in(level));
        }
        hit.range.len()
    }

    /// Begins to read into the first level what only lower levels hold of a prompt, for a look-up to come, which was
    /// wanted at `asked_at`. For each request that waits for a read, this one too, a chunk takes `pass`
    /// longer. True: `Ended::Ahead` follows, unless `stop_ahead` comes before.
    pub fn read_ahead(
        &mut self,
        now: Ticks,
        slot: Slot,
        range: &ChunkRange,
        asked_at: Ticks,
        pass: Ticks,
    ) -> bool {
        if self.lower.is_empty() || range.is_empty() {
            return false;
        }
        self.tick(now);
        let (hit, mut room) = self.find(range);
        self.lock_hit(&hit);
        let chunks = hit.lower_chunks();
        if chunks == 0 || !self.may_prefetch(now, slot, &hit, &mut room) {
            self.unlock_hit(&hit);
            return false;
        }
        let wanted = Wanted { slot, deadline: self.deadline(asked_at, chunks), ahead: true, pass };
        if self.prefetching < self.config.policy.prefetches() {
            self.prefetch(now, wanted, hit, room);
        } else {
            self.waiting_reads.push_back((wanted, hit, room));
        }
        true
    }

    /// Ends a read ahead with what has arrived, if it has had its time. None: the engine has to wait.
    pub fn stop_ahead(&mut self, now: Ticks, slot: Slot) -> Option<ReadAhead> {
        if let Some(index) = self.waiting_reads.iter().position(|(wanted, ..)| wanted.slot == slot) {
            if self.waiting_reads[index].0.deadline > now {
                return None;
            }
            let (_, hit, room) = self.waiting_reads.remove(index)?;
            self.unlock_hit(&hit);
            self.first.give_up(&room);
            return Some(ReadAhead::new());
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
