//! The whole engine: exact small cases, and properties over seeded random loads.

use crate::engine::Engine;
use crate::engine::config::EngineConfig;
use crate::engine::cost::CostConfig;
use crate::engine::request::{Completion, Submission};
use crate::eviction::kind::EvictionKind;
use crate::keys::Segment;
use crate::tiers::config::{LevelConfig, Placement, TickShare, TierConfig, TierPolicy};
use crate::tiers::device::DeviceConfig;
use crate::time::{FOREVER, from_s, to_s};

mod any;
mod blocks_oracle;
mod cache;
mod cluster;
mod eviction_oracle;
mod front_end;
mod fuzz;
mod hierarchy;
mod leases;
mod levels;
mod nodes;
mod placement;
mod polls;
mod probing;
mod schedule;

const CHUNK_BYTES: u64 = 1000;

pub(crate) fn lmcache() -> TierPolicy {
    TierPolicy {
        end_uses: true,
        placement: Placement::Copy,
        partial_stores: false,
        evict_on_demand: false,
        tick_s: 1.0,
        watermark: 0.8,
        evict_ratio: 0.2,
        tick_share: TickShare::Ratio,
        read_in_place: false,
        min_prefetch_tokens: 0,
        prefetch_share: None,
        prefetch_timeout_s: None,
        prefetch_token_s: 0.0,
        write_end_uses: true,
        keep_prefetched: false,
        max_prefetches: 8,
    }
}

pub(crate) fn lru() -> TierPolicy {
    TierPolicy { evict_on_demand: true, end_uses: false, keep_prefetched: true, ..lmcache() }
}

pub(crate) fn device(latency_s: f64, byte_s: f64) -> DeviceConfig {
    DeviceConfig {
        latency_s,
        chunk_s: 1e-4,
        byte_s,
        shared_byte_s: byte_s,
        depth: 1,
        ..DeviceConfig::default()
    }
}

/// A level that a page cache stands in front of, unless it is the first. It evicts if the policy evicts on demand.
pub(crate) fn level(name: &str, policy: &TierPolicy, chunks: u64) -> LevelConfig {
    let (first, copy) = (name == "cpu", device(1e-3, 1e-6));
    LevelConfig {
        name: name.to_string(),
        chunks,
        eviction: EvictionKind::Lru,
        evicts: policy.evict_on_demand,
        read: if first { copy } else { device(5e-3, 2e-5) },
        write: if first { copy } else { device(5e-3, 2e-5) },
        page_cache_read: (!first).then(|| device(2e-3, 4e-6)),
        ..any::plain_level()
    }
}

pub(crate) fn tiers(policy: TierPolicy, cpu_chunks: u64, disk_chunks: Option<u64>) -> TierConfig {
    let disk = disk_chunks.map(|chunks| level("disk", &policy, chunks));
    let levels = std::iter::once(level("cpu", &policy, cpu_chunks)).chain(disk).collect();
    TierConfig { policy, chunk_bytes: CHUNK_BYTES, chunk_tokens: 8, levels, private_levels: 1 }
}

pub(crate) fn config(gpu_blocks: u32, tiers: Option<TierConfig>) -> EngineConfig {
    EngineConfig {
        gpu_blocks,
        null_blocks: 1,
        block_tokens: 4,
        chunk_tokens: 8,
        max_num_batched_tokens: 64,
        max_num_seqs: 6,
        max_model_len: 100_000,
        record_token_times: true,
        macro_steps: true,
        lookup_polls: 0,
        load_polls: 0,
        wake_polls: 0,
        prefills_first: false,
        reads_ahead: false,
        stores_replies: false,
        min_load_tokens: 0,
        parses_whole: false,
        journal: false,
        cost: CostConfig {
            step_s: 2e-3,
            token_s: 1e-4,
            attention_s: 1e-7,
            attention_context_s: 1.5e-7,
            context_s: 1e-7,
            request_s: 1e-3,
            request_token_s: 1e-6,
            ..CostConfig::default()
        },
        tiers,
    }
}

pub(crate) fn ask(id: &str, prompt: &[(i64, u64)], output_tokens: u64) -> Submission {
    let prompt: Vec<Segment> = prompt.iter().map(|&(hash_id, tokens)| Segment { hash_id, tokens }).collect();
    Submission { id: id.to_string(), prompt: prompt.into(), output_tokens, reply_id: reply_id(id) }
}

fn reply_id(id: &str) -> i64 {
    id.bytes().fold(1 << 40, |hash: i64, byte| hash.wrapping_mul(31) ^ i64::from(byte))
}

fn one(engine: &mut Engine, submission: Submission) -> Completion {
    engine.submit(submission, engine.now()).expect("a request that is taken");
    engine.advance(FOREVER).expect("no dead end").pop().expect("one completion")
}

