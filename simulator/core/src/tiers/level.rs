//! One level below the first: what it holds, what of that the page cache holds too, and its devices.

use std::collections::VecDeque;

use super::config::{LevelConfig, Placement, TierConfig};
use super::device::Device;
use super::reader::Reader;
use super::ticker::Ticker;
use crate::cache::Cache;
use crate::chunks::spans::{Span, count, marked, push_span};
use crate::chunks::{ExtentId, Found, NEW, NONE, PromptCursor};
use crate::eviction::kind::EvictionKind;
use crate::keys::{ChunkRange, Key, KeyMap};
use crate::time::{self, Ticks};

#[derive(Clone, Copy, Debug)]
struct Rules {
    chunks: u64,
    eviction: EvictionKind,
    lease: Ticks,
    evicts: bool,
    /// A write beyond the first count of chunks empties the level down to the second one, if it evicts.
    watermark: u64,
    target: u64,
    /// Callers name chunks without the prompt that they belong to.
    loose: bool,
    has_page_cache: bool,
    /// Others ask which keys went.
    notes_gone: bool,
    takes_dropped: bool,
    writes_use: bool,
    exclusive: bool,
    promotes: bool,
    buffer: u64,
}

impl Rules {
    fn held(&self) -> Cache {
        let notes_gone = self.has_page_cache || self.loose || self.notes_gone;
        Cache::new(self.chunks, self.eviction, self.lease, self.loose, notes_gone)
    }
}

#[derive(Debug)]
pub struct Level {
    rules: Rules,
    held: Cache,
    in_page_cache: KeyMap<()>,
    read: Reader,
    write: Device,
    /// None: reads bypass the page cache.
    page_cache_read: Option<Reader>,
    pub ticker: Ticker,
    /// Chunks that look-ups find already while the device still writes them, and when it will have written them.
    buffered: u64,
    flushes: VecDeque<(Ticks, u64)>,
    /// Scratch memory.
    lacking: Vec<Span>,
}

impl Level {
    pub fn new(config: &LevelConfig, tiers: &TierConfig, loose: bool) -> Self {
        let share = |share: f64| (share * config.chunks as f64) as u64;
        // Chunks that fall down a waterfall, and slots of a real device, are single chunks.
        let falls = tiers.policy.placement == Placement::Waterfall || config.takes_dropped;
        let single = config.external || falls || config.exclusive;
        let rules = Rules {
            chunks: config.chunks,
            eviction: config.eviction,
            lease: time::from_s(config.lease_s),
            evicts: config.evicts,
            watermark: share(config.watermark),
            target: share(config.target),
            loose: loose || single,
            has_page_cache: config.page_cache_read.is_some(),
            notes_gone: falls
                || config.ticks.is_some()
                || tiers.levels.iter().any(|level| level.takes_dropped),
            takes_dropped: config.takes_dropped,
            writes_use: config.writes_use,
            exclusive: config.exclusive,
            promotes: config.promotes,
            buffer: config.buffer_chunks,
        };
        Self {
            held: rules.held(),
            rules,
            in_page_cache: KeyMap::default(),
            read: Reader::new(&config.read),
            write: Device::new(&config.write),
            page_cache_read: config.page_cache_read.as_ref().map(Reader::new),
            ticker: Ticker::new(config.ticks.as_ref()),
            buffered: 0,
            flushes: VecDeque::new(),
            lacking: Vec::new(),
        }
    }

    pub fn clock(&mut self, now: Ticks) {
        self.held.clock(now);
    }

    /// Where the level holds the chunk of that number of a prompt, or has reserved room for it.
    #[inline(always)]
    pub fn find(&self, cursor: &mut PromptCursor, prompt: &[Key], number: usize) -> Found {
        self.held.find(cursor, prompt, number)
    }

    /// As `Cache::alike`.
    #[inline(always)]
    pub fn alike(
        &self,
        cursor: &mut PromptCursor,
        prompt: &[Key],
        number: usize,
        found: Found,
        most: usize,
    ) -> usize {
        self.held.alike(cursor, prompt, number, found, most)
    }

