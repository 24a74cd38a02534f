//! Host memory, a pool and an SSD: what SGLang's HiCache and Mooncake's store do together.

use super::any::plain_level;
use super::schedule::together;
use super::{CHUNK_BYTES, ask, config, drain, lmcache, lru, one};
use crate::engine::Engine;
use crate::engine::config::EngineConfig;
use crate::engine::cost::CostConfig;
use crate::engine::request::Completion;
use crate::eviction::kind::EvictionKind;
use crate::keys::block_runs;
use crate::tiers::config::{LevelConfig, TickConfig, TickShare, TierConfig, TierPolicy};
use crate::tiers::device::DeviceConfig;
use crate::time::to_s;

/// A prompt of eight chunks and one token.
const PROMPT: [(i64, u64); 1] = [(1, 65)];
const OTHER: [(i64, u64); 1] = [(2, 65)];

fn bytes_per_s(rate: f64) -> DeviceConfig {
    DeviceConfig { byte_s: 1.0 / rate, shared_byte_s: 1.0 / rate, ..DeviceConfig::default() }
}

fn level(name: &str, chunks: u64) -> LevelConfig {
    LevelConfig { name: name.to_string(), chunks, evicts: true, ..plain_level() }
}

/// Mooncake's memory: leases of 10 s; a tick of 10 ms drops what is above nine tenths, and a twentieth more.
fn pool(chunks: u64) -> LevelConfig {
    let share = TickShare::Surplus;
    let ticks = TickConfig { tick_s: 0.01, watermark: 0.9, evict_ratio: 0.05, tick_share: share };
    LevelConfig {
        eviction: EvictionKind::Lease,
        lease_s: 10.0,
        ticks: Some(ticks),
        evicts: false,
        writes_use: true,
        ..level("pool", chunks)
    }
}

fn host() -> TierPolicy {
    TierPolicy { end_uses: true, max_prefetches: 1, ..lru() }
}

fn sglang(policy: TierPolicy, levels: Vec<LevelConfig>) -> EngineConfig {
    let tiers = TierConfig { policy, chunk_bytes: CHUNK_BYTES, chunk_tokens: 8, levels, private_levels: 1 };
    EngineConfig { reads_ahead: true, prefills_first: true, journal: true, ..config(100, Some(tiers)) }
}

fn engine(policy: TierPolicy, levels: Vec<LevelConfig>) -> Engine {
    Engine::new(sglang(policy, levels)).expect("a good configuration")
}

fn levels(done: &Completion) -> [u64; 3] {
    [done.sources.levels[0], done.sources.levels[1], done.sources.levels[2]]
}

fn ask_again(engine: &mut Engine, id: &str, prompt: &[(i64, u64)]) -> Completion {
    let done = one(engine, ask(id, prompt, 1));
    drain(engine);
    done
}

/// Where a prompt comes from without GPU and host.
fn warm(engine: &mut Engine, prompt: &[(i64, u64)]) -> [u64; 3] {
    engine.reset(&["gpu", "cpu"]).expect("idle");
    levels(&ask_again(engine, "warm", prompt))
}

/// Time to first token of a prompt whose cached chunks lie in the levels that `reset` leaves.
fn ttft_s(engine: &mut Engine, id: &str, reset: &[&str]) -> (f64, [u64; 3]) {
    engine.reset(reset).expect("idle");
    let sent = engine.now();
    let done = ask_again(engine, id, &PROMPT);
    (to_s(done.first_token.expect("a token") - sent), levels(&done))
}

#[test]
fn what_is_read_ahead_counts_for_the_level_in_which_it_lay() {
    let mut engine = engine(host(), vec![level("cpu", 20), pool(40), level("ssd", 100)]);
    ask_again(&mut engine, "cold", &PROMPT);
    for (id, reset, from) in [
        ("host", &["gpu"][..], [64, 0, 0]),
        ("pool", &["gpu", "cpu"], [0, 64, 0]),
        // The read has left the chunks on the host.
        ("host again", &["gpu"], [64, 0, 0]),
        ("ssd", &["gpu", "cpu", "pool"], [0, 0, 64]),
        // And nothing in the pool, unless the SSD promotes.
        ("ssd again", &["gpu", "cpu"], [0, 0, 64]),
    ] {
        assert_eq!(ttft_s(&mut engine, id, reset).1, from, "{id}");
        engine.check_idle();
    }
}

