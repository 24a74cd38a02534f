//! What a step takes in, on small cases whose times follow from the cost constants.

use super::{ask, config, lmcache, one, random_load, reply_id, run, tiers};
use crate::engine::Engine;
use crate::engine::config::EngineConfig;
use crate::engine::request::Completion;
use crate::keys::{block_keys, block_runs};
use crate::time::{FOREVER, from_s, to_s};

/// A request: its name, its prompt as streams with their tokens, and how many tokens it generates.
pub(super) type Asked<'a> = (&'a str, &'a [(i64, u64)], u64);

/// Serves requests that are all sent now; in the order of their ends.
pub(super) fn together(engine: &mut Engine, asked: &[Asked]) -> Vec<Completion> {
    for &(id, prompt, output) in asked {
        engine.submit(ask(id, prompt, output), engine.now()).expect("a request that is taken");
    }
    let mut served = Vec::new();
    while served.len() < asked.len() {
        served.extend(engine.advance(FOREVER).expect("no dead end"));
    }
    served
}

/// How many pauses between a request's tokens are longer than a step of two tokens, which takes 2.2 ms and a little.
fn long_gaps(done: &Completion) -> usize {
    done.tokens.windows(2).filter(|pair| to_s(pair[1] - pair[0]) > 2.3e-3).count()
}

#[test]
fn the_older_request_goes_on_in_the_step_that_preempts_the_younger_one() {
    // 16 blocks. Each has 7 for its prompt and an eighth from its 29th token on; the older one asks for a ninth first.
    let mut engine = Engine::new(config(17, None)).expect("good");
    let served = together(&mut engine, &[("older", &[(1, 28)], 20), ("younger", &[(2, 28)], 20)]);
    assert_eq!(served.iter().map(|done| done.id.as_str()).collect::<Vec<_>>(), ["older", "younger"]);
    assert_eq!(served.iter().map(|done| done.preemptions).collect::<Vec<_>>(), [0, 1]);
    // The step that computes the younger one's prompt takes longer, and no other.
    assert_eq!(long_gaps(&served[0]), 1);
    // The younger one is a step behind. It waits until the older one ends.
    let ends = *served[0].tokens.last().expect("tokens");
    assert_eq!(served[1].tokens.iter().filter(|&&at| at < ends).count(), 4);
}

#[test]
fn the_youngest_request_preempts_itself_and_no_older_one() {
    // 16 blocks. The younger request has the longer prompt, so that it asks for the seventeenth.
    let mut engine = Engine::new(config(17, None)).expect("good");
    let served = together(&mut engine, &[("older", &[(1, 24)], 20), ("younger", &[(2, 28)], 20)]);
    assert_eq!(served.iter().map(|done| done.preemptions).collect::<Vec<_>>(), [0, 1]);
    assert_eq!(long_gaps(&served[0]), 1);
    let ends = *served[0].tokens.last().expect("tokens");
    assert_eq!(served[1].tokens.iter().filter(|&&at| at < ends).count(), 5);
}

#[test]
fn the_whole_prompt_must_fit_and_the_head_blocks_the_line() {
    let mut engine = Engine::new(config(17, None)).expect("good");
    for (id, tokens, output, at_s) in [("long", 40, 20, 0.0), ("head", 30, 4, 0.01), ("small", 4, 4, 0.02)] {
        let submission = ask(id, &[(reply_id(id) + 7, tokens)], output);
        engine.submit(submission, from_s(at_s)).expect("taken");
    }
    let order: Vec<String> =
        (0..3).flat_map(|_| engine.advance(FOREVER).expect("no dead end")).map(|done| done.id).collect();
    assert_eq!(order, ["long", "head", "small"]);
}

#[test]
fn a_preempted_request_goes_ahead_of_one_whose_look_up_has_ended_meanwhile() {
    let mut engine = Engine::new(config(25, Some(tiers(lmcache(), 100, Some(100))))).expect("good");
    one(&mut engine, ask("fill", &[(3, 57)], 1));
    assert_eq!(engine.advance(FOREVER).expect("no dead end"), []);
    engine.reset(&["gpu", "cpu", "page_cache"]).expect("idle");
    // 24 blocks. The disk takes 146 ms to read seven chunks, and the older request preempts the younger one meanwhile.
    // When the older one ends, after 150 ms, the younger one needs 12 blocks, and the one that was read for 15.
    let asked: [Asked; 3] = [("older", &[(1, 28)], 66), ("younger", &[(2, 28)], 40), ("read", &[(3, 57)], 1)];
    let served = together(&mut engine, &asked);
    assert_eq!(served.iter().map(|done| done.id.as_str()).collect::<Vec<_>>(), ["older", "younger", "read"]);
    assert_eq!(served.iter().map(|done| done.preemptions).collect::<Vec<_>>(), [0, 1, 0]);
    assert_eq!(served[2].sources.levels[1], 56);
}

