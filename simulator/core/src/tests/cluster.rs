//! Clusters: exact small cases of routing and sharing, and properties over seeded random loads.

use crate::cluster::{Cluster, Routing, Sharing};
use crate::engine::Engine;
use crate::engine::config::EngineConfig;
use crate::engine::request::{Completion, Submission};
use crate::tests::{ask, config, lmcache, lru, random_load, tiers, variants};
use crate::tiers::config::TierPolicy;
use crate::time::{FOREVER, from_s, to_s};

const ROUTINGS: [Routing; 3] = [Routing::RoundRobin, Routing::LeastLoaded, Routing::PrefixAware];
const SHARINGS: [Sharing; 3] = [Sharing::Nothing, Sharing::Lower, Sharing::All];

/// Id, prompt, output tokens, seconds.
type Asked<'a> = (&'a str, &'a [(i64, u64)], u64, f64);
type Served = Vec<(usize, Completion)>;

fn cluster(config: EngineConfig, instances: usize, routing: Routing, sharing: Sharing) -> Cluster {
    Cluster::new(config, instances, routing, sharing).expect("a good configuration")
}

fn submit_all(cluster: &mut Cluster, load: &[(Submission, f64)]) {
    for (submission, at_s) in load {
        cluster.submit(submission.clone(), from_s(*at_s)).expect("a request that is taken");
    }
}

fn finish(cluster: &mut Cluster) -> Served {
    let mut served = Vec::new();
    loop {
        let some = cluster.advance(FOREVER).expect("no dead end");
        if some.is_empty() {
            return served;
        }
        served.extend(some);
    }
}

/// Which instance served a request that is sent now, and its completion.
fn one(cluster: &mut Cluster, submission: Submission) -> (usize, Completion) {
    cluster.submit(submission, cluster.now()).expect("a request that is taken");
    let mut served = finish(cluster);
    assert_eq!(served.len(), 1);
    served.remove(0)
}

/// All that can be set up: sizes, routings and sharings.
fn setups() -> Vec<(EngineConfig, Routing, Sharing)> {
    let mut setups = Vec::new();
    for config in variants() {
        for sharing in SHARINGS {
            for routing in ROUTINGS {
                if Cluster::new(config.clone(), 1, routing, sharing).is_ok() {
                    setups.push((config.clone(), routing, sharing));
                }
            }
        }
    }
    assert_eq!(setups.len(), 3 * (2 + 3 * 3 + 2));
    setups
}

#[test]
fn a_cluster_of_one_is_an_engine() {
    for seed in 0..12 {
        let load = random_load(seed, 60);
        for (config, routing, sharing) in setups() {
            let mut engine = Engine::new(config.clone()).expect("a good configuration");
            let mut cluster = cluster(config, 1, routing, sharing);
            submit_all(&mut cluster, &load);
            for (submission, at_s) in &load {
                engine.submit(submission.clone(), from_s(*at_s)).expect("a request that is taken");
            }
            loop {
                let alone = engine.advance(FOREVER).expect("no dead end");
                let served = cluster.advance(FOREVER).expect("no dead end");
                assert_eq!(
                    served,
                    alone.iter().map(|one| (0, one.clone())).collect::<Served>(),
                    "seed {seed}"
                );
                assert_eq!(cluster.now(), engine.now(), "seed {seed}");
                if alone.is_empty() {
                    break;
                }
            }
            assert_eq!(cluster.counters(), engine.counters(), "seed {seed}");
        }
    }
}

#[test]
fn macro_steps_and_stops_change_nothing_in_a_cluster() {
    for seed in 0..10 {
        let load = random_load(seed, 80);
        for (config, routing, sharing) in setups() {
            let singles = EngineConfig { macro_steps: false, ..config.clone() };
            let mut whole = cluster(config.clone(), 3, routing, sharing);
            let mut single = cluster(singles, 3, routing, sharing);
            let stopped_config = config.clone();
            let mut stopped = cluster(config, 3, routing, sharing);
            for cluster in [&mut whole, &mut single, &mut stopped] {
                submit_all(cluster, &load);
            }
            let served = finish(&mut whole);
            let mut parted = cluster(stopped_config.clone(), 3, routing, sharing);
            submit_all(&mut parted, &load);
            let mut parts = parted.advance(from_s(0.3)).expect("no dead end");
            for until in [from_s(0.5), from_s(0.9), FOREVER] {
                parted
                    .advance_all(until, |instance, done| parts.push((instance, done)))
                    .expect("no dead end");
                assert!(until == FOREVER || parted.now() == until);
            }
            assert_eq!(parts, served, "seed {seed} {routing:?} {sharing:?}");
            assert_eq!(parted.now(), whole.now());
            assert_eq!(parted.counters(), whole.counters());
            assert_eq!(finish(&mut single), served, "seed {seed} {routing:?} {sharing:?}");
            let mut spans = Vec::new();
            while !stopped.idle() {
                let until = stopped.now() + from_s(0.0037);
                spans.extend(stopped.advance(until).expect("no dead end"));
                stopped.counters();
            }
            assert_eq!(spans, served, "seed {seed} {routing:?} {sharing:?}");
            assert_eq!(whole.counters(), single.counters(), "seed {seed} {routing:?} {sharing:?}");
            assert_eq!(whole.counters(), stopped.counters(), "seed {seed} {routing:?} {sharing:?}");
        }
    }
}

