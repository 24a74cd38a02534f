//! Chunk tiers below the GPU: CPU memory and disk, with the rules of cache servers as data.
//!
//! Sans I/O: the tiers say which transfer ends when, and act when told that it ended (`io_done`). Chunk counts stand
//! for bytes throughout.

use std::collections::{BTreeMap, VecDeque};

use crate::cache::Cache;
use crate::device::{Device, SharedDevice};
use crate::disk::Disk;
use crate::external::Outbox;
use crate::journal::Journal;
use crate::keys::{Key, KeyMap};
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

    /// Takes the chunks from `at` on out of it.
    pub(crate) fn split_off(&mut self, at: usize) -> Self {
        Self { keys: self.keys.split_off(at), in_cpu: self.in_cpu.split_off(at) }
    }

    /// Where in the prompt the disk's chunk of that number lies; behind all chunks, if there are not so many.
    pub(crate) fn position_of_disk_chunk(&self, number: u64) -> usize {
        let mut on_disk = (0..self.in_cpu.len()).filter(|&index| !self.in_cpu[index]);
        on_disk.nth(number as usize).unwrap_or(self.in_cpu.len())
    }

    pub(crate) fn disk_chunks(&self) -> u64 {
        self.in_cpu.iter().filter(|in_cpu| !**in_cpu).count() as u64
    }

    pub(crate) fn keys_where(&self, in_cpu: bool) -> impl Iterator<Item = Key> {
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

/// A transfer of one of the devices that read for the disk tier.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Read {
    Disk(u64),
    PageCache(u64),
    /// Somebody else's.
    External,
}

/// A hit that is being read from disk: `chunks` by the transfer under way since `began`, `warm` after it from the page
/// cache. At the deadline it is answered with what is there.
#[derive(Debug)]
pub(crate) struct Prefetch {
    pub slot: Slot,
    pub hit: Hit,
    pub began: Ticks,
    pub chunks: u64,
    pub warm: u64,
    pub deadline: Ticks,
}

