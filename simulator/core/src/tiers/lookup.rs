//! Look-ups: which chunks of a prompt the levels hold, and what the tiers read from lower levels before they answer.

use std::mem;
use std::ops::Range;

use super::transfers::{Asked, Ended, Hit, LevelId, Op, Portion, Prefetch, Read, Slot};
use super::{MOST_LEVELS, Tiers, id_and};
use crate::chunks::spans::{Span, push_span, span_at};
use crate::chunks::{Found, NEW, NONE, PromptCursor};
use crate::keys::{ChunkRange, Key};
use crate::time::{self, FOREVER, Ticks};

/// For whom the tiers read, and until when they do.
#[derive(Debug)]
pub(super) struct Wanted {
    pub slot: Slot,
    pub deadline: Ticks,
    pub ahead: bool,
    pub pass: Ticks,
}

impl Tiers {
    /// Finds and locks a prefix; begins to read what only lower levels hold. `asked_at`: when the look-up came.
    pub(super) fn start(
        &mut self,
        now: Ticks,
        (slot, range): (Slot, &ChunkRange),
        asked_at: Ticks,
    ) -> Option<Hit> {
        let (mut hit, mut room) = self.find(range);
        self.lock_hit(&hit);
        if hit.lower_chunks() > 0 {
            let enough = self.reads(hit.lower_chunks().saturating_mul(self.config.chunk_tokens));
            if enough && self.may_prefetch(now, slot, &hit, &mut room) {
                let deadline = self.deadline(asked_at, hit.lower_chunks());
                self.prefetch(now, Wanted { slot, deadline, ahead: false, pass: 0 }, hit, room);
                return None;
            }
            // Without room for all of them the hit ends before the first chunk that only a lower level holds.
            let beyond = hit.split_off(hit.first_lower_span());
            self.unlock_hit(&beyond);
        }
        self.answered(slot, &hit);
        Some(hit)
    }

    /// The prefix that the levels hold, and the marks in the first level of the chunks that only lower levels hold.
    pub(super) fn find(&mut self, range: &ChunkRange) -> (Hit, Vec<Span>) {
        let (mut hit, mut room, prompt) = (Hit::default(), Vec::new(), range.prompt());
        let (mut first_cursor, mut cursors) = (PromptCursor::new(), [PromptCursor::new(); MOST_LEVELS]);
        let mut number = 0;
        while number < prompt.len() {
            let found = self.first.find(&mut first_cursor, prompt, number);
            if self.first.holds(found.at) {
                let len = found.len;
                hit.push(Span::new(self.first.cut(found, len), len), 0);
                push_span(&mut room, Span::new(NONE, len));
                number += len;
                continue;
            }
            let Some((lower, below)) = self.find_lower(&mut cursors, prompt, number) else { break };
            let len = self.first.alike(&mut first_cursor, prompt, number, found, below.len);
            let at = if found.at == NONE { NEW } else { self.first.cut(found, len) };
            let level = lower as LevelId + 1;
            match hit.last_level() {
                // The chunks of each level have spans of their own.
                Some(last) if last > 0 && last != level => room.push(Span::new(at, len)),
                _ => push_span(&mut room, Span::new(at, len)),
            }
            hit.push(Span::new(self.lower[lower].cut(below, len), len), level);
            number += len;
        }
        if number > 0 {
            hit.range = range.slice(0..number);
        }
        (hit, room)
    }

    /// The first lower level that holds the chunk of that number, and the chunks from it on that no level above it
    /// holds.
    #[inline(always)]
    pub(super) fn find_lower(
        &self,
        cursors: &mut [PromptCursor; MOST_LEVELS],
        prompt: &[Key],
        number: usize,
    ) -> Option<(usize, Found)> {
        let mut above = [Found { at: NONE, skip: 0, len: 0 }; MOST_LEVELS];
        for (lower, level) in self.lower.iter().enumerate() {
            let found = level.find(&mut cursors[lower], prompt, number);
            if level.holds(found.at) {
                let mut len = found.len;
                for ((level, cursor), found) in self.lower[..lower].iter().zip(cursors).zip(above) {
                    len = level.alike(cursor, prompt, number, found, len);
                }
                return Some((lower, Found { len, ..found }));
            }
            above[lower] = found;
        }
        None
    }

