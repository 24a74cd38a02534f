//! Where chunks go: what a store writes to which level, and what moves down when a level drops it.

use super::config::Placement;
use super::level::Level;
use super::transfers::{Ended, IoId, Op, Slot, StoreDown, WriteDown};
use super::{INSTANCE_BIT, MOST_LEVELS, Tiers, id_and};
use crate::chunks::spans::{Span, count, drop_first, keys, marked, push_span};
use crate::chunks::{NEW, NONE, PromptCursor};
use crate::keys::{ChunkRange, Key};
use crate::time::{FOREVER, Ticks};

impl Tiers {
    /// Begins to copy chunks from the GPU to the levels that lack them. False: nothing begun.
    pub fn store(&mut self, now: Ticks, slot: Slot, range: ChunkRange) -> bool {
        let mut marks = self.fresh_marks();
        let spilled = self.place(&range, &mut marks);
        let count = count(&marks);
        let begins = count > 0 && self.reserve(now, slot, &range, &mut marks, true);
        self.journal.note("store", || id_and(self.transfers.next_id(), range.keys()));
        self.journal.note("storing", || if begins { keys(&range, &marks).collect() } else { Vec::new() });
        if !begins {
            self.ticker.short_of_room |= count > 0;
            self.put_back(marks);
            return self.spill(now, slot, &range, spilled).is_some();
        }
        self.counters.stores_begun += count;
        let end = self.first_write.submit(now, slot >> INSTANCE_BIT, count, count * self.config.chunk_bytes);
        self.begin(end, Op::Store { slot, range, marks, spilled });
        true
    }

    /// Marks the chunks of a range that a store writes to the first level. Returns the marks of those that it writes
    /// past it. The store uses the chunks that are there already, unless requests' ends use them.
    fn place(&mut self, range: &ChunkRange, marks: &mut Vec<Span>) -> Vec<Span> {
        let there = self.mark_lacking(range, marks);
        let policy = &self.config.policy;
        let mut spilled = Vec::new();
        if policy.placement == Placement::Spillover {
            let limit = policy.watermark * self.config.levels[0].chunks as f64;
            let lacking = count(marks);
            let fits =
                (0..lacking).take_while(|more| ((self.first.used() + more + 1) as f64) < limit).count();
            spilled.extend(marks.iter().map(|&mark| Span { at: mark.at.max(NEW), ..mark }));
            self.first.keep_first(marks, fits as u64);
            drop_first(&mut spilled, fits as u64);
        } else if policy.partial_stores {
            let room = self.first.room(policy.evicts());
            self.ticker.short_of_room |= room < count(marks);
            self.first.keep_first(marks, room);
        }
        self.first.touch_at(there.into_iter());
        spilled
    }

    /// Marks the chunks of a range that a store writes, and returns those that it uses.
    fn mark_lacking(&mut self, range: &ChunkRange, marks: &mut Vec<Span>) -> Vec<Span> {
        let policy = &self.config.policy;
        let (mut first_cursor, mut cursors) = (PromptCursor::new(), [PromptCursor::new(); MOST_LEVELS]);
        let (mut there, mut number) = (Vec::new(), range.first());
        while number < range.prompt().len() {
            let found = self.first.find(&mut first_cursor, range.prompt(), number);
            let (mut at, mut len) = (found.at, found.len);
            if self.first.has(at) {
                if !policy.end_uses {
                    there.push(Span::new(self.first.cut(found, len), len));
                }
                at = NONE;
            } else {
                let mut skips = false;
                if policy.placement == Placement::Copy {
                    let most = range.prompt().len() - number;
                    len = self.first.alike(&mut first_cursor, range.prompt(), number, found, most);
                } else {
                    for (level, cursor) in self.lower.iter().zip(&mut cursors) {
                        let below = level.find(cursor, range.prompt(), number);
                        len = len.min(below.len);
                        skips |= level.has(below.at);
                    }
                }
                at = match at {
                    _ if skips => NONE,
                    NONE => NEW,
                    _ => self.first.cut(found, len),
                };
            }
            push_span(marks, Span::new(at, len));
            number += len;
        }
        there
    }

