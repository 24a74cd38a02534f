//! The front end beside the engine: exact small cases.

use crate::engine::Engine;
use crate::engine::config::EngineConfig;
use crate::engine::cost::CostConfig;
use crate::engine::request::Completion;
use crate::tests::{ask, config};
use crate::time::{FOREVER, Ticks, from_s, to_s};

/// About a millisecond, and whole in ticks.
const MS: f64 = 1.0 / 1024.0;

/// Requests that are sent at such ms and ask for so many tokens, in that order.
fn served(cost: CostConfig, sent: &[(f64, u64)]) -> Vec<Completion> {
    let mut engine = Engine::new(EngineConfig { cost, ..config(400, None) }).expect("a good configuration");
    for (id, &(at_ms, tokens)) in sent.iter().enumerate() {
        let request = ask(&id.to_string(), &[(1 + id as i64, 1)], tokens);
        engine.submit(request, from_s(at_ms * MS)).expect("taken");
    }
    let mut done = Vec::new();
    while done.len() < sent.len() {
        done.extend(engine.advance(FOREVER).expect("no dead end"));
    }
    done.sort_by(|one, other| one.id.cmp(&other.id));
    done
}

/// First tokens of two requests of one token, in the order of sending. The front end takes 1 ms, a step 2 ms.
fn first_tokens(shared_core: bool, sent_ms: [f64; 2]) -> [Ticks; 2] {
    let cost = CostConfig { step_s: 2.0 * MS, request_s: MS, shared_core, ..CostConfig::default() };
    let done = served(cost, &sent_ms.map(|at_ms| (at_ms, 1)));
    [0, 1].map(|id: usize| done[id].first_token.expect("a token"))
}

#[test]
fn a_step_and_the_front_end_have_half_of_their_core_each() {
    let ms = |first: f64, second: f64| [first * MS, second * MS].map(from_s);
    assert_eq!(first_tokens(false, [0.0, 0.0]), ms(3.0, 5.0));
    // From 1 ms on, the first one's step shares the core with the second one's parsing, which then takes 2 ms.
    assert_eq!(first_tokens(true, [0.0, 0.0]), ms(4.0, 6.0));
    assert_eq!(first_tokens(false, [0.0, 2.5]), ms(3.0, 5.5));
    // The half of a millisecond that the step lacks takes a whole one, and then the parsing the core for itself.
    assert_eq!(first_tokens(true, [0.0, 2.5]), ms(3.5, 6.0));
    assert_eq!(first_tokens(true, [0.0, 3.0]), ms(3.0, 6.0));
}

/// First and last tokens of requests that are sent at once, in ms.
fn answers(cost: CostConfig, output_tokens: &[u64]) -> Vec<(f64, f64)> {
    let sent: Vec<_> = output_tokens.iter().map(|&tokens| (0.0, tokens)).collect();
    let ms = |at: Option<Ticks>| to_s(at.expect("a token")) / MS;
    served(cost, &sent).iter().map(|done| (ms(done.first_token), ms(done.last_token))).collect()
}

#[test]
fn a_first_token_and_a_last_pass_the_front_end_and_those_of_one_step_together() {
    let cost = CostConfig { step_s: 2.0 * MS, response_s: MS, ..CostConfig::default() };
    assert_eq!(answers(cost, &[1]), [(3.0, 3.0)]);
    assert_eq!(answers(cost, &[1, 1]), [(3.0, 3.0), (3.0, 3.0)]);
    assert_eq!(answers(cost, &[3]), [(3.0, 7.0)]);
    // The second step shares its core with the first token's answer, and takes 1 ms longer.
    let shared = CostConfig { shared_core: true, ..cost };
    assert_eq!(answers(shared, &[3]), [(4.0, 8.0)]);
    assert_eq!(answers(shared, &[1, 2]), [(4.0, 4.0), (4.0, 6.0)]);
}

#[test]
fn tokens_that_wait_for_the_front_end_come_together() {
    let cost = CostConfig { step_s: MS, response_s: 5.0 * MS, ..CostConfig::default() };
    assert_eq!(answers(cost, &[2]), [(6.0, 11.0)]);
    assert_eq!(answers(cost, &[1, 3]), [(6.0, 6.0), (6.0, 11.0)]);
}

#[test]
fn a_front_end_turns_to_others_in_the_midst_of_parsing() {
    let cost = CostConfig { step_s: MS, request_s: 4.0 * MS, ..CostConfig::default() };
    let shared = CostConfig { shared_core: true, ..cost };
    // Read until 2 and 4 ms, parsed until 6 and 8; the first one's step shares the core with the latter.
    assert_eq!(answers(shared, &[1, 1]), [(8.0, 8.0), (10.0, 10.0)]);
    assert_eq!(answers(cost, &[1, 1]), [(5.0, 5.0), (9.0, 9.0)]);
}
