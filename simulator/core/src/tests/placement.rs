//! The rules of placements and packs on sequences that were worked out by hand: tiers without an engine.

use super::{lmcache, lru};
use crate::eviction::kind::EvictionKind;
use crate::keys::{ChunkRange, Key};
use crate::tiers::config::{Placement, TickShare, TierConfig, TierPolicy};
use crate::tiers::device::DeviceConfig;
use crate::tiers::{Begun, Ended, Hit, Tiers};
use crate::time::{Ticks, from_s, to_s};

/// Tiers whose transfers end at `drain`, and take no time unless a test configures one.
struct Bench {
    tiers: Tiers,
    now: Ticks,
    answered: Ticks,
    begun: Vec<Begun>,
}

/// Levels whose transfers take no time and bypass the page cache.
fn free(mut config: TierConfig) -> TierConfig {
    for level in &mut config.levels {
        (level.read, level.write) = (DeviceConfig::default(), DeviceConfig::default());
        level.page_cache_read = None;
    }
    config
}

fn part(keys: &[Key]) -> ChunkRange {
    ChunkRange::of(keys.to_vec())
}

impl Bench {
    fn new(policy: TierPolicy, cpu_chunks: u64, disk_chunks: u64) -> Self {
        Self::of(free(super::tiers(policy, cpu_chunks, Some(disk_chunks))))
    }

    /// Mooncake's master and its SSD, which drops its oldest chunks from nine tenths down to eight.
    fn mooncake(cpu_chunks: u64, disk_chunks: u64) -> Self {
        let mut config = free(super::tiers(mooncake(), cpu_chunks, Some(disk_chunks)));
        (config.levels[0].eviction, config.levels[0].lease_s) = (EvictionKind::Lease, 10.0);
        let disk = &mut config.levels[1];
        (disk.eviction, disk.evicts) = (EvictionKind::Fifo, true);
        (disk.watermark, disk.target) = (0.9, 0.8);
        Self::of(config)
    }

    fn of(config: TierConfig) -> Self {
        Self { tiers: Tiers::new(config, false).loose(), now: 0, answered: 0, begun: Vec::new() }
    }

    fn at(&mut self, seconds: f64) -> &mut Self {
        self.now = from_s(seconds);
        self.tiers.tick(self.now);
        self
    }

    /// Ends all transfers, in the order of their ends, and returns what a look-up found.
    fn drain(&mut self) -> Option<Hit> {
        let mut found = None;
        loop {
            self.begun.extend(self.tiers.take_begun());
            let next = self.begun.iter().enumerate().min_by_key(|(_, begun)| (begun.end, begun.id));
            let Some((index, _)) = next else { return found };
            let Begun { end, id, .. } = self.begun.remove(index);
            self.now = self.now.max(end);
            self.tiers.tick(self.now);
            if let Ended::Lookup(_, hit) = self.tiers.io_done(self.now, id) {
                (found, self.answered) = (Some(hit), self.now);
            }
        }
    }

    fn store(&mut self, keys: &[Key]) -> &mut Self {
        self.tiers.store(self.now, 0, part(keys));
        self.drain();
        self
    }

    /// Looks the keys up and releases the hit: 'c' for a chunk in the CPU tier, 'd' for one from disk.
    fn look(&mut self, keys: &[Key]) -> String {
        let hit = self.tiers.lookup(self.now, 0, &part(keys));
        let hit = hit.or_else(|| self.drain()).expect("an answer");
        self.tiers.release(&hit);
        hit.chunk_levels().map(|level| ['c', 'd', 'e'][level as usize]).collect()
    }

    /// Where each of the keys is, without using it.
    fn where_are(&self, keys: &[Key]) -> String {
        let held = |key: &Key| match self.tiers.holders(*key)[..] {
            [true, true] => 'b',
            [true] | [true, false] => 'c',
            [false, true] => 'd',
            _ => '-',
        };
        keys.iter().map(held).collect()
    }
}

fn waterfall() -> TierPolicy {
    TierPolicy { placement: Placement::Waterfall, read_in_place: true, keep_prefetched: false, ..lru() }
}