    /// Keeps each chunk where it was found.
    pub(super) fn lock_hit(&mut self, hit: &Hit) {
        self.first.lock(hit.spans_in(0));
        for (level, lower) in (1..).zip(&mut self.lower) {
            lower.lock(hit.spans_in(level));
        }
    }

    pub(super) fn unlock_hit(&mut self, hit: &Hit) {
        self.first.unlock(hit.spans_in(0));
        self.unlock_lower(hit);
    }

    fn unlock_lower(&mut self, hit: &Hit) {
        for (level, lower) in (1..).zip(&mut self.lower) {
            lower.unlock(hit.spans_in(level));
        }
    }

    pub(super) fn answered(&mut self, slot: Slot, hit: &Hit) {
        let flags = || hit.chunk_levels().map(|level| u64::from(level == 0)).collect::<Vec<_>>();
        self.journal.note("answer", || id_and(slot as u64, &flags()));
        if hit.spans.iter().any(|span| span.at == NONE) {
            self.first.touch(&hit.range);
        } else {
            self.first.touch_at(hit.spans.iter().copied());
        }
        for (level, chunks) in counted(hit) {
            self.counters.levels[level].hit_chunks += chunks;
        }
    }

    /// Releases the hit of a look-up that led to nothing, which does not count.
    pub fn take_back(&mut self, hit: &Hit) {
        for (level, chunks) in counted(hit) {
            self.counters.levels[level].hit_chunks -= chunks;
        }
        self.release(hit);
    }

    /// Divides a hit's spans before the chunk of that number. Returns the index of the span that begins there. `read`:
    /// the tiers have read all of them into the first level.
    pub(super) fn divide(&mut self, hit: &mut Hit, number: usize, read: bool) -> usize {
        let (index, skip) = span_at(&hit.spans, number);
        if skip == 0 {
            return index;
        }
        let level = hit.level(index) as usize;
        let span = &mut hit.spans[index];
        let rest = match level {
            1.. if !read => self.lower[level - 1].split_span(span, skip),
            _ => self.first.split_span(span, skip),
        };
        hit.insert_rest(index + 1, rest);
        index + 1
    }

    /// Whether the tiers may read a hit's chunks from lower levels. Takes the room in the first level that they need.
    pub(super) fn may_prefetch(&mut self, now: Ticks, slot: Slot, hit: &Hit, room: &mut Vec<Span>) -> bool {
        let policy = &self.config.policy;
        let limit = policy.prefetch_share.map(|share| share * self.config.levels[0].chunks as f64);
        limit.is_none_or(|limit| (self.prefetching_chunks as f64) < limit)
            && (policy.read_in_place || self.reserve(now, slot, &hit.range, room, false))
    }

    /// Begins to read a hit's chunks from lower levels: level by level, from its device and then from the page cache.
    pub(super) fn prefetch(&mut self, now: Ticks, wanted: Wanted, hit: Hit, room: Vec<Span>) {
        let count = hit.lower_chunks();
        self.prefetching += 1;
        self.prefetching_chunks += count;
        let mut portions = Vec::new();
        for lower in (0..self.lower.len()).rev() {
            let spans: Vec<Span> = hit.spans_in(lower as LevelId + 1).collect();
            if spans.is_empty() {
                continue;
            }
            let chunks: u64 = spans.iter().map(|span| u64::from(span.len)).sum();
            let warm = self.lower[lower].begin_read(&spans);
            self.counters.levels[lower + 1].read_bytes += (chunks - warm) * self.config.chunk_bytes;
            let of_both = [(true, warm), (false, chunks - warm)];
            let portion = of_both.map(|(page_cache, chunks)| Portion { lower, page_cache, chunks });
            portions.extend(portion.into_iter().filter(|portion| portion.chunks > 0));
        }
        let Wanted { slot, deadline, ahead, pass } = wanted;
        let mut prefetch =
            Box::new(Prefetch { slot, hit, room, began: now, chunks: 0, portions, deadline, ahead, pass });
        if let Some(outbox) = &mut self.outbox {
            outbox.read(self.transfers.next_id(), slot, prefetch.hit.lower_keys());
            prefetch.portions.clear();
            prefetch.deadline = FOREVER;
            return self.begin(FOREVER, Op::Prefetch(prefetch, Read::External));
        }
        self.read_next(now, prefetch);
    }