#[test]
fn an_ssd_that_promotes_brings_what_is_read_into_the_pool() {
    let ssd = LevelConfig { promotes: true, ..level("ssd", 100) };
    let mut engine = engine(host(), vec![level("cpu", 20), pool(40), ssd]);
    ask_again(&mut engine, "cold", &PROMPT);
    assert_eq!(ttft_s(&mut engine, "ssd", &["gpu", "cpu", "pool"]).1, [0, 0, 64]);
    assert_eq!(ttft_s(&mut engine, "pool", &["gpu", "cpu"]).1, [0, 64, 0]);
}

#[test]
fn an_exclusive_level_gets_what_falls_and_gives_up_what_is_read() {
    let below = LevelConfig { exclusive: true, takes_dropped: true, ..level("pool", 40) };
    let mut engine = engine(host(), vec![level("cpu", 8), below]);
    ask_again(&mut engine, "one", &PROMPT);
    assert_eq!(engine.tiers_if_any().expect("tiers").used(), [8, 0]);
    ask_again(&mut engine, "other", &OTHER);
    assert_eq!(engine.tiers_if_any().expect("tiers").used(), [8, 8]);
    // The read takes the host's room from the other prompt, whose chunks fall in their turn.
    assert_eq!(ttft_s(&mut engine, "one again", &["gpu"]).1, [0, 64, 0]);
    assert_eq!(engine.tiers_if_any().expect("tiers").used(), [8, 8]);
    assert_eq!(ttft_s(&mut engine, "in the host", &["gpu"]).1, [64, 0, 0]);
    engine.check_idle();
}

#[test]
fn ticks_empty_the_pool_in_the_order_of_leases_and_the_ssd_keeps_what_they_drop() {
    for (dropped, on_ssd) in [(false, [8, 16]), (true, [0, 2])] {
        let ssd = LevelConfig { takes_dropped: dropped, ..level("ssd", 100) };
        let mut engine = engine(host(), vec![level("cpu", 100), pool(17), ssd]);
        ask_again(&mut engine, "one", &PROMPT);
        assert_eq!(engine.tiers_if_any().expect("tiers").used()[1..], [8, on_ssd[0]]);
        // 16 of 17 are above nine tenths: ceil((16/17 - 0.9 + 0.05) x 16) = 2 go, the first put before all others.
        ask_again(&mut engine, "other", &OTHER);
        engine.advance(crate::time::from_s(1.0)).expect("no dead end");
        ask_again(&mut engine, "third", &[(3, 1)]);
        assert_eq!(engine.tiers_if_any().expect("tiers").used()[1..], [14, on_ssd[1]]);
        // A hole at the beginning of the first prompt: without the SSD nothing of it would be found.
        assert_eq!(ttft_s(&mut engine, "again", &["gpu", "cpu"]).1, [0, 48, 16]);
    }
}

#[test]
fn what_a_pool_may_drop_goes_to_the_ssd_first_and_stays_until_it_is_there() {
    let ssd = LevelConfig { takes_dropped: true, offload_every_s: 1.0, ..level("ssd", 100) };
    let mut engine = engine(host(), vec![level("cpu", 100), pool(17), ssd]);
    ask_again(&mut engine, "one", &PROMPT);
    assert_eq!(engine.tiers_if_any().expect("tiers").used()[1..], [8, 0]);
    // 16 of 17 are above nine tenths. No chunk has a lease, so that a tick queues all of them, and drops none.
    ask_again(&mut engine, "other", &OTHER);
    let asked_at = |engine: &mut Engine, at_s: f64, id: &str| {
        engine.advance(crate::time::from_s(at_s)).expect("no dead end");
        one(engine, ask(id, &[(3, 1)], 1));
        engine.tiers_if_any().expect("tiers").used()[1..].to_vec()
    };
    assert_eq!(asked_at(&mut engine, 0.5, "queued"), [16, 16]);
    // The heartbeat's reads lease them for 10 s. Then ceil((16/17 - 0.9 + 0.05) x 16) = 2 of them go.
    assert_eq!(asked_at(&mut engine, 10.9, "leased"), [16, 16]);
    assert_eq!(asked_at(&mut engine, 11.5, "dropped"), [14, 16]);
    engine.check_idle();
    let found = [PROMPT, OTHER].map(|prompt| warm(&mut engine, &prompt));
    assert_eq!([found[0][1] + found[1][1], found[0][2] + found[1][2]], [112, 16]);
}

