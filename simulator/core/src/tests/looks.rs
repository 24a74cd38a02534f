//! When the scheduler sees what the tiers hold: exact small cases.

use crate::engine::Engine;
use crate::engine::config::EngineConfig;
use crate::engine::cost::CostConfig;
use crate::tests::{ask, config, lmcache, tiers};
use crate::time::{FOREVER, from_s, to_s};

/// About a millisecond, and whole in ticks.
const MS: f64 = 1.0 / 1024.0;

/// A step takes 2 ms and a look 1 ms; the connector asks twice.
fn engine(lookup_ms: f64, find_chunk_ms: f64, status_ms: f64) -> Engine {
    let cost = CostConfig {
        step_s: 2.0 * MS,
        poll_s: MS,
        lookup_s: lookup_ms * MS,
        find_chunk_s: find_chunk_ms * MS,
        status_s: status_ms * MS,
        ..CostConfig::default()
    };
    let tiers = Some(tiers(lmcache(), 100, None));
    Engine::new(EngineConfig { cost, lookup_polls: 2, ..config(400, tiers) }).expect("a good configuration")
}

/// First tokens, in ms, of requests of 17 tokens that are sent at such ms.
fn first_tokens(mut engine: Engine, sent_ms: &[f64]) -> Vec<f64> {
    for (id, &at_ms) in sent_ms.iter().enumerate() {
        let request = ask(&id.to_string(), &[(1 + id as i64, 17)], 1);
        engine.submit(request, from_s(at_ms * MS)).expect("taken");
    }
    let mut done = Vec::new();
    while done.len() < sent_ms.len() {
        done.extend(engine.advance(FOREVER).expect("no dead end"));
    }
    done.sort_by(|one, other| one.id.cmp(&other.id));
    done.iter().map(|one| to_s(one.first_token.expect("a token")) / MS).collect()
}

#[test]
fn a_schedule_sees_an_answer_at_its_first_look_after_that_and_asks_on() {
    assert_eq!(first_tokens(engine(0.0, 0.0, 0.0), &[0.0]), [4.0]);
    // Answered at 1.5 ms, seen at 2; asked on, answered at 2.5, seen at 3.
    assert_eq!(first_tokens(engine(1.5, 0.0, 0.5), &[0.0]), [5.0]);
    assert_eq!(first_tokens(engine(1.0, 0.0, 1.0), &[0.0]), [4.0], "an answer of that moment is seen");
    // Two whole chunks, which it has found at 3.5 ms: the second answer comes at 4.
    assert_eq!(first_tokens(engine(1.5, 1.0, 0.5), &[0.0]), [6.0]);
}

#[test]
fn requests_sent_one_after_another_are_answered_at_one_look_and_computed_together() {
    assert_eq!(first_tokens(engine(0.0, 0.0, 0.0), &[0.0, 1.0]), [4.0, 6.0]);
    // Look-ups are answered at 1.5 and 3 ms, the questions of 2 and 3 ms at 3.5 and 4.
    assert_eq!(first_tokens(engine(1.5, 0.0, 0.5), &[0.0, 1.0]), [6.0, 6.0]);
    // One question at a time: of three look-ups at once, the last one is answered at 4.5 ms.
    assert_eq!(first_tokens(engine(1.5, 0.0, 0.0), &[0.0, 0.0, 0.0]), [7.0, 7.0, 9.0]);
}

#[test]
fn where_looks_take_no_time_an_idle_engine_sees_an_answer_when_it_comes() {
    let mut config = engine(1.5, 0.0, 0.5).config().clone();
    config.cost.poll_s = 0.0;
    assert_eq!(first_tokens(Engine::new(config).expect("good"), &[0.0]), [4.0]);
}
