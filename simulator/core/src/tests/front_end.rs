//! The front end beside the engine: exact small cases.

use crate::engine::Engine;
use crate::engine::config::EngineConfig;
use crate::engine::cost::CostConfig;
use crate::engine::request::Completion;
use crate::tests::{ask, config, drain, lmcache, one, tiers};
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
    let cost = CostConfig { step_s: MS, request_s: 3.0 * MS, ..CostConfig::default() };
    let shared = CostConfig { shared_core: true, ..cost };
    // Read until 1 and 2 ms, parsed until 4 and 6; the first one's step shares the core with the latter.
    assert_eq!(answers(shared, &[1, 1]), [(6.0, 6.0), (8.0, 8.0)]);
    assert_eq!(answers(cost, &[1, 1]), [(4.0, 4.0), (7.0, 7.0)]);
}

#[test]
fn a_front_end_that_parses_requests_as_a_whole_is_done_with_the_first_one_sooner() {
    let cost = CostConfig { step_s: MS, request_s: 3.0 * MS, shared_core: true, ..CostConfig::default() };
    let whole = EngineConfig { cost, parses_whole: true, ..config(400, None) };
    let mut engine = Engine::new(whole).expect("a good configuration");
    for id in 0..2 {
        engine.submit(ask(&id.to_string(), &[(1 + id, 1)], 1), 0).expect("taken");
    }
    let mut tokens = Vec::new();
    while tokens.len() < 2 {
        let done = engine.advance(FOREVER).expect("no dead end");
        tokens.extend(done.iter().map(|one| to_s(one.first_token.expect("a token")) / MS));
    }
    // The first one is parsed at 3 ms, where a front end that reads both before takes 4; its step shares the core.
    assert_eq!(tokens, [5.0, 8.0]);
}

/// Thousandths of a second up to the first token of a prompt of 20 tokens, two chunks of 8 and 4 more; then of 5 others
/// that are sent at once.
fn step_costs(cost: CostConfig, has_tiers: bool) -> [f64; 3] {
    let tiers = has_tiers.then(|| tiers(lmcache(), 100, None));
    let config = EngineConfig { cost, max_num_batched_tokens: 1000, ..config(400, tiers) };
    let mut engine = Engine::new(config).expect("a good configuration");
    let ttft = |done: Completion, sent: Ticks| to_s(done.first_token.expect("a token") - sent) / MS;
    let mut found = [0.0; 3];
    for (number, found) in found[..2].iter_mut().enumerate() {
        let sent = engine.now();
        *found = ttft(one(&mut engine, ask(&format!("lone {number}"), &[(7, 20)], 1)), sent);
        drain(&mut engine);
    }
    let sent = engine.now();
    for number in 0..5 {
        engine.submit(ask(&number.to_string(), &[(100 + number, 4)], 3), sent).expect("taken");
    }
    let mut done = Vec::new();
    while done.len() < 5 {
        done.extend(engine.advance(FOREVER).expect("no dead end"));
    }
    found[2] = to_s(done[4].last_token.expect("tokens") - sent) / MS;
    found
}

#[test]
fn a_step_takes_time_for_each_request_that_it_begins_and_each_token_that_it_stores() {
    let none = CostConfig { step_s: 2.0 * MS, ..CostConfig::default() };
    assert_eq!(step_costs(none, true), [2.0, 2.0, 6.0]);
    // The steps after the first one begin no request.
    assert_eq!(step_costs(CostConfig { step_request_s: MS, ..none }, true), [3.0, 3.0, 11.0]);
    // Whole chunks, and those of a prefix that is there already are not stored again.
    let stores = CostConfig { store_token_s: MS, ..none };
    assert_eq!(step_costs(stores, true), [18.0, 2.0, 6.0]);
    assert_eq!(step_costs(stores, false), [2.0, 2.0, 6.0]);
}

#[test]
fn a_first_token_takes_longer_where_another_step_follows() {
    let cost = CostConfig { step_s: 2.0 * MS, response_next_s: MS, ..CostConfig::default() };
    assert_eq!(answers(cost, &[1, 1]), [(2.0, 2.0), (2.0, 2.0)]);
    assert_eq!(answers(cost, &[3]), [(3.0, 6.0)]);
    assert_eq!(answers(cost, &[1, 2]), [(3.0, 3.0), (3.0, 4.0)]);
    // The second one is parsed while the first one's step runs, and its own step follows.
    let parsed = CostConfig { request_s: 1.5 * MS, response_s: 0.5 * MS, ..cost };
    assert_eq!(answers(parsed, &[1, 1]), [(5.5, 5.5), (6.5, 6.5)]);
    assert_eq!(step_costs(cost, true)[..2], [2.0, 2.0]);
}

#[test]
fn the_engine_s_own_work_on_a_poll_goes_ahead_of_the_front_end_s() {
    // The second request is parsed while the engine asks about the first. Its first poll takes 4 ms, and it sleeps for 1.
    let last_s = |response_next_s| {
        let cost = CostConfig {
            step_s: MS,
            request_s: 3.0 * MS,
            poll_s: 3e-3,
            response_next_s,
            ..CostConfig::default()
        };
        let config = EngineConfig { cost, lookup_polls: 2, ..config(400, Some(tiers(lmcache(), 100, None))) };
        let mut engine = Engine::new(config).expect("a good configuration");
        for (id, prompt) in [("a", [(7, 1)]), ("b", [(8, 1)])] {
            engine.submit(ask(id, &prompt, 1), 0).expect("taken");
        }
        let mut done = Vec::new();
        while done.len() < 2 {
            done.extend(engine.advance(FOREVER).expect("no dead end"));
        }
        done.iter().map(|each| to_s(each.first_token.expect("a token"))).fold(0.0, f64::max)
    };
    assert!(last_s(5e-3) > last_s(0.0) + 2e-3);
}

#[test]
fn a_first_token_takes_longer_while_its_request_is_stored() {
    let none = CostConfig { step_s: 2.0 * MS, ..CostConfig::default() };
    let stores = CostConfig { response_store_s: MS, ..none };
    // The second request finds what the first one stored.
    assert_eq!(step_costs(stores, true)[..2], [3.0, 2.0]);
    assert_eq!(step_costs(stores, false)[..2], [2.0, 2.0]);
    let answers = CostConfig { response_s: 0.5 * MS, ..stores };
    assert_eq!(step_costs(answers, true)[..2], [3.5, 2.5]);
}

#[test]
fn a_first_token_takes_longer_for_each_token_of_the_prompts_in_its_step() {
    let cost = CostConfig { step_s: 2.0 * MS, ..CostConfig::default() };
    let slower = CostConfig { response_token_s: 0.5 * MS, ..cost };
    // Prompts of a token each; a last token takes no longer.
    assert_eq!(answers(cost, &[1, 3]), [(2.0, 2.0), (2.0, 6.0)]);
    assert_eq!(answers(slower, &[1, 3]), [(3.0, 3.0), (3.0, 6.0)]);
    assert_eq!(answers(slower, &[3]), [(2.5, 6.0)]);
}
