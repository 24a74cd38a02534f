//! Chunk tiers below the GPU: CPU memory and disk, with the rules of cache servers as data.
//!
//! Sans I/O: the tiers say which transfer ends when, and act when told that it ended (`io_done`). Chunk counts stand
//! for bytes throughout.

pub mod config;
pub mod device;
mod level;
mod lookup;
pub mod outbox;
mod placement;
pub mod server;
mod transfers;

use std::collections::VecDeque;
use std::ops::Range;

use crate::cache::Cache;
use crate::chunks::spans::{Span, marked};
use crate::chunks::{NONE, PromptCursor};
use crate::journal::{Journal, Note};
use crate::keys::{ChunkRange, Key, KeyMap};
use crate::time::{self, FOREVER, Ticks};
use config::TierConfig;
use device::{Device, SharedDevice};
use level::Disk;
use outbox::{Issued, Outbox};
use transfers::Transfers;
pub use transfers::{Begun, Ended, Hit, IoId, Slot};
use transfers::{Op, Prefetch, Read};

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
    disk_read: SharedDevice,
    disk_write: Device,
    page_cache_read: SharedDevice,
    transfers: Transfers,
    /// Look-ups that read from disk, and how many chunks.
    prefetching: u64,
    prefetching_chunks: u64,
    waiting_lookups: VecDeque<(Slot, ChunkRange)>,
    /// Chunks of hits that were read from disk past the CPU tier, and how often `release` will name them.
    in_place: KeyMap<u32>,
    tick_every: Ticks,
    /// The number of the next tick, and when it is due.
    next_tick: u128,
    tick_due: Ticks,
    /// A store found no room since the last eviction.
    short_of_room: bool,
    counters: TierCounters,
    /// Transfers begun since the engine last looked.
    begun: Vec<Begun>,
    /// Marks of transfers that have ended, kept for their memory only.
    spare: Vec<Vec<Span>>,
    outbox: Option<Outbox>,
    /// Numbers are a slot or a transfer's id, then keys. "tick": how many ticks, then the keys dropped. "answer": slot,
    /// then a flag for each chunk found: in the CPU tier or not.
    journal: Journal,
}

impl Tiers {
    pub fn new(config: TierConfig, journal: bool) -> Self {
        let ticks = config.policy.tick_s > 0.0 && !config.policy.evicts();
        let tick_every = if ticks { time::from_s(config.policy.tick_s) } else { 0 };
        Self {
            outbox: config.disk_chunks.filter(|_| config.external_disk).map(|_| Outbox::default()),
            cpu: config.cpu_tier(false, journal),
            disk: config.disk_tier(false),
            cpu_read: Device::new(&config.cpu_read),
            cpu_write: Device::new(&config.cpu_write),
            disk_read: SharedDevice::new(&config.disk_read),
            disk_write: Device::new(&config.disk_write),
            page_cache_read: SharedDevice::new(&config.page_cache_read),
            transfers: Transfers::default(),
            prefetching: 0,
            prefetching_chunks: 0,
            waiting_lookups: VecDeque::new(),
            in_place: KeyMap::default(),
            tick_every,
            next_tick: 1,
            tick_due: if tick_every > 0 { tick_every } else { FOREVER },
            short_of_room: false,
            counters: TierCounters::default(),
            begun: Vec::new(),
            spare: Vec::new(),
            journal: Journal::new(journal),
            config,
        }
    }

    pub fn counters(&self) -> TierCounters {
        self.counters
    }

    pub fn take_journal(&mut self) -> Vec<Note> {
        self.journal.take()
    }

    /// The caller has yet to answer an external transfer.
    pub fn awaits_external_io(&self) -> bool {
        self.outbox.as_ref().is_some_and(Outbox::awaits_answers)
    }

    pub fn name_owners(&mut self, owner: impl Fn(Slot) -> i64) {
        if let Some(outbox) = &mut self.outbox {
            outbox.name_owners(owner);
        }
    }