#[test]
fn a_pin_goes_before_every_routing() {
    for (config, routing, sharing) in setups() {
        let mut cluster = cluster(config, 3, routing, sharing);
        let load = random_load(3, 30);
        for (number, (submission, at_s)) in load.iter().enumerate() {
            let pin = (number % 3) as i64;
            cluster.submit_to(pin, submission.clone(), from_s(*at_s)).expect("a request that is taken");
        }
        for (instance, done) in finish(&mut cluster) {
            let number = load.iter().position(|(submission, _)| submission.id == done.id);
            assert_eq!(number.map(|number| number % 3), Some(instance), "{routing:?} {sharing:?}");
        }
        let refused = cluster.submit_to(3, load[0].0.clone(), FOREVER);
        assert_eq!(
            refused,
            Err(format!("request {}: is pinned to instance 3; there are 0 to 2", load[0].0.id))
        );
    }
}

#[test]
fn requests_tokens_and_chunks_are_conserved() {
    for seed in 50..60 {
        let load = random_load(seed, 120);
        for (config, routing, sharing) in setups() {
            let mut cluster = cluster(config, 4, routing, sharing);
            submit_all(&mut cluster, &load);
            let served = finish(&mut cluster);
            let mut ids: Vec<&str> = served.iter().map(|(_, done)| done.id.as_str()).collect();
            let mut asked: Vec<&str> = load.iter().map(|(submission, _)| submission.id.as_str()).collect();
            ids.sort_unstable();
            asked.sort_unstable();
            assert_eq!(ids, asked);
            let mut computed = 0;
            for (instance, done) in &served {
                let from = done.sources;
                assert!(*instance < 4 && done.error.is_none());
                assert_eq!(from.sum(), done.prompt_tokens);
                computed += from.computed;
            }
            assert!(cluster.idle());
            let counters = cluster.counters();
            assert_eq!(counters.computed_tokens, computed);
            assert_eq!(counters.tiers.stores_begun, counters.tiers.stores_ended);
        }
    }
}

/// Instances by request id, of requests that are sent at these next_events.
fn routed(routing: Routing, requests: &[Asked]) -> Vec<(String, usize)> {
    let mut cluster = cluster(config(200, None), 2, routing, Sharing::Nothing);
    for (id, prompt, output, at_s) in requests {
        cluster.submit(ask(id, prompt, *output), from_s(*at_s)).expect("taken");
    }
    let mut instances: Vec<_> =
        finish(&mut cluster).into_iter().map(|(instance, done)| (done.id, instance)).collect();
    instances.sort();
    instances
}

fn named(pairs: &[(&str, usize)]) -> Vec<(String, usize)> {
    pairs.iter().map(|(id, instance)| (id.to_string(), *instance)).collect()
}

#[test]
fn round_robin_goes_by_the_order_of_sending() {
    let load: [Asked; 4] = [
        ("a", &[(1, 8)], 4, 0.3),
        ("b", &[(2, 8)], 4, 0.1),
        ("c", &[(3, 8)], 4, 0.2),
        ("d", &[(4, 8)], 4, 0.3),
    ];
    let instances = routed(Routing::RoundRobin, &load);
    assert_eq!(instances, named(&[("a", 0), ("b", 0), ("c", 1), ("d", 1)]));
}