/// Serves these after one whose only step takes as long as the others need to arrive. The others' completions, in the
/// order in which they were asked.
fn behind_a_long_step(engine: &mut Engine, asked: &[Asked]) -> Vec<Completion> {
    let whole_step: &[(i64, u64)] = &[(99, 64)];
    let all: Vec<_> = std::iter::once(("first", whole_step, 1)).chain(asked.iter().copied()).collect();
    let served = together(engine, &all);
    let named = |id: &str| served.iter().find(|done| done.id == id).cloned().expect("served");
    asked.iter().map(|(id, _, _)| named(id)).collect()
}

fn first_token_s(done: &Completion) -> f64 {
    to_s(done.first_token.expect("a token"))
}

#[test]
fn a_step_without_budget_asks_the_tiers_for_no_further_request() {
    let mut engine = Engine::new(config(100, Some(tiers(lmcache(), 100, None)))).expect("good");
    one(&mut engine, ask("fill", &[(1, 33)], 1));
    assert_eq!(engine.advance(FOREVER).expect("no dead end"), []);
    engine.reset(&["gpu"]).expect("idle");
    // One takes all 64 tokens of the step's budget. Only the next step asks for the other, whose four chunks take
    // 1 ms + 4 x 0.1 ms + 4 x 1 ms to load.
    let served = behind_a_long_step(&mut engine, &[("whole", &[(2, 64)], 1), ("hit", &[(1, 33)], 1)]);
    assert_eq!(served[1].sources.levels[0], 32);
    assert!(first_token_s(&served[1]) - first_token_s(&served[0]) > 5.4e-3);
}

#[test]
fn prompts_of_one_step_share_its_budget() {
    let mut engine = Engine::new(config(100, None)).expect("good");
    let served = behind_a_long_step(&mut engine, &[("a", &[(1, 40)], 1), ("b", &[(2, 40)], 1)]);
    // 40 and 24 tokens, then the other 16: 2 ms + 16 x 0.1 ms and the attention to 24 tokens.
    let later_s = first_token_s(&served[1]) - first_token_s(&served[0]);
    assert!((3.6e-3..3.8e-3).contains(&later_s), "{later_s}");
}

#[test]
fn a_request_that_decodes_takes_a_token_of_the_budget() {
    let mut engine = Engine::new(config(100, None)).expect("good");
    let served = behind_a_long_step(&mut engine, &[("decodes", &[(1, 4)], 30), ("prompt", &[(2, 124)], 1)]);
    // 60 tokens beside the other's four, 63 beside its second token, and the last one beside its third.
    let steps = served[0].tokens.iter().filter(|&&at| to_s(at) <= first_token_s(&served[1])).count();
    assert_eq!(steps, 3);
}

#[test]
fn what_a_load_left_out_is_computed_in_one_step() {
    let mut engine = Engine::new(config(100, Some(tiers(lmcache(), 100, None)))).expect("good");
    one(&mut engine, ask("fill", &[(1, 33)], 1));
    assert_eq!(engine.advance(FOREVER).expect("no dead end"), []);
    engine.reset(&["gpu"]).expect("idle");
    let sent = engine.now();
    let done = one(&mut engine, ask("half", &[(1, 32), (2, 28)], 1));
    assert_eq!((done.sources.levels[0], done.sources.computed), (32, 28));
    // Arrival, the load, and one step of 28 tokens after 32.
    let least_s = (1e-3 + 60e-6) + 5.4e-3 + (2e-3 + 28e-4);
    let took_s = to_s(done.first_token.expect("a token") - sent);
    assert!((least_s..least_s + 5e-4).contains(&took_s), "{took_s}");
}

#[test]
fn a_request_beyond_the_most_that_run_waits_for_an_end() {
    let mut engine = Engine::new(config(100, None)).expect("good");
    let prompts: Vec<[(i64, u64); 1]> = (0..7).map(|stream| [(stream, 4)]).collect();
    let ids = ["a", "b", "c", "d", "e", "f", "g"];
    let asked: Vec<Asked> =
        ids.iter().zip(&prompts).map(|(id, prompt)| (*id, prompt.as_slice(), 30)).collect();
    let served = behind_a_long_step(&mut engine, &asked);
    let (last, others) = served.split_last().expect("seven");
    let ended_s =
        others.iter().map(|done| to_s(*done.tokens.last().expect("tokens"))).fold(f64::MAX, f64::min);
    assert!(first_token_s(last) > ended_s);
}

#[test]
fn an_engine_tells_the_longest_prefix_that_its_blocks_or_its_tiers_hold() {
    let mut engine = Engine::new(config(100, Some(tiers(lmcache(), 100, None)))).expect("good");
    one(&mut engine, ask("fill", &[(1, 61)], 1));
    assert_eq!(engine.advance(FOREVER).expect("no dead end"), []);
    let prompt = ask("probe", &[(1, 200)], 1).prompt;
    let (runs, keys) = (block_runs(&prompt, 4), block_keys(&prompt, 8));
    assert_eq!(engine.held_tokens(&runs, &keys), 60);
    engine.reset(&["gpu"]).expect("idle");
    assert_eq!(engine.held_tokens(&runs, &keys), 56);
    let again = one(&mut engine, ask("again", &[(1, 61)], 1));
    assert_eq!((again.sources.gpu, again.sources.levels[0]), (0, 56));
    assert_eq!(one(&mut engine, ask("third", &[(1, 61)], 1)).sources.gpu, 60);
    assert_eq!((engine.counters().gpu_hit_tokens, engine.counters().level_tokens[0]), (60, 56));
}