    /// Makes an extent of the first chunks of what `find` found, `most` at most.
    pub fn cut(&mut self, found: Found, most: usize) -> ExtentId {
        self.held.cut(found, most)
    }

    /// Leaves the first `len` chunks to a span that has more, and returns the span of the others.
    pub fn split_span(&mut self, span: &mut Span, len: usize) -> Span {
        self.held.split_span(span, len)
    }

    pub fn holds(&self, at: ExtentId) -> bool {
        self.held.holds(at)
    }

    /// The level holds the chunk, or a store is writing it.
    pub fn has(&self, at: ExtentId) -> bool {
        self.held.has(at)
    }

    pub fn takes_dropped(&self) -> bool {
        self.rules.takes_dropped
    }

    pub fn promotes(&self) -> bool {
        self.rules.promotes
    }

    /// Runs the ticks that are due. Returns how many there were, and the keys that went at each.
    pub fn run_ticks(&mut self, now: Ticks, falls: bool) -> (u64, Vec<(Ticks, Vec<Key>)>) {
        self.held.clear_gone();
        let (ticks, dropped) = self.ticker.run(now, &mut self.held, falls);
        dropped.iter().flat_map(|(_, keys)| keys).for_each(|key| _ = self.in_page_cache.remove(key));
        (ticks, dropped)
    }

    /// The same, by another way of dropping (`Ticker::run_with`); the caller has the keys that went leave the page cache.
    pub fn run_ticks_with(
        &mut self,
        now: Ticks,
        drops: impl FnMut(&mut Cache, Ticks, u64) -> (u64, bool),
    ) -> u64 {
        self.held.clear_gone();
        self.ticker.run_with(now, &mut self.held, drops)
    }

    pub fn leave_page_cache(&mut self, gone: &[Key]) {
        gone.iter().for_each(|key| _ = self.in_page_cache.remove(key));
    }

    pub fn end_offload(&mut self, spans: &[Span], written: bool) {
        self.held.end_offload(spans, written);
    }

    /// Makes chunks findable whose write has begun and ends at `end`, if the buffer has room for them.
    pub fn buffers(&mut self, now: Ticks, end: Ticks, count: u64, marks: &mut Vec<Span>) -> bool {
        while let Some((_, flushed)) = self.flushes.pop_front_if(|(at, _)| *at <= now) {
            self.buffered -= flushed;
        }
        if self.buffered + count > self.rules.buffer {
            return false;
        }
        self.buffered += count;
        self.flushes.push_back((end, count));
        self.end_write(marks);
        true
    }

    pub fn exclusive(&self) -> bool {
        self.rules.exclusive
    }

    /// Drops those of these chunks that are neither read nor written.
    pub fn drop_chunks(&mut self, keys: &[Key]) {
        for key in self.held.drop_settled(keys) {
            self.in_page_cache.remove(&key);
        }
    }

    pub fn reset(&mut self) {
        self.held = self.rules.held();
        self.in_page_cache = KeyMap::default();
        self.flushes.clear();
        self.buffered = 0;
    }

    pub fn reset_page_cache(&mut self) {
        self.in_page_cache.clear();
    }

    /// Marks those of the marked chunks of a range that the level lacks and has room for, as being written. Returns
    /// their number.
    pub fn begin_write(&mut self, range: &ChunkRange, marks: &mut Vec<Span>) -> u64 {
        let evicts = self.rules.evicts;
        self.held.clear_gone();
        if !evicts && self.held.room(false) == 0 {
            self.ticker.short_of_room = true;
            marks.clear();
            return 0;
        }
        // Most stores write nothing past the first level. A level beyond its watermark empties all the same.
        if marks.is_empty() && !(evicts && self.held.used() > self.rules.watermark) {
            return 0;
        }
        self.mark_lacking(range, marks);
        let mut count = count(marks);
        if evicts && self.held.used() + count > self.rules.watermark {
            self.held.shrink(self.rules.target.saturating_sub(count));
        }
        let room = self.held.room(evicts);
        if count > room {
            self.ticker.short_of_room = true;
            count = self.held.keep_first(marks, room);
        }
        self.held.reserve(range, marks, true, evicts);
        if self.rules.has_page_cache {
            for key in self.held.gone() {
                self.in_page_cache.remove(key);
            }
        }
        count
    }