#[test]
fn the_least_loaded_has_the_fewest_unfinished_requests() {
    // `long` keeps instance 0 busy all the time; the others, 20 ms apart, take 1 + 2 + 1 ms each.
    let mut load: Vec<Asked> =
        vec![("long", &[(1, 8)], 200, 0.0), ("b", &[(2, 8)], 1, 0.02), ("c", &[(3, 8)], 1, 0.04)];
    assert_eq!(routed(Routing::LeastLoaded, &load), named(&[("b", 1), ("c", 1), ("long", 0)]));
    assert_eq!(routed(Routing::RoundRobin, &load), named(&[("b", 1), ("c", 0), ("long", 0)]));
    // At one moment: equal loads go to the lowest number.
    load[1].3 = 0.0;
    load[2].3 = 0.0;
    assert_eq!(routed(Routing::LeastLoaded, &load), named(&[("b", 1), ("c", 0), ("long", 0)]));
}

#[test]
fn prefix_aware_goes_where_most_of_the_prompt_is() {
    let mut both = cluster(config(200, None), 2, Routing::PrefixAware, Sharing::Nothing);
    // No instance holds anything: the least loaded, the lowest number.
    assert_eq!(one(&mut both, ask("a", &[(1, 40)], 1)).0, 0);
    both.submit(ask("long", &[(2, 8)], 200), both.now()).expect("taken");
    // `long` went to 0 as well, so that 1 is the least loaded; 0 holds 40 tokens of the first prompt.
    both.submit(ask("b", &[(3, 24)], 1), both.now()).expect("taken");
    both.submit(ask("c", &[(1, 40), (9, 8)], 1), both.now()).expect("taken");
    let mut served: Vec<_> =
        finish(&mut both).into_iter().map(|(at, done)| (done.id, at, done.sources.gpu)).collect();
    served.sort();
    let row = |id: &str, instance, gpu| (id.to_string(), instance, gpu);
    assert_eq!(served, [row("b", 1, 0), row("c", 0, 40), row("long", 0, 0)]);
    // Each of them holds part of a prompt: the longer one wins, whatever the load.
    assert_eq!(one(&mut both, ask("d", &[(3, 24), (8, 30)], 1)).0, 1);
    assert_eq!(one(&mut both, ask("e", &[(1, 40), (7, 1)], 1)).1.sources.gpu, 40);
}

#[test]
fn prefix_aware_sees_what_was_generated_up_to_that_moment() {
    for macro_steps in [true, false] {
        let config = EngineConfig { macro_steps, ..config(200, None) };
        let mut both = cluster(config, 2, Routing::PrefixAware, Sharing::Nothing);
        both.submit(ask("first", &[(1, 5)], 1), 0).expect("taken");
        both.submit(ask("talks", &[(2, 8)], 400), 0).expect("taken");
        // The tokens that `talks` has generated prolong its prompt; only its own instance holds them.
        let reply = ask("talks", &[], 1).reply_id;
        both.submit(ask("quotes", &[(2, 8), (reply, 60)], 1), from_s(0.2)).expect("taken");
        let served = finish(&mut both);
        let of = |id: &str| served.iter().find(|(_, done)| done.id == id).expect("served");
        assert_eq!((of("talks").0, of("quotes").0), (1, 1));
        assert_eq!(of("quotes").1.sources.gpu, 64);
    }
}

#[test]
fn what_one_computed_another_hits_in_a_shared_tier_only() {
    for (sharing, cpu, disk) in [(Sharing::Nothing, 0, 0), (Sharing::Lower, 0, 64), (Sharing::All, 64, 0)] {
        let config = config(100, Some(tiers(lmcache(), 100, Some(100))));
        let mut both = cluster(config, 2, Routing::RoundRobin, sharing);
        assert_eq!(one(&mut both, ask("a", &[(1, 65)], 1)).0, 0);
        let (instance, done) = one(&mut both, ask("b", &[(1, 65)], 1));
        assert_eq!((instance, done.sources.levels[0], done.sources.levels[1]), (1, cpu, disk), "{sharing:?}");
        // Both instances computed the eight chunks only where they share nothing.
        let stored = if sharing == Sharing::Nothing { 16 } else { 8 };
        assert_eq!(both.counters().tiers.stores_ended, stored, "{sharing:?}");
        // `a` again on instance 0: its own GPU has it.
        assert_eq!(one(&mut both, ask("c", &[(1, 65)], 1)).1.sources.gpu, 64);
        both.reset(&["gpu", "cpu"]).expect("idle");
        assert_eq!(one(&mut both, ask("d", &[(1, 65)], 1)).1.sources.levels[1], 64);
        both.reset(&["gpu", "cpu", "disk", "page_cache"]).expect("idle");
        assert_eq!(one(&mut both, ask("e", &[(1, 65)], 1)).1.sources.computed, 65);
    }
}

