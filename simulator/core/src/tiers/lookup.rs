//! Look-ups: which chunks of a prompt the tiers hold, and what is read from disk before they answer.

use super::{Ended, Hit, Op, Prefetch, Read, Slot, Tiers, id_and};
use crate::chunks::spans::{Span, push_span, span_at};
use crate::chunks::{NEW, NONE, PromptCursor};
use crate::keys::ChunkRange;
use crate::time::{self, FOREVER, Ticks};

impl Tiers {
    /// Looks and locks; reads from disk what only the disk holds.
    pub(super) fn start(&mut self, now: Ticks, slot: Slot, range: &ChunkRange) -> Option<Hit> {
        let (mut hit, mut room) = self.find(range);
        self.lock_hit(&hit);
        if hit.disk_chunks() > 0 {
            if self.may_prefetch(now, slot, &hit, &mut room) {
                self.prefetch(now, slot, hit, room);
                return None;
            }
            // Without room for all of them the hit ends before the first chunk that only the disk holds.
            let beyond = hit.split_off(hit.in_cpu.iter().position(|in_cpu| !in_cpu).unwrap_or(0));
            self.unlock_hit(&beyond);
        }
        self.answered(slot, &hit);
        Some(hit)
    }

    /// The prefix that the tiers hold, and in the CPU tier the marks of its chunks that only the disk holds.
    fn find(&mut self, range: &ChunkRange) -> (Hit, Vec<Span>) {
        let (mut hit, mut room, prompt) = (Hit::default(), Vec::new(), range.prompt());
        let (mut cpu_cursor, mut disk_cursor) = (PromptCursor::new(), PromptCursor::new());
        let mut number = 0;
        while number < prompt.len() {
            let place = self.cpu.find(&mut cpu_cursor, prompt, number);
            let mut len = place.len;
            if self.cpu.holds(place.at) {
                hit.push(Span::new(self.cpu.cut(place, len), len), true);
                push_span(&mut room, Span::new(NONE, len));
                number += len;
                continue;
            }
            let Some(disk) = &mut self.disk else { break };
            let below = disk.find(&mut disk_cursor, prompt, number);
            if !disk.holds(below.at) {
                break;
            }
            if place.at == NONE {
                // What is nowhere is found bit by bit.
                while len < below.len {
                    let more = self.cpu.find(&mut cpu_cursor, prompt, number + len);
                    if more.at != NONE {
                        break;
                    }
                    len += more.len;
                }
            }
            len = len.min(below.len);
            let at = if place.at == NONE { NEW } else { self.cpu.cut(place, len) };
            push_span(&mut room, Span::new(at, len));
            hit.push(Span::new(disk.cut(below, len), len), false);
            number += len;
        }
        if number > 0 {
            hit.range = range.slice(0..number);
        }
        (hit, room)
    }

    /// Keeps each chunk where it was found.
    fn lock_hit(&mut self, hit: &Hit) {
        self.cpu.lock(hit.spans_where(true));
        if let Some(disk) = &mut self.disk {
            disk.lock(hit.spans_where(false));
        }
    }

    fn unlock_hit(&mut self, hit: &Hit) {
        self.cpu.unlock(hit.spans_where(true));
        if let Some(disk) = &mut self.disk {
            disk.unlock(hit.spans_where(false));
        }
    }

    fn answered(&mut self, slot: Slot, hit: &Hit) {
        self.journal.note("answer", || id_and(slot as u64, &hit.flags().map(u64::from).collect::<Vec<_>>()));
        if hit.spans.iter().any(|span| span.at == NONE) {
            self.cpu.touch(&hit.range);
        } else {
            self.cpu.touch_at(hit.spans.iter().copied());
        }
        self.count_hit(hit);
    }

    /// Divides a hit's spans before the chunk of that number, and returns that of the span which begins there. `read`:
    /// all of them are in the CPU tier now.
    pub(super) fn divide(&mut self, hit: &mut Hit, number: usize, read: bool) -> usize {
        let (index, skip) = span_at(&hit.spans, number);
        if skip == 0 {
            return index;
        }
        let rest = match &mut self.disk {
            Some(disk) if !read && !hit.in_cpu[index] => disk.split_span(&mut hit.spans[index], skip),
            _ => self.cpu.split_span(&mut hit.spans[index], skip),
        };
        hit.spans.insert(index + 1, rest);
        hit.in_cpu.insert(index + 1, hit.in_cpu[index]);
        index + 1
    }

    fn count_hit(&mut self, hit: &Hit) {
        self.counters.cpu_hit_chunks += hit.chunks() - hit.disk_chunks();
        self.counters.disk_hit_chunks += hit.disk_chunks();
    }

    /// Whether a hit's chunks may be read from disk; takes the room in the CPU tier that this needs.
    fn may_prefetch(&mut self, now: Ticks, slot: Slot, hit: &Hit, room: &mut Vec<Span>) -> bool {
        let policy = &self.config.policy;
        let limit = policy.prefetch_share.map(|share| share * self.config.cpu_chunks as f64);
        hit.disk_chunks().saturating_mul(self.config.chunk_tokens) >= policy.min_prefetch_tokens
            && limit.is_none_or(|limit| (self.prefetching_chunks as f64) < limit)
            && (policy.read_in_place || self.reserve(now, slot, &hit.range, room, false))
    }

