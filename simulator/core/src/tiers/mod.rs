//! Chunk tiers below the GPU: a list of levels, with the rules of cache servers as data.
//!
//! The GPU loads from the first level and stores to it. Chunks that only a lower level holds come up through the first
//! one; stores go down to the lower levels as the placement says. Sans I/O: the tiers say which transfer ends when, and
//! act on its end (`io_done`). Chunk counts stand for bytes throughout.

mod ahead;
pub mod config;
pub mod device;
mod level;
mod lookup;
pub mod outbox;
mod placement;
mod reader;
mod remote;
pub mod server;
mod ticker;
mod ticks;
mod transfers;
mod workers;

#[cfg(test)]
mod check;

use std::collections::VecDeque;
use std::ops::Range;

use crate::cache::Cache;
use crate::chunks::spans::{Span, marked};
use crate::chunks::{NONE, PromptCursor};
use crate::journal::{Journal, Note};
use crate::keys::{ChunkRange, Key, KeyMap};
use crate::time::{self, FOREVER, Ticks};
use config::{MOST_LEVELS, Placement, TierConfig};
use device::Device;
use level::Level;
use lookup::Wanted;
use outbox::{Issued, Outbox};
use ticker::Ticker;
use transfers::{Asked, Op, Transfers};
pub use transfers::{Begun, Ended, Hit, IoId, ReadAhead, Slot};