#[test]
fn a_tick_drops_a_share_of_what_is_there_and_not_of_what_is_being_put() {
    // The second prompt's put takes 8 s: of the 8 chunks that are there ceil((16/17 - 0.9 + 0.05) x 8) = 1 goes.
    let write = bytes_per_s(CHUNK_BYTES as f64);
    let mut engine = engine(host(), vec![level("cpu", 100), LevelConfig { write, ..pool(17) }]);
    ask_again(&mut engine, "one", &PROMPT);
    one(&mut engine, ask("other", &OTHER, 1));
    one(&mut engine, ask("third", &[(3, 1)], 1));
    assert_eq!(engine.tiers_if_any().expect("tiers").used()[1..], [15]);
}

#[test]
fn a_buffer_shows_writes_at_once_while_it_has_room() {
    // A chunk takes a second. Without a buffer the engine drains for 8 s.
    for (buffer_chunks, drained_s) in [(0, 8.0), (7, 8.0), (8, 0.0)] {
        let write = bytes_per_s(CHUNK_BYTES as f64);
        let ssd = LevelConfig { buffer_chunks, write, ..level("ssd", 100) };
        let mut engine = engine(host(), vec![level("cpu", 20), ssd]);
        let done = ask_again(&mut engine, "cold", &PROMPT);
        let after_s = to_s(engine.now() - done.last_token.expect("a token"));
        assert!((after_s - drained_s).abs() < 0.01, "{buffer_chunks}: {after_s}");
    }
}

#[test]
fn a_prefetch_is_waited_for_or_cut_off_when_the_engine_asks() {
    // A chunk takes 10 ms from the pool. The engine asks as soon as the request arrives.
    let timed = |prefetch_timeout_s| TierPolicy { prefetch_timeout_s, prefetch_token_s: 0.0, ..host() };
    for (timeout_s, tokens, least_s) in [(None, 64, 0.08), (Some(0.035), 24, 0.035), (Some(0.0), 0, 0.0)] {
        let slow = LevelConfig { read: bytes_per_s(CHUNK_BYTES as f64 / 0.01), ..level("pool", 40) };
        let mut engine = engine(timed(timeout_s), vec![level("cpu", 20), slow]);
        ask_again(&mut engine, "cold", &PROMPT);
        let (ttft_s, from) = ttft_s(&mut engine, "warm", &["gpu", "cpu"]);
        assert_eq!(from, [0, tokens, 0], "{timeout_s:?}");
        assert!(ttft_s > least_s && ttft_s < least_s + 0.02, "{timeout_s:?}: {ttft_s}");
        engine.check_idle();
    }
}

#[test]
fn a_look_up_that_is_overdue_once_its_turn_comes_is_answered_then_and_no_sooner() {
    // One look-up at a time. The first is cut off after 52 ms, when 24 ms of the second one's are long over.
    let policy = TierPolicy { prefetch_timeout_s: Some(0.02), prefetch_token_s: 5e-4, ..host() };
    let tokens = |macro_steps: bool| {
        let slow = LevelConfig { read: bytes_per_s(CHUNK_BYTES as f64 / 0.01), ..level("pool", 40) };
        let plain = sglang(policy.clone(), vec![level("cpu", 20), slow]);
        let config = EngineConfig { reads_ahead: false, prefills_first: false, macro_steps, ..plain };
        let mut engine = Engine::new(config).expect("good");
        let short = [(3, 9)];
        [&PROMPT[..], &short].iter().for_each(|prompt| _ = ask_again(&mut engine, "cold", prompt));
        engine.reset(&["gpu", "cpu"]).expect("idle");
        let asked = [("decodes", &[(9, 1)][..], 90), ("first", &PROMPT, 1), ("second", &short, 1)];
        let done = together(&mut engine, &asked);
        let decodes = done.iter().find(|one| one.id == "decodes").expect("it ended");
        decodes.tokens.clone()
    };
    let (many, single) = (tokens(true), tokens(false));
    assert_eq!((many.len(), many), (90, single));
}

