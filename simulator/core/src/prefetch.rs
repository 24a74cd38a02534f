//! Look-ups: which chunks of a prompt the tiers hold, and what is read from disk before they answer.

use crate::keys::Key;
use crate::tiers::{Ended, Hit, Op, Prefetch, Read, Slot, Tiers, with};
use crate::time::{self, FOREVER, Ticks};

impl Tiers {
    /// Looks and locks; reads from disk what only the disk holds.
    pub(crate) fn start(&mut self, now: Ticks, slot: Slot, keys: &[Key]) -> Option<Hit> {
        let mut hit = Hit::default();
        for &key in keys {
            let in_cpu = self.cpu.contains(key);
            if !in_cpu && !self.disk.as_ref().is_some_and(|disk| disk.contains(key)) {
                break;
            }
            hit.keys.push(key);
            hit.in_cpu.push(in_cpu);
        }
        self.lock_hit(&hit);
        if hit.disk_chunks() > 0 {
            if self.may_prefetch(now, slot, &hit) {
                self.prefetch(now, slot, hit);
                return None;
            }
            // Without room for all of them the hit ends before the first chunk that only the disk holds.
            let beyond = hit.split_off(hit.in_cpu.iter().position(|in_cpu| !in_cpu).unwrap_or(0));
            self.unlock_hit(&beyond);
        }
        self.answered(slot, &hit);
        Some(hit)
    }

    /// Keeps each chunk where it was found.
    fn lock_hit(&mut self, hit: &Hit) {
        hit.keys_where(true).for_each(|key| self.cpu.lock(key));
        if let Some(disk) = &mut self.disk {
            hit.keys_where(false).for_each(|key| disk.lock(key));
        }
    }

    fn unlock_hit(&mut self, hit: &Hit) {
        hit.keys_where(true).for_each(|key| self.cpu.unlock(key));
        if let Some(disk) = &mut self.disk {
            hit.keys_where(false).for_each(|key| disk.unlock(key));
        }
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

    /// Whether a hit's chunks may be read from disk; takes the room in the CPU tier that this needs.
    fn may_prefetch(&mut self, now: Ticks, slot: Slot, hit: &Hit) -> bool {
        let policy = &self.config.policy;
        let limit = policy.prefetch_share.map(|share| share * self.config.cpu_chunks as f64);
        hit.disk_chunks() * self.config.chunk_tokens >= policy.min_prefetch_tokens
            && limit.is_none_or(|limit| (self.prefetching_chunks as f64) < limit)
            && (policy.read_in_place
                || self.reserve(now, slot, &hit.keys_where(false).collect::<Vec<_>>(), false))
    }

    /// Begins to read a hit's chunks from disk.
    fn prefetch(&mut self, now: Ticks, slot: Slot, hit: Hit) {
        let count = hit.disk_chunks();
        self.prefetching += 1;
        self.prefetching_chunks += count;
        let keys: Vec<Key> = hit.keys_where(false).collect();
        let warm = self.disk.as_mut().map_or(0, |disk| disk.begin_read(&keys));
        let cold = count - warm;
        self.counters.storage_read_bytes += cold * self.config.chunk_bytes;
        let mut prefetch =
            Prefetch { slot, hit, began: now, chunks: cold, warm, deadline: self.deadline(now, count) };
        if let Some(outbox) = &mut self.outbox {
            outbox.read(self.next_io, slot, &keys);
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
        let tokens = (chunks * self.config.chunk_tokens) as f64;
        let most_s = |base_s: f64| time::from_s(base_s + policy.prefetch_token_s * tokens);
        policy.prefetch_timeout_s.map_or(FOREVER, |base_s| now.saturating_add(most_s(base_s)))
    }

    fn read_page_cache(&mut self, now: Ticks, mut prefetch: Prefetch) {
        let chunks = std::mem::take(&mut prefetch.warm);
        (prefetch.began, prefetch.chunks) = (now, chunks);
        let (id, end) = self.page_cache_read.submit(now, chunks, chunks * self.config.chunk_bytes);
        self.begin(end.min(prefetch.deadline), Op::Prefetch(prefetch, Read::PageCache(id)));
    }

    /// Err: when the transfer will end, unless others join it.
    pub(crate) fn read_ended(&mut self, now: Ticks, read: Read) -> Result<(), Ticks> {
        match read {
            Read::Disk(id) => self.disk_read.ended(now, id),
            Read::PageCache(id) => self.page_cache_read.ended(now, id),
            Read::External => Ok(()),
        }
    }

    /// A read was to end now; others that joined it meanwhile may have made it longer.
    pub(crate) fn read_on(&mut self, now: Ticks, prefetch: Prefetch, read: Read) -> Ended {
        match self.read_ended(now, read) {
            Err(end) if now >= prefetch.deadline => {
                let missing = prefetch.chunks + prefetch.warm - self.read_by(now, end, &prefetch, read);
                self.begin(end, Op::Rest(read));
                let arrived = prefetch.hit.position_of_disk_chunk(prefetch.hit.disk_chunks() - missing);
                self.prefetched(now, prefetch.slot, prefetch.hit, arrived)
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
                let arrived = prefetch.hit.keys.len();
                self.prefetched(now, prefetch.slot, prefetch.hit, arrived)
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

    pub(crate) fn prefetched(&mut self, now: Ticks, slot: Slot, mut hit: Hit, arrived: usize) -> Ended {
        self.journal.note("prefetched", || vec![slot as u64]);
        self.prefetching -= 1;
        self.prefetching_chunks -= hit.disk_chunks();
        let beyond = hit.split_off(arrived);
        self.unlock_hit(&beyond);
        if let Some(disk) = &mut self.disk {
            hit.keys_where(false).for_each(|key| disk.unlock(key));
        }
        self.counters.disk_loaded_chunks += hit.disk_chunks();
        let loaded: Vec<Key> = hit.keys_where(false).collect();
        if self.config.policy.read_in_place {
            loaded.iter().for_each(|&key| *self.passing.entry(key).or_default() += 1);
        } else {
            self.cpu.give_up(&beyond.keys_where(false).collect::<Vec<_>>());
            self.cpu.admit_loaded(&loaded, !self.config.policy.keep_prefetched);
        }
        self.answered(slot, &hit);
        while self.prefetching < self.config.policy.prefetches()
            && let Some((slot, keys)) = self.waiting_lookups.pop_front()
        {
            if let Some(hit) = self.start(now, slot, &keys) {
                self.begin(now, Op::Answer { slot, hit });
            }
        }
        Ended::Lookup(slot, hit)
    }
}
