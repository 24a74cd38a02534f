//! A calibration's points, against the engine stepped by hand.

use crate::engine::Engine;
use crate::probing::{Probe, probe};
use crate::tests::{ask, config, drain, lmcache, tiers};
use crate::time::{FOREVER, to_s};

/// Two prompts of 40 tokens, of which 32 were sent before, from CPU RAM: the GPU has forgotten them.
fn asks() -> Probe {
    let slots = [0, 1];
    Probe {
        first: slots.iter().map(|&slot| ask(&format!("warm{slot}"), &[(1 + slot, 32)], 1)).collect(),
        emptied: vec!["gpu".to_string()],
        together: slots
            .iter()
            .map(|&slot| ask(&slot.to_string(), &[(1 + slot, 32), (3 + slot, 8)], 5))
            .collect(),
    }
}

#[test]
fn a_probe_is_what_the_engine_gives_when_it_is_stepped_by_hand() {
    let (config, asks) = (config(400, Some(tiers(lmcache(), 400, None))), asks());
    let found = probe(config.clone(), &asks).expect("all are served");
    let mut engine = Engine::new(config).expect("a good configuration");
    for one in &asks.first {
        engine.submit(one.clone(), engine.now()).expect("taken");
        engine.advance(FOREVER).expect("no dead end");
    }
    drain(&mut engine);
    engine.reset(&["gpu"]).expect("idle");
    let sent = engine.now();
    for one in &asks.together {
        engine.submit(one.clone(), sent).expect("taken");
    }
    let mut done = Vec::new();
    while done.len() < asks.together.len() {
        done.extend(engine.advance(FOREVER).expect("no dead end"));
    }
    let near = |one: f64, other: f64| assert!((one - other).abs() < 1e-12, "{one} and {other}");
    near(to_s(found.ended - found.sent), to_s(engine.now() - sent));
    for ((first, last), one) in found.tokens.iter().zip(&done) {
        near(to_s(first - found.sent), to_s(one.first_token.expect("a token") - sent));
        near(to_s(last - found.sent), to_s(one.last_token.expect("a token") - sent));
    }
    assert_eq!((found.tokens.len(), engine.counters().level_tokens[0]), (2, 64));
}

#[test]
fn a_probe_that_cannot_be_served_says_why() {
    let told = |config, asks: &Probe| probe(config, asks).err().expect("a refusal");
    let too_long =
        Probe { first: Vec::new(), emptied: Vec::new(), together: vec![ask("long", &[(1, 4000)], 1)] };
    let says = "1000 blocks are needed and the GPU has 99: it can never fit";
    assert_eq!(told(config(100, None), &too_long), says);
    assert!(!told(config(0, None), &asks()).is_empty(), "no GPU block");
    let unknown = Probe { emptied: vec!["tape".to_string()], ..asks() };
    assert_eq!(probe(config(400, None), &unknown).expect("no such tier").tokens.len(), 2);
}
