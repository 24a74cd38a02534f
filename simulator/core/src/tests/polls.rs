use super::schedule::together;
use super::{ask, config, drain, lmcache, one, tiers};
use crate::engine::Engine;
use crate::engine::config::EngineConfig;
use crate::engine::cost::CostConfig;
use crate::engine::request::Completion;
use crate::time::{FOREVER, Ticks, from_s, to_s};

#[test]
fn an_engine_that_computes_sees_an_answer_two_steps_later_and_an_idle_one_at_once() {
    let first_s = |lookup_polls, busy| {
        let config = EngineConfig { lookup_polls, ..config(400, Some(tiers(lmcache(), 100, None))) };
        let mut engine = Engine::new(config).expect("good");
        if busy {
            engine.submit(ask("other", &[(1, 9)], 40), 0).expect("taken");
        }
        engine.submit(ask("late", &[(2, 9)], 1), from_s(0.02)).expect("taken");
        let done = engine.advance(FOREVER).expect("no dead end").pop().expect("the shorter one");
        assert_eq!(done.id, "late");
        to_s(done.first_token.expect("a token"))
    };
    assert_eq!(first_s(2, false), first_s(0, false));
    let later_s = first_s(2, true) - first_s(0, true);
    assert!((0.004..0.005).contains(&later_s), "a step of decoding takes 2.1 ms and a little, not {later_s}");
}

/// When requests that arrive at these moments have their first tokens, in seconds. A poll takes 1 ms, a step 2 ms and
/// more, parsing 1 ms.
fn firsts(wake_polls: u64, at: &[Ticks]) -> Vec<f64> {
    firsts_of_chunks(wake_polls, 0.0, at)
}

/// The same. Each prompt has one chunk, which the server takes that long to ask for.
fn firsts_of_chunks(wake_polls: u64, request_chunk_s: f64, at: &[Ticks]) -> Vec<f64> {
    firsts_of(CostConfig { request_chunk_s, ..cost() }, wake_polls, at)
}

fn cost() -> CostConfig {
    let plain = config(400, Some(tiers(lmcache(), 100, None)));
    CostConfig { poll_s: 1e-3, request_token_s: 0.0, ..plain.cost }
}

fn firsts_of(cost: CostConfig, wake_polls: u64, at: &[Ticks]) -> Vec<f64> {
    let plain = config(400, Some(tiers(lmcache(), 100, None)));
    let mut engine = Engine::new(EngineConfig { lookup_polls: 2, wake_polls, cost, ..plain }).expect("good");
    let done = served(&mut engine, at);
    done.iter().map(|one| to_s(one.first_token.expect("a token"))).collect()
}

/// Prompts that are sent so long from now, once all are served; in that order.
fn served(engine: &mut Engine, at: &[Ticks]) -> Vec<Completion> {
    let now = engine.now();
    for (number, at) in at.iter().enumerate() {
        engine.submit(ask(&number.to_string(), &[(number as i64, 9)], 1), now + at).expect("taken");
    }
    let mut done = Vec::new();
    while done.len() < at.len() {
        done.extend(engine.advance(FOREVER).expect("no dead end"));
    }
    done.sort_by(|a, b| a.id.cmp(&b.id));
    done
}

#[test]
fn an_idle_engine_asks_once_more_and_longer_where_the_server_slept() {
    let asks_s = firsts(1, &[0])[0] - firsts(0, &[0])[0];
    assert!((asks_s - 5e-3 / 6.0).abs() < 1e-9, "{asks_s}");
    // A poll of 1 ms on average: of three, the first takes 4 thirds of it.
    let none = firsts_of(CostConfig { poll_s: 0.0, ..cost() }, 1, &[0])[0];
    assert!((firsts(1, &[0])[0] - none - 3e-3).abs() < 1e-9);
}

#[test]
fn of_prompts_that_are_sent_together_the_second_one_s_answer_comes_after_the_first_one_s() {
    // The second is parsed 1 ms after the first and more, as the engine asks then, and computed in the next step.
    let together = firsts(1, &[0, 0]);
    assert!(together[1] - together[0] > 2e-3, "{together:?}");
    let later = firsts(1, &[0, from_s(1.0)]);
    assert!((later[1] - 1.0 - later[0]).abs() < 1e-9, "{later:?}");
}