#[test]
fn reads_ahead_pass_while_others_compute_one_after_another() {
    // The first prompt computes for three steps of 8 ms. The others come during the first one, and the pool answers
    // during the second one: its 0.2 ms a chunk are hidden behind the third one.
    let read = bytes_per_s(CHUNK_BYTES as f64 / 2e-4);
    let mut engine = engine(host(), vec![level("cpu", 100), LevelConfig { read, ..level("pool", 100) }]);
    ask_again(&mut engine, "one", &PROMPT);
    ask_again(&mut engine, "other", &OTHER);
    engine.reset(&["gpu", "cpu"]).expect("idle");
    let sent = engine.now();
    let asked = [("cold", &[(3, 192)][..], 1), ("first", &PROMPT, 1), ("second", &OTHER, 1)];
    let done = together(&mut engine, &asked);
    drain(&mut engine);
    let by_id = |id: &str| done.iter().find(|one| one.id == id).expect("it ended");
    assert_eq!([levels(by_id("first")), levels(by_id("second"))], [[0, 64, 0]; 2]);
    let last_s = to_s(by_id("second").first_token.expect("a token") - sent);
    let cold_s = to_s(by_id("cold").first_token.expect("a token") - sent);
    // Both ran in the step after the cold one, which took no longer for the pool.
    assert!(last_s - cold_s < 3e-3, "{cold_s} {last_s}");
}

#[test]
fn a_request_that_storage_is_asked_about_misses_the_first_step_after_it_came() {
    // Two steps for the first prompt, with room for the second one beside its end.
    let pool = || vec![level("cpu", 100), level("pool", 100)];
    let asks_for = |min_prefetch_tokens| TierPolicy { min_prefetch_tokens, ..host() };
    for (mut engine, waits) in [
        (engine(host(), vec![level("cpu", 100)]), false),
        (engine(asks_for(24), pool()), true),
        (engine(asks_for(25), pool()), false),
    ] {
        let done = together(&mut engine, &[("first", &[(1, 96)][..], 1), ("second", &[(2, 25)][..], 1)]);
        let token = |id: &str| done.iter().find(|one| one.id == id).expect("it ended").first_token;
        assert_eq!(token("first") < token("second"), waits);
    }
}

#[test]
fn the_pass_that_has_an_answer_has_those_to_all_that_was_asked_by_then() {
    // The second prompt is parsed 1 ms after the first. A prompt that has it all on the GPU does not ask.
    let tokens = |poll_s: f64| {
        let plain = sglang(host(), vec![level("cpu", 100), level("pool", 100)]);
        let mut engine =
            Engine::new(EngineConfig { cost: CostConfig { poll_s, ..plain.cost }, ..plain }).expect("good");
        ask_again(&mut engine, "warm", &[(3, 9)]);
        let sent = engine.now();
        let asked = [("first", &[(1, 25)][..], 1), ("second", &[(2, 25)][..], 1)];
        let done = together(&mut engine, &asked);
        let of =
            |id: &str| done.iter().find(|one| one.id == id).expect("it ended").first_token.expect("a token");
        let found = [to_s(of("first") - sent), to_s(of("second") - sent)];
        drain(&mut engine);
        let sent = engine.now();
        (found, to_s(ask_again(&mut engine, "hit", &[(3, 9)]).first_token.expect("a token") - sent))
    };
    let ([first, second], hit) = tokens(0.0);
    assert!(first < second);
    let ([waiting, with_it], as_soon) = tokens(3e-3);
    assert_eq!((waiting, hit), (with_it, as_soon));
    assert!(waiting > first + 3e-3);
}

