//! Three levels below the GPU: host memory, a pool, and an SSD.

use super::{ask, config, drain, level, lmcache, lru, one, random_load, run, tiers};
use crate::engine::Engine;
use crate::engine::config::EngineConfig;
use crate::engine::request::Completion;
use crate::tiers::config::{MOST_LEVELS, Placement, TierConfig, TierPolicy};
use crate::time::to_s;

const CHUNKS: u64 = 8;
const PROMPT: [(i64, u64); 1] = [(1, 8 * CHUNKS + 1)];

/// Levels with room for so many chunks.
fn three(policy: TierPolicy, chunks: [u64; 3]) -> TierConfig {
    let mut config = tiers(policy, chunks[0], Some(chunks[1]));
    config.levels[1].name = "pool".to_string();
    let policy = config.policy.clone();
    config.levels.push(level("ssd", &policy, chunks[2]));
    config
}

fn engine(policy: TierPolicy, chunks: [u64; 3]) -> Engine {
    Engine::new(config(100, Some(three(policy, chunks)))).expect("a good configuration")
}

/// Tokens that came from each level.
fn levels(done: &Completion) -> [u64; 3] {
    let from = done.sources;
    assert_eq!(from.sum(), done.prompt_tokens);
    [from.levels[0], from.levels[1], from.levels[2]]
}

fn ask_again(engine: &mut Engine, id: &str) -> [u64; 3] {
    let done = one(engine, ask(id, &PROMPT, 1));
    drain(engine);
    levels(&done)
}

#[test]
fn a_store_goes_down_to_each_level_and_each_level_serves_it() {
    let mut engine = engine(lmcache(), [100, 100, 100]);
    assert_eq!(ask_again(&mut engine, "cold"), [0, 0, 0]);
    let stores = engine.counters().tiers;
    assert_eq!((stores.stores_begun, stores.stores_ended), (CHUNKS, CHUNKS));
    engine.reset(&["gpu"]).expect("idle");
    assert_eq!(ask_again(&mut engine, "host"), [64, 0, 0]);
    engine.reset(&["gpu", "cpu"]).expect("idle");
    assert_eq!(ask_again(&mut engine, "pool"), [0, 64, 0]);
    engine.reset(&["gpu", "cpu", "pool", "page_cache"]).expect("idle");
    assert_eq!(ask_again(&mut engine, "ssd"), [0, 0, 64]);
    let counters = engine.counters().tiers.levels;
    assert_eq!([0, 1, 2].map(|level| counters[level].hit_chunks), [CHUNKS; 3]);
    assert_eq!([0, 1, 2].map(|level| counters[level].loaded_chunks), [0, CHUNKS, CHUNKS]);
    // The page cache answered the pool's read, and not the SSD's.
    assert_eq!([1, 2].map(|level| counters[level].read_bytes), [0, CHUNKS * super::CHUNK_BYTES]);
    engine.check_idle();
}

#[test]
fn a_prompt_in_two_lower_levels_is_read_from_one_after_the_other() {
    // The pool has room for five of the eight chunks; the SSD has all.
    let mut engine = engine(lmcache(), [100, 5, 100]);
    ask_again(&mut engine, "cold");
    engine.reset(&["gpu", "cpu", "page_cache"]).expect("idle");
    let sent = engine.now();
    let done = one(&mut engine, ask("mixed", &PROMPT, 1));
    assert_eq!(levels(&done), [0, 40, 24]);
    let ttft_s = to_s(done.first_token.expect("a token") - sent);
    let arrival_s = 1e-3 + 65e-6;
    let read_s = |chunks: f64| 5e-3 + chunks * 1e-4 + chunks * 1000.0 * 2e-5;
    let load_s = 1e-3 + 8e-4 + 8000.0 * 1e-6;
    let step_s = 2e-3 + 1e-4 + 1e-7 * 0.5 + (1.5e-7 + 1e-7) * 64.0;
    assert!((ttft_s - arrival_s - read_s(5.0) - read_s(3.0) - load_s - step_s).abs() < 1e-12, "{ttft_s}");
    drain(&mut engine);
    engine.check_idle();
}

#[test]
fn a_chunk_of_the_pool_behind_one_of_the_ssd_counts_as_the_pool_s() {
    // Another prompt pushes the first three chunks out of the pool, before the other five come.
    let mut engine = engine(lru(), [100, CHUNKS, 100]);
    for asked in [[(1, 25)], [(2, 65)], PROMPT] {
        one(&mut engine, ask("before", &asked, 1));
        drain(&mut engine);
    }
    engine.reset(&["gpu", "cpu"]).expect("idle");
    let before = engine.counters().tiers.levels;
    assert_eq!(ask_again(&mut engine, "mixed"), [0, 40, 24]);
    let after = engine.counters().tiers.levels;
    assert_eq!([0, 1, 2].map(|level| after[level].hit_chunks - before[level].hit_chunks), [0, 5, 3]);
    engine.check_idle();
}