#[test]
fn a_question_takes_the_server_as_long_as_its_chunks_and_an_answer_waits_for_other_questions() {
    let near = |one: f64, other: f64| (one - other).abs() < 1e-9;
    let plain = firsts(1, &[0])[0];
    // Of the first one's, three quarters pass while the server wakes up, or a quarter of a poll of 1 ms.
    for (chunk_s, more_s) in [(0.2e-3, 0.05e-3), (0.4e-3, 0.15e-3), (2.5e-3, 2.25e-3)] {
        assert!(near(firsts_of_chunks(1, chunk_s, &[0])[0], plain + more_s));
    }
    let apart = firsts(0, &[0, 0]);
    assert!(apart[1] > apart[0]);
    let behind = firsts_of_chunks(0, 1.5e-3, &[0, 0]);
    assert!(near(behind[0], behind[1]) && behind[0] > apart[0] + 1.5e-3, "{behind:?}");
}

/// First tokens of prompts whose one chunk lies in CPU RAM, in seconds after they were sent at once.
fn firsts_of_loads(load_polls: u64, count: usize) -> Vec<f64> {
    firsts_of_loads_at(0.0, load_polls, &vec![0; count])
}

/// The same, of prompts that are sent at these moments, after the first one is.
fn firsts_of_loads_at(response_next_s: f64, load_polls: u64, at: &[Ticks]) -> Vec<f64> {
    let plain = config(400, Some(tiers(lmcache(), 100, None)));
    let cost =
        CostConfig { poll_s: 0.6e-3, request_s: 0.0, request_token_s: 0.0, response_next_s, ..plain.cost };
    let mut engine = Engine::new(EngineConfig { load_polls, cost, ..plain }).expect("good");
    for number in 0..at.len() {
        one(&mut engine, ask("warm", &[(number as i64, 9)], 1));
    }
    drain(&mut engine);
    engine.reset(&["gpu"]).expect("idle");
    let sent = engine.now();
    let done = served(&mut engine, at);
    assert!(done.iter().all(|each| each.sources.levels[0] == 8), "loaded, not computed");
    done.iter().map(|each| to_s(each.first_token.expect("a token") - sent)).collect()
}

#[test]
fn an_engine_whose_only_request_was_preempted_asks_again_for_a_loads_end() {
    // Twelve blocks. What is loaded fills four, so that the other one, which runs alone, has no ninth.
    let plain = config(13, Some(tiers(lmcache(), 100, None)));
    let mut engine =
        Engine::new(EngineConfig { load_polls: 1, max_num_seqs: 1, ..plain }).expect("a good configuration");
    one(&mut engine, ask("warm", &[(1, 17)], 1));
    drain(&mut engine);
    engine.reset(&["gpu"]).expect("idle");
    let done = together(&mut engine, &[("loads", &[(1, 17)], 1), ("runs", &[(2, 8)], 30)]);
    let of = |id: &str| done.iter().find(|each| each.id == id).expect("it ended");
    assert_eq!((of("loads").sources.levels[0], of("runs").preemptions), (16, 1));
    assert!(of("loads").first_token < of("runs").last_token);
}

#[test]
fn an_engine_that_waits_for_a_load_sees_its_end_half_a_poll_later_and_goes_on_a_poll_after_that() {
    let later_s = firsts_of_loads(1, 1)[0] - firsts_of_loads(0, 1)[0];
    assert!(
        (later_s - 1.5 * 0.5e-3).abs() < 1e-9,
        "a poll of 0.6 ms that wakes nothing up takes 0.5: {later_s}"
    );
}

#[test]
fn a_load_that_ends_during_a_step_is_computed_with_a_poll_after_it() {
    let (at_once, seen) = (firsts_of_loads(0, 2), firsts_of_loads(1, 2));
    let step_s = at_once[1] - at_once[0];
    assert!((seen[1] - seen[0] - step_s - 0.5e-3).abs() < 1e-9, "{at_once:?} {seen:?}");
}

#[test]
fn a_pass_behind_a_step_takes_the_work_on_a_step_and_half_as_much_for_each_load_that_it_begins() {
    let (at_once, seen) = (firsts_of_loads_at(0.4e-3, 0, &[0, 0]), firsts_of_loads_at(0.4e-3, 1, &[0, 0]));
    let step_s = at_once[1] - at_once[0];
    // The engine sleeps 1 ms of it.
    assert!((seen[1] - seen[0] - step_s - 1.4e-3).abs() < 1e-9, "{at_once:?} {seen:?}");
    // One more comes during the first one's step, or much later. Where it comes meanwhile, its load begins behind the step.
    let later = firsts_of_loads_at(0.4e-3, 1, &[0, 0, from_s(1.0)]);
    let more = firsts_of_loads_at(0.4e-3, 1, &[0, 0, from_s(later[0]) - from_s(1e-3)]);
    // The first one's token, which passes on the same core, waits for that; the second one's for the third one's step, too.
    let waits_s = [0.2e-3, 0.2e-3 + 0.4e-3];
    for (number, wait_s) in waits_s.into_iter().enumerate() {
        assert!((more[number] - later[number] - wait_s).abs() < 1e-9, "{later:?} {more:?}");
    }
}