    /// When the tiers stop to wait for so many chunks that they begin to read now.
    pub(super) fn deadline(&self, now: Ticks, chunks: u64) -> Ticks {
        let policy = &self.config.policy;
        let tokens = chunks as f64 * self.config.chunk_tokens as f64;
        let most_s = |base_s: f64| time::from_s(base_s + policy.prefetch_token_s * tokens);
        policy.prefetch_timeout_s.map_or(FOREVER, |base_s| now.saturating_add(most_s(base_s)))
    }

    /// Begins the next portion of a prefetch.
    fn read_next(&mut self, now: Ticks, mut prefetch: Box<Prefetch>) {
        let Some(Portion { lower, page_cache, chunks }) = prefetch.portions.pop() else { return };
        (prefetch.began, prefetch.chunks) = (now, chunks);
        let device = self.lower[lower].reader(page_cache);
        let (id, end) = device.submit(now, self.instance, chunks, chunks * self.config.chunk_bytes);
        self.begin(
            prefetch.wakes_at(now, end),
            Op::Prefetch(prefetch, Read::Level { lower, page_cache, id }),
        );
    }

    /// Err: when the transfer will end, unless others join it.
    pub(super) fn read_ended(&mut self, now: Ticks, read: Read) -> Result<(), Ticks> {
        match read {
            Read::Level { lower, page_cache, id } => self.lower[lower].reader(page_cache).ended(now, id),
            Read::HeldUp { until } if until > now => Err(until),
            Read::HeldUp { .. } | Read::External => Ok(()),
        }
    }

    /// A read was to end now; transfers that joined it meanwhile may have made it longer.
    pub(super) fn read_on(&mut self, now: Ticks, prefetch: Box<Prefetch>, read: Read) -> Ended {
        match self.read_ended(now, read) {
            Err(end) if now >= prefetch.deadline && !prefetch.ahead => {
                self.cut_off(now, *prefetch, read, Some(end))
            }
            Err(end) => {
                let (slot, overdue) = (prefetch.slot, now >= prefetch.deadline);
                self.begin(prefetch.wakes_at(now, end), Op::Prefetch(prefetch, read));
                if overdue { Ended::Overdue(slot) } else { Ended::Nothing }
            }
            Ok(()) if !prefetch.portions.is_empty() => {
                self.read_next(now, prefetch);
                Ended::Nothing
            }
            Ok(()) if prefetch.pass > 0 => {
                self.hold_up(now, prefetch);
                Ended::Nothing
            }
            Ok(()) => {
                let arrived = prefetch.hit.range.len();
                self.prefetched(now, *prefetch, arrived)
            }
        }
    }

    /// The chunks of a read are there later by what the scheduler did for those who waited.
    fn hold_up(&mut self, now: Ticks, mut prefetch: Box<Prefetch>) {
        let times = u128::from(prefetch.hit.lower_chunks()) * (1 + self.waiting_reads.len()) as u128;
        let until = now.saturating_add(mem::take(&mut prefetch.pass).saturating_mul(times));
        self.begin(prefetch.wakes_at(now, until), Op::Prefetch(prefetch, Read::HeldUp { until }));
    }

    /// Ends a prefetch with what has arrived. `end`: when the transfer under way will end; None: it has ended.
    pub(super) fn cut_off(
        &mut self,
        now: Ticks,
        prefetch: Prefetch,
        read: Read,
        end: Option<Ticks>,
    ) -> Ended {
        let later: u64 = prefetch.portions.iter().map(|portion| portion.chunks).sum();
        let mut missing = later;
        if let Some(end) = end {
            missing += prefetch.chunks - self.read_by(now, end, &prefetch, read);
            self.begin(end, Op::Rest(read));
        }
        let arrived = prefetch.hit.position_of_lower_chunk(prefetch.hit.lower_chunks() - missing);
        self.prefetched(now, prefetch, arrived)
    }

    /// How many chunks of a transfer that ends at `end` are there now: they come evenly after its latency.
    fn read_by(&self, now: Ticks, end: Ticks, prefetch: &Prefetch, read: Read) -> u64 {
        let latency_s = match read {
            Read::Level { lower, page_cache, .. } => {
                let level = &self.config.levels[lower + 1];
                let cached = level.page_cache_read.as_ref().filter(|_| page_cache);
                cached.unwrap_or(&level.read).latency_s
            }
            Read::HeldUp { .. } | Read::External => 0.0,
        };
        let first = prefetch.began.saturating_add(time::from_s(latency_s));
        let each = (end.saturating_sub(first) / u128::from(prefetch.chunks.max(1))).max(1);
        (now.saturating_sub(first) / each).min(u128::from(prefetch.chunks)) as u64
    }