#[test]
fn instances_share_a_shared_device() {
    // Two different prompts of eight chunks on disk, asked for at once, one on each instance.
    let firsts = SHARINGS.map(|sharing| {
        let config = config(100, Some(tiers(lru(), 100, Some(100))));
        let mut both = cluster(config, 2, Routing::RoundRobin, sharing);
        one(&mut both, ask("a", &[(1, 65)], 1));
        one(&mut both, ask("b", &[(2, 65)], 1));
        both.reset(&["gpu", "cpu", "page_cache"]).expect("idle");
        let sent = both.now();
        both.submit(ask("a", &[(1, 65)], 1), sent).expect("taken");
        both.submit(ask("b", &[(2, 65)], 1), sent).expect("taken");
        let served = finish(&mut both);
        assert!(served.iter().all(|(_, done)| done.sources.levels[1] == 64));
        served.iter().map(|(_, done)| to_s(done.first_token.expect("a token") - sent)).collect::<Vec<_>>()
    });
    let [own, disk, all] = firsts;
    assert_eq!(own[0], own[1]);
    // Side by side, both reads of eight chunks of 1000 bytes take as long as their data one after another: twice 8000 x
    // 20 us, of which each alone would have had one, and its 5 ms of latency and 8 x 0.1 ms pass meanwhile.
    let ends = |shared: &[f64], ends: [f64; 2]| {
        shared.iter().zip(ends).all(|(end, expected)| (end - own[0] - expected).abs() < 1e-9)
    };
    let both = 0.16 - 5e-3 - 8e-4;
    assert!(ends(&disk, [both, both]), "{own:?} {disk:?}");
    // A CPU memory of their own copies at once; a shared one copies 8 x 0.1 ms + 8000 x 1 us one after another.
    assert!(ends(&all, [both, both + 8.8e-3]), "{own:?} {all:?}");
}

#[test]
fn prefetches_of_all_instances_count_together_where_one_server_makes_them() {
    let policy = TierPolicy { max_prefetches: 1, ..lmcache() };
    let config = config(100, Some(tiers(policy, 100, Some(100))));
    let mut both = cluster(config, 2, Routing::RoundRobin, Sharing::All);
    one(&mut both, ask("a", &[(1, 65)], 1));
    one(&mut both, ask("b", &[(2, 65)], 1));
    both.reset(&["gpu", "cpu", "page_cache"]).expect("idle");
    let sent = both.now();
    both.submit(ask("a", &[(1, 65)], 300), sent).expect("taken");
    both.submit(ask("b", &[(2, 65)], 1), sent + from_s(0.01)).expect("taken");
    let served = finish(&mut both);
    let first = |at: usize| to_s(served[at].1.first_token.expect("a token"));
    assert_eq!((served[0].1.id.as_str(), served[0].0), ("b", 1));
    // b's read begins when a's has ended, and waits out its own latency of 5 ms too.
    assert!((first(0) - first(1) - 0.1658).abs() < 1e-9, "{}", first(0) - first(1));
}

#[test]
fn a_cluster_that_cannot_be_is_refused() {
    let refused = |config, instances, sharing| {
        Cluster::new(config, instances, Routing::RoundRobin, sharing).err().expect("a refusal")
    };
    let with_cpu = || config(100, Some(tiers(lmcache(), 10, None)));
    assert_eq!(refused(config(100, None), 0, Sharing::Nothing), "instances must be at least 1, not 0");
    assert_eq!(refused(with_cpu(), 2, Sharing::Lower), "a tier cannot be shared that is not there");
    assert_eq!(refused(config(100, None), 2, Sharing::All), "a tier cannot be shared that is not there");
    assert!(Cluster::new(with_cpu(), 2, Routing::RoundRobin, Sharing::All).is_ok());
    let mut two = cluster(config(100, None), 2, Routing::RoundRobin, Sharing::Nothing);
    two.submit(ask("a", &[(1, 4)], 1), from_s(1.0)).expect("taken");
    assert!(two.submit(ask("a", &[(2, 4)], 1), from_s(2.0)).is_err());
    assert!(two.reset(&["gpu"]).is_err());
    finish(&mut two);
    assert!(two.submit(ask("b", &[(1, 4)], 1), 0).is_err());
    for routing in ROUTINGS {
        let mut two = cluster(config(11, None), 2, routing, Sharing::Nothing);
        assert!(one(&mut two, ask("huge", &[(1, u64::MAX), (1, 9)], 1)).1.error.is_some());
        assert!(one(&mut two, ask("big", &[(1, 38)], 4)).1.error.is_some());
    }
}
