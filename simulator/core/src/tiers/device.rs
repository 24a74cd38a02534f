//! Modelled devices: one direction (reads or writes) of something that moves bytes.
//!
//! A transfer is a row of operations, a chunk each. Alone it takes latency + (chunks x chunk + bytes x byte) / depth.
//! All transfers together move at most a byte in shared_byte, and at most a chunk in shared_chunk (one interpreter's
//! time for it). So n transfers of large data get min(1 / shared_byte, size / shared_chunk, n size / (chunk + size
//! byte)) bytes a second. Reads of a depth share a pool of workers (`workers.rs`), which has the place of n; a device
//! with links is remote (`remote.rs`). A device never sleeps; it says when a transfer ends.

use std::collections::{BTreeMap, BTreeSet};

use crate::time::{self, Ticks};

/// What each client of a remote device has: a link with a bandwidth of 1 / byte_s, and connections over it. Each
/// operation waits for latency_s; chunk_s is the client's own work on it. shared_byte_s bounds all clients together.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(feature = "python", derive(pyo3::FromPyObject))]
pub struct LinkConfig {
    pub latency_s: f64,
    /// Operations that a client has in flight; 0 means 1.
    pub connections: u64,
}

/// latency_s is a transfer's, once. A device with a link has none, and no depth or shared_chunk_s.
#[derive(Clone, Copy, Debug, Default)]
#[cfg_attr(feature = "python", derive(pyo3::FromPyObject))]
pub struct DeviceConfig {
    pub latency_s: f64,
    pub chunk_s: f64,
    pub byte_s: f64,
    pub shared_byte_s: f64,
    pub shared_chunk_s: f64,
    /// Operations that a write has in flight, or that all reads have together (workers.rs); 0 means 1.
    pub depth: u64,
    pub link: Option<LinkConfig>,
}

#[derive(Clone, Debug)]
pub(super) struct Rates {
    /// What a transfer waits for once.
    pub latency: Ticks,
    chunk: Ticks,
    byte: Ticks,
    shared_byte: Ticks,
    shared_chunk: Ticks,
    depth: u128,
    link: Option<LinkRates>,
}

#[derive(Clone, Copy, Debug)]
struct LinkRates {
    latency: Ticks,
    connections: u128,
}

impl Rates {
    pub fn new(config: &DeviceConfig) -> Self {
        let link = |link: LinkConfig| LinkRates {
            latency: time::from_s(link.latency_s),
            connections: u128::from(link.connections.max(1)),
        };
        Self {
            link: config.link.map(link),
            latency: time::from_s(config.latency_s),
            chunk: time::from_s(config.chunk_s),
            byte: time::from_s(config.byte_s),
            shared_byte: time::from_s(config.shared_byte_s),
            shared_chunk: time::from_s(config.shared_chunk_s),
            depth: u128::from(config.depth.max(1)),
        }
    }

    /// The time of a transfer alone on the device, without its latency.
    pub fn alone(&self, chunks: u64, bytes: u64) -> Ticks {
        let (chunks, bytes) = (u128::from(chunks), u128::from(bytes));
        let one_by_one = self.chunk * chunks + self.byte * bytes;
        if let Some(link) = &self.link {
            return one_by_one + link.latency * chunks.div_ceil(link.connections);
        }
        match self.depth.min(chunks) {
            0 | 1 => one_by_one,
            depth => one_by_one / depth,
        }
    }

    /// The time for which bytes keep a link busy.
    pub fn bytes(&self, bytes: u64) -> Ticks {
        self.byte * u128::from(bytes)
    }

    /// The time for which operations keep a client busy, or its connections.
    pub fn operations(&self, chunks: u64, bytes: u64) -> Ticks {
        let Some(link) = &self.link else { return 0 };
        let own = self.chunk * u128::from(chunks);
        own.max((own + self.bytes(bytes) + link.latency * u128::from(chunks)) / link.connections)
    }

    /// How many links carry what all of them together may, in 2^-bits; None: no bound.
    pub fn links(&self, bits: u32) -> Option<u128> {
        (self.shared_byte > 0).then(|| ((self.byte << bits) / self.shared_byte).max(1))
    }

    /// The time for which a transfer keeps the shared part of the device busy.
    pub fn shared(&self, chunks: u64, bytes: u64) -> Ticks {
        (self.shared_byte * u128::from(bytes)).max(self.shared_chunk * u128::from(chunks))
    }
}

