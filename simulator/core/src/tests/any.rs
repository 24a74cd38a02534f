//! Random configurations of an engine and its tiers.

use proptest::prelude::*;

use super::tiers;
use crate::engine::config::EngineConfig;
use crate::engine::cost::CostConfig;
use crate::eviction::kind::EvictionKind;
use crate::tiers::config::{Placement, TickShare, TierConfig, TierPolicy};

pub fn any_eviction() -> impl Strategy<Value = EvictionKind> {
    prop::sample::select(EvictionKind::ALL.map(|(_, kind)| kind).to_vec())
}

fn any_policy() -> impl Strategy<Value = TierPolicy> {
    let kinds =
        (any_eviction(), any_eviction(), prop::sample::select(Placement::ALL.map(|(_, one)| one).to_vec()));
    let flags = prop::collection::vec(any::<bool>(), 8);
    let shares = (0.0..1.1, 0.0..1.0, prop::option::of(0.0..0.8), 0.0..1.1, 0.0..1.0);
    let times = (prop::sample::select(vec![0.0, 0.003, 0.1]), 0.0..2.0, prop::option::of(0.0..0.05));
    (kinds, flags, shares, times, 1u64..4, prop::sample::select(vec![0, 0, 20])).prop_map(
        |(kinds, flags, shares, times, max_prefetches, min_prefetch_tokens)| TierPolicy {
            eviction: kinds.0,
            disk_eviction: kinds.1,
            placement: kinds.2,
            end_uses: flags[0],
            partial_stores: flags[1],
            evict_on_demand: flags[2],
            keep_prefetched: flags[3],
            read_in_place: flags[4],
            disk_evicts: flags[5],
            tick_share: if flags[6] { TickShare::Ratio } else { TickShare::Surplus },
            watermark: shares.0,
            evict_ratio: shares.1,
            prefetch_share: shares.2,
            disk_watermark: shares.3,
            disk_target: shares.4,
            tick_s: times.0,
            lease_s: times.1,
            prefetch_timeout_s: times.2,
            prefetch_token_s: 1e-4,
            max_prefetches,
            min_prefetch_tokens,
            lookup_polls: 2 * u64::from(flags[7]),
        },
    )
}

fn any_tiers(chunk_tokens: u64) -> impl Strategy<Value = TierConfig> {
    let sizes = (1u64..40, prop::option::of(1u64..80));
    (any_policy(), sizes, any::<bool>(), prop::sample::select(vec![0.0, 1e-3, 0.1])).prop_map(
        move |(policy, (cpu_chunks, disk_chunks), odirect, latency_s)| {
            let mut config = tiers(policy, cpu_chunks, disk_chunks);
            (config.chunk_tokens, config.odirect) = (chunk_tokens, odirect);
            (config.disk_read.latency_s, config.disk_write.latency_s) = (latency_s, latency_s);
            config.disk_read.shared_chunk_s = if odirect { 2e-4 } else { 0.0 };
            config
        },
    )
}

fn front_end(shared_core: bool, answers: bool, polls: bool) -> CostConfig {
    let (response_s, poll_s) = (7e-4 * f64::from(answers), 3e-4 * f64::from(polls));
    CostConfig { shared_core, response_s, poll_s, ..super::config(400, None).cost }
}

pub fn any_config() -> impl Strategy<Value = EngineConfig> {
    let (sizes, limits) = ((2u32..90, 1u64..9, 1u64..4), (1u64..80, 1u64..8));
    (sizes, limits).prop_flat_map(|((gpu_blocks, block_tokens, blocks), (budget, seqs))| {
        let chunk_tokens = blocks * block_tokens;
        let tiers = prop::option::weighted(0.9, any_tiers(chunk_tokens));
        (tiers, any::<(bool, bool, bool)>()).prop_map(move |(tiers, (shared_core, answers, polls))| {
            EngineConfig {
                block_tokens,
                chunk_tokens,
                max_num_batched_tokens: budget,
                max_num_seqs: seqs,
                max_model_len: 300,
                cost: front_end(shared_core, answers, polls),
                ..super::config(gpu_blocks, tiers)
            }
        })
    })
}
