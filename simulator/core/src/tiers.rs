//! Chunk tiers below the GPU: CPU memory and disk, with LMCache's rules as data.
//!
//! Sans I/O: the tiers say which transfer ends when, and act when told that it ended (`io_done`). Chunk counts stand
//! for bytes throughout.

use std::collections::{BTreeMap, VecDeque};

use crate::device::{Device, DeviceConfig, SharedDevice};
use crate::disk::Disk;
use crate::external::Outbox;
use crate::journal::Journal;
use crate::keys::Key;
use crate::l1::L1;
use crate::time::{self, FOREVER, Ticks};

pub type IoId = u64;
/// The engine's name for a request, handed back in `Ended`.
pub type Slot = usize;

#[derive(Clone, Debug)]
#[cfg_attr(feature = "python", derive(pyo3::FromPyObject))]
pub struct TierPolicy {
    /// Evict when a write needs room. Otherwise only at ticks, and a write without room is given up.
    pub evict_on_demand: bool,
    pub tick_s: f64,
    pub watermark: f64,
    pub evict_ratio: f64,
    /// Chunks read from disk stay in the CPU tier.
    pub keep_prefetched: bool,
    pub max_prefetches: u64,
    /// A full disk drops its least recently used chunks. Otherwise it takes no more.
    pub disk_evicts: bool,
}