    /// Room in the first level for all of the marked chunks or for none of them.
    pub(super) fn reserve(
        &mut self,
        now: Ticks,
        slot: Slot,
        range: &ChunkRange,
        marks: &mut Vec<Span>,
        storing: bool,
    ) -> bool {
        let reserved = self.first.reserve(range, marks, storing, self.config.policy.evicts());
        let falls = self.lower.first().is_some_and(Level::takes_dropped);
        if falls || self.config.policy.placement == Placement::Waterfall {
            let gone = self.first.take_gone().collect();
            self.demote(now, slot, gone, 0);
        } else {
            self.first.clear_gone();
        }
        reserved
    }

    /// Chunks that the level above has dropped move to a lower level, and on from there. Look-ups find them again once
    /// they are there.
    pub(super) fn demote(&mut self, now: Ticks, slot: Slot, mut gone: Vec<Key>, lower: usize) {
        if gone.is_empty() || lower == self.lower.len() {
            return;
        }
        gone.reverse();
        let mut marks = vec![Span::new(NEW, gone.len())];
        let range = ChunkRange::of(gone);
        let count = self.begin_write(lower, &range, &mut marks);
        let further = self.falling_from(lower);
        self.write_dropped(now, slot, lower, &range, marks, count);
        self.demote(now, slot, further, lower + 1);
    }

    /// Begins to write chunks for which no store waits.
    pub(super) fn write_dropped(
        &mut self,
        now: Ticks,
        slot: Slot,
        lower: usize,
        range: &ChunkRange,
        mut marks: Vec<Span>,
        count: u64,
    ) {
        if count == 0 {
            return;
        }
        let end = self.issue_write(now, slot, lower, range, &marks, count);
        if self.lower[lower].buffers(now, end, count, &mut marks) {
            return;
        }
        let write = WriteDown { lower, marks, ..WriteDown::default() };
        self.begin(end, Op::WriteDown(write));
    }

    /// What the last write to a level pushed out, if it goes to the next one.
    pub(super) fn falling_from(&self, lower: usize) -> Vec<Key> {
        let below = self.lower.get(lower + 1);
        let waterfall = self.config.policy.placement == Placement::Waterfall;
        let falls = below.is_some_and(|level| waterfall || level.takes_dropped());
        if falls { self.lower[lower].gone().to_vec() } else { Vec::new() }
    }

    /// Begins to write marked chunks past the first level to the first lower level that takes any. None: none does.
    pub(super) fn spill(
        &mut self,
        now: Ticks,
        slot: Slot,
        range: &ChunkRange,
        spilled: Vec<Span>,
    ) -> Option<Ended> {
        for lower in 0..self.lower.len() {
            let mut marks = spilled.clone();
            let count = self.begin_write(lower, range, &mut marks);
            if count > 0 {
                self.counters.stores_begun += count;
                let end = self.issue_write(now, slot, lower, range, &marks, count);
                self.begin(end, Op::Spill { slot, lower, marks });
                return Some(Ended::Nothing);
            }
        }
        None
    }

    /// Chunks have arrived in the first level: look-ups find them from now on. The tiers copy them down if the
    /// placement says so.
    pub(super) fn stored(
        &mut self,
        now: Ticks,
        id: IoId,
        slot: Slot,
        range: &ChunkRange,
        mut marks: Vec<Span>,
    ) {
        let unended = count(&marks);
        self.first.end_store(&mut marks, self.config.policy.write_end_uses);
        self.journal.note("stored", || vec![id, self.transfers.next_id()]);
        if self.config.policy.placement == Placement::Copy {
            self.copy_down(now, StoreDown { slot, range: range.clone(), unended }, marks, 0);
        } else {
            self.put_back(marks);
            self.counters.stores_ended += unended;
        }
    }

