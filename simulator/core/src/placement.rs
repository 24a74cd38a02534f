//! Where chunks go: what a store writes to which tier, and what moves down when a tier drops it.

use crate::chunks::{NEW, NONE, Walk};
use crate::keys::{Key, Part};
use crate::pieces::{Piece, count, drop_first, keys, marked, push_piece};
use crate::tier_config::{Placement, TickShare};
use crate::tiers::{Ended, IoId, Op, Slot, Tiers, with};
use crate::time::{FOREVER, Ticks};

impl Tiers {
    /// Begins to copy chunks from the GPU to the tiers that lack them. False: nothing begun.
    pub fn store(&mut self, now: Ticks, slot: Slot, part: Part) -> bool {
        let mut marks = self.fresh_marks();
        let spilled = self.place(&part, &mut marks);
        let count = count(&marks);
        let begins = count > 0 && self.reserve(now, slot, &part, &mut marks, true);
        self.journal.note("store", || with(self.transfers.next_id(), part.keys()));
        self.journal.note("storing", || if begins { keys(&part, &marks).collect() } else { Vec::new() });
        if !begins {
            self.short_of_room |= count > 0;
            self.put_back(marks);
            return self.spill(now, slot, &part, spilled).is_some();
        }
        self.counters.stores_begun += count;
        let end = self.cpu_write.submit(now, count, count * self.config.chunk_bytes);
        self.begin(end, Op::Store { slot, part, marks, spilled });
        true
    }