#[test]
fn a_front_end_on_the_same_core_goes_ahead_of_passes_that_wait_for_storage() {
    // The front end takes 1 ms a request, and storage answers within a tenth of that.
    let first_step = |yields_core: bool, count: usize| {
        let plain = sglang(host(), vec![level("cpu", 100), level("pool", 100)]);
        let cost = CostConfig { poll_s: 1e-4, yields_core, ..plain.cost };
        let mut engine =
            Engine::new(EngineConfig { cost, max_num_batched_tokens: 400, ..plain }).expect("good");
        let prompts = [[(1, 25)], [(2, 25)], [(3, 25)], [(4, 25)]];
        let asked: Vec<_> =
            ["a", "b", "c", "d"].into_iter().zip(prompts.iter().map(|one| &one[..])).collect();
        let asked: Vec<_> = asked[..count].iter().map(|&(id, prompt)| (id, prompt, 1)).collect();
        let done = together(&mut engine, &asked);
        let first = done.iter().filter_map(|one| one.first_token).min();
        done.iter().filter(|one| one.first_token == first).count()
    };
    assert_eq!([1, 2, 4].map(|count| first_step(false, count)), [1, 1, 1]);
    // The second of two has come and is answered by then. Of four, the front end has two to go.
    assert_eq!([1, 2, 4].map(|count| first_step(true, count)), [1, 2, 1]);
}

#[test]
fn passes_hold_a_read_up_for_each_request_that_waits_for_one() {
    // What a pass holds a chunk up is more than a step: no step bounds what comes after it. The second prompt comes while
    // the first one is read.
    let first_tokens_s = |read_pass_s: f64, asked: &[&str]| {
        let read = bytes_per_s(CHUNK_BYTES as f64 / 1e-3);
        let plain = sglang(host(), vec![level("cpu", 100), LevelConfig { read, ..level("pool", 100) }]);
        let cost = CostConfig { read_pass_s, ..plain.cost };
        let mut engine = Engine::new(EngineConfig { cost, ..plain }).expect("good");
        let prompts = [("first", &PROMPT[..], 1), ("second", &OTHER[..], 1)];
        prompts.iter().for_each(|(_, prompt, _)| _ = ask_again(&mut engine, "cold", prompt));
        engine.reset(&["gpu", "cpu"]).expect("idle");
        let sent = engine.now();
        let done = together(&mut engine, &prompts[..asked.len()]);
        drain(&mut engine);
        engine.check_idle();
        let of = |id: &&str| done.iter().find(|one| one.id == *id).expect("it ended").first_token;
        asked.iter().map(|id| to_s(of(id).expect("a token") - sent)).collect::<Vec<_>>()
    };
    for (asked, chunks) in [(&["first"][..], &[8.0][..]), (&["first", "second"], &[16.0, 24.0])] {
        let (slow, slower) = (first_tokens_s(0.01, asked), first_tokens_s(0.02, asked));
        let more: Vec<f64> = slow.iter().zip(&slower).map(|(less, more)| (more - less) * 100.0).collect();
        assert_eq!(more.iter().map(|chunks| (chunks * 1e6).round() / 1e6).collect::<Vec<_>>(), chunks);
    }
}

#[test]
fn what_lies_before_the_pages_that_a_read_ahead_brings_outlives_them() {
    const HEAD: [(i64, u64); 1] = [(1, 33)];
    const BETWEEN: [(i64, u64); 1] = [(2, 33)];
    const LATER: [(i64, u64); 1] = [(3, 33)];
    let read = bytes_per_s(CHUNK_BYTES as f64 / 1e-5);
    let mut engine = engine(host(), vec![level("cpu", 12), LevelConfig { read, ..level("pool", 100) }]);
    ask_again(&mut engine, "cold", &PROMPT);
    ask_again(&mut engine, "cold later", &LATER);
    engine.reset(&["gpu", "cpu"]).expect("idle");
    // The host gets the prompt's head from the pool, and then four chunks that the head is older than.
    ask_again(&mut engine, "head", &HEAD);
    ask_again(&mut engine, "between", &BETWEEN);
    engine.reset(&["gpu"]).expect("idle");
    let from_pool =
        |engine: &Engine| engine.tiers_if_any().expect("tiers").counters().levels[1].loaded_chunks;
    let before = from_pool(&engine);
    // While a prompt of less than a chunk computes, the reads ahead bring the tail, and then four chunks for which the
    // host has no room. Those of `between` go, as the tail's pages hang on the head's.
    let asked = [("short", &[(4, 7)][..], 1), ("prompt", &PROMPT, 1), ("later", &LATER, 1)];
    let done = together(&mut engine, &asked);
    drain(&mut engine);
    let of = |id: &str| {
        let sources = done.iter().find(|one| one.id == id).expect("it ended").sources.levels;
        [sources[0], sources[1]]
    };
    assert_eq!([of("prompt"), of("later")], [[32, 32], [0, 32]]);
    // The head was not read once more.
    assert_eq!(from_pool(&engine) - before, 4 + 4);
}