/// First come, first served: a transfer's data moves after the data of the transfers before it; latencies overlap. Of a
/// remote device, each client's transfers go one after another over its link, and all wait for the total bandwidth.
#[derive(Clone, Debug)]
pub struct Device {
    rates: Rates,
    busy_until: Ticks,
    /// By client.
    links_busy_until: Vec<Ticks>,
}

impl Device {
    pub fn new(config: &DeviceConfig) -> Self {
        Self { rates: Rates::new(config), busy_until: 0, links_busy_until: Vec::new() }
    }

    /// Takes a client's transfer in and returns when it ends.
    pub fn submit(&mut self, now: Ticks, client: usize, chunks: u64, bytes: u64) -> Ticks {
        if self.rates.link.is_some() {
            return self.submit_remote(now, client, chunks, bytes);
        }
        let start = (now + self.rates.latency).max(self.busy_until);
        self.busy_until = start + self.rates.alone(chunks, bytes).max(self.rates.shared(chunks, bytes));
        self.busy_until
    }

    #[cold]
    fn submit_remote(&mut self, now: Ticks, client: usize, chunks: u64, bytes: u64) -> Ticks {
        if self.links_busy_until.len() <= client {
            self.links_busy_until.resize(client + 1, 0);
        }
        self.busy_until = self.busy_until.max(now) + self.rates.shared(chunks, bytes);
        let link = &mut self.links_busy_until[client];
        *link = ((*link).max(now) + self.rates.alone(chunks, bytes)).max(self.busy_until);
        *link
    }
}

/// Concurrent transfers: each gets an equal share of the shared bandwidth.
///
/// All times are integers. `served` is the device time that each transfer in flight has had since time 0.
#[derive(Clone, Debug)]
pub struct SharedDevice {
    rates: Rates,
    now: Ticks,
    served: Ticks,
    /// For each transfer: `served` at the moment when the transfer has had its share, and its number.
    sharing: BTreeSet<(Ticks, u64)>,
    /// When transfers would end on a device of their own.
    alone_until: BTreeMap<u64, Ticks>,
    next: u64,
}

impl SharedDevice {
    pub fn new(config: &DeviceConfig) -> Self {
        let (sharing, alone_until) = (BTreeSet::new(), BTreeMap::new());
        Self { rates: Rates::new(config), now: 0, served: 0, sharing, alone_until, next: 0 }
    }

    /// As `Reader::submit`.
    pub fn submit(&mut self, now: Ticks, chunks: u64, bytes: u64) -> (u64, Ticks) {
        self.share_until(now);
        let id = self.next;
        self.next += 1;
        self.sharing.insert((self.served + self.rates.shared(chunks, bytes), id));
        self.alone_until.insert(id, now + self.rates.latency + self.rates.alone(chunks, bytes));
        (id, self.end(id))
    }

    /// As `Reader::ended`.
    pub fn ended(&mut self, now: Ticks, id: u64) -> Result<(), Ticks> {
        self.share_until(now);
        let end = self.end(id);
        if end > now {
            return Err(end);
        }
        self.alone_until.remove(&id);
        Ok(())
    }

    /// Divides the device's time up to `now` among the transfers.
    fn share_until(&mut self, now: Ticks) {
        while let Some(&(until, id)) = self.sharing.first() {
            let count = self.sharing.len() as u128;
            let needed = (until - self.served) * count;
            if self.now + needed > now {
                // The next call divides the remainder: no time is lost.
                let share = now.saturating_sub(self.now) / count;
                self.served += share;
                self.now += share * count;
                return;
            }
            self.now += needed;
            self.served = until;
            self.sharing.remove(&(until, id));
        }
        self.now = self.now.max(now);
    }