#[test]
fn in_a_waterfall_new_chunks_go_to_the_top_and_the_least_recently_used_ones_fall() {
    let mut bench = Bench::new(waterfall(), 3, 2);
    bench.store(&[1]).store(&[2]).store(&[3]);
    assert_eq!(bench.where_are(&[1, 2, 3]), "ccc");
    // 4 takes the place of 1, which falls to disk.
    bench.store(&[4]);
    assert_eq!(bench.where_are(&[1, 2, 3, 4]), "dccc");
    // A hit makes 2 the last to go; 3 and 4 fall, and 1 leaves the disk as its least recently used chunk.
    assert_eq!(bench.look(&[2]), "c");
    bench.store(&[5]).store(&[6]);
    assert_eq!(bench.where_are(&[1, 2, 3, 4, 5, 6]), "-cddcc");
    // A hit on disk is read where it lies, and is the last to go there: 7 takes the place of 2, and that of 4.
    assert_eq!(bench.look(&[3]), "d");
    bench.store(&[7]);
    assert_eq!(bench.where_are(&[2, 3, 4, 5, 6, 7]), "dd-ccc");
    // A store skips chunks that are on disk.
    bench.store(&[3]);
    assert_eq!(bench.where_are(&[2, 3, 5, 6, 7]), "ddccc");
}

#[test]
fn a_waterfall_cascades_by_whole_prompts_and_reads_both_tiers_at_once() {
    let mut bench = Bench::new(waterfall(), 4, 4);
    bench.store(&[1, 2, 3]);
    // Room for two comes from the tail of the first prompt.
    bench.store(&[11, 12, 13]);
    assert_eq!(bench.where_are(&[1, 2, 3, 11, 12, 13]), "cddccc");
    assert_eq!(bench.look(&[1, 2, 3]), "cdd");
    assert_eq!(bench.where_are(&[1, 2, 3]), "cdd");
    // Two more fall, 13 and 12 before 11: the disk is full, and drops nothing yet.
    bench.store(&[21, 22]);
    assert_eq!(bench.where_are(&[1, 2, 3, 11, 12, 13, 21, 22]), "cddcddcc");
    // 11 falls as well, and 3 goes: the last chunk of the prompt that was used before all others on disk.
    bench.store(&[31]);
    assert_eq!(bench.where_are(&[1, 2, 3, 11, 12, 13, 31]), "cd-dddc");
    assert_eq!(bench.tiers.used(), [4, 4]);
}

#[test]
fn a_spillover_fills_each_tier_below_four_fifths_and_moves_nothing() {
    let policy = TierPolicy {
        placement: Placement::Spillover,
        watermark: 0.8,
        tick_s: 0.0,
        read_in_place: true,
        end_uses: false,
        ..lmcache()
    };
    let mut bench = Bench::new(policy, 10, 3);
    // 7 of 10 chunks are less than 80 %, 8 are not.
    bench.store(&[1, 2, 3, 4, 5]);
    bench.store(&[11, 12, 13, 14]);
    assert_eq!(bench.where_are(&[1, 2, 3, 4, 5, 11, 12, 13, 14]), "cccccccdd");
    assert_eq!(bench.look(&[11, 12, 13, 14]), "ccdd");
    // The disk takes one more, and then nothing is taken any more and nothing goes.
    bench.store(&[21, 22]);
    assert_eq!(bench.where_are(&[21, 22]), "d-");
    assert_eq!(bench.where_are(&[1, 2, 3, 4, 5, 11, 12, 13, 14]), "cccccccdd");
    let counters = bench.tiers.counters();
    assert_eq!((counters.stores_begun, counters.stores_ended), (10, 10));
}

#[test]
fn the_end_of_a_store_renews_its_chunks_unless_their_place_is_that_of_its_beginning() {
    for (write_end_uses, left) in [(true, "c-ccc"), (false, "ccc-c")] {
        let policy = TierPolicy { end_uses: true, write_end_uses, placement: Placement::Waterfall, ..lru() };
        let mut bench = Bench::of(free(super::tiers(policy, 4, None)));
        bench.store(&[1, 2]);
        // The request ends while the rest of its prompt is on its way.
        bench.tiers.store(bench.now, 0, part(&[1, 2, 3, 4]));
        bench.tiers.end(&part(&[1, 2, 3, 4]));
        bench.drain();
        bench.store(&[5]);
        assert_eq!(bench.where_are(&[1, 2, 3, 4, 5]), left, "{write_end_uses}");
    }
}