fn drain(engine: &mut Engine) {
    assert_eq!(engine.advance(FOREVER).expect("no dead end"), []);
    assert!(engine.idle());
}

/// splitmix64: small, seeded, the same everywhere.
struct Chance(u64);

impl Chance {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let value = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (value ^ (value >> 31)) % bound
    }
}

/// Requests with shared prefixes, some of which go on from an earlier request's reply.
pub(crate) fn random_load(seed: u64, count: u64) -> Vec<(Submission, f64)> {
    let mut chance = Chance(seed);
    let mut at_s = 0.0;
    let mut load: Vec<(Submission, f64)> = Vec::new();
    for number in 0..count {
        at_s += chance.below(40) as f64 * 1e-3;
        let mut prompt = vec![(chance.below(5) as i64, 1 + chance.below(60))];
        if chance.below(3) == 0 && number > 0 {
            let (earlier, _) = &load[chance.below(number) as usize];
            prompt = earlier.prompt.iter().map(|segment| (segment.hash_id, segment.tokens)).collect();
            prompt.push((earlier.reply_id, earlier.output_tokens));
            if prompt.iter().map(|(_, tokens)| tokens).sum::<u64>() > 140 {
                prompt.truncate(1);
            }
        }
        prompt.push((1000 + number as i64, 1 + chance.below(30)));
        load.push((ask(&format!("r{number}"), &prompt, 1 + chance.below(50)), at_s));
    }
    load
}

fn run(config: EngineConfig, load: &[(Submission, f64)]) -> (Vec<Completion>, Engine) {
    let mut engine = Engine::new(config).expect("a good configuration");
    for (submission, at_s) in load {
        engine.submit(submission.clone(), from_s(*at_s)).expect("a request that is taken");
    }
    let mut completions = Vec::new();
    loop {
        let some = engine.advance(FOREVER).expect("no dead end");
        engine.check_capacities();
        if some.is_empty() {
            return (completions, engine);
        }
        completions.extend(some);
    }
}

pub(crate) fn variants() -> Vec<EngineConfig> {
    vec![
        config(400, None),
        config(60, None),
        config(60, Some(tiers(lmcache(), 30, Some(100)))),
        config(60, Some(tiers(lmcache(), 400, None))),
        config(80, Some(tiers(lru(), 12, Some(40)))),
        config(60, Some(tiers(lmcache(), 1, Some(10_000)))),
    ]
}

#[test]
fn macro_steps_give_what_single_steps_give() {
    for seed in 0..40 {
        let load = random_load(seed, 60);
        for macros in variants() {
            let singles = EngineConfig { macro_steps: false, ..macros.clone() };
            let (fast, fast_engine) = run(macros, &load);
            let (slow, slow_engine) = run(singles, &load);
            assert_eq!(fast, slow, "seed {seed}");
            assert_eq!(fast_engine.counters(), slow_engine.counters(), "seed {seed}");
            assert_eq!(fast_engine.free_queue(), slow_engine.free_queue(), "seed {seed}");
        }
    }
}

#[test]
fn stopping_often_changes_nothing() {
    for seed in 0..10 {
        let load = random_load(seed, 40);
        for config in variants() {
            let (whole, _) = run(config.clone(), &load);
            let mut engine = Engine::new(config).expect("a good configuration");
            for (submission, at_s) in &load {
                engine.submit(submission.clone(), from_s(*at_s)).expect("a request that is taken");
            }
            let mut spans = Vec::new();
            while !engine.idle() {
                let until = engine.now() + from_s(0.0037);
                spans.extend(engine.advance(until).expect("no dead end"));
                engine.check_capacities();
            }
            assert_eq!(spans, whole, "seed {seed}");
        }
    }
}

#[test]
fn tokens_and_blocks_are_conserved() {
    let mut preemptions = 0;
    for seed in 100..130 {
        let load = random_load(seed, 80);
        for config in variants() {
            let (completions, engine) = run(config, &load);
            assert_eq!(completions.len(), load.len());
            for done in &completions {
                let from = done.sources;
                assert_eq!(done.error, None);
                assert_eq!(from.sum(), done.prompt_tokens);
                assert!(from.computed >= 1);
                assert_eq!(done.tokens.len() as u64, done.output_tokens);
                assert!(done.tokens.windows(2).all(|pair| pair[0] < pair[1]));
                preemptions += done.preemptions;
            }
            engine.check_idle();
            let counters = engine.counters().tiers;
            assert_eq!(counters.stores_begun, counters.stores_ended);
        }
    }
    assert!(preemptions > 0, "the loads are meant to run out of blocks");
}

