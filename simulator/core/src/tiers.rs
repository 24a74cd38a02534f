//! Chunk tiers below the GPU: CPU memory and disk, with LMCache's rules as data.
//!
//! Sans I/O: the tiers say which transfer ends when, and act when told that it ended (`io_done`). Chunk counts stand
//! for bytes throughout.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use crate::chunks::{Chain, Chunks, Hit, touch, unlock};
use crate::device::{Device, DeviceConfig};
use crate::keys::{Key, KeyMap};
use crate::lru::Lru;
use crate::time::{self, Ticks};

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
    pub cpu_read: DeviceConfig,
    pub cpu_write: DeviceConfig,
    pub disk_read: DeviceConfig,
    pub disk_write: DeviceConfig,
    pub page_cache_read: DeviceConfig,
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
    Load(Slot),
    Store {
        slot: Slot,
        chunks: Chunks,
    },
    DiskWrite(Chunks),
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
struct Disk {
    chunks: u64,
    held: Lru,
    writing: KeyMap<()>,
    in_page_cache: KeyMap<()>,
}

impl Disk {
    fn room(&self) -> u64 {
        self.chunks.saturating_sub(self.held.len() + self.writing.len() as u64)
    }

    fn drop_oldest(&mut self, count: u64, mut gone: impl FnMut(Key)) {
        self.held.drop_oldest(count, |key| {
            self.in_page_cache.remove(&key);
            gone(key);
        });
    }
}

#[derive(Debug)]
pub struct Tiers {
    config: TierConfig,
    cpu: Lru,
    /// Chunks of the CPU tier that transfers in flight write to.
    staged: u64,
    disk: Option<Disk>,
    cpu_read: Device,
    cpu_write: Device,
    disk_read: Device,
    disk_write: Device,
    page_cache_read: Device,
    ops: BTreeMap<IoId, Op>,
    next_io: IoId,
    prefetching: u64,
    waiting_prefetches: VecDeque<(Slot, Hit)>,
    /// Time between two eviction ticks; 0: there are none.
    tick: Ticks,
    next_tick: Ticks,
    counters: TierCounters,
    /// Transfers begun since the engine last looked.
    begun: Vec<Begun>,
}

