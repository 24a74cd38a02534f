//! Where chunks go: what a store writes to which tier, and what moves down when a tier drops it.

use super::config::{Placement, TickShare};
use super::{Ended, IoId, Op, Slot, Tiers, id_and};
use crate::chunks::spans::{Span, count, drop_first, keys, marked, push_span};
use crate::chunks::{NEW, NONE, PromptCursor};
use crate::keys::{ChunkRange, Key};
use crate::time::{FOREVER, Ticks};

impl Tiers {
    /// GroupCounts to copy chunks from the GPU to the tiers that lack them. False: nothing begun.
    pub fn store(&mut self, now: Ticks, slot: Slot, range: ChunkRange) -> bool {
        let mut marks = self.fresh_marks();
        let spilled = self.place(&range, &mut marks);
        let count = count(&marks);
        let begins = count > 0 && self.reserve(now, slot, &range, &mut marks, true);
        self.journal.note("store", || id_and(self.transfers.next_id(), range.keys()));
        self.journal.note("storing", || if begins { keys(&range, &marks).collect() } else { Vec::new() });
        if !begins {
            self.short_of_room |= count > 0;
            self.put_back(marks);
            return self.spill(now, slot, &range, spilled).is_some();
        }
        self.counters.stores_begun += count;
        let end = self.cpu_write.submit(now, count, count * self.config.chunk_bytes);
        self.begin(end, Op::Store { slot, range, marks, spilled });
        true
    }

    /// Marks the chunks of a range that a store writes to the CPU tier, and returns the marks of those that it writes past it
    /// to disk. Of what is there already, this is a use, unless requests' ends are.
    fn place(&mut self, range: &ChunkRange, marks: &mut Vec<Span>) -> Vec<Span> {
        let there = self.mark_lacking(range, marks);
        let policy = &self.config.policy;
        let mut spilled = Vec::new();
        if policy.placement == Placement::Spillover {
            let limit = policy.watermark * self.config.cpu_chunks as f64;
            let lacking = count(marks);
            let fits = (0..lacking).take_while(|more| ((self.cpu.used() + more + 1) as f64) < limit).count();
            spilled.extend(marks.iter().map(|&mark| Span { at: mark.at.max(NEW), ..mark }));
            self.cpu.keep_first(marks, fits as u64);
            drop_first(&mut spilled, fits as u64);
        } else if policy.partial_stores {
            let room = self.cpu.room(policy.evicts());
            self.short_of_room |= room < count(marks);
            self.cpu.keep_first(marks, room);
        }
        self.cpu.touch_at(there.into_iter());
        spilled
    }

    /// Marks the chunks of a range that a store writes, and returns those that it uses.
    fn mark_lacking(&mut self, range: &ChunkRange, marks: &mut Vec<Span>) -> Vec<Span> {
        let policy = &self.config.policy;
        let (mut cpu_cursor, mut disk_cursor) = (PromptCursor::new(), PromptCursor::new());
        let (mut there, mut number) = (Vec::new(), range.first());
        while number < range.prompt().len() {
            let place = self.cpu.find(&mut cpu_cursor, range.prompt(), number);
            let (mut at, mut len) = (place.at, place.len);
            if self.cpu.has(at) {
                if !policy.end_uses {
                    there.push(Span::new(self.cpu.cut(place, len), len));
                }
                at = NONE;
            } else {
                let disk = self.disk.as_ref().filter(|_| policy.placement != Placement::Copy);
                let below = disk.map(|disk| (disk, disk.find(&mut disk_cursor, range.prompt(), number)));
                len = below.map_or(len, |(_, below)| len.min(below.len));
                let skips = below.is_some_and(|(disk, below)| disk.has(below.at));
                at = match at {
                    _ if skips => NONE,
                    NONE => NEW,
                    _ => self.cpu.cut(place, len),
                };
            }
            push_span(marks, Span::new(at, len));
            number += len;
        }
        there
    }

    /// Room in the CPU tier for all of the marked chunks or for none of them.
    pub(super) fn reserve(
        &mut self,
        now: Ticks,
        slot: Slot,
        range: &ChunkRange,
        marks: &mut Vec<Span>,
        storing: bool,
    ) -> bool {
        let reserved = self.cpu.reserve(range, marks, storing, self.config.policy.evicts());
        self.demote(now, slot);
        reserved
    }

    /// Chunks that the CPU tier has dropped go to disk, if this placement says so. They are found again once they are
    /// there.
    fn demote(&mut self, now: Ticks, slot: Slot) {
        if self.config.policy.placement != Placement::Waterfall || self.cpu.gone.is_empty() {
            return self.cpu.gone.clear();
        }
        let mut gone = std::mem::take(&mut self.cpu.gone);
        gone.reverse();
        let marks = vec![Span::new(NEW, gone.len())];
        self.write_down(now, slot, &ChunkRange::of(gone), marks, None);
    }