#[test]
fn each_tier_serves_what_it_was_left() {
    let mut engine = Engine::new(config(100, Some(tiers(lmcache(), 100, Some(100))))).expect("good");
    let served = |done: &Completion| {
        (done.sources.computed, done.sources.gpu, done.sources.levels[0], done.sources.levels[1])
    };
    let prompt = [(1, 65)];
    let cold = one(&mut engine, ask("recompute", &prompt, 1));
    assert_eq!(served(&cold), (65, 0, 0, 0));
    drain(&mut engine);
    assert_eq!(served(&one(&mut engine, ask("gpu", &prompt, 1))), (1, 64, 0, 0));
    engine.reset(&["gpu"]).expect("idle");
    assert_eq!(served(&one(&mut engine, ask("cpu", &prompt, 1))), (1, 0, 64, 0));
    engine.reset(&["gpu", "cpu"]).expect("idle");
    assert_eq!(served(&one(&mut engine, ask("disk", &prompt, 1))), (1, 0, 0, 64));
    assert_eq!(engine.counters().tiers.levels[1].read_bytes, 0);
    drain(&mut engine);
    engine.reset(&["gpu", "cpu", "page_cache"]).expect("idle");
    assert_eq!(served(&one(&mut engine, ask("cold", &prompt, 1))), (1, 0, 0, 64));
    assert_eq!(engine.counters().tiers.levels[1].read_bytes, 8 * CHUNK_BYTES);
    drain(&mut engine);
    engine.reset(&["gpu", "cpu", "disk", "page_cache"]).expect("idle");
    assert_eq!(served(&one(&mut engine, ask("again", &prompt, 1))), (65, 0, 0, 0));
}

#[test]
fn a_full_hit_computes_one_token_and_mixes_tiers_at_the_last_block() {
    let mut engine = Engine::new(config(100, Some(tiers(lmcache(), 100, None)))).expect("good");
    one(&mut engine, ask("first", &[(1, 64)], 1));
    drain(&mut engine);
    let again = one(&mut engine, ask("again", &[(1, 64)], 1)).sources;
    assert_eq!((again.computed, again.gpu, again.levels[0]), (1, 60, 3));
}

#[test]
fn a_load_from_disk_is_serial() {
    let mut engine = Engine::new(config(100, Some(tiers(lmcache(), 100, Some(100))))).expect("good");
    one(&mut engine, ask("first", &[(1, 65)], 1));
    drain(&mut engine);
    engine.reset(&["gpu", "cpu", "page_cache"]).expect("idle");
    let sent = engine.now();
    let done = one(&mut engine, ask("cold", &[(1, 65)], 1));
    let ttft_s = to_s(done.first_token.expect("a token") - sent);
    let arrival_s = 1e-3 + 65e-6;
    let transfers_s = (5e-3 + 8e-4 + 8000.0 * 2e-5) + (1e-3 + 8e-4 + 8000.0 * 1e-6);
    let step_s = 2e-3 + 1e-4 + 1e-7 * 0.5 + (1.5e-7 + 1e-7) * 64.0;
    assert!((ttft_s - arrival_s - transfers_s - step_s).abs() < 1e-12, "{ttft_s}");
}

#[test]
fn what_can_never_be_served_is_an_error_row() {
    let mut engine = Engine::new(config(11, None)).expect("good");
    let too_long = one(&mut engine, ask("big", &[(1, 38)], 4));
    let text = too_long.error.expect("an error");
    assert_eq!(text, "11 blocks are needed and the GPU has 10: it can never fit");
    assert!(one(&mut engine, ask("fits", &[(1, 37)], 4)).error.is_none());
    assert!(one(&mut engine, ask("empty", &[], 4)).error.is_some());
    assert!(one(&mut engine, ask("mute", &[(1, 4)], 0)).error.is_some());
    assert!(one(&mut engine, ask("huge", &[(1, u64::MAX), (1, 9)], 1)).error.is_some());
    assert!(engine.idle());
}

#[test]
fn bad_use_is_refused() {
    let mut engine = Engine::new(config(11, None)).expect("good");
    engine.submit(ask("a", &[(1, 4)], 1), from_s(1.0)).expect("taken");
    assert!(engine.submit(ask("a", &[(1, 4)], 1), from_s(1.0)).is_err());
    assert!(engine.reset(&["gpu"]).is_err());
    engine.advance(FOREVER).expect("no dead end");
    assert!(engine.submit(ask("b", &[(1, 4)], 1), 0).is_err());
    assert!(Engine::new(config(1, None)).is_err());
    assert!(Engine::new(EngineConfig { block_tokens: 0, ..config(9, None) }).is_err());
}

