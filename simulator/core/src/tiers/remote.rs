//! Reads from a remote device: a store that several clients reach, each over a link of its own.
//!
//! A transfer alone takes latency x rounds + chunks x chunk + bytes x byte: a client has so many connections, and each
//! round of operations waits once. The transfers of one client divide its link, its connections and the work that it
//! does by itself on each operation; a transfer ends when it has had its part of all three. The clients that read at a
//! moment divide the device's total bandwidth evenly, and none gets more than its link carries.

use std::collections::{BTreeMap, BTreeSet};

use super::device::{DeviceConfig, Rates};
use crate::time::Ticks;

/// Times in here are whole parts of so many ticks, so that their products fit.
const TICKS_BITS: u32 = 32;
/// A client's share of its link is a whole number of 2^-24 of it.
const SHARE_BITS: u32 = 24;

/// Transfers that divide something evenly, first the one that needs the least.
#[derive(Clone, Debug, Default)]
struct Queue {
    /// What each transfer in here has had since time 0.
    served: u128,
    /// What the queue has got and could not divide evenly yet.
    rest: u128,
    /// For each transfer: `served` at the moment when it has had all, and its number.
    waiting: BTreeSet<(u128, u64)>,
}

impl Queue {
    fn add(&mut self, work: u128, id: u64) {
        self.waiting.insert((self.served + work, id));
    }

    fn holds(&self, id: u64) -> bool {
        self.waiting.iter().any(|&(_, other)| other == id)
    }

    /// What the queue has to get until its first transfer has had all.
    fn lacks(&self) -> Option<u128> {
        self.waiting.first().map(|(until, _)| (until - self.served) * self.waiting.len() as u128 - self.rest)
    }

    /// The queue gets this. True: its first transfer has had all, and leaves.
    fn serve(&mut self, work: u128) -> bool {
        let Some(&first) = self.waiting.first() else { return false };
        let (count, work) = (self.waiting.len() as u128, work + self.rest);
        if (first.0 - self.served) * count > work {
            (self.served, self.rest) = (self.served + work / count, work % count);
            return false;
        }
        (self.served, self.rest) = (first.0, 0);
        self.waiting.remove(&first);
        true
    }

    /// The time after which a transfer has had all, if the queue alone has the whole of what it divides.
    fn end(&self, id: u64) -> u128 {
        let (mut at, mut served) = (0, self.served);
        for (&(until, other), count) in self.waiting.iter().zip((1..=self.waiting.len() as u128).rev()) {
            at += (until - served) * count;
            served = until;
            if other == id {
                return at - self.rest.min(at);
            }
        }
        0
    }
}

/// One client's transfers: their bytes on the link, and their operations.
#[derive(Clone, Debug, Default)]
struct Link {
    bytes: Queue,
    operations: Queue,
}

#[derive(Clone, Copy, Debug)]
struct Transfer {
    client: usize,
    alone_until: Ticks,
}

#[derive(Clone, Debug)]
pub struct RemoteDevice {
    rates: Rates,
    /// The total bandwidth as a number of links, in 2^-SHARE_BITS; None: no bound.
    total: Option<u128>,
    now: u128,
    links: Vec<Link>,
    transfers: BTreeMap<u64, Transfer>,
    next: u64,
}

impl RemoteDevice {
    pub fn new(config: &DeviceConfig) -> Self {
        let rates = Rates::new(config);
        let (transfers, links) = (BTreeMap::new(), Vec::new());
        Self { total: rates.links(SHARE_BITS), rates, now: 0, links, transfers, next: 0 }
    }

    /// As `SharedDevice::submit`, for one of its clients.
    pub fn submit(&mut self, now: Ticks, client: usize, chunks: u64, bytes: u64) -> (u64, Ticks) {
        self.run_until(now);
        let id = self.next;
        self.next += 1;
        if self.links.len() <= client {
            self.links.resize_with(client + 1, Link::default);
        }
        let link = &mut self.links[client];
        link.bytes.add(coarse(self.rates.bytes(bytes)), id);
        link.operations.add(coarse(self.rates.operations(chunks, bytes)), id);
        let alone_until = now + self.rates.alone(chunks, bytes);
        self.transfers.insert(id, Transfer { client, alone_until });
        (id, self.end(id))
    }

    /// As `SharedDevice::ended`.
    pub fn ended(&mut self, now: Ticks, id: u64) -> Result<(), Ticks> {
        self.run_until(now);
        let end = self.end(id);
        if end > now {
            return Err(end);
        }
        self.transfers.remove(&id);
        Ok(())
    }