    /// A prefetch brought the hit's chunks up to number `arrived`.
    fn prefetched(&mut self, now: Ticks, prefetch: Prefetch, arrived: usize) -> Ended {
        let Prefetch { slot, mut hit, mut room, ahead, .. } = prefetch;
        self.journal.note("prefetched", || vec![slot as u64]);
        self.prefetching -= 1;
        self.prefetching_chunks -= hit.lower_chunks();
        let came = self.divide(&mut hit, arrived, false);
        let beyond = hit.split_off(came);
        self.unlock_hit(&beyond);
        self.unlock_lower(&hit);
        // Another read may have brought the first of them meanwhile.
        let there = if ahead { self.first_holds(&hit.range) as usize } else { 0 };
        for (chunks, level) in hit.ranges().filter(|(_, level)| *level > 0) {
            self.counters.levels[level as usize].loaded_chunks += chunks.len() as u64;
        }
        if self.config.policy.read_in_place {
            hit.lower_keys().for_each(|key| *self.in_place.entry(key).or_default() += 1);
            hit.read_in_place();
        } else {
            let came = self.first.divide(&mut room, arrived);
            let missing = room.split_off(came);
            self.first.give_up(&missing);
            self.first.admit_loaded(&room, !self.config.policy.keep_prefetched);
            hit.moved_to(&room);
        }
        self.go_elsewhere(now, slot, &hit);
        if ahead {
            // Only leaves of SGLang's tree go: the pages that came do not outlive those before them.
            self.first.touch(&hit.range);
        } else {
            self.answered(slot, &hit);
        }
        if let Some((wanted, hit, room)) = self.waiting_reads.pop_front() {
            self.prefetch(now, wanted, hit, room);
        }
        while self.prefetching < self.config.policy.prefetches()
            && let Some(Asked { slot, range, at }) = self.waiting_lookups.pop_front()
        {
            if let Some(hit) = self.start(now, (slot, &range), at) {
                self.begin(now, Op::Answer { slot, hit });
            }
        }
        if !ahead {
            return Ended::Lookup(slot, hit);
        }
        let below = hit.ranges().filter(|(chunks, level)| *level > 0 && chunks.end > there);
        let read = below.map(|(chunks, level)| (chunks.start.max(there)..chunks.end, level)).collect();
        self.release(&hit);
        Ended::Ahead(slot, read)
    }

    /// What the first level has read from an exclusive level leaves that; what it has read from a level that promotes
    /// goes to the level above that as well.
    fn go_elsewhere(&mut self, now: Ticks, slot: Slot, hit: &Hit) {
        for lower in 0..self.lower.len() {
            let (exclusive, promotes) = (self.lower[lower].exclusive(), self.lower[lower].promotes());
            if !(exclusive || promotes) {
                continue;
            }
            let of = |level: LevelId| usize::from(level) == lower + 1;
            if promotes && lower > 0 {
                let mark = |(chunks, level): (Range<usize>, LevelId)| {
                    Span::new(if of(level) { NEW } else { NONE }, chunks.len())
                };
                let mut marks: Vec<Span> = hit.ranges().map(mark).collect();
                let count = self.begin_write(lower - 1, &hit.range, &mut marks);
                self.write_dropped(now, slot, lower - 1, &hit.range, marks, count);
            }
            if exclusive && self.config.policy.reads_ahead() {
                let held = hit.ranges().filter(|(_, level)| of(*level));
                let keys: Vec<Key> = held.flat_map(|(chunks, _)| hit.range.keys()[chunks].to_vec()).collect();
                self.lower[lower].drop_chunks(&keys);
            }
        }
    }
}

/// Levels with the chunks that a hit counts there: a lower level's chunks where they lay. The first level counts only
/// the prefix that it holds, as LMCache does: what it holds behind a chunk from below counts there.
fn counted(hit: &Hit) -> impl Iterator<Item = (usize, u64)> {
    hit.ranges().scan(0, |below, (chunks, level)| {
        if level > 0 {
            *below = level;
        }
        Some((*below as usize, chunks.len() as u64))
    })
}
