//! Chunk tiers below the GPU: CPU memory and disk, with the rules of cache servers as data.
//!
//! Sans I/O: the tiers say which transfer ends when, and act when told that it ended (`io_done`). Chunk counts stand
//! for bytes throughout.

use std::collections::VecDeque;
use std::ops::Range;

use crate::cache::Cache;
use crate::chunks::{NONE, Walk};
use crate::device::{Device, SharedDevice};
use crate::disk::Disk;
use crate::external::Outbox;
use crate::journal::Journal;
use crate::keys::{Key, KeyMap, Part};
use crate::pieces::{Piece, marked};
use crate::tier_config::TierConfig;
use crate::time::{self, FOREVER, Ticks};
use crate::transfers::Transfers;
pub(crate) use crate::transfers::{Begun, Ended, Hit, IoId, Op, Prefetch, Read, Slot};

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
    pub(crate) transfers: Transfers,
    /// Look-ups that read from disk, and how many chunks.
    pub(crate) prefetching: u64,
    pub(crate) prefetching_chunks: u64,
    pub(crate) waiting_lookups: VecDeque<(Slot, Part)>,
    /// Chunks of hits that were read from disk past the CPU tier, and how often `release` will name them.
    pub(crate) passing: KeyMap<u32>,
    tick_every: Ticks,
    /// The number of the next tick, and when it is due.
    next_tick: u128,
    tick_due: Ticks,
    /// A store found no room since the last eviction.
    pub(crate) short_of_room: bool,
    pub(crate) counters: TierCounters,
    /// Transfers begun since the engine last looked.
    begun: Vec<Begun>,
    /// Marks of transfers that have ended, kept for their memory only.
    spare: Vec<Vec<Piece>>,
    pub outbox: Option<Outbox>,
    /// Numbers are a slot or a transfer's id, then keys. "tick": how many ticks, then the keys dropped. "answer": slot,
    /// then a flag for each chunk found: in the CPU tier or not.
    pub journal: Journal,
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
            passing: KeyMap::default(),
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

    /// Begins to look for a prefix of a prompt's chunks. Some: the answer at once; None: `Ended::Lookup` brings it.
    pub fn lookup(&mut self, now: Ticks, slot: Slot, part: &Part) -> Option<Hit> {
        if part.is_empty() {
            return Some(Hit::default());
        }
        // Decode steps that were taken at once have passed ticks.
        self.tick(now);
        self.journal.note("lookup", || with(slot as u64, part.keys()));
        if self.disk.is_some() && self.prefetching >= self.config.policy.prefetches() {
            self.waiting_lookups.push_back((slot, part.clone()));
            return None;
        }
        self.start(now, slot, part)
    }

    /// Of how many leading keys of a prompt a chunk is held.
    pub fn held(&self, prompt: &[Key]) -> u64 {
        let (mut in_cpu, mut on_disk, mut number) = (Walk::new(), Walk::new(), 0);
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

    /// Begins to copy a hit's chunks from `first` on to the GPU; those before are not needed. `Ended::Load` follows at
    /// the moment returned.
    pub fn load(&mut self, now: Ticks, slot: Slot, mut hit: Hit, first: usize) -> Ticks {
        let first = first.min(hit.part.len());
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
        self.release_first(hit, hit.pieces.len());
    }

    /// Unlocks the first so many pieces.
    fn release_first(&mut self, hit: &Hit, pieces: usize) {
        let Some((last, _)) = pieces.checked_sub(1).and_then(|last| hit.ranges().nth(last)) else { return };
        self.journal.note("release", || hit.part.keys()[..last.end].to_vec());
        if self.passing.is_empty() && hit.pieces[..pieces].iter().all(|piece| piece.at != NONE) {
            return self.cpu.unlock(hit.pieces[..pieces].iter().copied());
        }
        for ((chunks, _), &piece) in hit.ranges().zip(&hit.pieces[..pieces]) {
            self.unlock_one_by_one(hit, chunks, piece);
        }
    }

    /// A request has ended: its prompt's chunks were used, wherever they came from.
    pub fn end(&mut self, part: &Part) {
        if !part.is_empty() && self.config.policy.end_uses {
            self.journal.note("touch", || part.keys().to_vec());
            self.cpu.touch(part);
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
            Some(Op::Store { slot, part, marks, spilled }) => {
                self.stored(now, id, slot, &part, marks);
                self.spill(now, slot, &part, spilled).unwrap_or(Ended::Store(slot))
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
    pub(crate) fn fresh_marks(&mut self) -> Vec<Piece> {
        self.spare.pop().unwrap_or_default()
    }

    pub(crate) fn put_back(&mut self, mut marks: Vec<Piece>) {
        if marks.capacity() > 0 {
            marks.clear();
            self.spare.push(marks);
        }
    }

    pub(crate) fn begin(&mut self, end: Ticks, op: Op) {
        self.begun.push(Begun { end, id: self.transfers.next_id(), quiet: op.is_quiet() });
        self.transfers.begin(op);
    }

    /// Unlocks a piece of a hit, chunks of which may have been read past the CPU tier.
    fn unlock_one_by_one(&mut self, hit: &Hit, chunks: Range<usize>, mut piece: Piece) {
        for index in chunks {
            let one = match piece.len {
                1 => piece,
                _ => {
                    let rest = self.cpu.divide_piece(&mut piece, 1);
                    std::mem::replace(&mut piece, rest)
                }
            };
            if self.pass(hit.part.keys()[index]) {
                continue;
            }
            let number = hit.part.first() + index;
            let at = match one.at {
                NONE => {
                    let place = self.cpu.find(&mut Walk::new(), hit.part.prompt(), number);
                    if place.at == NONE { NONE } else { self.cpu.cut(place, 1) }
                }
                at => at,
            };
            self.cpu.unlock(marked(&[Piece { at, len: 1 }]));
        }
    }

    /// Lets go of a chunk that was read past the CPU tier. False: it was not.
    fn pass(&mut self, key: Key) -> bool {
        match self.passing.get_mut(&key) {
            Some(1) => self.passing.remove(&key).is_some(),
            Some(times) => {
                *times -= 1;
                true
            }
            None => false,
        }
    }
}

/// The numbers of a note: an id, and what belongs to it.
pub(crate) fn with(id: u64, rest: &[u64]) -> Vec<u64> {
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

    /// What must hold at any moment, for `hits` that were answered and neither loaded nor released.
    pub fn check(&self, hits: &[&Hit]) {
        self.cpu.check();
        self.disk.iter().for_each(Disk::check);
        if let (Some(outbox), Some(disk)) = (&self.outbox, &self.disk) {
            outbox.check(&disk.all_keys(), self.config.disk_chunks.unwrap_or(0));
        }
        let mut pins: KeyMap<u32> = KeyMap::default();
        let mut pin = |keys: &[Key]| keys.iter().for_each(|&key| *pins.entry(key).or_default() += 1);
        let keys = |pieces: &mut dyn Iterator<Item = Piece>| {
            pieces.flat_map(|piece| self.cpu.keys(piece)).collect::<Vec<_>>()
        };
        hits.iter().for_each(|hit| pin(hit.part.keys()));
        for op in self.transfers.iter() {
            match op {
                Op::Load { hit, .. } | Op::Answer { hit, .. } => pin(hit.part.keys()),
                Op::DiskWrite { cpu, .. } => pin(&keys(&mut marked(cpu))),
                Op::Prefetch(prefetch, _) => pin(&keys(&mut prefetch.hit.pieces_where(true))),
                Op::Store { .. } | Op::Spill { .. } | Op::Rest(_) => {}
            }
        }
        let held = |key: &Key| self.cpu.readers(*key) + self.passing.get(key).copied().unwrap_or(0);
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
        assert_eq!((self.prefetching, self.prefetching_chunks, self.passing.len()), (0, 0, 0));
        assert!(self.waiting_lookups.is_empty());
        assert_eq!(self.counters.stores_begun, self.counters.stores_ended);
    }
}