/// A server that instances share knows a request by its slot and, from this bit on, by its instance.
pub const INSTANCE_BIT: u32 = 32;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LevelCounters {
    /// Chunks that look-ups found here first.
    pub hit_chunks: u64,
    /// Of those, chunks that the tiers read into the first level; 0 there.
    pub loaded_chunks: u64,
    /// Read from the level's device; a read that the page cache answers adds none.
    pub read_bytes: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierCounters {
    pub levels: [LevelCounters; MOST_LEVELS],
    /// Chunks. A store ends when the chunk is in every level that takes it.
    pub stores_begun: u64,
    pub stores_ended: u64,
}

impl TierCounters {
    pub fn plus(mut self, other: Self) -> Self {
        for (own, others) in self.levels.iter_mut().zip(other.levels) {
            own.hit_chunks += others.hit_chunks;
            own.loaded_chunks += others.loaded_chunks;
            own.read_bytes += others.read_bytes;
        }
        self.stores_begun += other.stores_begun;
        self.stores_ended += other.stores_ended;
        self
    }
}

#[derive(Debug)]
pub struct Tiers {
    config: TierConfig,
    first: Cache,
    first_read: Device,
    first_write: Device,
    /// The levels below the first one.
    lower: Vec<Level>,
    transfers: Transfers,
    /// Which client of lower levels that instances share these tiers are.
    instance: usize,
    /// Look-ups that read from lower levels, and how many chunks.
    prefetching: u64,
    prefetching_chunks: u64,
    waiting_lookups: VecDeque<Asked>,
    /// Reads ahead that wait for others to end, with the room in the first level that they have taken.
    waiting_reads: VecDeque<(Wanted, Hit, Vec<Span>)>,
    /// Chunks of hits that the tiers read past the first level, and how often `release` will name them.
    in_place: KeyMap<u32>,
    /// The first level's ticks, and when the next one is due that lets chunks fall or concerns a lower level.
    ticker: Ticker,
    lower_due: Ticks,
    /// Some level's eviction depends on the time.
    leases: bool,
    counters: TierCounters,
    /// Transfers begun since the engine last looked.
    begun: Vec<Begun>,
    /// Scratch memory: marks of transfers that have ended.
    spare: Vec<Vec<Span>>,
    /// The transfers of an external level.
    outbox: Option<Outbox>,
    /// Numbers are a slot or a transfer's id, then keys. "tick": how many ticks, then the keys dropped. "answer": slot,
    /// then a flag for each chunk found: in the first level or not.
    journal: Journal,
}

impl Tiers {
    pub fn new(config: TierConfig, journal: bool) -> Self {
        let external = config.levels.iter().any(|level| level.external);
        let mut tiers = Self {
            outbox: external.then(Outbox::default),
            first: first_cache(&config, false, journal),
            first_read: Device::new(&config.levels[0].read),
            first_write: Device::new(&config.levels[0].write),
            lower_due: FOREVER,
            leases: config.levels.iter().any(|level| level.eviction.leases()),
            lower: lower_levels(&config, false),
            transfers: Transfers::default(),
            instance: 0,
            prefetching: 0,
            prefetching_chunks: 0,
            waiting_lookups: VecDeque::new(),
            waiting_reads: VecDeque::new(),
            in_place: KeyMap::default(),
            ticker: Ticker::new(config.policy.ticks().as_ref()),
            counters: TierCounters::default(),
            begun: Vec::new(),
            spare: Vec::new(),
            journal: Journal::new(journal),
            config,
        };
        tiers.lower_due = tiers.next_due();
        tiers
    }

    pub fn set_instance(&mut self, instance: usize) {
        self.instance = instance;
    }

    pub fn counters(&self) -> TierCounters {
        self.counters
    }

    pub fn take_journal(&mut self) -> Vec<Note> {
        self.journal.take()
    }

    pub fn idle(&self) -> bool {
        self.transfers.is_empty()
    }

    pub fn take_begun(&mut self) -> impl Iterator<Item = Begun> {
        self.begun.drain(..)
    }

    /// Runs the eviction ticks up to `now`.
    pub fn tick(&mut self, now: Ticks) {
        while self.tick_some(now) {}
    }

    /// The same, up to one that begins transfers. True: others are due.
    pub fn tick_some(&mut self, now: Ticks) -> bool {
        if self.ticker.due <= now && self.config.offloads(0) {
            self.tick_offloading(now, 0);
            self.lower_due = self.next_due();
        } else if self.ticker.due <= now {
            let falls = self.lower.first().is_some_and(Level::takes_dropped);
            let (ticks, dropped) = self.ticker.run(now, &mut self.first, falls);
            self.journal.note("tick", || id_and(ticks, &all_keys(&dropped)));
            if falls {
                dropped.into_iter().for_each(|(at, keys)| self.demote(at, 0, keys, 0));
                self.lower_due = self.next_due();
            }
        }
        if self.lower_due <= now {
            self.tick_lower(now);
        }
        let more = self.ticker.due <= now || self.lower_due <= now;
        if self.leases && !more {
            self.first.clock(now);
            self.lower.iter_mut().for_each(|level| level.clock(now));
        }
        more
    }

    /// Begins to look for a prefix of a prompt's chunks. Some: the answer at once; None: `Ended::Lookup` brings it.
    pub fn lookup(&mut self, now: Ticks, slot: Slot, range: &ChunkRange) -> Option<Hit> {
        if range.is_empty() {
            return Some(Hit::default());
        }
        // Decode steps that the engine took at once have passed ticks.
        self.tick(now);
        self.journal.note("lookup", || id_and(slot as u64, range.keys()));
        if !self.lower.is_empty() && self.prefetching >= self.config.policy.prefetches() {
            self.waiting_lookups.push_back(Asked { slot, range: range.clone(), at: now });
            return None;
        }
        self.start(now, (slot, range), now)
    }

    /// How many leading chunks of a prompt the levels hold together.
    pub fn held(&self, prompt: &[Key]) -> u64 {
        let mut first_cursor = PromptCursor::new();
        let (mut cursors, mut number) = ([PromptCursor::new(); MOST_LEVELS], 0);
        while number < prompt.len() {
            let found = self.first.find(&mut first_cursor, prompt, number);
            if self.first.holds(found.at) {
                number += found.len;
                continue;
            }
            let Some((_, found)) = self.find_lower(&mut cursors, prompt, number) else { break };
            number += found.len;
        }
        number as u64
    }

    /// Exchanges the levels below the private ones with those of another server.
    pub fn swap_lower(&mut self, other: &mut Self) {
        if self.config.private_levels <= 1 {
            std::mem::swap(&mut self.lower, &mut other.lower);
            return std::mem::swap(&mut self.lower_due, &mut other.lower_due);
        }
        let private = self.config.private_levels - 1;
        self.lower[private..].swap_with_slice(&mut other.lower[private..]);
        for tiers in [self, other] {
            tiers.lower_due = tiers.next_due();
        }
    }

    /// Begins to copy a hit's chunks from number `first` on to the GPU, and unlocks those before. `Ended::Load` follows
    /// at the moment returned.
    pub fn load(&mut self, now: Ticks, slot: Slot, mut hit: Hit, first: usize) -> Ticks {
        let first = first.min(hit.range.len());
        let first = self.divide(&mut hit, first, true);
        self.release_first(&hit, first);
        hit.skip(first);
        let count = hit.chunks();
        let end = self.first_read.submit(now, slot >> INSTANCE_BIT, count, count * self.config.chunk_bytes);
        self.begin(end, Op::Load { slot, hit });
        end
    }

    /// Unlocks the chunks of a hit that the engine does not need any more.
    pub fn release(&mut self, hit: &Hit) {
        self.release_first(hit, hit.spans.len());
    }

    /// Unlocks the first so many spans.
    fn release_first(&mut self, hit: &Hit, spans: usize) {
        let Some((last, _)) = spans.checked_sub(1).and_then(|last| hit.ranges().nth(last)) else { return };
        self.journal.note("release", || hit.range.keys()[..last.end].to_vec());
        if self.in_place.is_empty() && hit.spans[..spans].iter().all(|span| span.at != NONE) {
            return self.first.unlock(hit.spans[..spans].iter().copied());
        }
        for ((chunks, _), &span) in hit.ranges().zip(&hit.spans[..spans]) {
            self.unlock_one_by_one(hit, chunks, span);
        }
    }

    /// Uses a prompt's chunks, those that the first level knows.
    pub fn touch(&mut self, range: &ChunkRange) {
        self.first.touch(range);
    }

    /// A request has ended: it used its prompt's chunks, wherever they came from.
    pub fn end(&mut self, range: &ChunkRange) {
        if !range.is_empty() && self.config.policy.end_uses {
            self.journal.note("touch", || range.keys().to_vec());
            self.first.touch(range);
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
            Some(Op::Spill { slot, lower, mut marks }) => {
                self.written(id, lower, &mut marks, true);
                Ended::Store(slot)
            }
            Some(Op::WriteDown(write)) => {
                self.written_down(now, id, write);
                Ended::Nothing
            }
            None => Ended::Nothing,
        }
    }

    /// Empties the levels of these names. A name that no level has changes nothing.
    pub fn reset(&mut self, names: &[&str]) {
        let named = |level: usize| names.contains(&self.config.levels[level].name.as_str());
        if named(0) {
            self.first.clear();
        }
        for index in 0..self.lower.len() {
            if named(index + 1) {
                self.lower[index].reset();
                if let Some(outbox) = &mut self.outbox {
                    outbox.drop_all();
                }
            }
        }
    }

    /// Forgets what the page cache holds of all levels.
    pub fn reset_page_cache(&mut self) {
        self.lower.iter_mut().for_each(Level::reset_page_cache);
    }

    pub fn lower_tick_is_due(&self, now: Ticks) -> bool {
        self.lower_due <= now
    }

    /// No request waits for this transfer.
    pub fn is_quiet(&self, id: IoId) -> bool {
        self.transfers.get(id).is_some_and(Op::is_quiet)
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

    /// False: no such transfer is pending.
    fn answer(&mut self, id: IoId, failed: Vec<Key>) -> bool {
        self.outbox.as_mut().is_some_and(|outbox| outbox.answer(id, failed))
    }

    /// Empty memory for marks.
    fn fresh_marks(&mut self) -> Vec<Span> {
        self.spare.pop().unwrap_or_default()
    }

    fn put_back(&mut self, mut marks: Vec<Span>) {
        if marks.capacity() > 0 {
            marks.clear();
            self.spare.push(marks);
        }
    }

    #[inline(always)]
    fn begin(&mut self, end: Ticks, op: Op) {
        self.begun.push(Begun { end, id: self.transfers.next_id(), quiet: op.is_quiet() });
        self.transfers.begin(op);
    }

    /// Unlocks a span of a hit, chunks of which the tiers may have read past the first level.
    fn unlock_one_by_one(&mut self, hit: &Hit, chunks: Range<usize>, mut span: Span) {
        for index in chunks {
            let one = match span.len {
                1 => span,
                _ => {
                    let rest = self.first.split_span(&mut span, 1);
                    std::mem::replace(&mut span, rest)
                }
            };
            if self.release_in_place(hit.range.keys()[index]) {
                continue;
            }
            let number = hit.range.first() + index;
            let at = match one.at {
                NONE => {
                    let found = self.first.find(&mut PromptCursor::new(), hit.range.prompt(), number);
                    if found.at == NONE { NONE } else { self.first.cut(found, 1) }
                }
                at => at,
            };
            self.first.unlock(marked(&[Span { at, len: 1 }]));
        }
    }

    /// Releases a chunk that the tiers read past the first level. False: they did not.
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

/// `loose`: callers name chunks without the prompt that they belong to.
fn first_cache(config: &TierConfig, loose: bool, journal: bool) -> Cache {
    let (level, policy, loose) = (&config.levels[0], &config.policy, loose || config.offloads(0));
    let falls = config.levels.get(1).is_some_and(|below| below.takes_dropped);
    let notes_gone = journal || falls || policy.placement == Placement::Waterfall;
    Cache::new(level.chunks, level.eviction, time::from_s(level.lease_s), loose, notes_gone)
}

fn lower_levels(config: &TierConfig, loose: bool) -> Vec<Level> {
    let numbered = config.levels.iter().enumerate().skip(1);
    numbered.map(|(number, level)| Level::new(level, config, loose || config.offloads(number))).collect()
}

/// The keys that went, tick by tick.
fn all_keys(dropped: &[(Ticks, Vec<Key>)]) -> Vec<Key> {
    dropped.iter().flat_map(|(_, keys)| keys.iter().copied()).collect()
}

/// The numbers of a note: an id, and what belongs to it.
fn id_and(id: u64, rest: &[u64]) -> Vec<u64> {
    [&[id], rest].concat()
}
