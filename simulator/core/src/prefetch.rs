//! Look-ups: which chunks of a prompt the tiers hold, and what is read from disk before they answer.

use crate::keys::Key;
use crate::tiers::{Ended, Hit, Op, Slot, Tiers, with};
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

    /// Reads a hit's chunks from disk, one after another.
    fn prefetch(&mut self, now: Ticks, slot: Slot, hit: Hit) {
        let (count, bytes) = (hit.disk_chunks(), self.config.chunk_bytes);
        self.prefetching += 1;
        self.prefetching_chunks += count;
        if self.outbox.is_none() && self.config.policy.prefetch_timeout_s.is_some() {
            return self.prefetch_in_time(now, slot, hit);
        }
        let keys: Vec<Key> = hit.keys_where(false).collect();
        let warm = self.disk.as_mut().map_or(0, |disk| disk.begin_read(&keys));
        let (cold, arrived) = (count - warm, hit.keys.len());
        self.counters.storage_read_bytes += cold * bytes;
        if let Some(outbox) = &mut self.outbox {
            outbox.read(self.next_io, slot, &keys);
            return self.begin(FOREVER, Op::Prefetch { slot, hit, warm: 0, arrived });
        }
        let (end, left) = match cold {
            0 => (self.page_cache_read.submit(now, warm, warm * bytes), 0),
            _ => (self.disk_read.submit(now, cold, cold * bytes), warm),
        };
        self.begin(end, Op::Prefetch { slot, hit, warm: left, arrived });
    }

    /// Reads a hit's chunks from disk, in the prompt's order, until the time for it is over.
    fn prefetch_in_time(&mut self, now: Ticks, slot: Slot, hit: Hit) {
        let (policy, bytes) = (&self.config.policy, self.config.chunk_bytes);
        let tokens = (hit.disk_chunks() * self.config.chunk_tokens) as f64;
        let most_s = policy.prefetch_timeout_s.unwrap_or(f64::INFINITY) + policy.prefetch_token_s * tokens;
        let (deadline, mut end, mut arrived) = (now.saturating_add(time::from_s(most_s)), now, 0);
        for (&key, &in_cpu) in hit.keys.iter().zip(&hit.in_cpu) {
            if !in_cpu && end <= deadline {
                let warm = self.disk.as_mut().map_or(0, |disk| disk.begin_read(&[key]));
                self.counters.storage_read_bytes += (1 - warm) * bytes;
                let device = if warm == 1 { &mut self.page_cache_read } else { &mut self.disk_read };
                end = end.max(device.submit(now, 1, bytes));
            }
            arrived += usize::from(end <= deadline);
        }
        self.begin(end.min(deadline), Op::Prefetch { slot, hit, warm: 0, arrived });
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
        while self.prefetching < self.config.policy.max_prefetches
            && let Some((slot, keys)) = self.waiting_lookups.pop_front()
        {
            if let Some(hit) = self.start(now, slot, &keys) {
                self.begin(now, Op::Answer { slot, hit });
            }
        }
        Ended::Lookup(slot, hit)
    }
}
