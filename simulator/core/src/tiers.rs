//! Chunk tiers below the GPU: CPU memory and disk, with LMCache's rules as data.
//!
//! Sans I/O: the tiers say which transfer ends when, and act when told that it ended (`io_done`). Chunk counts stand
//! for bytes throughout.

use std::collections::{BTreeMap, VecDeque};

use crate::cache::Cache;
use crate::device::Device;
use crate::disk::Disk;
use crate::journal::Journal;
use crate::keys::Key;
use crate::tier_config::TierConfig;
use crate::time::{self, Ticks};

pub type IoId = u64;
/// The engine's name for a request, handed back in `Ended`.
pub type Slot = usize;

/// A prefix of a request's chunks that the tiers hold, locked until `release`. The first `in_cpu.len()` chunks.
#[derive(Clone, Debug, Default)]
pub struct Hit {
    pub keys: Vec<Key>,
    /// Chunk by chunk: found in the CPU tier (else read from disk).
    pub in_cpu: Vec<bool>,
}

impl Hit {
    pub fn chunks(&self) -> u64 {
        self.in_cpu.len() as u64
    }

    fn disk_chunks(&self) -> u64 {
        self.in_cpu.iter().filter(|in_cpu| !**in_cpu).count() as u64
    }

    fn keys_where(&self, in_cpu: bool) -> impl Iterator<Item = Key> {
        let of = self.keys.iter().zip(&self.in_cpu).filter(move |(_, held)| **held == in_cpu);
        of.map(|(key, _)| *key)
    }
}

/// What the engine has to know of a transfer that ended.
#[derive(Debug)]
pub enum Ended {
    Lookup(Slot, Hit),
    Load(Slot),
    Store(Slot),
    Nothing,
}

/// A transfer, and when it ends. Quiet: no request waits for it.
#[derive(Debug)]
pub struct Begun {
    pub end: Ticks,
    pub id: IoId,
    pub quiet: bool,
}

#[derive(Debug)]
enum Op {
    /// Disk to CPU: `warm` chunks are left to read from the page cache.
    Prefetch {
        slot: Slot,
        hit: Hit,
        warm: u64,
    },
    Load {
        slot: Slot,
        keys: Vec<Key>,
    },
    /// An answer that needs no transfer, to a request that had to wait for others to be answered.
    Answer {
        slot: Slot,
        hit: Hit,
    },
    Store {
        slot: Slot,
        keys: Vec<Key>,
    },
    /// CPU to disk: `keys` are read, those in `writes` are new to the disk.
    DiskWrite {
        keys: Vec<Key>,
        writes: Vec<Key>,
    },
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierCounters {
    pub cpu_hit_chunks: u64,
    pub disk_hit_chunks: u64,
    pub disk_loaded_chunks: u64,
    pub stores_begun: u64,
    pub stores_ended: u64,
    pub storage_read_bytes: u64,
}

#[derive(Debug)]
pub struct Tiers {
    config: TierConfig,
    cpu: Cache,
    disk: Option<Disk>,
    cpu_read: Device,
    cpu_write: Device,
    disk_read: Device,
    disk_write: Device,
    page_cache_read: Device,
    ops: BTreeMap<IoId, Op>,
    next_io: IoId,
    prefetching: u64,
    waiting_lookups: VecDeque<(Slot, Vec<Key>)>,
    ticked_until: Ticks,
    counters: TierCounters,
    /// Transfers begun since the engine last looked.
    begun: Vec<Begun>,
    /// Numbers are a slot or a transfer's id, then keys. "tick": how many ticks, then the keys dropped. "answer": slot,
    /// then a flag for each chunk found: in the CPU tier or not.
    pub journal: Journal,
}

impl Tiers {
    pub fn new(config: TierConfig, journal: bool) -> Self {
        Self {
            cpu: config.cpu_tier(),
            disk: config.disk_tier(),
            cpu_read: Device::new(&config.cpu_read),
            cpu_write: Device::new(&config.cpu_write),
            disk_read: Device::new(&config.disk_read),
            disk_write: Device::new(&config.disk_write),
            page_cache_read: Device::new(&config.page_cache_read),
            ops: BTreeMap::new(),
            next_io: 0,
            prefetching: 0,
            waiting_lookups: VecDeque::new(),
            ticked_until: 0,
            counters: TierCounters::default(),
            begun: Vec::new(),
            journal: Journal::new(journal),
            config,
        }
    }

    pub fn counters(&self) -> TierCounters {
        self.counters
    }

    pub fn idle(&self) -> bool {
        self.ops.is_empty()
    }

    pub fn take_begun(&mut self) -> Vec<Begun> {
        std::mem::take(&mut self.begun)
    }