    /// GroupCounts to read a hit's chunks from disk.
    fn prefetch(&mut self, now: Ticks, slot: Slot, hit: Hit, room: Vec<Span>) {
        let count = hit.disk_chunks();
        self.prefetching += 1;
        self.prefetching_chunks += count;
        let spans: Vec<Span> = hit.spans_where(false).collect();
        let warm = self.disk.as_mut().map_or(0, |disk| disk.begin_read(&spans));
        let cold = count - warm;
        self.counters.storage_read_bytes += cold * self.config.chunk_bytes;
        let deadline = self.deadline(now, count);
        let mut prefetch = Box::new(Prefetch { slot, hit, room, began: now, chunks: cold, warm, deadline });
        if let Some(outbox) = &mut self.outbox {
            outbox.read(self.transfers.next_id(), slot, prefetch.hit.disk_keys());
            (prefetch.warm, prefetch.deadline) = (0, FOREVER);
            return self.begin(FOREVER, Op::Prefetch(prefetch, Read::External));
        }
        if cold == 0 {
            return self.read_page_cache(now, prefetch);
        }
        let (id, end) = self.disk_read.submit(now, cold, cold * self.config.chunk_bytes);
        self.begin(end.min(prefetch.deadline), Op::Prefetch(prefetch, Read::Disk(id)));
    }

    /// When so many chunks that are read from now on are no longer waited for.
    fn deadline(&self, now: Ticks, chunks: u64) -> Ticks {
        let policy = &self.config.policy;
        let tokens = chunks as f64 * self.config.chunk_tokens as f64;
        let most_s = |base_s: f64| time::from_s(base_s + policy.prefetch_token_s * tokens);
        policy.prefetch_timeout_s.map_or(FOREVER, |base_s| now.saturating_add(most_s(base_s)))
    }

    fn read_page_cache(&mut self, now: Ticks, mut prefetch: Box<Prefetch>) {
        let chunks = std::mem::take(&mut prefetch.warm);
        (prefetch.began, prefetch.chunks) = (now, chunks);
        let (id, end) = self.page_cache_read.submit(now, chunks, chunks * self.config.chunk_bytes);
        self.begin(end.min(prefetch.deadline), Op::Prefetch(prefetch, Read::PageCache(id)));
    }

    /// Err: when the transfer will end, unless others join it.
    pub(super) fn read_ended(&mut self, now: Ticks, read: Read) -> Result<(), Ticks> {
        match read {
            Read::Disk(id) => self.disk_read.ended(now, id),
            Read::PageCache(id) => self.page_cache_read.ended(now, id),
            Read::External => Ok(()),
        }
    }

    /// A read was to end now; others that joined it meanwhile may have made it longer.
    pub(super) fn read_on(&mut self, now: Ticks, prefetch: Box<Prefetch>, read: Read) -> Ended {
        match self.read_ended(now, read) {
            Err(end) if now >= prefetch.deadline => {
                let missing = prefetch.chunks + prefetch.warm - self.read_by(now, end, &prefetch, read);
                self.begin(end, Op::Rest(read));
                let arrived = prefetch.hit.position_of_disk_chunk(prefetch.hit.disk_chunks() - missing);
                self.prefetched(now, *prefetch, arrived)
            }
            Err(end) => {
                self.begin(end.min(prefetch.deadline), Op::Prefetch(prefetch, read));
                Ended::Nothing
            }
            Ok(()) if prefetch.warm > 0 => {
                self.read_page_cache(now, prefetch);
                Ended::Nothing
            }
            Ok(()) => {
                let arrived = prefetch.hit.range.len();
                self.prefetched(now, *prefetch, arrived)
            }
        }
    }

    /// How many chunks of a transfer that ends at `end` are there now: they come evenly after its latency.
    fn read_by(&self, now: Ticks, end: Ticks, prefetch: &Prefetch, read: Read) -> u64 {
        let device = match read {
            Read::Disk(_) => &self.config.disk_read,
            _ => &self.config.page_cache_read,
        };
        let first = prefetch.began.saturating_add(time::from_s(device.latency_s));
        let each = (end.saturating_sub(first) / u128::from(prefetch.chunks.max(1))).max(1);
        (now.saturating_sub(first) / each).min(u128::from(prefetch.chunks)) as u64
    }

    pub(super) fn prefetched(&mut self, now: Ticks, prefetch: Prefetch, arrived: usize) -> Ended {
        let Prefetch { slot, mut hit, mut room, .. } = prefetch;
        self.journal.note("prefetched", || vec![slot as u64]);
        self.prefetching -= 1;
        self.prefetching_chunks -= hit.disk_chunks();
        let came = self.divide(&mut hit, arrived, false);
        let beyond = hit.split_off(came);
        self.unlock_hit(&beyond);
        if let Some(disk) = &mut self.disk {
            disk.unlock(hit.spans_where(false));
        }
        self.counters.disk_loaded_chunks += hit.disk_chunks();
        if self.config.policy.read_in_place {
            hit.disk_keys().for_each(|key| *self.in_place.entry(key).or_default() += 1);
            hit.spans
                .iter_mut()
                .zip(&hit.in_cpu)
                .filter(|(_, in_cpu)| !**in_cpu)
                .for_each(|(span, _)| span.at = NONE);
        } else {
            let came = self.cpu.divide(&mut room, arrived);
            let missing = room.split_off(came);
            self.cpu.give_up(&missing);
            self.cpu.admit_loaded(&room, !self.config.policy.keep_prefetched);
            hit.moved_to(&room);
        }
        self.answered(slot, &hit);
        while self.prefetching < self.config.policy.prefetches()
            && let Some((slot, range)) = self.waiting_lookups.pop_front()
        {
            if let Some(hit) = self.start(now, slot, &range) {
                self.begin(now, Op::Answer { slot, hit });
            }
        }
        Ended::Lookup(slot, hit)
    }
}
