//! Random configurations and loads, invariants checked at every stop; PROPTEST_CASES=N: more, PROPTEST_RNG_SEED=N:
//! others.

use std::collections::BTreeSet;

use proptest::prelude::*;
use proptest::test_runner::RngSeed;

use super::any::{any_config, any_eviction};
use super::ask;
use crate::cache::Cache;
use crate::chunks::spans::{Span, count, marked};
use crate::chunks::{ExtentId, NEW, NONE, PromptCursor};
use crate::engine::config::EngineConfig;
use crate::engine::request::{Completion, Submission};
use crate::engine::{Counters, Engine};
use crate::keys::{ChunkRange, Key};
use crate::tiers::config::TierConfig;
use crate::tiers::outbox::Issued;
use crate::time::{FOREVER, from_s};

/// Prompts, tokens asked for, and pauses before sending, in seconds.
type Load = Vec<(Vec<(i64, u64)>, u64, f64)>;
/// Completions in order, and the counters after them, for each of two loads.
type Outcome = Vec<(Vec<Completion>, Counters)>;

fn cases(count: u32) -> ProptestConfig {
    let known = ProptestConfig::default();
    let seed = std::env::var("PROPTEST_RNG_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    let asked = std::env::var("PROPTEST_CASES").is_ok();
    ProptestConfig {
        cases: if asked { known.cases } else { count },
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(seed),
        ..known
    }
}

/// Requests with shared prefixes, some twice in one prompt and some that can never be served, and their pauses.
fn any_load() -> impl Strategy<Value = Load> {
    let segment = (0i64..6, 0u64..50);
    let prompt = prop::collection::vec(segment, 0..4);
    let pause_s = prop::sample::select(vec![0.0, 0.0, 0.002, 0.03, 0.5]);
    prop::collection::vec((prompt, 0u64..30, pause_s), 1..25)
}

/// Sends a load, stops every `stop_s` to check, and then until nothing is left to do.
fn replay(engine: &mut Engine, name: &str, load: &Load, stop_s: f64) -> Vec<Completion> {
    let mut at = engine.now();
    let submissions: Vec<Submission> = load
        .iter()
        .enumerate()
        .map(|(i, (prompt, output, _))| ask(&format!("{name}{i}"), prompt, *output))
        .collect();
    for (submission, (_, _, pause_s)) in submissions.into_iter().zip(load) {
        at += from_s(*pause_s);
        engine.submit(submission, at).expect("a request that is taken");
    }
    let mut completions = Vec::new();
    for _ in 0..30 {
        completions.extend(engine.advance(engine.now() + from_s(stop_s)).expect("no dead end"));
        engine.check();
    }
    loop {
        let some = engine.advance(FOREVER).expect("no dead end");
        engine.check();
        if some.is_empty() {
            return completions;
        }
        completions.extend(some);
    }
}

/// All that a run says.
fn outcome(config: EngineConfig, loads: &[Load; 2], reset: [bool; 4]) -> Outcome {
    let names = ["gpu", "cpu", "disk", "page_cache"];
    let names: Vec<&str> = names.into_iter().zip(reset).filter(|(_, on)| *on).map(|(name, _)| name).collect();
    let mut engine = Engine::new(config).expect("a good configuration");
    let mut said = Vec::new();
    for (name, load) in ["a", "b"].into_iter().zip(loads) {
        let completions = replay(&mut engine, name, load, 0.011);
        assert_eq!(completions.len(), load.len(), "each request completes once, or is an error row");
        for done in completions.iter().filter(|done| done.error.is_none()) {
            let from = done.sources;
            assert_eq!(from.sum(), done.prompt_tokens);
            assert_eq!(done.tokens.len() as u64, done.output_tokens);
        }
        engine.check_idle();
        engine.reset(&names).expect("idle");
        engine.check_idle();
        said.push((completions, engine.counters()));
    }
    said
}

#[derive(Clone, Debug)]
enum Act {
    Store(Vec<Key>),
    Load(Vec<Key>),
    EndOldest { arrives: bool },
    Lock(Key),
    UnlockOldest,
    Touch(Vec<Key>),
    Drop(u64),
    Clock(u64),
}

fn any_act() -> impl Strategy<Value = Act> {
    let keys =
        || prop::collection::btree_set(0u64..24, 1..6).prop_map(|keys| keys.into_iter().collect::<Vec<_>>());
    prop_oneof![
        4 => keys().prop_map(Act::Store),
        2 => keys().prop_map(Act::Load),
        5 => any::<bool>().prop_map(|arrives| Act::EndOldest { arrives }),
        2 => (0u64..24).prop_map(Act::Lock),
        2 => Just(Act::UnlockOldest),
        3 => keys().prop_map(Act::Touch),
        1 => (0u64..9).prop_map(Act::Drop),
        1 => (1u64..30).prop_map(Act::Clock),
    ]
}

/// One cache under random use, with its writes and readers in flight.
struct Use {
    cache: Cache,
    evicts: bool,
    writes: Vec<(Vec<Span>, bool)>,
    pins: Vec<(Key, ExtentId)>,
    now: u128,
}

impl Use {
    fn find(&self, key: Key) -> ExtentId {
        self.cache.find(&mut PromptCursor::new(), &[key], 0).at
    }

    fn act(&mut self, act: &Act) {
        self.cache.clear_gone();
        match act {
            Act::Store(keys) => self.reserve(keys, true),
            Act::Load(keys) => self.reserve(keys, false),
            Act::EndOldest { arrives } if !self.writes.is_empty() => {
                let (mut marks, storing) = self.writes.remove(0);
                match (storing, arrives) {
                    (true, _) => self.cache.admit_stored(&mut marks),
                    (false, false) => self.cache.give_up(&marks),
                    (false, true) => {
                        let key = |span: Span| self.cache.keys(span).next().map(|key| (key, span.at));
                        let pins: Vec<(Key, ExtentId)> = marked(&marks).filter_map(key).collect();
                        self.cache.admit_loaded(&marks, pins[0].0.is_multiple_of(2));
                        self.pins.extend(pins);
                    }
                }
            }
            Act::Lock(key) if self.cache.contains(*key) => {
                let at = self.find(*key);
                self.cache.lock(marked(&[Span::new(at, 1)]));
                self.pins.push((*key, at));
            }
            Act::UnlockOldest if !self.pins.is_empty() => {
                let (key, at) = self.pins.remove(0);
                assert_eq!(self.find(key), at, "a pinned chunk moved");
                self.cache.unlock(marked(&[Span::new(at, 1)]));
            }
            Act::Touch(keys) => self.cache.touch(&ChunkRange::of(keys.clone())),
            Act::Drop(count) => {
                self.cache.drop_some(*count);
                assert!(self.cache.gone().len() as u64 <= *count);
            }
            Act::Clock(ticks) => {
                self.now += u128::from(*ticks);
                self.cache.clock(self.now);
            }
            _ => {}
        }
    }

    /// Reserves room for the keys that the cache lacks.
    fn reserve(&mut self, keys: &[Key], storing: bool) {
        let mark = |&key: &Key| {
            let at = self.find(key);
            let there = if storing { self.cache.has(at) } else { self.cache.holds(at) };
            Span::new(if there { NONE } else { at.min(NEW) }, 1)
        };
        let mut marks: Vec<Span> = keys.iter().map(mark).collect();
        let (count, room, used) = (count(&marks), self.cache.room(self.evicts), self.cache.used());
        match self.cache.reserve(&ChunkRange::of(keys.to_vec()), &mut marks, storing, self.evicts) {
            true => {
                assert_eq!(self.cache.used(), used + count - self.cache.gone().len() as u64);
                self.writes.extend((count > 0).then_some((marks, storing)));
            }
            false => assert!(count > room && self.cache.used() == used, "all or none"),
        }
    }
}

proptest! {
    #![proptest_config(cases(400))]
    #[test]
    fn a_cache_keeps_its_books(
        eviction in any_eviction(), capacity in 0u64..16, evicts in any::<bool>(),
        acts in prop::collection::vec(any_act(), 1..120),
    ) {
        let cache = Cache::new(capacity, eviction, 20, true, true);
        let mut one = Use { cache, evicts, writes: Vec::new(), pins: Vec::new(), now: 0 };
        for act in &acts {
            one.act(act);
            one.cache.check();
            prop_assert!(one.pins.iter().all(|&(key, _)| one.cache.contains(key)), "a pinned chunk went");
        }
    }
}

proptest! {
    #![proptest_config(cases(150))]
    #[test]
    fn an_engine_serves_or_refuses_all_and_loses_nothing(
        config in any_config(), first in any_load(), second in any_load(), reset in any::<[bool; 4]>(),
    ) {
        let loads = [first, second];
        let singles = EngineConfig { macro_steps: false, ..config.clone() };
        prop_assert_eq!(outcome(config, &loads, reset), outcome(singles, &loads, reset));
    }
}

proptest! {
    #![proptest_config(cases(150))]
    #[test]
    fn extents_give_what_single_chunks_give(config in any_config(), load in any_load()) {
        let config = EngineConfig { journal: true, ..config };
        let mut extents = Engine::new(config.clone()).expect("a good configuration");
        let mut loose = Engine::new(config).expect("a good configuration").loose();
        prop_assert_eq!(replay(&mut extents, "a", &load, 0.011), replay(&mut loose, "a", &load, 0.011));
        prop_assert_eq!(extents.take_journal(), loose.take_journal());
    }
}

/// The disk of a caller: the chunks that it holds, and the transfers that it has not answered.
#[derive(Default)]
struct CallersDisk {
    held: BTreeSet<Key>,
    asked: Vec<Issued>,
}

impl CallersDisk {
    /// Takes new transfers. Each reads chunks that the disk holds, or writes chunks that it lacks.
    fn take(&mut self, engine: &mut Engine) {
        for key in engine.take_dropped() {
            self.held.remove(&key);
        }
        for issued in engine.take_issued() {
            let there = |(key, _): &(Key, u64)| self.held.contains(key);
            match issued.write {
                true => assert!(!issued.chunks.iter().any(there), "written and there already"),
                false => assert!(issued.chunks.iter().all(there), "read and not there"),
            }
            self.asked.push(issued);
        }
    }

    /// Answers one transfer; `fails` says which of a write's chunks do not arrive.
    fn answer(&mut self, engine: &mut Engine, which: usize, fails: u64) {
        let issued = self.asked.remove(which % self.asked.len());
        let keys = issued.chunks.iter().map(|(key, _)| *key);
        let (failed, arrived): (Vec<Key>, Vec<Key>) = keys.partition(|key| fails != 0 && key % fails == 0);
        if issued.write {
            self.held.extend(arrived);
        }
        engine.complete_io(issued.id, engine.now(), failed.clone());
        engine.complete_io(issued.id, engine.now(), failed);
    }
}

proptest! {
    #![proptest_config(cases(150))]
    #[test]
    fn a_callers_disk_is_asked_for_what_it_has_though_writes_fail(
        config in any_config().prop_filter("a disk", |c| c.tiers.as_ref().is_some_and(|t| t.levels.len() == 2)),
        load in any_load(), answers in prop::collection::vec((0usize..9, 0u64..4), 1..40), reset in any::<bool>(),
    ) {
        let mut config = config;
        config.tiers.iter_mut().for_each(|tiers| {
            let disk = &mut tiers.levels[1];
            (disk.external, disk.exclusive, disk.takes_dropped) = (true, false, false);
            (disk.buffer_chunks, disk.ticks, disk.offload_every_s) = (0, None, 0.0);
        });
        let (mut engine, mut disk) = (Engine::new(config).expect("a good configuration"), CallersDisk::default());
        for (index, (prompt, output, _)) in load.iter().enumerate() {
            engine.submit(ask(&format!("a{index}"), prompt, *output), 0).expect("a request that is taken");
        }
        let (mut answers, mut rows, mut idle) = (answers.iter().cycle(), 0, false);
        while !idle {
            let some = engine.advance(engine.now() + from_s(0.02)).expect("no dead end");
            rows += some.len();
            disk.take(&mut engine);
            engine.check();
            let (which, fails) = answers.next().expect("a cycle");
            if !disk.asked.is_empty() && *which > 3 {
                disk.answer(&mut engine, *which, *fails);
                engine.check();
            } else if some.is_empty() && engine.next_event().is_none() {
                idle = disk.asked.is_empty();
                if !idle {
                    disk.answer(&mut engine, *which, *fails);
                }
            }
        }
        prop_assert_eq!(rows, load.len());
        prop_assert!(engine.idle());
        engine.reset(if reset { &["disk"] } else { &[] }).expect("idle");
        disk.take(&mut engine);
        let tiers = engine.tiers_if_any().expect("tiers");
        tiers.check_idle();
        prop_assert_eq!(disk.held.iter().copied().collect::<Vec<_>>(), tiers.keys_on_disk());
    }
}

/// Any numbers at all, the largest ones too.
fn any_number() -> impl Strategy<Value = u64> {
    prop_oneof![Just(0), Just(1), Just(u64::MAX), Just(u64::MAX / 2), 0u64..100, any::<u64>()]
}

fn any_real() -> impl Strategy<Value = f64> {
    prop_oneof![Just(0.0), Just(-1.0), Just(f64::NAN), Just(f64::INFINITY), Just(1e300), 0.0..2.0]
}

fn wild_config() -> impl Strategy<Value = EngineConfig> {
    let sizes = prop::collection::vec(any_number(), 12);
    (any_config(), sizes, prop::collection::vec(any_real(), 8), prop::collection::vec(any::<bool>(), 22))
        .prop_map(|(mut config, sizes, reals, wild)| {
            let tiers = config.tiers.as_mut();
            let mut numbers = vec![
                &mut config.block_tokens,
                &mut config.chunk_tokens,
                &mut config.max_num_batched_tokens,
                &mut config.max_num_seqs,
            ];
            let mut shares = Vec::new();
            if let Some(TierConfig { policy, chunk_bytes, chunk_tokens, levels, .. }) = tiers {
                numbers.extend([chunk_bytes, chunk_tokens]);
                for level in levels {
                    numbers.push(&mut level.chunks);
                    shares.extend([&mut level.target, &mut level.lease_s]);
                }
                numbers.extend([&mut policy.max_prefetches, &mut policy.min_prefetch_tokens]);
                shares.extend([&mut policy.watermark, &mut policy.evict_ratio]);
                shares.push(&mut policy.prefetch_token_s);
            }
            let (some, others) = wild.split_at(12);
            for ((number, size), _) in numbers.into_iter().zip(sizes).zip(some).filter(|(_, wild)| **wild) {
                *number = size;
            }
            for ((share, real), _) in shares.into_iter().zip(reals).zip(others).filter(|(_, wild)| **wild) {
                *share = real;
            }
            config
        })
}

proptest! {
    #![proptest_config(cases(200))]
    #[test]
    fn bad_numbers_are_refused_in_one_line_or_do_no_harm(config in wild_config(), load in any_load()) {
        match Engine::new(config) {
            Ok(mut engine) => {
                for (index, (prompt, output, _)) in load.iter().enumerate() {
                    engine.submit(ask(&format!("a{index}"), prompt, *output), 0).expect("a request that is taken");
                }
                let mut rows = 0;
                // An error: requests wait for blocks that nothing will free, said in one line.
                while let Some(some) = engine.advance(FOREVER).ok().filter(|some| !some.is_empty()) {
                    engine.check();
                    rows += some.len();
                }
                prop_assert!(rows == load.len() || engine.advance(FOREVER).is_err());
            }
            Err(text) => prop_assert!(!text.is_empty() && !text.contains('\n'), "{}", text),
        }
    }
}