#[test]
fn a_load_by_layer_hides_behind_the_step_or_the_step_behind_it() {
    let ttft_s = |rate: f64| {
        let host_level = LevelConfig { read: bytes_per_s(rate), ..level("cpu", 20) };
        let mut engine = engine(host(), vec![host_level]);
        ask_again(&mut engine, "cold", &PROMPT);
        ttft_s(&mut engine, "warm", &["gpu"])
    };
    let ((free_s, from), (hidden_s, _), (slow_s, _)) = (ttft_s(1e18), ttft_s(8e6), ttft_s(8e3));
    assert_eq!(from, [64, 0, 0]);
    // The step takes more than 2 ms. 8,000 bytes take 1 ms, or 1 s.
    assert!((free_s - hidden_s).abs() < 1e-9, "{free_s} {hidden_s}");
    assert!(slow_s > 1.0 && slow_s < 1.01, "{slow_s}");
}

#[test]
fn levels_that_contradict_each_other_are_refused() {
    let refused = |levels| {
        let tiers =
            TierConfig { policy: lmcache(), chunk_bytes: 1, chunk_tokens: 8, levels, private_levels: 1 };
        Engine::new(config(60, Some(tiers))).err().expect("a refusal")
    };
    let first = LevelConfig { takes_dropped: true, ..level("cpu", 9) };
    let second = LevelConfig { promotes: true, ..level("pool", 9) };
    for levels in [vec![first], vec![level("cpu", 9), second]] {
        assert!(
            refused(levels).starts_with("only a level with another one between it and the GPU may promote")
        );
    }
    let ticks = TickConfig { tick_s: -1.0, watermark: 0.9, evict_ratio: 0.05, tick_share: TickShare::Ratio };
    let bad = LevelConfig { ticks: Some(ticks), ..level("pool", 9) };
    assert_eq!(
        refused(vec![level("cpu", 9), bad]),
        "the tier policy's pool_tick_s must be a number of 0 or more, not -1"
    );
}

#[test]
fn what_comes_back_is_the_nodes_that_it_was_and_one_node_of_what_a_lower_level_held() {
    // What levels have lost before they get the first half back, and after that; the least that is loaded.
    for (before, after, least, from, node) in [
        (&[][..], &[][..], 0, [64, 0, 0], 4),
        (&[], &["cpu"], 0, [0, 64, 0], 16),
        (&["cpu"], &[], 0, [32, 32, 0], 8),
        (&["cpu", "pool"], &[], 0, [32, 0, 0], 8),
        (&[], &[], 65, [0, 0, 0], 4),
    ] {
        let sglang = sglang(host(), vec![level("cpu", 400), pool(400)]);
        let mut engine = Engine::new(EngineConfig { min_load_tokens: least, ..sglang }).expect("good");
        // Nodes of 8, 4 and 4 blocks. Another prompt takes nearly all of the GPU's 99 blocks, twice.
        ask_again(&mut engine, "half", &[(1, 33)]);
        ask_again(&mut engine, "three quarters", &[(1, 49)]);
        ask_again(&mut engine, "whole", &PROMPT);
        ask_again(&mut engine, "other", &[(2, 390)]);
        engine.reset(before).expect("idle");
        ask_again(&mut engine, "half again", &[(1, 33)]);
        ask_again(&mut engine, "another", &[(3, 390)]);
        engine.reset(after).expect("idle");
        assert_eq!(levels(&ask_again(&mut engine, "again", &PROMPT)), from);
        engine.take_journal();
        // 85 blocks: all of the other prompts' go, and of this one's, which are newer, the last node.
        ask_again(&mut engine, "last", &[(4, 337)]);
        let key = block_runs(&ask("again", &PROMPT, 1).prompt, 4)[0].key;
        let evicted =
            engine.take_journal().0.iter().filter(|note| note.numbers.first() == Some(&key)).count();
        assert_eq!(evicted, node, "{from:?}");
    }
}