fn sglang() -> TierPolicy {
    TierPolicy {
        tick_s: 0.0,
        max_prefetches: 1 << 32,
        min_prefetch_tokens: 256,
        prefetch_share: Some(0.5),
        prefetch_timeout_s: Some(1.0),
        prefetch_token_s: 0.25 / 1024.0,
        ..lru()
    }
}

/// SGLang with pages of 64 tokens; a page takes `page_s` to read from disk.
fn hicache(host_pages: u64, page_s: f64) -> Bench {
    let mut config = super::tiers(sglang(), host_pages, Some(1000));
    config.chunk_tokens = 64;
    let disk = &mut config.levels[1];
    (disk.evicts, disk.page_cache_read) = (false, None);
    disk.read = DeviceConfig { chunk_s: page_s, ..DeviceConfig::default() };
    Bench::of(config)
}

#[test]
fn sglang_fetches_no_less_than_256_tokens_from_storage() {
    let mut bench = hicache(100, 1e-3);
    bench.store(&[1, 2, 3, 4, 5]);
    bench.tiers.reset(&["cpu"]);
    assert_eq!(bench.look(&[1, 2, 3]), "");
    assert_eq!(bench.look(&[1, 2, 3, 4]), "dddd");
    // Fetched pages stay on the host, and the fifth page alone is too few tokens.
    assert_eq!(bench.look(&[1, 2, 3, 4, 5]), "cccc");
    // The look-up stops at the first page that is nowhere.
    assert_eq!(bench.look(&[1, 2, 99, 4, 5]), "cc");
}

#[test]
fn sglang_stops_a_fetch_when_its_time_is_over_and_keeps_what_came() {
    // Eight pages of 64 tokens: 1 s and 0.125 s, in which four pages of 0.25 s arrive.
    let mut bench = hicache(100, 0.25);
    let pages: Vec<Key> = (1..=8).collect();
    bench.store(&pages);
    bench.tiers.reset(&["cpu"]);
    let start = bench.now;
    assert_eq!(bench.look(&pages), "dddd");
    assert_eq!(to_s(bench.answered - start), 1.125);
    // The device reads on to the transfer's end, for nothing.
    assert_eq!(to_s(bench.now - start), 2.0);
    assert_eq!(bench.where_are(&pages), "bbbbdddd");
    assert_eq!(bench.tiers.used()[0], 4);
    assert_eq!(bench.tiers.counters().levels[1].loaded_chunks, 4);
}

#[test]
fn sglang_fetches_into_half_of_the_host_at_most() {
    let mut bench = hicache(16, 1e-3);
    let prompts: Vec<Vec<Key>> = (0..3).map(|prompt| (prompt * 10..prompt * 10 + 5).collect()).collect();
    for prompt in &prompts {
        bench.store(prompt);
    }
    bench.tiers.reset(&["cpu"]);
    // Five pages are under way, then ten: no less than half of 16, so the third prompt is not fetched.
    assert!(bench.tiers.lookup(bench.now, 0, &part(&prompts[0])).is_none());
    assert!(bench.tiers.lookup(bench.now, 1, &part(&prompts[1])).is_none());
    let third = bench.tiers.lookup(bench.now, 2, &part(&prompts[2])).expect("an answer at once");
    assert_eq!(third.chunks(), 0);
    bench.drain();
    assert_eq!(bench.where_are(&prompts[2]), "ddddd");
    assert_eq!(bench.look(&prompts[2]), "ddddd");
}

#[test]
fn sglang_writes_through_and_makes_room_on_the_host_page_by_page() {
    let mut bench = hicache(4, 1e-3);
    bench.store(&[1, 2, 3]).store(&[4, 5]);
    // The tail of the older prompt went, and only that.
    assert_eq!(bench.where_are(&[1, 2, 3, 4, 5]), "bbdbb");
}

fn mooncake() -> TierPolicy {
    TierPolicy {
        end_uses: false,
        partial_stores: true,
        tick_s: 0.01,
        watermark: 0.9,
        evict_ratio: 0.05,
        tick_share: TickShare::Surplus,
        read_in_place: true,
        max_prefetches: 1 << 32,
        ..lmcache()
    }
}

