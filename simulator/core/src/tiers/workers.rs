//! Reads by a pool of workers that all transfers share: LMCache's native file client has four threads and one queue.
//!
//! A worker takes the next operation (a chunk) of the transfer that came first. Operations in flight divide the device
//! evenly; alone, one takes chunk + size x byte. So the first of two transfers ends before the second, and its last
//! operations share the device with the second one's first.

use std::collections::{BTreeMap, VecDeque};

use super::device::{DeviceConfig, Rates};
use crate::time::Ticks;

#[derive(Clone, Copy, Debug)]
struct Operation {
    transfer: u64,
    alone_until: Ticks,
    /// `served` at the moment when the operation has had its share of the device.
    until: Ticks,
}

/// Operations of a transfer that no worker has taken.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    transfer: u64,
    operations: u64,
    alone: Ticks,
    shared: Ticks,
}

#[derive(Clone, Debug)]
struct Pool {
    workers: usize,
    now: Ticks,
    /// The device time that each operation in flight has had since time 0.
    served: Ticks,
    busy: Vec<Operation>,
    waiting: VecDeque<Waiting>,
}

#[derive(Clone, Debug)]
pub struct WorkerPool {
    rates: Rates,
    pool: Pool,
    /// When each transfer would end on a device of its own.
    alone_until: BTreeMap<u64, Ticks>,
    next: u64,
}

impl WorkerPool {
    pub fn new(config: &DeviceConfig) -> Self {
        let workers = usize::try_from(config.depth.max(1)).unwrap_or(usize::MAX);
        let pool = Pool { workers, now: 0, served: 0, busy: Vec::new(), waiting: VecDeque::new() };
        Self { rates: Rates::new(config), pool, alone_until: BTreeMap::new(), next: 0 }
    }

    /// As `Reader::submit`.
    pub fn submit(&mut self, now: Ticks, chunks: u64, bytes: u64) -> (u64, Ticks) {
        self.pool.run_until(now);
        let (id, operations) = (self.next, chunks.max(1));
        self.next += 1;
        let each = bytes / operations;
        let (alone, shared) = (self.rates.alone(1, each), self.rates.shared(1, each));
        self.pool.waiting.push_back(Waiting { transfer: id, operations, alone, shared });
        self.pool.take();
        self.alone_until.insert(id, now + self.rates.latency + self.rates.alone(chunks, bytes));
        (id, self.end(id))
    }

    /// As `Reader::ended`.
    pub fn ended(&mut self, now: Ticks, id: u64) -> Result<(), Ticks> {
        self.pool.run_until(now);
        let end = self.end(id);
        if end > now {
            return Err(end);
        }
        self.alone_until.remove(&id);
        Ok(())
    }

    fn end(&self, id: u64) -> Ticks {
        let mut pool = self.pool.clone();
        while pool.holds(id) && pool.pass(Ticks::MAX) {}
        self.alone_until.get(&id).copied().unwrap_or(pool.now).max(pool.now)
    }
}

impl Pool {
    fn holds(&self, id: u64) -> bool {
        self.busy.iter().any(|one| one.transfer == id) || self.waiting.iter().any(|one| one.transfer == id)
    }

    fn run_until(&mut self, now: Ticks) {
        while self.now < now && self.pass(now) {}
        if self.busy.is_empty() {
            self.now = self.now.max(now);
        }
    }

    /// Idle workers take operations.
    fn take(&mut self) {
        while self.busy.len() < self.workers
            && let Some(first) = self.waiting.front_mut()
        {
            let (alone_until, until) = (self.now + first.alone, self.served + first.shared);
            self.busy.push(Operation { transfer: first.transfer, alone_until, until });
            first.operations -= 1;
            if first.operations == 0 {
                self.waiting.pop_front();
            }
        }
    }

    /// Lets time pass until an operation has had its share or ends, or until `until`. False: no worker is busy.
    fn pass(&mut self, until: Ticks) -> bool {
        let served = self.served;
        let sharing = self.busy.iter().filter(|one| one.until > served).count() as Ticks;
        let share = self.busy.iter().filter(|one| one.until > served).map(|one| one.until - served).min();
        let shared_at = share.map(|share| self.now + share * sharing);
        let alone_at = self.busy.iter().filter(|one| one.until <= served).map(|one| one.alone_until).min();
        let Some(next) = shared_at.into_iter().chain(alone_at).min() else { return false };
        let next = next.max(self.now);
        if next > until {
            // The next call divides the remainder: no time is lost.
            let passed = (until - self.now) / sharing.max(1);
            self.served += if sharing > 0 { passed } else { 0 };
            self.now = if sharing > 0 { self.now + passed * sharing } else { until };
            return false;
        }
        self.served += (next - self.now).checked_div(sharing).unwrap_or(0);
        self.now = next;
        let (now, served) = (self.now, self.served);
        self.busy.retain(|one| one.until > served || one.alone_until > now);
        self.take();
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::time;

    /// Four workers, a chunk of 1 byte: 1 s of the device, and `chunk_s` of a worker's own.
    fn pool(chunk_s: f64) -> WorkerPool {
        let config = DeviceConfig { chunk_s, shared_byte_s: 1.0, depth: 4, ..DeviceConfig::default() };
        WorkerPool::new(&config)
    }

    fn end_s(pool: &mut WorkerPool, id: u64, mut end: Ticks) -> f64 {
        while let Err(later) = pool.ended(end, id) {
            end = later;
        }
        time::to_s(end)
    }

    #[test]
    fn the_first_of_two_ends_with_the_second_ones_first_operations() {
        let mut pool = pool(0.0);
        let (first, at) = pool.submit(0, 9, 9);
        assert_eq!(time::to_s(at), 9.0);
        let (second, last) = pool.submit(0, 9, 9);
        assert_eq!(time::to_s(last), 18.0);
        // Of three rounds of four operations, the third is the first one's last and three of the second's.
        assert_eq!(end_s(&mut pool, first, at), 12.0);
        assert_eq!(end_s(&mut pool, second, last), 18.0);
    }

    #[test]
    fn a_worker_s_own_time_keeps_it_from_the_next_operation() {
        let mut pool = pool(10.0);
        let (first, at) = pool.submit(0, 6, 6);
        // Four at once for 10 s, then two.
        assert_eq!(end_s(&mut pool, first, at), 20.0);
    }

    #[test]
    fn one_that_comes_later_shares_only_what_workers_are_free_for() {
        let mut pool = pool(0.0);
        let (first, at) = pool.submit(0, 2, 2);
        let (second, last) = pool.submit(time::from_s(1.0), 4, 4);
        // One byte has passed by 1 s. Two of the later one's join the two in flight, which have half a second left each.
        assert_eq!(end_s(&mut pool, first, at), 3.0);
        assert_eq!(end_s(&mut pool, second, last), 6.0);
    }
}
