//! What the disk tier holds, and what of it the page cache holds too.

use crate::cache::Cache;
use crate::chunks::spans::{Span, count, marked, push_span};
use crate::chunks::{ExtentId, Found, NEW, NONE, PromptCursor};
use crate::eviction::kind::EvictionKind;
use crate::keys::{ChunkRange, Key, KeyMap};
use crate::time::Ticks;

#[derive(Clone, Copy, Debug)]
pub struct DiskRules {
    pub chunks: u64,
    /// A full disk drops chunks; otherwise it takes no more.
    pub evicts: bool,
    /// A write beyond the first count of chunks empties the disk down to the second one, if it evicts.
    pub watermark: u64,
    pub target: u64,
    /// Reads bypass the page cache.
    pub odirect: bool,
    pub eviction: EvictionKind,
    pub lease: Ticks,
    /// Chunks can be found without the prompt that they belong to.
    pub loose: bool,
}

#[derive(Debug)]
pub struct Disk {
    rules: DiskRules,
    held: Cache,
    in_page_cache: KeyMap<()>,
    /// Kept for its memory only.
    lacking: Vec<Span>,
}

impl Disk {
    pub fn new(rules: DiskRules) -> Self {
        let mut held = Cache::new(rules.chunks, rules.eviction, rules.lease, rules.loose);
        held.notes_gone = !rules.odirect || rules.loose;
        Self { rules, held, in_page_cache: KeyMap::default(), lacking: Vec::new() }
    }

    pub fn clock(&mut self, now: Ticks) {
        self.held.clock(now);
    }

    /// Where the chunk of that number of a prompt is held or reserved.
    #[inline(always)]
    pub fn find(&self, cursor: &mut PromptCursor, prompt: &[Key], number: usize) -> Found {
        self.held.find(cursor, prompt, number)
    }

    /// Makes an extent of the first chunks of what was found, no more than so many.
    pub fn cut(&mut self, place: Found, most: usize) -> ExtentId {
        self.held.cut(place, most)
    }

    /// Leaves the first `len` of its chunks to a span that has more, and returns the span of the others.
    pub fn split_span(&mut self, span: &mut Span, len: usize) -> Span {
        self.held.split_span(span, len)
    }

    pub fn holds(&self, at: ExtentId) -> bool {
        self.held.holds(at)
    }

    /// Held or being written.
    pub fn has(&self, at: ExtentId) -> bool {
        self.held.has(at)
    }

    /// Chunks held and being written.
    #[cfg(test)]
    pub fn used(&self) -> u64 {
        self.held.used()
    }

    pub fn reset(&mut self) {
        *self = Self::new(self.rules);
    }

    pub fn reset_page_cache(&mut self) {
        self.in_page_cache.clear();
    }

    /// Marks those of the marked chunks of a range that the disk lacks and has room for, as being written. Returns their
    /// number.
    pub fn begin_write(&mut self, range: &ChunkRange, marks: &mut Vec<Span>) -> u64 {
        let evicts = self.rules.evicts;
        self.held.gone.clear();
        if !evicts && self.held.room(false) == 0 {
            marks.clear();
            return 0;
        }
        self.mark_lacking(range, marks);
        let mut count = count(marks);
        if evicts && self.held.used() + count > self.rules.watermark {
            self.held.shrink(self.rules.target.saturating_sub(count));
        }
        let room = self.held.room(evicts);
        if count > room {
            count = self.held.keep_first(marks, room);
        }
        self.held.reserve(range, marks, true, evicts);
        for key in self.held.gone.iter().filter(|_| !self.rules.odirect) {
            self.in_page_cache.remove(key);
        }
        count
    }

    /// Leaves those of the marked chunks marked that the disk lacks, where they lie or are to come.
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
                let place = self.held.find(&mut cursor, range.prompt(), number);
                let len = place.len.min(end - number);
                let at = match place.at {
                    NONE => NEW,
                    at if self.held.has(at) => NONE,
                    _ => self.held.cut(place, len),
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
        &self.held.gone
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
        if !self.rules.odirect {
            let keys = marked(marks).flat_map(|span| self.held.keys(span));
            self.in_page_cache.extend(keys.map(|key| (key, ())));
        }
        self.held.admit_stored(marks);
    }

    /// Uses chunks that are locked. Returns how many of them the page cache held; it holds all of them now.
    pub fn begin_read(&mut self, spans: &[Span]) -> u64 {
        self.held.touch_at(spans.iter().copied());
        if self.rules.odirect {
            return 0;
        }
        let keys = spans.iter().flat_map(|&span| self.held.keys(span));
        keys.map(|key| u64::from(self.in_page_cache.insert(key, ()).is_some())).sum()
    }

    pub fn lock(&mut self, spans: impl Iterator<Item = Span>) {
        self.held.lock(spans);
    }

    pub fn unlock(&mut self, spans: impl Iterator<Item = Span>) {
        self.held.unlock(spans);
    }
}

#[cfg(test)]
impl Disk {
    pub fn contains(&self, key: Key) -> bool {
        self.held.contains(key)
    }

    pub fn check(&self) {
        self.held.check();
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