    /// GroupCounts to write marked chunks past the CPU tier to disk. None: it takes none.
    pub(super) fn spill(
        &mut self,
        now: Ticks,
        slot: Slot,
        range: &ChunkRange,
        mut marks: Vec<Span>,
    ) -> Option<Ended> {
        let count = self.begin_write(range, &mut marks);
        if count == 0 {
            return None;
        }
        self.counters.stores_begun += count;
        let end = self.issue_write(now, slot, range, &marks, count);
        self.begin(end, Op::Spill { slot, marks });
        Some(Ended::Nothing)
    }

    /// Chunks have arrived in the CPU tier: they can be found from now on, and are copied to disk if this placement
    /// says so.
    pub(super) fn stored(
        &mut self,
        now: Ticks,
        id: u64,
        slot: Slot,
        range: &ChunkRange,
        mut marks: Vec<Span>,
    ) {
        let count = count(&marks);
        self.cpu.admit_stored(&mut marks);
        self.journal.note("stored", || vec![id, self.transfers.next_id()]);
        if self.config.policy.placement == Placement::Copy {
            let mut to_disk = self.fresh_marks();
            to_disk.extend_from_slice(&marks);
            self.counters.stores_ended += count - self.write_down(now, slot, range, to_disk, Some(marks));
        } else {
            self.put_back(marks);
            self.counters.stores_ended += count;
        }
    }

    /// GroupCounts to write those of the marked chunks to disk that it lacks. `stored`: their places in the CPU tier, where
    /// they are locked meanwhile; None: they have gone from there.
    fn write_down(
        &mut self,
        now: Ticks,
        slot: Slot,
        range: &ChunkRange,
        mut marks: Vec<Span>,
        stored: Option<Vec<Span>>,
    ) -> u64 {
        let count = self.begin_write(range, &mut marks);
        let stores = stored.is_some();
        if stores {
            self.journal.note("writes", || keys(range, &marks).collect());
        }
        let cpu = stored.unwrap_or_default();
        if count > 0 {
            self.cpu.lock(marked(&cpu));
            let end = self.issue_write(now, slot, range, &marks, count);
            self.begin(end, Op::DiskWrite { cpu, disk: marks, stores });
        } else {
            self.put_back(cpu);
            self.put_back(marks);
        }
        count
    }

    fn begin_write(&mut self, range: &ChunkRange, marks: &mut Vec<Span>) -> u64 {
        let Some(disk) = &mut self.disk else {
            marks.clear();
            return 0;
        };
        let count = disk.begin_write(range, marks);
        if let Some(outbox) = &mut self.outbox {
            outbox.drop_chunks(disk.gone());
        }
        count
    }

    /// When the write of these chunks ends. FOREVER: somebody else makes it, and will tell.
    fn issue_write(
        &mut self,
        now: Ticks,
        slot: Slot,
        range: &ChunkRange,
        marks: &[Span],
        count: u64,
    ) -> Ticks {
        if let Some(outbox) = &mut self.outbox {
            outbox.write(self.transfers.next_id(), slot, keys(range, marks));
            return FOREVER;
        }
        self.disk_write.submit(now, count, count * self.config.chunk_bytes)
    }

    /// A write to disk has ended. Chunks that somebody else could not write are as if they had never been begun.
    pub(super) fn written(&mut self, id: IoId, marks: &mut Vec<Span>, stores: bool) {
        self.counters.stores_ended += if stores { count(marks) } else { 0 };
        let Some(disk) = &mut self.disk else { return };
        let Some(outbox) = &mut self.outbox else { return disk.end_write(marks) };
        let failed = outbox.take_failed(id);
        // Its chunks are single ones.
        let fails = |span: &Span| disk.keys(*span).any(|key| failed.contains(&key));
        let (lost, mut arrived): (Vec<Span>, Vec<Span>) = marked(marks).partition(fails);
        let lost_keys: Vec<Key> = lost.iter().flat_map(|&span| disk.keys(span)).collect();
        disk.end_write(&mut arrived);
        disk.give_up(&lost);
        outbox.drop_chunks(&lost_keys);
    }

    /// How many chunks the next tick drops.
    pub(super) fn tick_share(&self) -> u64 {
        let policy = &self.config.policy;
        let (usage, keys) = (self.cpu.usage(), self.cpu.tracked() as f64);
        match policy.tick_share {
            TickShare::Ratio if usage >= policy.watermark => ((policy.evict_ratio * keys) as u64).max(1),
            TickShare::Surplus if usage > policy.watermark || self.short_of_room => {
                let ratio = policy.evict_ratio.max(usage - policy.watermark + policy.evict_ratio);
                (ratio * keys).ceil() as u64
            }
            _ => 0,
        }
    }
}