impl Tiers {
    pub fn new(config: TierConfig) -> Self {
        let disk = config.disk_chunks.map(|chunks| Disk {
            chunks,
            held: Lru::default(),
            writing: KeyMap::default(),
            in_page_cache: KeyMap::default(),
        });
        let tick = if config.policy.evict_on_demand { 0 } else { time::from_s(config.policy.tick_s) };
        Self {
            cpu: Lru::default(),
            staged: 0,
            disk,
            cpu_read: Device::new(&config.cpu_read),
            cpu_write: Device::new(&config.cpu_write),
            disk_read: Device::new(&config.disk_read),
            disk_write: Device::new(&config.disk_write),
            page_cache_read: Device::new(&config.page_cache_read),
            ops: BTreeMap::new(),
            next_io: 0,
            prefetching: 0,
            waiting_prefetches: VecDeque::new(),
            tick,
            next_tick: tick,
            counters: TierCounters::default(),
            begun: Vec::new(),
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
        if self.tick == 0 || now < self.next_tick {
            return;
        }
        let mut ticks = 1 + (now - self.next_tick) / self.tick;
        self.next_tick += ticks * self.tick;
        while ticks > 0 && self.above_watermark() {
            let share = (self.config.policy.evict_ratio * self.cpu.len() as f64) as u64;
            if self.cpu.drop_oldest(share.max(1), |_| {}) == 0 {
                return;
            }
            ticks -= 1;
        }
    }

    /// Begins to look for a prefix of `chain`. Some: the answer at once; None: `Ended::Lookup` brings it.
    pub fn lookup(&mut self, now: Ticks, slot: Slot, chain: &Chain) -> Option<Hit> {
        let mut hit = Hit { chain: chain.clone(), in_cpu: Vec::new() };
        let mut on_disk = self.disk.as_ref().map(|disk| disk.held.walk(chain, 0..chain.len()));
        for in_cpu in self.cpu.walk(chain, 0..chain.len()) {
            let on_disk = on_disk.as_mut().and_then(Iterator::next).unwrap_or(false);
            if !in_cpu && !on_disk {
                break;
            }
            hit.in_cpu.push(in_cpu);
        }
        drop(on_disk);
        touch(&mut self.cpu, &hit.chunks_where(true), 1);
        if let Some(disk) = &mut self.disk {
            touch(&mut disk.held, &hit.chunks_where(false), 1);
        }
        if hit.disk_chunks() == 0 {
            self.count_hit(&hit);
            return Some(hit);
        }
        if self.prefetching < self.config.policy.max_prefetches {
            return self.prefetch(now, slot, hit);
        }
        self.waiting_prefetches.push_back((slot, hit));
        None
    }

    /// Begins to copy `chunks` of a hit to the GPU; `Ended::Load` follows.
    pub fn load(&mut self, now: Ticks, slot: Slot, chunks: u64) {
        let end = self.cpu_read.submit(now, chunks, chunks * self.config.chunk_bytes);
        self.begin(end, Op::Load(slot));
    }

    /// Unlocks a hit that is not needed any more.
    pub fn release(&mut self, hit: &Hit) {
        unlock(&mut self.cpu, &hit.chunks_where(true));
        self.staged -= hit.disk_chunks();
        if self.config.policy.keep_prefetched {
            touch(&mut self.cpu, &hit.chunks_where(false), 0);
        }
    }

    /// Begins to copy a range of a chain's chunks from the GPU to the CPU tier, all or none of those that it lacks.
    /// False: nothing begun.
    pub fn store(&mut self, now: Ticks, slot: Slot, chain: &Chain, range: Range<usize>) -> bool {
        let mut chunks = Chunks { chain: chain.clone(), ranges: Vec::new() };
        let held = range.clone().zip(self.cpu.walk(chain, range));
        held.filter(|(_, held)| !held).for_each(|(at, _)| chunks.push(at));
        let count = chunks.count();
        if count == 0 || !self.reserve(count) {
            return false;
        }
        self.counters.stores_begun += count;
        let end = self.cpu_write.submit(now, count, count * self.config.chunk_bytes);
        self.begin(end, Op::Store { slot, chunks });
        true
    }

    /// Acts on the end of a transfer. An unknown id changes nothing.
    pub fn io_done(&mut self, now: Ticks, id: IoId) -> Ended {
        match self.ops.remove(&id) {
            Some(Op::Load(slot)) => Ended::Load(slot),
            Some(Op::Prefetch { slot, hit, warm }) if warm > 0 => {
                let end = self.page_cache_read.submit(now, warm, warm * self.config.chunk_bytes);
                self.begin(end, Op::Prefetch { slot, hit, warm: 0 });
                Ended::Nothing
            }
            Some(Op::Prefetch { slot, hit, .. }) => self.prefetched(now, slot, hit),
            Some(Op::Store { slot, chunks }) => {
                self.stored(now, &chunks);
                Ended::Store(slot)
            }
            Some(Op::DiskWrite(chunks)) => {
                self.written(&chunks);
                Ended::Nothing
            }
            None => Ended::Nothing,
        }
    }

    pub fn reset_cpu(&mut self) {
        self.cpu = Lru::default();
    }

    pub fn reset_disk(&mut self) {
        if let Some(disk) = &mut self.disk {
            disk.held = Lru::default();
            disk.in_page_cache.clear();
        }
    }

    pub fn reset_page_cache(&mut self) {
        if let Some(disk) = &mut self.disk {
            disk.in_page_cache.clear();
        }
    }

    fn begin(&mut self, end: Ticks, op: Op) {
        let quiet = matches!(op, Op::Store { .. } | Op::DiskWrite(_));
        self.ops.insert(self.next_io, op);
        self.begun.push(Begun { end, id: self.next_io, quiet });
        self.next_io += 1;
    }

    fn above_watermark(&self) -> bool {
        let used = (self.cpu.len() + self.staged) as f64;
        self.config.cpu_chunks > 0 && used / self.config.cpu_chunks as f64 >= self.config.policy.watermark
    }

    /// Room for `count` more chunks in the CPU tier.
    fn reserve(&mut self, count: u64) -> bool {
        let wanted = self.cpu.len() + self.staged + count;
        let excess = wanted.saturating_sub(self.config.cpu_chunks);
        if excess > 0 && self.config.policy.evict_on_demand && count <= self.config.cpu_chunks {
            self.cpu.drop_oldest(excess, |_| {});
        }
        let fits = self.cpu.len() + self.staged + count <= self.config.cpu_chunks;
        self.staged += if fits { count } else { 0 };
        fits
    }

    fn count_hit(&mut self, hit: &Hit) {
        self.counters.cpu_hit_chunks += hit.chunks() - hit.disk_chunks();
        self.counters.disk_hit_chunks += hit.disk_chunks();
    }

    /// Reads a hit's chunks from disk, one after another. Without room for all of them the hit ends before the first.
    fn prefetch(&mut self, now: Ticks, slot: Slot, mut hit: Hit) -> Option<Hit> {
        let count = hit.disk_chunks();
        if !self.reserve(count) {
            let keep = hit.in_cpu.iter().position(|in_cpu| !in_cpu).unwrap_or(hit.in_cpu.len());
            for at in keep..hit.in_cpu.len() {
                match &mut self.disk {
                    _ if hit.in_cpu[at] => self.cpu.unlock(&hit.chain, at..at + 1),
                    Some(disk) => disk.held.unlock(&hit.chain, at..at + 1),
                    None => {}
                }
            }
            hit.in_cpu.truncate(keep);
            self.count_hit(&hit);
            return Some(hit);
        }
        self.prefetching += 1;
        self.count_hit(&hit);
        let odirect = self.config.odirect;
        let mut warm = 0;
        if let Some(disk) = &mut self.disk {
            for key in hit.chunks_where(false).keys().filter(|_| !odirect) {
                warm += u64::from(disk.in_page_cache.insert(key, ()).is_some());
            }
        }
        let (cold, bytes) = (count - warm, self.config.chunk_bytes);
        self.counters.storage_read_bytes += cold * bytes;
        let (end, left) = match cold {
            0 => (self.page_cache_read.submit(now, warm, warm * bytes), 0),
            _ => (self.disk_read.submit(now, cold, cold * bytes), warm),
        };
        self.begin(end, Op::Prefetch { slot, hit, warm: left });
        None
    }

    fn prefetched(&mut self, now: Ticks, slot: Slot, hit: Hit) -> Ended {
        self.prefetching -= 1;
        self.counters.disk_loaded_chunks += hit.disk_chunks();
        if let Some(disk) = &mut self.disk {
            unlock(&mut disk.held, &hit.chunks_where(false));
        }
        if let Some((next_slot, next_hit)) = self.waiting_prefetches.pop_front()
            && let Some(short) = self.prefetch(now, next_slot, next_hit)
        {
            // It needs no transfer, but its answer goes the way of all: a transfer of nothing.
            self.prefetching += 1;
            self.begin(now, Op::Prefetch { slot: next_slot, hit: short, warm: 0 });
        }
        Ended::Lookup(slot, hit)
    }

    /// Chunks have arrived in the CPU tier: they can be found from now on, and are written to disk.
    fn stored(&mut self, now: Ticks, chunks: &Chunks) {
        self.staged -= chunks.count();
        touch(&mut self.cpu, chunks, 0);
        let writes = self.disk_room(chunks);
        let count = writes.count();
        self.counters.stores_ended += chunks.count() - count;
        if count > 0 {
            writes.ranges.iter().for_each(|range| self.cpu.lock(&writes.chain, range.clone()));
            let end = self.disk_write.submit(now, count, count * self.config.chunk_bytes);
            self.begin(end, Op::DiskWrite(writes));
        }
    }

    /// Those of the chunks that the disk lacks and has room for, marked as being written.
    fn disk_room(&mut self, chunks: &Chunks) -> Chunks {
        let evicts = self.config.policy.disk_evicts;
        let chain = &chunks.chain;
        let mut writes = Chunks { chain: chain.clone(), ranges: Vec::new() };
        let Some(disk) = &mut self.disk else { return writes };
        let Some(last) = chunks.ranges.last() else { return writes };
        let start = chunks.ranges[0].start;
        let mut held: Vec<bool> = disk.held.walk(chain, start..last.end).collect();
        // What makes room for one of these may be another of them; if there is none, all room is made at once.
        let singly = held.contains(&true);
        let wanted = chunks.positions().filter(|&at| !disk.writing.contains_key(&chain[at]));
        let wanted: Vec<usize> = wanted.collect();
        for (index, &at) in wanted.iter().enumerate() {
            if held[at - start] {
                continue;
            }
            if disk.room() == 0 && evicts {
                let count = if singly { 1 } else { (wanted.len() - index) as u64 };
                disk.drop_oldest(count, |gone| {
                    if singly && let Some(own) = chain[start..last.end].iter().position(|&key| key == gone) {
                        held[own] = false;
                    }
                });
            }
            if disk.room() == 0 {
                break;
            }
            disk.writing.insert(chain[at], ());
            writes.push(at);
        }
        writes
    }

    fn written(&mut self, chunks: &Chunks) {
        self.counters.stores_ended += chunks.count();
        unlock(&mut self.cpu, chunks);
        let odirect = self.config.odirect;
        let Some(disk) = &mut self.disk else { return };
        touch(&mut disk.held, chunks, 0);
        for key in chunks.keys() {
            disk.writing.remove(&key);
            if !odirect {
                disk.in_page_cache.insert(key, ());
            }
        }
    }
}

#[cfg(test)]
impl Tiers {
    /// Chunks held and being written: in the CPU tier, on disk.
    pub fn used(&self) -> (u64, u64) {
        let disk = self.disk.as_ref().map_or(0, |disk| disk.held.len() + disk.writing.len() as u64);
        (self.cpu.len() + self.staged, disk)
    }
}