    pub fn take_issued(&mut self) -> Vec<Issued> {
        self.outbox.as_mut().map_or_else(Vec::new, Outbox::take_issued)
    }

    pub fn take_dropped(&mut self) -> Vec<Key> {
        self.outbox.as_mut().map_or_else(Vec::new, Outbox::take_dropped)
    }

    fn answer(&mut self, id: IoId, failed: Vec<Key>) -> bool {
        self.outbox.as_mut().is_some_and(|outbox| outbox.answer(id, failed))
    }

    pub fn idle(&self) -> bool {
        self.transfers.is_empty()
    }

    pub fn take_begun(&mut self) -> impl Iterator<Item = Begun> {
        self.begun.drain(..)
    }

    /// Runs the eviction ticks up to `now`. Use changes only at events, so ticks between two events can wait for the
    /// later one.
    pub fn tick(&mut self, now: Ticks) {
        if self.tick_due <= now {
            let first = self.next_tick;
            // Mostly one is due, and such divisions are dear.
            let last = if now - self.tick_due < self.tick_every { first } else { now / self.tick_every };
            let dropped = self.run_ticks(first, last, self.tick_every);
            self.next_tick = last + 1;
            self.tick_due = self.next_tick.saturating_mul(self.tick_every);
            self.journal.note("tick", || id_and((last - first + 1) as u64, &dropped));
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
            let went = self.cpu.drop_some(share);
            self.short_of_room &= went == 0;
            tick += 1;
            if went == 0 {
                // What nothing can be dropped from now stays so until the next event, or until a lease runs out.
                let Some(change) = self.cpu.next_change() else { break };
                tick = tick.max(change.div_ceil(every));
            }
            dropped.append(&mut self.cpu.gone);
        }
        dropped
    }

    fn clock(&mut self, now: Ticks) {
        self.cpu.clock(now);
        if let Some(disk) = &mut self.disk {
            disk.clock(now);
        }
    }

    pub fn lookup_polls(&self) -> u64 {
        self.config.policy.lookup_polls
    }

    /// GroupCounts to look for a prefix of a prompt's chunks. Some: the answer at once; None: `Ended::Lookup` brings it.
    pub fn lookup(&mut self, now: Ticks, slot: Slot, range: &ChunkRange) -> Option<Hit> {
        if range.is_empty() {
            return Some(Hit::default());
        }
        // Decode steps that were taken at once have passed ticks.
        self.tick(now);
        self.journal.note("lookup", || id_and(slot as u64, range.keys()));
        if self.disk.is_some() && self.prefetching >= self.config.policy.prefetches() {
            self.waiting_lookups.push_back((slot, range.clone()));
            return None;
        }
        self.start(now, slot, range)
    }

    /// Of how many leading keys of a prompt a chunk is held.
    pub fn held(&self, prompt: &[Key]) -> u64 {
        let (mut in_cpu, mut on_disk, mut number) = (PromptCursor::new(), PromptCursor::new(), 0);
        while number < prompt.len() {
            let place = self.cpu.find(&mut in_cpu, prompt, number);
            if self.cpu.holds(place.at) {
                number += place.len;
                continue;
            }
            let Some(disk) = &self.disk else { break };
            let place = disk.find(&mut on_disk, prompt, number);
            if !disk.holds(place.at) {
                break;
            }
            number += place.len;
        }
        number as u64
    }

    /// Exchanges the disk and what is in front of it with another server.
    pub fn swap_disk(&mut self, other: &mut Self) {
        std::mem::swap(&mut self.disk, &mut other.disk);
        std::mem::swap(&mut self.disk_read, &mut other.disk_read);
        std::mem::swap(&mut self.disk_write, &mut other.disk_write);
        std::mem::swap(&mut self.page_cache_read, &mut other.page_cache_read);
    }