#[derive(Clone, Debug)]
#[cfg_attr(feature = "python", derive(pyo3::FromPyObject))]
pub struct TierConfig {
    pub policy: TierPolicy,
    pub chunk_bytes: u64,
    pub cpu_chunks: u64,
    /// None: there is no disk tier.
    pub disk_chunks: Option<u64>,
    /// Reads bypass the page cache.
    pub odirect: bool,
    /// Someone else makes the disk's transfers, on a real device.
    pub external_disk: bool,
    pub cpu_read: DeviceConfig,
    pub cpu_write: DeviceConfig,
    pub disk_read: DeviceConfig,
    pub disk_write: DeviceConfig,
    pub page_cache_read: DeviceConfig,
}

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

    fn keys_where(&self, in_cpu: bool) -> Vec<Key> {
        let of = self.keys.iter().zip(&self.in_cpu).filter(|(_, held)| **held == in_cpu);
        of.map(|(key, _)| *key).collect()
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
enum Read {
    Disk(u64),
    PageCache(u64),
    /// Somebody else's.
    External,
}

#[derive(Debug)]
enum Op {
    /// Disk to CPU: `warm` chunks are left to read from the page cache; `read` is the transfer under way.
    Prefetch {
        slot: Slot,
        hit: Hit,
        warm: u64,
        read: Read,
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
    cpu: L1,
    disk: Option<Disk>,
    cpu_read: Device,
    cpu_write: Device,
    disk_read: SharedDevice,
    disk_write: Device,
    page_cache_read: SharedDevice,
    ops: BTreeMap<IoId, Op>,
    next_io: IoId,
    prefetching: u64,
    waiting_lookups: VecDeque<(Slot, Vec<Key>)>,
    ticked_until: Ticks,
    counters: TierCounters,
    /// Transfers begun since the engine last looked.
    begun: Vec<Begun>,
    pub outbox: Option<Outbox>,
    /// Numbers are a slot or a transfer's id, then keys. "tick": how many ticks, then the keys dropped. "answer": slot,
    /// then a flag for each chunk found: in the CPU tier or not.
    pub journal: Journal,
}

impl Tiers {
    pub fn new(config: TierConfig, journal: bool) -> Self {
        let (evicts, odirect) = (config.policy.disk_evicts, config.odirect);
        let disk = config.disk_chunks.map(|chunks| Disk::new(chunks, evicts, odirect));
        let outbox = config.disk_chunks.filter(|_| config.external_disk).map(Outbox::new);
        Self {
            outbox,
            cpu: L1::new(config.cpu_chunks),
            disk,
            cpu_read: Device::new(&config.cpu_read),
            cpu_write: Device::new(&config.cpu_write),
            disk_read: SharedDevice::new(&config.disk_read),
            disk_write: Device::new(&config.disk_write),
            page_cache_read: SharedDevice::new(&config.page_cache_read),
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
            let gone = self.cpu.evict(share.max(1));
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
            self.cpu.unlock(keys);
        }
    }

    /// A request has ended: its prompt's chunks were used, wherever they came from.
    pub fn end(&mut self, keys: &[Key]) {
        if !keys.is_empty() {
            self.journal.note("touch", || keys.to_vec());
            self.cpu.touch(keys);
        }
    }

    /// Begins to copy chunks from the GPU to the CPU tier, all or none of those that it lacks. False: nothing begun.
    pub fn store(&mut self, now: Ticks, slot: Slot, keys: &[Key]) -> bool {
        let new = self.cpu.storable(keys);
        let count = new.len() as u64;
        self.make_room(count);
        let begins = count > 0 && self.cpu.reserve(&new, true);
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
            Some(Op::Prefetch { slot, hit, warm, read }) => self.read_on(now, slot, hit, warm, read),
            Some(Op::Store { slot, keys }) => {
                self.stored(now, id, slot, &keys);
                Ended::Store(slot)
            }
            Some(Op::DiskWrite { keys, writes }) => {
                self.journal.note("written", || vec![id]);
                self.cpu.unlock(&keys);
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
        self.cpu = L1::new(self.config.cpu_chunks);
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

    /// No request waits for this transfer.
    pub fn is_quiet(&self, id: IoId) -> bool {
        matches!(self.ops.get(&id), Some(Op::Store { .. } | Op::DiskWrite { .. }))
    }

    fn begin(&mut self, end: Ticks, op: Op) {
        self.ops.insert(self.next_io, op);
        let quiet = self.is_quiet(self.next_io);
        self.begun.push(Begun { end, id: self.next_io, quiet });
        self.next_io += 1;
    }

    /// Drops what is in the way of `count` more chunks, if this policy does so.
    fn make_room(&mut self, count: u64) {
        let excess = self.cpu.excess(count);
        if excess > 0 && self.config.policy.evict_on_demand && count <= self.config.cpu_chunks {
            self.cpu.evict(excess);
        }
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
        self.cpu.lock(&hit.keys_where(true));
        if hit.disk_chunks() > 0 {
            self.make_room(hit.disk_chunks());
            if self.cpu.reserve(&hit.keys_where(false), false) {
                self.prefetch(now, slot, hit);
                return None;
            }
            // Without room for all of them the hit ends before the first chunk that only the disk holds.
            let keep = hit.in_cpu.iter().position(|in_cpu| !in_cpu).unwrap_or(hit.in_cpu.len());
            let beyond = Hit { keys: hit.keys.split_off(keep), in_cpu: hit.in_cpu.split_off(keep) };
            self.cpu.unlock(&beyond.keys_where(true));
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
        let warm = self.disk.as_mut().map_or(0, |disk| disk.begin_read(&hit.keys_where(false)));
        let (cold, bytes) = (count - warm, self.config.chunk_bytes);
        self.counters.storage_read_bytes += cold * bytes;
        if let Some(outbox) = &mut self.outbox {
            outbox.read(self.next_io, slot, &hit.keys_where(false));
            return self.begin(FOREVER, Op::Prefetch { slot, hit, warm: 0, read: Read::External });
        }
        if cold == 0 {
            return self.read_page_cache(now, slot, hit, warm);
        }
        let (id, end) = self.disk_read.submit(now, cold, cold * bytes);
        self.begin(end, Op::Prefetch { slot, hit, warm, read: Read::Disk(id) });
    }

    fn read_page_cache(&mut self, now: Ticks, slot: Slot, hit: Hit, chunks: u64) {
        let (id, end) = self.page_cache_read.submit(now, chunks, chunks * self.config.chunk_bytes);
        self.begin(end, Op::Prefetch { slot, hit, warm: 0, read: Read::PageCache(id) });
    }

    /// A read was to end now; others that joined it meanwhile may have made it longer.
    fn read_on(&mut self, now: Ticks, slot: Slot, hit: Hit, warm: u64, read: Read) -> Ended {
        let later = match read {
            Read::Disk(id) => self.disk_read.ended(now, id),
            Read::PageCache(id) => self.page_cache_read.ended(now, id),
            Read::External => Ok(()),
        };
        if let Err(end) = later {
            self.begin(end, Op::Prefetch { slot, hit, warm, read });
            return Ended::Nothing;
        }
        if warm > 0 {
            self.read_page_cache(now, slot, hit, warm);
            return Ended::Nothing;
        }
        self.prefetched(now, slot, hit)
    }

    fn prefetched(&mut self, now: Ticks, slot: Slot, hit: Hit) -> Ended {
        self.journal.note("prefetched", || vec![slot as u64]);
        self.prefetching -= 1;
        self.counters.disk_loaded_chunks += hit.disk_chunks();
        let loaded = hit.keys_where(false);
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
    fn stored(&mut self, now: Ticks, id: IoId, slot: Slot, keys: &[Key]) {
        let admitted = self.cpu.admit_stored(keys);
        let writes = self.disk.as_mut().map_or_else(Vec::new, |disk| disk.begin_write(&admitted));
        let count = writes.len() as u64;
        self.counters.stores_ended += keys.len() as u64 - count;
        self.journal.note("stored", || vec![id, self.next_io]);
        self.journal.note("writes", || writes.clone());
        if count > 0 {
            self.cpu.lock(&admitted);
            let end = match (&mut self.outbox, &self.disk) {
                (Some(outbox), Some(disk)) => {
                    outbox.write(self.next_io, slot, &writes, |key| disk.has(key));
                    FOREVER
                }
                _ => self.disk_write.submit(now, count, count * self.config.chunk_bytes),
            };
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