    /// Marks the chunks of a part that a store writes to the CPU tier, and returns the marks of those that it writes past it
    /// to disk. Of what is there already, this is a use, unless requests' ends are.
    fn place(&mut self, part: &Part, marks: &mut Vec<Piece>) -> Vec<Piece> {
        let there = self.mark_lacking(part, marks);
        let policy = &self.config.policy;
        let mut spilled = Vec::new();
        if policy.placement == Placement::Spillover {
            let limit = policy.watermark * self.config.cpu_chunks as f64;
            let lacking = count(marks);
            let fits = (0..lacking).take_while(|more| ((self.cpu.used() + more + 1) as f64) < limit).count();
            spilled.extend(marks.iter().map(|&mark| Piece { at: mark.at.max(NEW), ..mark }));
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

    /// Marks the chunks of a part that a store writes, and returns those that it uses.
    fn mark_lacking(&mut self, part: &Part, marks: &mut Vec<Piece>) -> Vec<Piece> {
        let policy = &self.config.policy;
        let (mut cpu_walk, mut disk_walk) = (Walk::new(), Walk::new());
        let (mut there, mut number) = (Vec::new(), part.first());
        while number < part.prompt().len() {
            let place = self.cpu.find(&mut cpu_walk, part.prompt(), number);
            let (mut at, mut len) = (place.at, place.len);
            if self.cpu.has(at) {
                if !policy.end_uses {
                    there.push(Piece::new(self.cpu.cut(place, len), len));
                }
                at = NONE;
            } else {
                let disk = self.disk.as_ref().filter(|_| policy.placement != Placement::Copy);
                let below = disk.map(|disk| (disk, disk.find(&mut disk_walk, part.prompt(), number)));
                len = below.map_or(len, |(_, below)| len.min(below.len));
                let skips = below.is_some_and(|(disk, below)| disk.has(below.at));
                at = match at {
                    _ if skips => NONE,
                    NONE => NEW,
                    _ => self.cpu.cut(place, len),
                };
            }
            push_piece(marks, Piece::new(at, len));
            number += len;
        }
        there
    }

    /// Room in the CPU tier for all of the marked chunks or for none of them.
    pub(crate) fn reserve(
        &mut self,
        now: Ticks,
        slot: Slot,
        part: &Part,
        marks: &mut Vec<Piece>,
        storing: bool,
    ) -> bool {
        let reserved = self.cpu.reserve(part, marks, storing, self.config.policy.evicts());
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
        let marks = vec![Piece::new(NEW, gone.len())];
        self.write_down(now, slot, &Part::of(gone), marks, None);
    }

    /// Begins to write marked chunks past the CPU tier to disk. None: it takes none.
    pub(crate) fn spill(
        &mut self,
        now: Ticks,
        slot: Slot,
        part: &Part,
        mut marks: Vec<Piece>,
    ) -> Option<Ended> {
        let count = self.begin_write(part, &mut marks);
        if count == 0 {
            return None;
        }
        self.counters.stores_begun += count;
        let end = self.issue_write(now, slot, part, &marks, count);
        self.begin(end, Op::Spill { slot, marks });
        Some(Ended::Nothing)
    }

    /// Chunks have arrived in the CPU tier: they can be found from now on, and are copied to disk if this placement
    /// says so.
    pub(crate) fn stored(&mut self, now: Ticks, id: u64, slot: Slot, part: &Part, mut marks: Vec<Piece>) {
        let count = count(&marks);
        self.cpu.admit_stored(&mut marks);
        self.journal.note("stored", || vec![id, self.transfers.next_id()]);
        if self.config.policy.placement == Placement::Copy {
            let mut to_disk = self.fresh_marks();
            to_disk.extend_from_slice(&marks);
            self.counters.stores_ended += count - self.write_down(now, slot, part, to_disk, Some(marks));
        } else {
            self.put_back(marks);
            self.counters.stores_ended += count;
        }
    }

    /// Begins to write those of the marked chunks to disk that it lacks. `stored`: their places in the CPU tier, where
    /// they are locked meanwhile; None: they have gone from there.
    fn write_down(
        &mut self,
        now: Ticks,
        slot: Slot,
        part: &Part,
        mut marks: Vec<Piece>,
        stored: Option<Vec<Piece>>,
    ) -> u64 {
        let count = self.begin_write(part, &mut marks);
        let stores = stored.is_some();
        if stores {
            self.journal.note("writes", || keys(part, &marks).collect());
        }
        let cpu = stored.unwrap_or_default();
        if count > 0 {
            self.cpu.lock(marked(&cpu));
            let end = self.issue_write(now, slot, part, &marks, count);
            self.begin(end, Op::DiskWrite { cpu, disk: marks, stores });
        } else {
            self.put_back(cpu);
            self.put_back(marks);
        }
        count
    }

    fn begin_write(&mut self, part: &Part, marks: &mut Vec<Piece>) -> u64 {
        let Some(disk) = &mut self.disk else {
            marks.clear();
            return 0;
        };
        let count = disk.begin_write(part, marks);
        if let Some(outbox) = &mut self.outbox {
            outbox.drop_chunks(disk.gone());
        }
        count
    }

    /// When the write of these chunks ends. FOREVER: somebody else makes it, and will tell.
    fn issue_write(&mut self, now: Ticks, slot: Slot, part: &Part, marks: &[Piece], count: u64) -> Ticks {
        if let Some(outbox) = &mut self.outbox {
            outbox.write(self.transfers.next_id(), slot, keys(part, marks));
            return FOREVER;
        }
        self.disk_write.submit(now, count, count * self.config.chunk_bytes)
    }

    /// A write to disk has ended. Chunks that somebody else could not write are as if they had never been begun.
    pub(crate) fn written(&mut self, id: IoId, marks: &mut Vec<Piece>, stores: bool) {
        self.counters.stores_ended += if stores { count(marks) } else { 0 };
        let Some(disk) = &mut self.disk else { return };
        let Some(outbox) = &mut self.outbox else { return disk.end_write(marks) };
        let failed = outbox.take_failed(id);
        // Its chunks are single ones.
        let fails = |piece: &Piece| disk.keys(*piece).any(|key| failed.contains(&key));
        let (lost, mut arrived): (Vec<Piece>, Vec<Piece>) = marked(marks).partition(fails);
        let lost_keys: Vec<Key> = lost.iter().flat_map(|&piece| disk.keys(piece)).collect();
        disk.end_write(&mut arrived);
        disk.give_up(&lost);
        outbox.drop_chunks(&lost_keys);
    }

    /// How many chunks the next tick drops.
    pub(crate) fn tick_share(&self) -> u64 {
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