#[test]
fn lmcache_evicts_at_ticks_and_a_write_without_room_is_given_up() {
    let mut engine = Engine::new(config(100, Some(tiers(lmcache(), 10, None)))).expect("good");
    one(&mut engine, ask("eight", &[(1, 64)], 1));
    assert_eq!(engine.counters().tiers.stores_begun, 8);
    // 8 of 10 chunks: no room for three more, before the tick of 1 s drops int(0.2 x 8) = 1 of them.
    one(&mut engine, ask("three", &[(2, 24)], 1));
    drain(&mut engine);
    assert_eq!(engine.counters().tiers.stores_begun, 8);
    engine.advance(from_s(1.5)).expect("no dead end");
    one(&mut engine, ask("three more", &[(3, 24)], 1));
    drain(&mut engine);
    assert_eq!(engine.counters().tiers.stores_begun, 11);
    engine.reset(&["gpu"]).expect("idle");
    // The tail of the oldest prefix went first.
    assert_eq!(one(&mut engine, ask("eight again", &[(1, 64)], 1)).sources.levels[0], 56);
}

/// An idle engine that has served `prompts` (chunks of 8 tokens, one stream each).
fn filled(policy: TierPolicy, cpu_chunks: u64, disk_chunks: u64, prompts: &[(i64, u64)]) -> Engine {
    let mut engine =
        Engine::new(config(200, Some(tiers(policy, cpu_chunks, Some(disk_chunks))))).expect("good");
    for &(stream, chunks) in prompts {
        one(&mut engine, ask(&format!("fill{stream}"), &[(stream, chunks * 8 + 1)], 1));
        drain(&mut engine);
    }
    engine
}

fn disk_tokens(engine: &mut Engine, stream: i64, chunks: u64) -> u64 {
    engine.reset(&["gpu", "cpu"]).expect("idle");
    let done = one(engine, ask(&format!("probe{stream}"), &[(stream, chunks * 8 + 1)], 1));
    drain(engine);
    done.sources.levels[1]
}

#[test]
fn a_full_disk_takes_no_more_or_drops_the_oldest() {
    let prompts = [(1, 4), (2, 4), (3, 4)];
    let mut keeps = filled(lmcache(), 100, 10, &prompts);
    assert_eq!([1, 2, 3].map(|stream| disk_tokens(&mut keeps, stream, 4)), [32, 32, 16]);
    // Room for three comes from the tail of the least recently used prefix.
    let mut drops = filled(lru(), 100, 10, &prompts);
    assert_eq!(disk_tokens(&mut drops, 3, 4), 32);
    assert_eq!(disk_tokens(&mut drops, 2, 4), 32);
    assert_eq!(disk_tokens(&mut drops, 1, 4), 16);
}

#[test]
fn chunks_read_from_disk_stay_in_memory_only_if_the_policy_says_so() {
    for (policy, from_cpu, from_disk) in [(lmcache(), 0, 32), (lru(), 32, 0)] {
        let mut engine = filled(policy, 100, 100, &[(1, 4)]);
        assert_eq!(disk_tokens(&mut engine, 1, 4), 32);
        engine.reset(&["gpu"]).expect("idle");
        let again = one(&mut engine, ask("again", &[(1, 33)], 1)).sources;
        assert_eq!((again.levels[0], again.levels[1]), (from_cpu, from_disk));
    }
}

#[test]
fn a_disk_hit_without_room_in_memory_is_computed_again() {
    // Memory takes the second prompt's five chunks and has no room left to read the first one's four into.
    let mut engine = filled(lmcache(), 8, 100, &[(1, 4)]);
    engine.reset(&["gpu", "cpu"]).expect("idle");
    one(&mut engine, ask("other", &[(2, 41)], 1));
    let again = one(&mut engine, ask("again", &[(1, 33)], 1)).sources;
    assert_eq!((again.computed, again.levels[0], again.levels[1]), (33, 0, 0));
}

#[test]
fn prefetches_beyond_the_limit_wait_for_one_to_end() {
    let firsts = [1, 8].map(|limit| {
        let policy = TierPolicy { max_prefetches: limit, ..lmcache() };
        let mut engine = filled(policy, 100, 100, &[(1, 4), (2, 4)]);
        engine.reset(&["gpu", "cpu", "page_cache"]).expect("idle");
        let start = engine.now();
        engine.submit(ask("a", &[(1, 33)], 1), start).expect("taken");
        engine.submit(ask("b", &[(2, 33)], 1), start).expect("taken");
        let mut ends = Vec::new();
        while ends.len() < 2 {
            let done = engine.advance(FOREVER).expect("no dead end");
            ends.extend(done.into_iter().map(|one| to_s(one.first_token.expect("a token") - start)));
        }
        ends
    });
    // One at a time, the first has the disk for itself, and the second waits out its own latency of 5 ms after it.
    // Together they share the disk, and the second is through earlier.
    assert!(firsts[0][0] < firsts[1][0]);
    assert!(firsts[1][1] < firsts[0][1]);
}