    /// Leaves those of the marked chunks marked that the level lacks.
    fn mark_lacking(&mut self, range: &ChunkRange, marks: &mut Vec<Span>) {
        let (mut cursor, mut lacking) = (PromptCursor::new(), std::mem::take(&mut self.lacking));
        let mut number = range.first();
        for &Span { at, len } in marks.iter() {
            let end = number + len as usize;
            if at == NONE {
                lacking.push(Span { at, len });
                number = end;
            }
            while number < end {
                let found = self.held.find(&mut cursor, range.prompt(), number);
                let len = self.held.alike(&mut cursor, range.prompt(), number, found, end - number);
                let at = match found.at {
                    NONE => NEW,
                    at if self.held.has(at) => {
                        if self.rules.writes_use {
                            let at = self.held.cut(found, len);
                            self.held.touch_at(std::iter::once(Span::new(at, len)));
                        }
                        NONE
                    }
                    _ => self.held.cut(found, len),
                };
                push_span(&mut lacking, Span::new(at, len));
                number += len;
            }
        }
        std::mem::swap(marks, &mut lacking);
        lacking.clear();
        self.lacking = lacking;
    }

    /// The keys that went for the last write.
    pub fn gone(&self) -> &[Key] {
        self.held.gone()
    }

    /// The keys of a span's chunks.
    pub fn keys(&self, span: Span) -> impl Iterator<Item = Key> {
        self.held.keys(span)
    }

    /// These writes have failed.
    pub fn give_up(&mut self, marks: &[Span]) {
        self.held.give_up_stored(marks);
    }

    pub fn end_write(&mut self, marks: &mut Vec<Span>) {
        if self.rules.has_page_cache {
            let keys = marked(marks).flat_map(|span| self.held.keys(span));
            self.in_page_cache.extend(keys.map(|key| (key, ())));
        }
        self.held.admit_stored(marks);
    }

    /// Uses chunks that are locked. Returns how many of them the page cache held; it holds all of them now.
    pub fn begin_read(&mut self, spans: &[Span]) -> u64 {
        self.held.touch_at(spans.iter().copied());
        if !self.rules.has_page_cache {
            return 0;
        }
        let keys = spans.iter().flat_map(|&span| self.held.keys(span));
        keys.map(|key| u64::from(self.in_page_cache.insert(key, ()).is_some())).sum()
    }

    pub fn touch(&mut self, spans: impl Iterator<Item = Span>) {
        self.held.touch_at(spans);
    }

    pub fn lock(&mut self, spans: impl Iterator<Item = Span>) {
        self.held.lock(spans);
    }

    pub fn unlock(&mut self, spans: impl Iterator<Item = Span>) {
        self.held.unlock(spans);
    }

    /// The device that answers reads: the level's own, or the page cache.
    pub fn reader(&mut self, page_cache: bool) -> &mut Reader {
        match &mut self.page_cache_read {
            Some(device) if page_cache => device,
            _ => &mut self.read,
        }
    }

    pub fn writer(&mut self) -> &mut Device {
        &mut self.write
    }
}

#[cfg(test)]
impl Level {
    /// Chunks held and being written.
    pub fn used(&self) -> u64 {
        self.held.used()
    }

    pub fn contains(&self, key: Key) -> bool {
        self.held.contains(key)
    }

    pub fn check(&self) {
        self.held.check();
        assert!(self.held.used() <= self.rules.chunks);
        assert!(self.in_page_cache.keys().all(|&key| self.held.contains(key)));
    }

    /// Held or being written.
    pub fn all_keys(&self) -> Vec<Key> {
        self.held.all_keys()
    }

    pub fn check_idle(&self) {
        self.held.check_idle();
    }
}