    /// Runs the eviction ticks up to `now`. Use changes only at events, so ticks between two events can wait for the
    /// later one.
    pub fn tick(&mut self, now: Ticks) {
        let every = time::from_s(self.config.policy.tick_s);
        self.cpu.clock(now);
        if let Some(disk) = &mut self.disk {
            disk.clock(now);
        }
        if self.config.policy.evict_on_demand || every == 0 {
            return;
        }
        let ticks = now / every - self.ticked_until / every;
        self.ticked_until = now;
        let mut dropped = Vec::new();
        for _ in 0..ticks {
            if self.cpu.usage() < self.config.policy.watermark {
                break;
            }
            let share = (self.config.policy.evict_ratio * self.cpu.tracked() as f64) as u64;
            let gone = self.cpu.drop_some(share.max(1));
            // What nothing can be dropped from now stays so until the next event.
            if gone.is_empty() {
                break;
            }
            dropped.extend(gone);
        }
        if ticks > 0 {
            self.journal.note("tick", || with(ticks as u64, &dropped));
        }
    }

    /// Begins to look for a prefix of `keys`. Some: the answer at once; None: `Ended::Lookup` brings it.
    pub fn lookup(&mut self, now: Ticks, slot: Slot, keys: &[Key]) -> Option<Hit> {
        if keys.is_empty() {
            return Some(Hit::default());
        }
        self.journal.note("lookup", || with(slot as u64, keys));
        if self.disk.is_some() && self.prefetching >= self.config.policy.max_prefetches {
            self.waiting_lookups.push_back((slot, keys.to_vec()));
            return None;
        }
        self.start(now, slot, keys)
    }

    /// Begins to copy a hit's chunks from `first` on to the GPU; those before are not needed. `Ended::Load` follows.
    pub fn load(&mut self, now: Ticks, slot: Slot, mut hit: Hit, first: usize) {
        let keys = hit.keys.split_off(first.min(hit.keys.len()));
        self.release(&hit.keys);
        let count = keys.len() as u64;
        let end = self.cpu_read.submit(now, count, count * self.config.chunk_bytes);
        self.begin(end, Op::Load { slot, keys });
    }

    /// Unlocks chunks of a hit that are not needed any more.
    pub fn release(&mut self, keys: &[Key]) {
        if !keys.is_empty() {
            self.journal.note("release", || keys.to_vec());
            self.unlock(keys);
        }
    }

    /// A request has ended: its prompt's chunks were used, wherever they came from.
    pub fn end(&mut self, keys: &[Key]) {
        if !keys.is_empty() && self.config.policy.end_uses {
            self.journal.note("touch", || keys.to_vec());
            self.cpu.touch(keys);
        }
    }

    /// Begins to copy chunks from the GPU to the CPU tier, all or none of those that it lacks. False: nothing begun.
    pub fn store(&mut self, now: Ticks, slot: Slot, keys: &[Key]) -> bool {
        let (there, new): (Vec<Key>, Vec<Key>) = keys.iter().partition(|key| self.cpu.has(**key));
        if !self.config.policy.end_uses {
            self.cpu.touch(&there);
        }
        let count = new.len() as u64;
        let begins = count > 0 && self.reserve(&new, true);
        self.journal.note("store", || with(self.next_io, keys));
        self.journal.note("storing", || if begins { new.clone() } else { Vec::new() });
        if !begins {
            return false;
        }
        self.counters.stores_begun += count;
        let end = self.cpu_write.submit(now, count, count * self.config.chunk_bytes);
        self.begin(end, Op::Store { slot, keys: new });
        true
    }

    /// Acts on the end of a transfer. An unknown id changes nothing.
    pub fn io_done(&mut self, now: Ticks, id: IoId) -> Ended {
        match self.ops.remove(&id) {
            Some(Op::Load { slot, keys }) => {
                self.release(&keys);
                Ended::Load(slot)
            }
            Some(Op::Answer { slot, hit }) => Ended::Lookup(slot, hit),
            Some(Op::Prefetch { slot, hit, warm }) if warm > 0 => {
                let end = self.page_cache_read.submit(now, warm, warm * self.config.chunk_bytes);
                self.begin(end, Op::Prefetch { slot, hit, warm: 0 });
                Ended::Nothing
            }
            Some(Op::Prefetch { slot, hit, .. }) => self.prefetched(now, slot, hit),
            Some(Op::Store { slot, keys }) => {
                self.stored(now, id, &keys);
                Ended::Store(slot)
            }
            Some(Op::DiskWrite { keys, writes }) => {
                self.journal.note("written", || vec![id]);
                self.unlock(&keys);
                self.counters.stores_ended += writes.len() as u64;
                if let Some(disk) = &mut self.disk {
                    disk.end_write(&writes);
                }
                Ended::Nothing
            }
            None => Ended::Nothing,
        }
    }

    pub fn reset_cpu(&mut self) {
        self.cpu = self.config.cpu_tier();
    }

    pub fn reset_disk(&mut self) {
        if let Some(disk) = &mut self.disk {
            disk.reset();
        }
    }

    pub fn reset_page_cache(&mut self) {
        if let Some(disk) = &mut self.disk {
            disk.reset_page_cache();
        }
    }

    fn begin(&mut self, end: Ticks, op: Op) {
        let quiet = matches!(op, Op::Store { .. } | Op::DiskWrite { .. });
        self.ops.insert(self.next_io, op);
        self.begun.push(Begun { end, id: self.next_io, quiet });
        self.next_io += 1;
    }