    /// GroupCounts to copy a hit's chunks from `first` on to the GPU; those before are not needed. `Ended::Load` follows at
    /// the moment returned.
    pub fn load(&mut self, now: Ticks, slot: Slot, mut hit: Hit, first: usize) -> Ticks {
        let first = first.min(hit.range.len());
        let first = self.divide(&mut hit, first, true);
        self.release_first(&hit, first);
        hit.skip(first);
        let count = hit.chunks();
        let end = self.cpu_read.submit(now, count, count * self.config.chunk_bytes);
        self.begin(end, Op::Load { slot, hit });
        end
    }

    /// Unlocks chunks of a hit that are not needed any more.
    pub fn release(&mut self, hit: &Hit) {
        self.release_first(hit, hit.spans.len());
    }

    /// Unlocks the first so many spans.
    fn release_first(&mut self, hit: &Hit, spans: usize) {
        let Some((last, _)) = spans.checked_sub(1).and_then(|last| hit.ranges().nth(last)) else { return };
        self.journal.note("release", || hit.range.keys()[..last.end].to_vec());
        if self.in_place.is_empty() && hit.spans[..spans].iter().all(|span| span.at != NONE) {
            return self.cpu.unlock(hit.spans[..spans].iter().copied());
        }
        for ((chunks, _), &span) in hit.ranges().zip(&hit.spans[..spans]) {
            self.unlock_one_by_one(hit, chunks, span);
        }
    }

    /// A request has ended: its prompt's chunks were used, wherever they came from.
    pub fn end(&mut self, range: &ChunkRange) {
        if !range.is_empty() && self.config.policy.end_uses {
            self.journal.note("touch", || range.keys().to_vec());
            self.cpu.touch(range);
        }
    }

