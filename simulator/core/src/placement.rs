//! Where chunks go: what a store writes to which tier, and what moves down when a tier drops it.

use crate::keys::Key;
use crate::tier_config::{Placement, TickShare};
use crate::tiers::{Ended, IoId, Op, Slot, Tiers, with};
use crate::time::{FOREVER, Ticks};

impl Tiers {
    /// Begins to copy chunks from the GPU to the tiers that lack them. False: nothing begun.
    pub fn store(&mut self, now: Ticks, slot: Slot, keys: &[Key]) -> bool {
        let (cpu, disk) = self.placed(keys);
        if !self.config.policy.end_uses && cpu.len() + disk.len() < keys.len() {
            let there: Vec<Key> = keys.iter().filter(|key| self.cpu.has(**key)).copied().collect();
            self.cpu.touch(&there);
        }
        let count = cpu.len() as u64;
        let begins = count > 0 && self.reserve(now, slot, &cpu, true);
        self.journal.note("store", || with(self.next_io, keys));
        self.journal.note("storing", || if begins { cpu.clone() } else { Vec::new() });
        if !begins {
            self.short_of_room |= count > 0;
            return self.spill(now, slot, disk).is_some();
        }
        self.counters.stores_begun += count;
        let end = self.cpu_write.submit(now, count, count * self.config.chunk_bytes);
        self.begin(end, Op::Store { slot, keys: cpu, spilled: disk });
        true
    }

    /// Those of the keys that a store writes to the CPU tier, and those that it writes past it to disk.
    fn placed(&mut self, keys: &[Key]) -> (Vec<Key>, Vec<Key>) {
        let policy = &self.config.policy;
        let lacks = |key: &&Key| match policy.placement {
            Placement::Copy => !self.cpu.has(**key),
            _ => !self.cpu.has(**key) && !self.disk.as_ref().is_some_and(|disk| disk.has(**key)),
        };
        let mut cpu: Vec<Key> = keys.iter().filter(lacks).copied().collect();
        if policy.placement == Placement::Spillover {
            let limit = policy.watermark * self.config.cpu_chunks as f64;
            let fits = (0..cpu.len() as u64).take_while(|more| ((self.cpu.used() + more + 1) as f64) < limit);
            let disk = cpu.split_off(fits.count());
            return (cpu, disk);
        }
        let room = self.cpu.room(policy.evicts());
        if policy.partial_stores && room < cpu.len() as u64 {
            cpu.truncate(room as usize);
            self.short_of_room = true;
        }
        (cpu, Vec::new())
    }

    /// Room in the CPU tier for all of the keys or for none of them.
    pub(crate) fn reserve(&mut self, now: Ticks, slot: Slot, keys: &[Key], storing: bool) -> bool {
        let gone = self.cpu.reserve(keys, storing, self.config.policy.evicts());
        gone.map(|gone| self.demote(now, slot, gone)).is_some()
    }

    /// Chunks that the CPU tier has dropped go to disk, if this placement says so. They are found again once they are
    /// there.
    fn demote(&mut self, now: Ticks, slot: Slot, mut gone: Vec<Key>) {
        if self.config.policy.placement != Placement::Waterfall || gone.is_empty() {
            return;
        }
        gone.reverse();
        self.write_down(now, slot, Vec::new(), &gone, false);
    }

    /// Begins to write chunks past the CPU tier to disk. None: it takes none.
    pub(crate) fn spill(&mut self, now: Ticks, slot: Slot, keys: Vec<Key>) -> Option<Ended> {
        let keys = self.begin_disk_write(&keys);
        let count = keys.len() as u64;
        if count == 0 {
            return None;
        }
        self.counters.stores_begun += count;
        let end = self.issue_write(now, slot, &keys);
        self.begin(end, Op::Spill { slot, keys });
        Some(Ended::Nothing)
    }

    /// Chunks have arrived in the CPU tier: they can be found from now on, and are copied to disk if this placement
    /// says so.
    pub(crate) fn stored(&mut self, now: Ticks, id: u64, slot: Slot, keys: &[Key]) {
        let admitted = self.cpu.admit_stored(keys);
        self.journal.note("stored", || vec![id, self.next_io]);
        let written = match self.config.policy.placement {
            Placement::Copy => self.write_down(now, slot, admitted.clone(), &admitted, true),
            _ => 0,
        };
        self.counters.stores_ended += keys.len() as u64 - written;
    }

    /// Begins to write those of the keys to disk that it lacks, and locks `read` in the CPU tier meanwhile.
    fn write_down(&mut self, now: Ticks, slot: Slot, read: Vec<Key>, keys: &[Key], stores: bool) -> u64 {
        let writes = self.begin_disk_write(keys);
        let count = writes.len() as u64;
        if stores {
            self.journal.note("writes", || writes.clone());
        }
        if count > 0 {
            read.iter().for_each(|&key| self.cpu.lock(key));
            let end = self.issue_write(now, slot, &writes);
            self.begin(end, Op::DiskWrite { keys: read, writes, stores });
        }
        count
    }

    /// Room on disk for those of the keys that it lacks and takes.
    fn begin_disk_write(&mut self, keys: &[Key]) -> Vec<Key> {
        let Some(disk) = &mut self.disk else { return Vec::new() };
        let (writes, gone) = disk.begin_write(keys);
        if let Some(outbox) = &mut self.outbox {
            outbox.drop_chunks(&gone);
        }
        writes
    }

    /// When the write of these chunks ends. FOREVER: somebody else makes it, and will tell.
    fn issue_write(&mut self, now: Ticks, slot: Slot, keys: &[Key]) -> Ticks {
        if let Some(outbox) = &mut self.outbox {
            outbox.write(self.next_io, slot, keys);
            return FOREVER;
        }
        let count = keys.len() as u64;
        self.disk_write.submit(now, count, count * self.config.chunk_bytes)
    }

    /// A write to disk has ended. Chunks that somebody else could not write are as if they had never been begun.
    pub(crate) fn written(&mut self, id: IoId, keys: &[Key], stores: bool) {
        self.counters.stores_ended += if stores { keys.len() as u64 } else { 0 };
        let Some(disk) = &mut self.disk else { return };
        let Some(outbox) = &mut self.outbox else { return disk.end_write(keys) };
        let failed = outbox.take_failed(id);
        let (lost, arrived): (Vec<Key>, Vec<Key>) = keys.iter().partition(|key| failed.contains(key));
        disk.end_write(&arrived);
        disk.give_up(&lost);
        outbox.drop_chunks(&lost);
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