    fn run_until(&mut self, now: Ticks) {
        let now = now >> TICKS_BITS;
        for link in &mut self.links {
            let mut left = now.saturating_sub(self.now);
            while let Some(lacks) = link.operations.lacks() {
                link.operations.serve(left);
                if lacks > left {
                    break;
                }
                left -= lacks;
            }
        }
        let mut clock = self.now;
        while clock < now && pass(&mut self.links, &mut clock, now, self.total) {}
        self.now = self.now.max(now);
    }

    fn end(&self, id: u64) -> Ticks {
        let Some(&Transfer { client, alone_until }) = self.transfers.get(&id) else { return 0 };
        let link = &self.links[client];
        let mut end = self.now + link.operations.end(id);
        if link.bytes.holds(id) {
            let (mut links, mut clock) = (self.links.clone(), self.now);
            while links[client].bytes.holds(id) && pass(&mut links, &mut clock, u128::MAX, self.total) {}
            end = end.max(clock);
        }
        // A part of a tick's unit may be lost, never gained.
        alone_until.max(if end > self.now { (end + 1) << TICKS_BITS } else { self.now << TICKS_BITS })
    }
}

/// Lets the clients' bytes pass until the next transfer has had its own, or until `until`. False: there is none.
fn pass(links: &mut [Link], clock: &mut u128, until: u128, total: Option<u128>) -> bool {
    let active = links.iter().filter(|link| !link.bytes.waiting.is_empty()).count() as u128;
    // A client gets (share / whole) of its link.
    let whole = active << SHARE_BITS;
    let share = total.map_or(whole, |total| total.min(whole));
    let needs = |link: &Link| link.bytes.lacks().map(|lacks| lacks.saturating_mul(whole).div_ceil(share));
    let Some(next) = links.iter().filter_map(needs).min() else { return false };
    let passed = next.min(until - *clock);
    for link in links {
        link.bytes.serve(passed.saturating_mul(share) / whole);
    }
    *clock += passed;
    true
}