#[derive(Debug)]
pub(crate) enum Op {
    /// Disk to CPU.
    Prefetch(Prefetch, Read),
    /// What is left of a read that was not waited for.
    Rest(Read),
    Load {
        slot: Slot,
        keys: Vec<Key>,
    },
    /// An answer that needs no transfer, to a request that had to wait for others to be answered.
    Answer {
        slot: Slot,
        hit: Hit,
    },
    /// GPU to CPU; `spilled` chunks go to disk after that.
    Store {
        slot: Slot,
        keys: Vec<Key>,
        spilled: Vec<Key>,
    },
    /// GPU to disk.
    Spill {
        slot: Slot,
        keys: Vec<Key>,
    },
    /// CPU to disk: `keys` are read, those in `writes` are new to the disk. With them a store ends, or else chunks that
    /// the CPU tier has dropped move down.
    DiskWrite {
        keys: Vec<Key>,
        writes: Vec<Key>,
        stores: bool,
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
    pub(crate) config: TierConfig,
    pub(crate) cpu: Cache,
    pub(crate) disk: Option<Disk>,
    pub(crate) cpu_read: Device,
    pub(crate) cpu_write: Device,
    pub(crate) disk_read: SharedDevice,
    pub(crate) disk_write: Device,
    pub(crate) page_cache_read: SharedDevice,
    ops: BTreeMap<IoId, Op>,
    pub(crate) next_io: IoId,
    /// Look-ups that read from disk, and how many chunks.
    pub(crate) prefetching: u64,
    pub(crate) prefetching_chunks: u64,
    pub(crate) waiting_lookups: VecDeque<(Slot, Vec<Key>)>,
    /// Chunks of hits that were read from disk past the CPU tier, and how often `release` will name them.
    pub(crate) passing: KeyMap<u32>,
    /// The number of the next tick.
    next_tick: u128,
    /// A store found no room since the last eviction.
    pub(crate) short_of_room: bool,
    pub(crate) counters: TierCounters,
    /// Transfers begun since the engine last looked.
    begun: Vec<Begun>,
    pub outbox: Option<Outbox>,
    /// Numbers are a slot or a transfer's id, then keys. "tick": how many ticks, then the keys dropped. "answer": slot,
    /// then a flag for each chunk found: in the CPU tier or not.
    pub journal: Journal,
}

impl Tiers {
    pub fn new(config: TierConfig, journal: bool) -> Self {
        Self {
            outbox: config.disk_chunks.filter(|_| config.external_disk).map(|_| Outbox::default()),
            cpu: config.cpu_tier(),
            disk: config.disk_tier(),
            cpu_read: Device::new(&config.cpu_read),
            cpu_write: Device::new(&config.cpu_write),
            disk_read: SharedDevice::new(&config.disk_read),
            disk_write: Device::new(&config.disk_write),
            page_cache_read: SharedDevice::new(&config.page_cache_read),
            ops: BTreeMap::new(),
            next_io: 0,
            prefetching: 0,
            prefetching_chunks: 0,
            waiting_lookups: VecDeque::new(),
            passing: KeyMap::default(),
            next_tick: 1,
            short_of_room: false,
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
        if !self.config.policy.evicts() && every > 0 && self.next_tick * every <= now {
            let (first, last) = (self.next_tick, now / every);
            let dropped = self.run_ticks(first, last, every);
            self.next_tick = last + 1;
            self.journal.note("tick", || with((last - first + 1) as u64, &dropped));
        }
        self.clock(now);
    }

    fn run_ticks(&mut self, first: u128, last: u128, every: Ticks) -> Vec<Key> {
        let (mut dropped, mut tick) = (Vec::new(), first);
        while tick <= last {
            self.clock(tick * every);
            let share = self.tick_share();
            if share == 0 {
                break;
            }
            let gone = self.cpu.drop_some(share);
            self.short_of_room &= gone.is_empty();
            tick += 1;
            if gone.is_empty() {
                // What nothing can be dropped from now stays so until the next event, or until a lease runs out.
                let Some(change) = self.cpu.next_change() else { break };
                tick = tick.max(change.div_ceil(every));
            }
            dropped.extend(gone);
        }
        dropped
    }

    fn clock(&mut self, now: Ticks) {
        self.cpu.clock(now);
        if let Some(disk) = &mut self.disk {
            disk.clock(now);
        }
    }

    /// Begins to look for a prefix of `keys`. Some: the answer at once; None: `Ended::Lookup` brings it.
    pub fn lookup(&mut self, now: Ticks, slot: Slot, keys: &[Key]) -> Option<Hit> {
        if keys.is_empty() {
            return Some(Hit::default());
        }
        // Decode steps that were taken at once have passed ticks.
        self.tick(now);
        self.journal.note("lookup", || with(slot as u64, keys));
        if self.disk.is_some() && self.prefetching >= self.config.policy.prefetches() {
            self.waiting_lookups.push_back((slot, keys.to_vec()));
            return None;
        }
        self.start(now, slot, keys)
    }

    /// Of how many leading keys a chunk is held.
    pub fn held(&self, keys: &[Key]) -> u64 {
        let held =
            |key: &Key| self.cpu.contains(*key) || self.disk.as_ref().is_some_and(|disk| disk.contains(*key));
        keys.iter().take_while(|key| held(key)).count() as u64
    }

    /// Exchanges the disk and what is in front of it with another server.
    pub fn swap_disk(&mut self, other: &mut Self) {
        std::mem::swap(&mut self.disk, &mut other.disk);
        std::mem::swap(&mut self.disk_read, &mut other.disk_read);
        std::mem::swap(&mut self.disk_write, &mut other.disk_write);
        std::mem::swap(&mut self.page_cache_read, &mut other.page_cache_read);
    }

    /// Begins to copy a hit's chunks from `first` on to the GPU; those before are not needed. `Ended::Load` follows at
    /// the moment returned.
    pub fn load(&mut self, now: Ticks, slot: Slot, mut hit: Hit, first: usize) -> Ticks {
        let keys = hit.keys.split_off(first.min(hit.keys.len()));
        self.release(&hit.keys);
        let count = keys.len() as u64;
        let end = self.cpu_read.submit(now, count, count * self.config.chunk_bytes);
        self.begin(end, Op::Load { slot, keys });
        end
    }

    /// Unlocks chunks of a hit that are not needed any more.
    pub fn release(&mut self, keys: &[Key]) {
        if !keys.is_empty() {
            self.journal.note("release", || keys.to_vec());
            keys.iter().for_each(|&key| self.unlock(key));
        }
    }

    /// A request has ended: its prompt's chunks were used, wherever they came from.
    pub fn end(&mut self, keys: &[Key]) {
        if !keys.is_empty() && self.config.policy.end_uses {
            self.journal.note("touch", || keys.to_vec());
            self.cpu.touch(keys);
        }
    }

    /// Acts on the end of a transfer. An unknown id changes nothing.
    pub fn io_done(&mut self, now: Ticks, id: IoId) -> Ended {
        match self.ops.remove(&id) {
            Some(Op::Load { slot, keys }) => {
                self.release(&keys);
                Ended::Load(slot)
            }
            Some(Op::Answer { slot, hit }) => Ended::Lookup(slot, hit),
            Some(Op::Prefetch(prefetch, read)) => self.read_on(now, prefetch, read),
            Some(Op::Rest(read)) => {
                if let Err(end) = self.read_ended(now, read) {
                    self.begin(end, Op::Rest(read));
                }
                Ended::Nothing
            }
            Some(Op::Store { slot, keys, spilled }) => {
                self.stored(now, id, slot, &keys);
                self.spill(now, slot, spilled).unwrap_or(Ended::Store(slot))
            }
            Some(Op::Spill { slot, keys }) => {
                self.written(id, &keys, true);
                Ended::Store(slot)
            }
            Some(Op::DiskWrite { keys, writes, stores }) => {
                self.journal.note("written", || vec![id]);
                keys.iter().for_each(|&key| self.cpu.unlock(key));
                self.written(id, &writes, stores);
                Ended::Nothing
            }
            None => Ended::Nothing,
        }
    }

    pub fn reset_cpu(&mut self) {
        self.cpu.clear();
    }

    pub fn reset_disk(&mut self) {
        if let Some(disk) = &mut self.disk {
            disk.reset();
        }
        if let Some(outbox) = &mut self.outbox {
            outbox.drop_all();
        }
    }

    pub fn reset_page_cache(&mut self) {
        if let Some(disk) = &mut self.disk {
            disk.reset_page_cache();
        }
    }

    /// No request waits for this transfer.
    pub fn is_quiet(&self, id: IoId) -> bool {
        let op = self.ops.get(&id);
        matches!(op, Some(Op::Store { .. } | Op::Spill { .. } | Op::DiskWrite { .. } | Op::Rest(_)))
    }

    pub(crate) fn begin(&mut self, end: Ticks, op: Op) {
        self.ops.insert(self.next_io, op);
        let quiet = self.is_quiet(self.next_io);
        self.begun.push(Begun { end, id: self.next_io, quiet });
        self.next_io += 1;
    }

    fn unlock(&mut self, key: Key) {
        match self.passing.get_mut(&key) {
            Some(1) => drop(self.passing.remove(&key)),
            Some(times) => *times -= 1,
            None => self.cpu.unlock(key),
        }
    }
}

/// The numbers of a note: an id, and what belongs to it.
pub(crate) fn with(id: u64, rest: &[u64]) -> Vec<u64> {
    [&[id], rest].concat()
}

#[cfg(test)]
impl Tiers {
    /// Chunks held and being written: in the CPU tier, on disk.
    pub fn used(&self) -> (u64, u64) {
        (self.cpu.used(), self.disk.as_ref().map_or(0, Disk::used))
    }