#[test]
fn two_loads_go_on_together_where_blocks_are_enough_for_both_prompts() {
    let mut engine = Engine::new(config(100, Some(tiers(lmcache(), 100, None)))).expect("good");
    let prompts: [[(i64, u64); 1]; 2] = [[(1, 33)], [(2, 33)]];
    together(&mut engine, &[("fill 1", &prompts[0], 1), ("fill 2", &prompts[1], 1)]);
    assert_eq!(engine.advance(FOREVER).expect("no dead end"), []);
    engine.reset(&["gpu"]).expect("idle");
    // The longer prompt keeps 25 of 99 blocks reserved while its first 8 are loaded; the other one needs 8 and one.
    let served = together(&mut engine, &[("long", &[(1, 32), (3, 100)], 1), ("short", &prompts[1], 1)]);
    assert!(served.iter().all(|done| done.sources.levels[0] == 32));
    // The short one's load is over before the long one's first step of 64 tokens, so that both end with the second.
    assert_eq!(served[0].first_token, served[1].first_token);
}

#[test]
fn a_waiting_request_is_admitted_in_the_step_that_fills_a_block_of_its_prompt() {
    // 9 blocks. The reader's prompt goes on with the writer's reply and needs all nine. It comes while the writer's
    // second block is half full, which no reader finds: one block is lacking until the writer has computed 8 tokens.
    for macro_steps in [true, false] {
        let mut engine = Engine::new(EngineConfig { macro_steps, ..config(10, None) }).expect("good");
        let prompt = [(1, 4), (reply_id("writer"), 24), (2, 5)];
        engine.submit(ask("writer", &prompt[..1], 24), 0).expect("taken");
        engine.submit(ask("reader", &prompt, 1), from_s(5e-3)).expect("taken");
        let reader = engine.advance(FOREVER).expect("no dead end").remove(0);
        let writer = engine.advance(FOREVER).expect("no dead end").remove(0);
        assert_eq!((reader.id.as_str(), reader.sources.gpu), ("reader", 8));
        // One token for the prompt, and one for each of four steps.
        assert_eq!(writer.tokens.iter().filter(|&&at| Some(at) <= reader.first_token).count(), 5);
    }
}

#[test]
fn macro_steps_count_the_polls_of_a_look_up() {
    for seed in 0..20 {
        let load = random_load(seed, 60);
        let macros = EngineConfig { lookup_polls: 2, ..config(60, Some(tiers(lmcache(), 30, Some(100)))) };
        let singles = EngineConfig { macro_steps: false, ..macros.clone() };
        assert_eq!(run(macros, &load).0, run(singles, &load).0, "seed {seed}");
    }
}

#[test]
fn a_hit_of_the_least_tokens_is_loaded_and_a_smaller_one_is_computed() {
    for (least, loaded) in [(32, 32), (33, 0)] {
        let with_cpu = config(100, Some(tiers(lmcache(), 100, None)));
        let mut engine = Engine::new(EngineConfig { min_load_tokens: least, ..with_cpu }).expect("good");
        one(&mut engine, ask("fill", &[(1, 33)], 1));
        assert_eq!(engine.advance(FOREVER).expect("no dead end"), []);
        engine.reset(&["gpu"]).expect("idle");
        let from = one(&mut engine, ask("again", &[(1, 33)], 1)).sources;
        assert_eq!((from.levels[0], from.computed), (loaded, 33 - loaded));
    }
}

#[test]
fn vllm_stores_the_chunks_of_a_reply_as_they_fill_and_sglang_when_it_ends() {
    for (prefills_first, after_19_steps) in [(false, 3), (true, 1)] {
        let with_cpu = config(100, Some(tiers(lmcache(), 100, None)));
        let stores = EngineConfig { stores_replies: true, prefills_first, ..with_cpu };
        let mut engine = Engine::new(stores).expect("good");
        engine.submit(ask("writer", &[(1, 8)], 40), 0).expect("taken");
        // Arrival and prompt take 3.8 ms, each of 19 steps 2.1 ms: 27 tokens are computed.
        assert_eq!(engine.advance(from_s(44.5e-3)).expect("no dead end"), []);
        assert_eq!(engine.counters().tiers.stores_begun, after_19_steps);
        assert_eq!(engine.advance(FOREVER).expect("no dead end")[0].tokens.len(), 40);
        assert_eq!(engine.counters().tiers.stores_begun, 5);
    }
}