#[test]
fn chunks_fall_down_a_waterfall_level_by_level() {
    let policy = TierPolicy { placement: Placement::Waterfall, read_in_place: true, ..lru() };
    let mut engine = engine(TierPolicy { keep_prefetched: false, ..policy }, [8, 8, 8]);
    for (id, stream) in [("a", 1), ("b", 2), ("c", 3)] {
        one(&mut engine, ask(id, &[(stream, 65)], 1));
        drain(&mut engine);
    }
    engine.reset(&["gpu"]).expect("idle");
    assert_eq!(ask_again(&mut engine, "oldest"), [0, 0, 64]);
}

#[test]
fn a_spillover_goes_to_the_first_level_with_room() {
    let policy = TierPolicy { placement: Placement::Spillover, read_in_place: true, ..lmcache() };
    let mut engine = engine(TierPolicy { tick_s: 0.0, watermark: 1.0, ..policy }, [5, 8, 100]);
    for (id, stream) in [("a", 2), ("b", 3), ("c", 1)] {
        one(&mut engine, ask(id, &[(stream, 65)], 1));
        drain(&mut engine);
    }
    engine.reset(&["gpu"]).expect("idle");
    // Four chunks of `a` fill the first level, four of `a` and four of `b` the pool.
    assert_eq!(ask_again(&mut engine, "c again"), [0, 0, 64]);
}

#[test]
fn macro_steps_change_nothing_with_three_levels() {
    for (seed, policy) in (0..10).flat_map(|seed| [(seed, lmcache()), (seed, lru())]) {
        let load = random_load(seed, 60);
        let macros = config(60, Some(three(policy, [12, 20, 60])));
        let singles = EngineConfig { macro_steps: false, ..macros.clone() };
        let (fast, fast_engine) = run(macros, &load);
        let (slow, slow_engine) = run(singles, &load);
        assert_eq!(fast, slow, "seed {seed}");
        assert_eq!(fast_engine.counters(), slow_engine.counters(), "seed {seed}");
        fast_engine.check_idle();
    }
}

#[test]
fn levels_that_cannot_be_are_refused() {
    let refused = |tiers: TierConfig| Engine::new(config(60, Some(tiers))).err().expect("a refusal");
    let mut none = three(lmcache(), [9, 9, 9]);
    none.levels.clear();
    assert_eq!(refused(none), format!("levels must be 1 to {MOST_LEVELS}, not 0"));
    let mut many = three(lmcache(), [9, 9, 9]);
    many.levels.extend([many.levels[2].clone(), many.levels[2].clone()]);
    assert_eq!(refused(many), format!("levels must be 1 to {MOST_LEVELS}, not 5"));
    let mut external = three(lmcache(), [9, 9, 9]);
    external.levels[2].external = true;
    assert_eq!(refused(external), "a level whose transfers the caller makes must be the second of two");
    external = super::tiers(lmcache(), 9, Some(9));
    (external.levels[1].external, external.levels[1].buffer_chunks) = (true, 1);
    assert_eq!(
        refused(external),
        "a level whose transfers the caller makes has no buffer, ticks or dropped chunks"
    );
    assert!(refused(three(lmcache(), [9, 9, 0])).starts_with("the ssd tier has no room for one chunk"));
}

#[test]
fn a_load_leaves_out_the_chunks_that_the_gpu_holds() {
    let mut engine = Engine::new(config(100, Some(tiers(lmcache(), 100, None)))).expect("good");
    ask_again(&mut engine, "cold");
    let mut ttft_s = |id: &str, on_gpu: &[(i64, u64)]| {
        engine.reset(&["gpu"]).expect("idle");
        one(&mut engine, ask(&format!("before {id}"), on_gpu, 1));
        drain(&mut engine);
        let sent = engine.now();
        let done = one(&mut engine, ask(id, &PROMPT, 1));
        to_s(done.first_token.expect("a token") - sent)
    };
    let saved_s = ttft_s("none of it", &[(2, 1)]) - ttft_s("half of it", &[(1, 4 * CHUNKS + 1)]);
    assert!((saved_s - 4.0 * (1e-4 + 1000.0 * 1e-6)).abs() < 1e-9, "{saved_s}");
}