    /// What must hold at any moment, for `hits` that were answered and neither loaded nor released.
    pub fn check(&self, hits: &[&Hit]) {
        self.cpu.check();
        self.disk.iter().for_each(Disk::check);
        if let (Some(outbox), Some(disk)) = (&self.outbox, &self.disk) {
            outbox.check(&disk.keys(), self.config.disk_chunks.unwrap_or(0));
        }
        let mut pins: KeyMap<u32> = KeyMap::default();
        let mut pin = |keys: &[Key]| keys.iter().for_each(|&key| *pins.entry(key).or_default() += 1);
        hits.iter().for_each(|hit| pin(&hit.keys));
        for op in self.ops.values() {
            match op {
                Op::Load { keys, .. } | Op::DiskWrite { keys, .. } => pin(keys),
                Op::Answer { hit, .. } => pin(&hit.keys),
                Op::Prefetch(prefetch, _) => pin(&prefetch.hit.keys_where(true).collect::<Vec<_>>()),
                Op::Store { .. } | Op::Spill { .. } | Op::Rest(_) => {}
            }
        }
        let held = |key: &Key| self.cpu.readers(*key) + self.passing.get(key).copied().unwrap_or(0);
        pins.iter().for_each(|(key, &times)| assert_eq!(held(key), times, "pins of {key:x}"));
    }

    /// Held or being written, in order.
    pub fn keys_on_disk(&self) -> Vec<Key> {
        let mut keys = self.disk.as_ref().map_or_else(Vec::new, Disk::keys);
        keys.sort_unstable();
        keys
    }

    pub fn check_idle(&self) {
        self.check(&[]);
        self.cpu.check_idle();
        self.disk.iter().for_each(Disk::check_idle);
        self.outbox.iter().for_each(Outbox::check_idle);
        assert_eq!((self.prefetching, self.prefetching_chunks, self.passing.len()), (0, 0, 0));
        assert!(self.waiting_lookups.is_empty());
        assert_eq!(self.counters.stores_begun, self.counters.stores_ended);
    }
}