    fn end(&self, id: u64) -> Ticks {
        let alone_until = self.alone_until.get(&id).copied().unwrap_or(self.now);
        if !self.sharing.iter().any(|&(_, other)| other == id) {
            return alone_until.max(self.now);
        }
        let (mut at, mut served) = (self.now, self.served);
        for (&(until, other), count) in self.sharing.iter().zip((1..=self.sharing.len() as u128).rev()) {
            at += (until - served) * count;
            served = until;
            if other == id {
                break;
            }
        }
        alone_until.max(at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(latency_s: f64, chunk_s: f64, byte_s: f64, shared_byte_s: f64) -> DeviceConfig {
        DeviceConfig { latency_s, chunk_s, byte_s, shared_byte_s, depth: 1, ..DeviceConfig::default() }
    }

    fn ends(device: &mut SharedDevice, submitted: &[(f64, u64, u64)]) -> Vec<f64> {
        let mut waiting = Vec::new();
        let mut ends = vec![0.0; submitted.len()];
        for (index, &(at_s, chunks, bytes)) in submitted.iter().enumerate() {
            let (id, end) = device.submit(time::from_s(at_s), chunks, bytes);
            waiting.push((end, id, index));
        }
        while let Some(next) = waiting.iter().copied().min() {
            waiting.retain(|other| *other != next);
            let (end, id, index) = next;
            match device.ended(end, id) {
                Ok(()) => ends[index] = time::to_s(end),
                Err(later) => waiting.push((later, id, index)),
            }
        }
        ends
    }

    #[test]
    fn transfers_queue_for_bandwidth_and_overlap_latency() {
        let mut device = Device::new(&config(1.0, 0.5, 0.25, 0.25));
        assert_eq!(time::to_s(device.submit(0, 0, 2, 4)), 3.0);
        assert_eq!(time::to_s(device.submit(0, 0, 1, 2)), 4.0);
        assert_eq!(time::to_s(device.submit(time::from_s(10.0), 0, 0, 0)), 11.0);
    }

    #[test]
    fn a_limit_below_what_a_transfer_could_do_alone_decides() {
        let mut device = Device::new(&config(0.0, 0.5, 0.25, 2.0));
        assert_eq!(time::to_s(device.submit(0, 0, 2, 4)), 8.0);
        assert_eq!(ends(&mut SharedDevice::new(&config(0.0, 0.5, 0.25, 2.0)), &[(0.0, 2, 4)]), [8.0]);
    }

    #[test]
    fn side_by_side_each_gets_an_equal_part() {
        let mut device = SharedDevice::new(&config(0.0, 0.0, 0.0, 1.0));
        // Two share from 0 on; the short one has its 2 bytes at 4, the long one the rest alone.
        assert_eq!(ends(&mut device, &[(0.0, 1, 2), (0.0, 1, 6)]), [4.0, 8.0]);
        // One that joins makes the other wait.
        let mut device = SharedDevice::new(&config(0.0, 0.0, 0.0, 1.0));
        assert_eq!(ends(&mut device, &[(0.0, 1, 4), (2.0, 1, 4)]), [6.0, 8.0]);
    }

    #[test]
    fn what_one_interpreter_spends_on_chunks_adds_up_over_transfers() {
        let config = DeviceConfig { shared_chunk_s: 0.5, ..config(0.25, 0.5, 0.0, 0.25) };
        assert_eq!(ends(&mut SharedDevice::new(&config), &[(0.0, 4, 4)]), [2.25]);
        assert_eq!(ends(&mut SharedDevice::new(&config), &[(0.0, 4, 4), (0.0, 4, 4)]), [4.0, 4.0]);
        // The narrower of the two counts, not both.
        assert_eq!(ends(&mut SharedDevice::new(&config), &[(0.0, 4, 16), (0.0, 4, 16)]), [8.0, 8.0]);
    }

    #[test]
    fn transfers_overlap_until_the_shared_bandwidth_is_full() {
        // Alone: 4 chunks of 1 s and 2 bytes of 0.5 s each are 8 s; the device could move them in 2 s.
        let alone = (0.0, 4, 8);
        for (count, end) in [(1, 8.0), (2, 8.0), (4, 8.0), (8, 16.0)] {
            let mut device = SharedDevice::new(&config(0.0, 1.0, 0.5, 0.25));
            assert_eq!(ends(&mut device, &vec![alone; count]), vec![end; count]);
        }
    }

    #[test]
    fn operations_in_flight_divide_the_time_alone() {
        let deep = DeviceConfig { depth: 4, ..config(1.0, 1.0, 0.5, 0.0) };
        assert_eq!(ends(&mut SharedDevice::new(&deep), &[(0.0, 4, 8)]), [3.0]);
        assert_eq!(ends(&mut SharedDevice::new(&deep), &[(0.0, 1, 2)]), [3.0]);
    }
}