fn coarse(ticks: Ticks) -> u128 {
    ticks >> TICKS_BITS
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::numbered;
    use crate::tiers::device::{Device, LinkConfig};
    use crate::time;

    /// A client's transfer: when it comes, from which client, chunks, bytes.
    type Asked = (f64, usize, u64, u64);

    /// A link of 1 byte/s with so many connections, and so many bytes/s for all.
    fn config(latency_s: f64, connections: u64, chunk_s: f64, total: f64) -> DeviceConfig {
        let link = Some(LinkConfig { latency_s, connections });
        DeviceConfig { chunk_s, byte_s: 1.0, shared_byte_s: 1.0 / total, link, ..DeviceConfig::default() }
    }

    /// When transfers end that come in this order.
    fn ends(config: &DeviceConfig, asked: &[Asked]) -> Vec<f64> {
        let mut device = RemoteDevice::new(config);
        let (mut waiting, mut ends) = (BTreeSet::new(), vec![0.0; asked.len()]);
        let settle =
            |device: &mut RemoteDevice, waiting: &mut BTreeSet<(Ticks, u64)>, ends: &mut Vec<f64>, until| {
                while let Some((end, id)) = waiting.first().copied().filter(|(end, _)| *end <= until) {
                    waiting.remove(&(end, id));
                    match device.ended(end, id) {
                        Ok(()) => ends[id as usize] = time::to_s(end),
                        Err(later) => _ = waiting.insert((later, id)),
                    }
                }
            };
        for &(at_s, client, chunks, bytes) in asked {
            settle(&mut device, &mut waiting, &mut ends, time::from_s(at_s));
            let (id, end) = device.submit(time::from_s(at_s), client, chunks, bytes);
            waiting.insert((end, id));
        }
        settle(&mut device, &mut waiting, &mut ends, time::FOREVER);
        assert!(device.transfers.is_empty());
        ends
    }

    fn assert_close(found: &[f64], expected: &[f64]) {
        let close = found.iter().zip(expected).all(|(one, other)| (one - other).abs() < 1e-6);
        assert!(close && found.len() == expected.len(), "{found:?} instead of {expected:?}");
    }

    #[test]
    fn alone_each_round_of_operations_waits_once() {
        // 10 operations over 4 connections are 3 rounds of 2 s; 0.25 s of own work each; 20 bytes.
        assert_close(&ends(&config(2.0, 4, 0.25, 100.0), &[(0.0, 0, 10, 20)]), &[6.0 + 2.5 + 20.0]);
        assert_close(&ends(&config(2.0, 320, 0.0, 100.0), &[(0.0, 0, 10, 20)]), &[2.0 + 20.0]);
        // The total is below what the link carries.
        assert_close(&ends(&config(0.0, 4, 0.0, 0.5), &[(0.0, 0, 1, 20)]), &[40.0]);
    }

    #[test]
    fn one_connection_serves_one_operation_at_a_time() {
        // 1 s of latency, 0.5 s of own work and 2 bytes are 3.5 s; three at once have all ended after three times that.
        let one = (0.0, 0, 1, 2);
        assert_close(&ends(&config(1.0, 1, 0.5, 100.0), &[one; 3]), &[10.5; 3]);
        // Three clients have a connection each.
        let each = [0, 1, 2].map(|client| (0.0, client, 1, 2));
        assert_close(&ends(&config(1.0, 1, 0.5, 100.0), &each), &[3.5; 3]);
    }

    #[test]
    fn clients_divide_the_total_and_transfers_their_clients_part() {
        // 1.5 bytes/s for two clients with links of 1: 0.75 each. Client 0 divides its part by three.
        let at_once = [(0.0, 0, 1, 3), (0.0, 0, 1, 3), (0.0, 0, 1, 3), (0.0, 1, 1, 3)];
        // Client 1 has its 3 bytes at 4; client 0 has had 3 of 9 by then, and then a whole link.
        assert_close(&ends(&config(0.0, 320, 0.0, 1.5), &at_once), &[10.0, 10.0, 10.0, 4.0]);
        // The total is above both links: neither sees the other.
        assert_close(&ends(&config(0.0, 320, 0.0, 2.0), &at_once), &[9.0, 9.0, 9.0, 3.0]);
        // One joins at 2: until then client 0 has had 2 of its 4 bytes, then 0.5 a second.
        let joined = [(0.0, 0, 1, 4), (2.0, 1, 1, 3)];
        assert_close(&ends(&config(0.0, 320, 0.0, 1.0), &joined), &[6.0, 7.0]);
    }

    #[test]
    fn many_clients_queue_at_the_total() {
        // n clients of one transfer each: bytes / link until the total is full, then n bytes / total.
        for (clients, end) in [(1, 10.0), (2, 10.0), (4, 10.0), (8, 20.0), (16, 40.0)] {
            let asked: Vec<Asked> = (0..clients).map(|client| (0.0, client, 4, 10)).collect();
            assert_close(&ends(&config(0.0, 320, 0.0, 4.0), &asked), &vec![end; clients]);
        }
    }

    /// Poisson arrivals at a rate, with seeded gaps.
    fn poisson(rate: f64, count: u64) -> Vec<f64> {
        let mut at_s = 0.0;
        let gap = |number: u64| -(((numbered(number) >> 11) as f64 + 0.5) / (1u64 << 53) as f64).ln() / rate;
        (0..count)
            .map(|number| {
                at_s += gap(number);
                at_s
            })
            .collect()
    }

    #[test]
    fn a_loaded_link_takes_as_long_as_processor_sharing_says() {
        // M/G/1 with processor sharing: a mean stay of S / (1 - rho).
        for rho in [0.3, 0.6] {
            let moments = poisson(rho / 5.0, 20_000);
            let asked: Vec<Asked> = moments.iter().map(|&at_s| (at_s, 0, 1, 5)).collect();
            let ended = ends(&config(0.0, 320, 0.0, 100.0), &asked);
            let mean = ended.iter().zip(&moments).map(|(end, at)| end - at).sum::<f64>() / ended.len() as f64;
            let expected = 5.0 / (1.0 - rho);
            assert!((mean / expected - 1.0).abs() < 0.03, "{mean} instead of {expected} at {rho}");
        }
    }

    #[test]
    fn loaded_writes_take_as_long_as_a_queue_says() {
        // M/D/1: a mean wait of rho S / 2 (1 - rho) before the service.
        for rho in [0.3, 0.6, 0.8] {
            let mut device = Device::new(&config(0.0, 320, 0.0, 100.0));
            let moments = poisson(rho / 5.0, 60_000);
            let stays =
                moments.iter().map(|&at_s| time::to_s(device.submit(time::from_s(at_s), 0, 1, 5)) - at_s);
            let mean = stays.sum::<f64>() / moments.len() as f64;
            let expected = 5.0 + rho * 5.0 / (2.0 * (1.0 - rho));
            assert!((mean / expected - 1.0).abs() < 0.03, "{mean} instead of {expected} at {rho}");
        }
    }

    #[test]
    fn writes_of_several_clients_queue_at_the_total() {
        let mut device = Device::new(&config(1.0, 320, 0.0, 1.5));
        let submit = |device: &mut Device, client| time::to_s(device.submit(0, client, 1, 6));
        // Each link takes 1 s and 6 bytes; the total lets 6 bytes through in 4 s.
        let found = [0, 1, 2, 0].map(|client| submit(&mut device, client));
        assert_close(&found, &[7.0, 8.0, 12.0, 16.0]);
    }
}