    /// Acts on the end of a transfer. An unknown id changes nothing.
    pub fn io_done(&mut self, now: Ticks, id: IoId) -> Ended {
        match self.transfers.take(id) {
            Some(Op::Load { slot, hit }) => {
                self.release(&hit);
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
            Some(Op::Store { slot, range, marks, spilled }) => {
                self.stored(now, id, slot, &range, marks);
                self.spill(now, slot, &range, spilled).unwrap_or(Ended::Store(slot))
            }
            Some(Op::Spill { slot, mut marks }) => {
                self.written(id, &mut marks, true);
                Ended::Store(slot)
            }
            Some(Op::DiskWrite { cpu, mut disk, stores }) => {
                self.journal.note("written", || vec![id]);
                self.cpu.unlock(marked(&cpu));
                self.written(id, &mut disk, stores);
                self.put_back(cpu);
                self.put_back(disk);
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
        self.transfers.get(id).is_some_and(Op::is_quiet)
    }

    /// Marks to be filled.
    fn fresh_marks(&mut self) -> Vec<Span> {
        self.spare.pop().unwrap_or_default()
    }

    fn put_back(&mut self, mut marks: Vec<Span>) {
        if marks.capacity() > 0 {
            marks.clear();
            self.spare.push(marks);
        }
    }

    fn begin(&mut self, end: Ticks, op: Op) {
        self.begun.push(Begun { end, id: self.transfers.next_id(), quiet: op.is_quiet() });
        self.transfers.begin(op);
    }

    /// Unlocks a span of a hit, chunks of which may have been read past the CPU tier.
    fn unlock_one_by_one(&mut self, hit: &Hit, chunks: Range<usize>, mut span: Span) {
        for index in chunks {
            let one = match span.len {
                1 => span,
                _ => {
                    let rest = self.cpu.split_span(&mut span, 1);
                    std::mem::replace(&mut span, rest)
                }
            };
            if self.release_in_place(hit.range.keys()[index]) {
                continue;
            }
            let number = hit.range.first() + index;
            let at = match one.at {
                NONE => {
                    let place = self.cpu.find(&mut PromptCursor::new(), hit.range.prompt(), number);
                    if place.at == NONE { NONE } else { self.cpu.cut(place, 1) }
                }
                at => at,
            };
            self.cpu.unlock(marked(&[Span { at, len: 1 }]));
        }
    }

    /// Lets go of a chunk that was read past the CPU tier. False: it was not.
    fn release_in_place(&mut self, key: Key) -> bool {
        match self.in_place.get_mut(&key) {
            Some(1) => self.in_place.remove(&key).is_some(),
            Some(times) => {
                *times -= 1;
                true
            }
            None => false,
        }
    }
}

/// The numbers of a note: an id, and what belongs to it.
fn id_and(id: u64, rest: &[u64]) -> Vec<u64> {
    [&[id], rest].concat()
}

#[cfg(test)]
impl Tiers {
    /// As they are when callers name chunks without their prompts.
    pub fn loose(mut self) -> Self {
        (self.cpu, self.disk) = (self.config.cpu_tier(true, true), self.config.disk_tier(true));
        self
    }

    /// Chunks held and being written: in the CPU tier, on disk.
    pub fn used(&self) -> (u64, u64) {
        (self.cpu.used(), self.disk.as_ref().map_or(0, Disk::used))
    }

    /// No tier holds more than it has room for.
    pub fn check_capacities(&self) {
        let (cpu, disk) = self.used();
        assert!(cpu <= self.config.cpu_chunks && disk <= self.config.disk_chunks.unwrap_or(0));
    }

    /// The CPU tier holds this chunk; the disk does.
    pub fn holds(&self, key: Key) -> (bool, bool) {
        (self.cpu.contains(key), self.disk.as_ref().is_some_and(|disk| disk.contains(key)))
    }

    /// What must hold at any moment, for `hits` that were answered and neither loaded nor released.
    pub fn check(&self, hits: &[&Hit]) {
        self.cpu.check();
        self.disk.iter().for_each(Disk::check);
        if let (Some(outbox), Some(disk)) = (&self.outbox, &self.disk) {
            outbox.check(&disk.all_keys(), self.config.disk_chunks.unwrap_or(0));
        }
        let mut pins: KeyMap<u32> = KeyMap::default();
        let mut pin = |keys: &[Key]| keys.iter().for_each(|&key| *pins.entry(key).or_default() += 1);
        let keys = |spans: &mut dyn Iterator<Item = Span>| {
            spans.flat_map(|span| self.cpu.keys(span)).collect::<Vec<_>>()
        };
        hits.iter().for_each(|hit| pin(hit.range.keys()));
        for op in self.transfers.iter() {
            match op {
                Op::Load { hit, .. } | Op::Answer { hit, .. } => pin(hit.range.keys()),
                Op::DiskWrite { cpu, .. } => pin(&keys(&mut marked(cpu))),
                Op::Prefetch(prefetch, _) => pin(&keys(&mut prefetch.hit.spans_where(true))),
                Op::Store { .. } | Op::Spill { .. } | Op::Rest(_) => {}
            }
        }
        let held = |key: &Key| self.cpu.readers(*key) + self.in_place.get(key).copied().unwrap_or(0);
        pins.iter().for_each(|(key, &times)| assert_eq!(held(key), times, "pins of {key:x}"));
    }

    /// Held or being written, in order.
    pub fn keys_on_disk(&self) -> Vec<Key> {
        let mut keys = self.disk.as_ref().map_or_else(Vec::new, Disk::all_keys);
        keys.sort_unstable();
        keys
    }

    pub fn check_idle(&self) {
        self.check(&[]);
        self.cpu.check_idle();
        self.disk.iter().for_each(Disk::check_idle);
        self.outbox.iter().for_each(Outbox::check_idle);
        assert_eq!((self.prefetching, self.prefetching_chunks, self.in_place.len()), (0, 0, 0));
        assert!(self.waiting_lookups.is_empty());
        assert_eq!(self.counters.stores_begun, self.counters.stores_ended);
    }
}