    /// Room in the CPU tier for all of the keys or for none of them.
    fn reserve(&mut self, keys: &[Key], storing: bool) -> bool {
        self.cpu.reserve(keys, storing, self.config.policy.evict_on_demand).is_some()
    }

    fn unlock(&mut self, keys: &[Key]) {
        keys.iter().for_each(|&key| self.cpu.unlock(key));
    }

    /// Looks and locks; reads from disk what only the disk holds.
    fn start(&mut self, now: Ticks, slot: Slot, keys: &[Key]) -> Option<Hit> {
        let mut hit = Hit::default();
        for &key in keys {
            let in_cpu = self.cpu.contains(key);
            if !in_cpu && !self.disk.as_ref().is_some_and(|disk| disk.contains(key)) {
                break;
            }
            hit.keys.push(key);
            hit.in_cpu.push(in_cpu);
        }
        hit.keys_where(true).for_each(|key| self.cpu.lock(key));
        if hit.disk_chunks() > 0 {
            let lacking: Vec<Key> = hit.keys_where(false).collect();
            if self.reserve(&lacking, false) {
                self.prefetch(now, slot, hit);
                return None;
            }
            // Without room for all of them the hit ends before the first chunk that only the disk holds.
            let keep = hit.in_cpu.iter().position(|in_cpu| !in_cpu).unwrap_or(hit.in_cpu.len());
            let beyond = Hit { keys: hit.keys.split_off(keep), in_cpu: hit.in_cpu.split_off(keep) };
            beyond.keys_where(true).for_each(|key| self.cpu.unlock(key));
        }
        self.answered(slot, &hit);
        Some(hit)
    }

    fn answered(&mut self, slot: Slot, hit: &Hit) {
        self.journal.note("answer", || {
            with(slot as u64, &hit.in_cpu.iter().map(|&held| u64::from(held)).collect::<Vec<_>>())
        });
        self.cpu.touch(&hit.keys);
        self.count_hit(hit);
    }

    fn count_hit(&mut self, hit: &Hit) {
        self.counters.cpu_hit_chunks += hit.chunks() - hit.disk_chunks();
        self.counters.disk_hit_chunks += hit.disk_chunks();
    }

    /// Reads a hit's chunks from disk, one after another.
    fn prefetch(&mut self, now: Ticks, slot: Slot, hit: Hit) {
        let count = hit.disk_chunks();
        self.prefetching += 1;
        let warm =
            self.disk.as_mut().map_or(0, |disk| disk.begin_read(&hit.keys_where(false).collect::<Vec<_>>()));
        let (cold, bytes) = (count - warm, self.config.chunk_bytes);
        self.counters.storage_read_bytes += cold * bytes;
        let (end, left) = match cold {
            0 => (self.page_cache_read.submit(now, warm, warm * bytes), 0),
            _ => (self.disk_read.submit(now, cold, cold * bytes), warm),
        };
        self.begin(end, Op::Prefetch { slot, hit, warm: left });
    }

    fn prefetched(&mut self, now: Ticks, slot: Slot, hit: Hit) -> Ended {
        self.journal.note("prefetched", || vec![slot as u64]);
        self.prefetching -= 1;
        self.counters.disk_loaded_chunks += hit.disk_chunks();
        let loaded: Vec<Key> = hit.keys_where(false).collect();
        if let Some(disk) = &mut self.disk {
            disk.end_read(&loaded);
        }
        self.cpu.admit_loaded(&loaded, !self.config.policy.keep_prefetched);
        self.answered(slot, &hit);
        while self.prefetching < self.config.policy.max_prefetches
            && let Some((slot, keys)) = self.waiting_lookups.pop_front()
        {
            if let Some(hit) = self.start(now, slot, &keys) {
                self.begin(now, Op::Answer { slot, hit });
            }
        }
        Ended::Lookup(slot, hit)
    }

    /// Chunks have arrived in the CPU tier: they can be found from now on, and are written to disk.
    fn stored(&mut self, now: Ticks, id: IoId, keys: &[Key]) {
        let admitted = self.cpu.admit_stored(keys);
        let writes = self.disk.as_mut().map_or_else(Vec::new, |disk| disk.begin_write(&admitted));
        let count = writes.len() as u64;
        self.counters.stores_ended += keys.len() as u64 - count;
        self.journal.note("stored", || vec![id, self.next_io]);
        self.journal.note("writes", || writes.clone());
        if count > 0 {
            admitted.iter().for_each(|&key| self.cpu.lock(key));
            let end = self.disk_write.submit(now, count, count * self.config.chunk_bytes);
            self.begin(end, Op::DiskWrite { keys: admitted, writes });
        }
    }
}

/// The numbers of a note: an id, and what belongs to it.
fn with(id: u64, rest: &[u64]) -> Vec<u64> {
    [&[id], rest].concat()
}

#[cfg(test)]
impl Tiers {
    /// Chunks held and being written: in the CPU tier, on disk.
    pub fn used(&self) -> (u64, u64) {
        (self.cpu.used(), self.disk.as_ref().map_or(0, Disk::used))
    }
}