    /// Begins to write those of a store's chunks to a lower level that it lacks, or to the next level that lacks any.
    /// The first level keeps them locked meanwhile.
    fn copy_down(&mut self, now: Ticks, store: StoreDown, first: Vec<Span>, lower: usize) {
        let levels = self.lower.iter().rposition(|level| !level.takes_dropped()).map_or(0, |last| last + 1);
        // A write to the level above has locked them.
        let locked = lower > 0;
        for lower in lower..levels {
            if self.lower[lower].takes_dropped() {
                continue;
            }
            let mut marks = self.fresh_marks();
            marks.extend_from_slice(&first);
            let count = self.begin_write(lower, &store.range, &mut marks);
            self.journal.note("writes", || keys(&store.range, &marks).collect());
            let further = self.falling_from(lower);
            self.demote(now, store.slot, further, lower + 1);
            if count == 0 {
                self.put_back(marks);
                continue;
            }
            let end = self.issue_write(now, store.slot, lower, &store.range, &marks, count);
            if self.lower[lower].buffers(now, end, count, &mut marks) {
                self.put_back(marks);
                continue;
            }
            if !locked {
                self.first.lock(marked(&first));
            }
            let ends_store = lower + 1 == levels;
            self.counters.stores_ended += if ends_store { store.unended - count } else { 0 };
            let next = (!ends_store).then(|| Box::new(store));
            let write = WriteDown { lower, first, marks, ends_store, next, ..WriteDown::default() };
            return self.begin(end, Op::WriteDown(write));
        }
        if levels == 0 {
            self.journal.note("writes", Vec::new);
        }
        if locked {
            self.first.unlock(marked(&first));
        }
        self.counters.stores_ended += store.unended;
        self.put_back(first);
    }

    /// A write to a lower level has ended. A store goes on to the next level.
    pub(super) fn written_down(&mut self, now: Ticks, id: IoId, write: WriteDown) {
        let WriteDown { lower, first, above, mut marks, ends_store, next } = write;
        self.journal.note("written", || vec![id]);
        self.written(id, lower, &mut marks, ends_store);
        if !above.is_empty() {
            self.end_offload(lower, &above, true);
        }
        match next {
            Some(store) => self.copy_down(now, *store, first, lower + 1),
            None => {
                self.first.unlock(marked(&first));
                self.put_back(first);
            }
        }
        self.put_back(marks);
    }

    pub(super) fn begin_write(&mut self, lower: usize, range: &ChunkRange, marks: &mut Vec<Span>) -> u64 {
        let level = &mut self.lower[lower];
        let count = level.begin_write(range, marks);
        if let Some(outbox) = &mut self.outbox {
            outbox.drop_chunks(level.gone());
        }
        count
    }

    /// When the write of these chunks ends. FOREVER: the caller makes it, and will say.
    pub(super) fn issue_write(
        &mut self,
        now: Ticks,
        slot: Slot,
        lower: usize,
        range: &ChunkRange,
        marks: &[Span],
        count: u64,
    ) -> Ticks {
        if let Some(outbox) = &mut self.outbox {
            outbox.write(self.transfers.next_id(), slot, keys(range, marks));
            return FOREVER;
        }
        let bytes = count * self.config.chunk_bytes;
        self.lower[lower].writer().submit(now, self.instance, count, bytes)
    }

    /// A write to a lower level has ended. Chunks that the caller could not write are as if no write had begun.
    pub(super) fn written(&mut self, id: IoId, lower: usize, marks: &mut Vec<Span>, ends_store: bool) {
        self.counters.stores_ended += if ends_store { count(marks) } else { 0 };
        let level = &mut self.lower[lower];
        let Some(outbox) = &mut self.outbox else { return level.end_write(marks) };
        let failed = outbox.take_failed(id);
        // An external level's spans are single chunks.
        let fails = |span: &Span| level.keys(*span).any(|key| failed.contains(&key));
        let (lost, mut arrived): (Vec<Span>, Vec<Span>) = marked(marks).partition(fails);
        let lost_keys: Vec<Key> = lost.iter().flat_map(|&span| level.keys(span)).collect();
        level.end_write(&mut arrived);
        level.give_up(&lost);
        outbox.drop_chunks(&lost_keys);
    }
}