#[test]
fn mooncake_evicts_expired_leases_in_their_order() {
    let mut bench = Bench::mooncake(20, 0);
    let keys: Vec<Key> = (1..=18).collect();
    bench.at(1.0).store(&keys);
    // 18 of 20 are 90 %, not more: nothing goes.
    assert_eq!(bench.at(2.001).where_are(&[1, 18]), "cc");
    // A look-up leases 17 and 18 until 12 s. One more chunk is 95 %: a tick drops ceil((0.95 - 0.9 + 0.05) x 19) = 2.
    assert_eq!(bench.look(&[17]) + &bench.look(&[18]), "cc");
    bench.store(&[19]);
    bench.at(2.005);
    assert_eq!(bench.where_are(&keys), "c".repeat(18));
    // All others' leases ran out when they were put, the prompt's first one first.
    bench.at(2.02);
    assert_eq!(bench.where_are(&[1, 2, 3, 16, 17, 18, 19]), "--ccccc");
    assert_eq!(bench.tiers.used()[0], 17);
}

#[test]
fn mooncake_keeps_leased_chunks_though_a_put_fails() {
    let mut bench = Bench::mooncake(10, 0);
    let keys: Vec<Key> = (1..=9).collect();
    bench.at(1.0).store(&keys);
    assert_eq!(bench.at(2.0).look(&keys), "c".repeat(9));
    // Each chunk is put on its own: one fits, two do not, and all others are leased until 12 s.
    bench.store(&[21, 22, 23]);
    assert_eq!(bench.where_are(&[21, 22, 23]), "c--");
    // 100 %: ceil(max(0.05, 1 - 0.9 + 0.05) x 10) = 2 should go, and only 21 has no lease.
    bench.at(2.5);
    assert_eq!(bench.where_are(&[1, 9, 21]), "cc-");
    bench.store(&[24, 25]);
    // Above the watermark again, and 24 goes. A put that fails for want of room has a tick evict as well.
    bench.at(11.9);
    assert_eq!(bench.where_are(&keys), "c".repeat(9));
    bench.store(&[31, 32]);
    assert_eq!(bench.where_are(&[31, 32]), "c-");
    bench.at(11.95);
    assert_eq!(bench.where_are(&[31]), "-");
    // Leases ran out at 12 s, the first chunk's first. 90 % is not above the watermark and no put has failed since.
    bench.at(20.0);
    assert_eq!(bench.where_are(&keys), "c".repeat(9));
    bench.store(&[41]);
    bench.at(20.01);
    assert_eq!(bench.where_are(&[1, 2, 3, 9, 41]), "--ccc");
}

#[test]
fn mooncake_empties_its_ssd_from_nine_to_eight_tenths_the_oldest_first() {
    let mut bench = Bench::mooncake(100, 20);
    for (second, first) in (1..).zip([0, 10, 20, 30, 40, 50]) {
        bench.at(f64::from(second)).store(&[first, first + 1, first + 2]);
    }
    assert_eq!(bench.tiers.used(), [18, 18]);
    // 19 of 20 would be more than 90 %: the oldest three go, so that 16 are held with the new one.
    bench.at(8.0).store(&[99]);
    assert_eq!(bench.tiers.used(), [19, 16]);
    assert_eq!(bench.where_are(&[0, 1, 2, 10, 99]), "cccbb");
    // Reads of the SSD take no room in memory and leave nothing there.
    bench.tiers.reset(&["cpu"]);
    assert_eq!(bench.look(&[10, 11, 12]), "ddd");
    assert_eq!((bench.tiers.used()[0], bench.where_are(&[10])), (0, "d".to_string()));
}

#[test]
fn a_chunk_that_passes_memory_is_unlocked_as_often_as_it_was_found() {
    let mut bench = Bench::new(waterfall(), 2, 4);
    bench.store(&[1, 2]).store(&[3, 4]);
    assert_eq!(bench.where_are(&[1, 2, 3, 4]), "ddcc");
    for slot in [0, 1] {
        assert!(bench.tiers.lookup(bench.now, slot, &part(&[1, 2])).is_none());
    }
    let hit = bench.drain().expect("an answer");
    bench.tiers.release(&hit);
    bench.tiers.release(&hit);
    // No lock is left behind: the chunks go as others do.
    bench.store(&[5, 6]).store(&[7, 8]);
    assert_eq!(bench.where_are(&[1, 2, 3, 4, 5, 6, 7, 8]), "--ddddcc");
}
