//! Random configurations of an engine and its tiers.

use proptest::prelude::*;

use super::{device, tiers};
use crate::engine::config::EngineConfig;
use crate::engine::cost::CostConfig;
use crate::eviction::kind::EvictionKind;
use crate::tiers::config::{LevelConfig, Placement, TickConfig, TickShare, TierConfig, TierPolicy};
use crate::tiers::device::{DeviceConfig, LinkConfig};

pub fn any_eviction() -> impl Strategy<Value = EvictionKind> {
    prop::sample::select(EvictionKind::ALL.map(|(_, kind)| kind).to_vec())
}

fn any_policy() -> impl Strategy<Value = TierPolicy> {
    let placement = prop::sample::select(Placement::ALL.map(|(_, one)| one).to_vec());
    let flags = prop::collection::vec(any::<bool>(), 7);
    let shares = (0.0..1.1, 0.0..1.0, prop::option::of(0.0..0.8));
    let times = (prop::sample::select(vec![0.0, 0.003, 0.1]), prop::option::of(0.0..0.05));
    (placement, flags, shares, times, 1u64..4, prop::sample::select(vec![0, 0, 20])).prop_map(
        |(placement, flags, shares, times, max_prefetches, min_prefetch_tokens)| TierPolicy {
            placement,
            end_uses: flags[0],
            partial_stores: flags[1],
            evict_on_demand: flags[2],
            keep_prefetched: flags[3],
            read_in_place: flags[4],
            tick_share: if flags[5] { TickShare::Ratio } else { TickShare::Surplus },
            watermark: shares.0,
            evict_ratio: shares.1,
            prefetch_share: shares.2,
            tick_s: times.0,
            prefetch_timeout_s: times.1,
            prefetch_token_s: 1e-4,
            write_end_uses: flags[6],
            max_prefetches,
            min_prefetch_tokens,
        },
    )
}

/// A level of one chunk, without any of the rules that a level may have.
pub fn plain_level() -> LevelConfig {
    LevelConfig {
        name: String::new(),
        chunks: 1,
        eviction: EvictionKind::Lru,
        lease_s: 0.0,
        ticks: None,
        takes_dropped: false,
        offload_every_s: 0.0,
        writes_use: false,
        exclusive: false,
        promotes: false,
        buffer_chunks: 0,
        evicts: false,
        watermark: 1.0,
        target: 1.0,
        read: DeviceConfig::default(),
        write: DeviceConfig::default(),
        page_cache_read: None,
        external: false,
    }
}

fn any_ticks() -> impl Strategy<Value = Option<TickConfig>> {
    let ticks = (prop::sample::select(vec![0.003, 0.1]), 0.0..1.1, 0.0..1.0, any::<bool>());
    prop::option::weighted(
        0.3,
        ticks.prop_map(|(tick_s, watermark, evict_ratio, ratio)| {
            let tick_share = if ratio { TickShare::Ratio } else { TickShare::Surplus };
            TickConfig { tick_s, watermark, evict_ratio, tick_share }
        }),
    )
}

fn any_link() -> impl Strategy<Value = Option<LinkConfig>> {
    let link =
        (0.0..0.1, 1u64..20).prop_map(|(latency_s, connections)| LinkConfig { latency_s, connections });
    prop::option::weighted(0.3, link)
}

/// A level below the first one. Only one with another one above it may promote.
fn any_level(name: &'static str, second: bool) -> impl Strategy<Value = LevelConfig> {
    let shares = (0.0..1.1, 0.0..1.0, 0.0..2.0);
    let latency_s = prop::sample::select(vec![0.0, 1e-3, 0.1]);
    let rules = (any_ticks(), prop::collection::vec(prop::bool::weighted(0.3), 4), 0u64..20, any_link());
    (1u64..80, any_eviction(), any::<(bool, bool)>(), shares, latency_s, rules).prop_map(
        move |(chunks, eviction, (evicts, odirect), (watermark, target, lease_s), latency_s, rules)| {
            let (ticks, flags, buffer_chunks, link) = rules;
            let read = DeviceConfig {
                latency_s,
                shared_chunk_s: if odirect { 2e-4 } else { 0.0 },
                link,
                ..device(0.0, 2e-5)
            };
            LevelConfig {
                name: name.to_string(),
                chunks,
                eviction,
                evicts,
                watermark,
                target,
                read,
                write: DeviceConfig { link, ..device(latency_s, 2e-5) },
                page_cache_read: (!odirect).then(|| device(2e-3, 4e-6)),
                lease_s,
                ticks,
                takes_dropped: flags[0],
                offload_every_s: if flags[0] && odirect { 0.05 } else { 0.0 },
                writes_use: flags[1],
                exclusive: flags[2],
                promotes: flags[3] && !second,
                buffer_chunks,
                external: false,
            }
        },
    )
}

/// One to four levels; two more often than others.
fn any_tiers(chunk_tokens: u64) -> impl Strategy<Value = TierConfig> {
    let lower = [any_level("disk", true), any_level("pool", false), any_level("ssd", false)];
    let count = prop::sample::select(vec![0, 0, 1, 1, 1, 2, 3]);
    (any_policy(), 1u64..40, any_eviction(), 0.0..2.0, lower, count).prop_map(
        move |(policy, cpu_chunks, eviction, lease_s, lower, count)| {
            let mut config = tiers(policy, cpu_chunks, None);
            (config.chunk_tokens, config.levels[0].eviction) = (chunk_tokens, eviction);
            config.levels[0].lease_s = lease_s;
            config.levels.extend(lower.into_iter().take(count));
            config
        },
    )
}

fn front_end(shared_core: bool, answers: bool, polls: bool, yields_core: bool) -> CostConfig {
    let (response_s, response_next_s) = (7e-4 * f64::from(answers), 11e-4 * f64::from(answers));
    let (poll_s, request_chunk_s) = (13e-4 * f64::from(polls), 5e-4 * f64::from(polls));
    let (read_pass_s, plain) = (3e-4 * f64::from(polls), super::config(400, None).cost);
    let response = CostConfig { response_s, response_next_s, ..plain };
    CostConfig { shared_core, yields_core, poll_s, request_chunk_s, read_pass_s, ..response }
}

pub fn any_config() -> impl Strategy<Value = EngineConfig> {
    let (sizes, limits) = ((2u32..90, 1u64..9, 1u64..4), (1u64..80, 1u64..8));
    (sizes, limits).prop_flat_map(|((gpu_blocks, block_tokens, blocks), (budget, seqs))| {
        let chunk_tokens = blocks * block_tokens;
        let tiers = prop::option::weighted(0.9, any_tiers(chunk_tokens));
        (tiers, any::<(bool, bool, bool, bool, bool, bool)>(), any::<(bool, bool)>()).prop_map(
            move |(
                tiers,
                (shared_core, answers, polls, late, prefills_first, some),
                (ahead, stores_replies),
            )| {
                EngineConfig {
                    reads_ahead: ahead,
                    stores_replies,
                    lookup_polls: 2 * u64::from(late),
                    wake_polls: u64::from(late),
                    load_polls: u64::from(late),
                    prefills_first,
                    min_load_tokens: 10 * u64::from(some),
                    block_tokens,
                    chunk_tokens,
                    max_num_batched_tokens: budget,
                    max_num_seqs: seqs,
                    max_model_len: 300,
                    parses_whole: late,
                    cost: front_end(shared_core, answers, polls, some),
                    ..super::config(gpu_blocks, tiers)
                }
            },
        )
    })
}
