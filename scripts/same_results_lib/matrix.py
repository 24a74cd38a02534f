"""The experiments that both sides run: those that ship, and sweeps made for this. Each has a fixed seed.

Caches are small, so that all tiers evict, and capacities, packs and loads cover each rule that the core has.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

PACKS = (
    "lmcache-0.5.6-mp", "lru", "fifo", "lfu", "s3-fifo", "arc", "waterfall", "spillover", "sglang-0.5.23-hicache",
    "mooncake-0.3.13",
)  # fmt: skip
PACK = "engines.sim.tier_policy"
TIERS = ["recompute", "gpu", "cpu", "disk", "disk_cold"]
CACHE: dict[str, Any] = {
    "block_tokens": 32,
    "chunk_tokens": 128,
    "gpu": "192MiB",
    "cpu": "256MiB",
    "disk": {"capacity": "448MiB"},
}
PREFIX: dict[str, Any] = {"kind": "prefix", "prompt_tokens": 1025, "hit_rate": 1.0, "output_tokens": 4}
SYNTHETIC: dict[str, Any] = {
    "kind": "synthetic",
    "requests": 120,
    "prompt_tokens": 1025,
    "hit_rate": 0.5,
    "prefixes": 14,
    "zipf": 0.7,
    "output_tokens": 12,
    "concurrency": 4,
}
OPEN: dict[str, Any] = {k: v for k, v in SYNTHETIC.items() if k != "concurrency"} | {"arrivals": "poisson"}
SESSIONS: dict[str, Any] = {
    "kind": "sessions",
    "sessions": 14,
    "turns": 4,
    "system_tokens": 256,
    "user_tokens": 160,
    "output_tokens": 40,
    "think": "500ms",
    "arrivals": "poisson",
    "rate_per_s": 3.0,
}
TRACE: dict[str, Any] = {"kind": "trace", "trace": "tiny_conversation", "block_tokens": 32, "time_scale": 0.1}
PERSONAS: dict[str, Any] = {
    "kind": "personas",
    "users": 10,
    "turns": 3,
    "personas": [
        {"name": "chat", "share": 3, "context_tokens": [128, 512], "output_tokens": [8, 32], "think": ["50ms", "2s"]},
        {"name": "code", "share": 1, "context_tokens": [256, 900], "output_tokens": [16, 64]},
    ],
}
CLUSTER: dict[str, list[Any]] = {
    "engines.sim.instances": [3],
    "engines.sim.routing": ["round-robin", "least-loaded", "prefix-aware"],
    "engines.sim.shared": [[], ["disk"], ["cpu", "disk"]],
}


def made(cache: dict[str, Any], workload: dict[str, Any], sweep: dict[str, Any], **more: Any) -> dict[str, Any]:
    """One experiment file's content; more: its other sections."""
    sim = {"hardware": "cpu-2core", "token_times": True}
    return {
        "name": "same-results",
        "seed": 11,
        "model": "tiny-llama",
        "workload": workload,
        "cache": CACHE | cache,
        "engines": {"sim": sim},
        "sweep": sweep,
    } | more


def sweeps() -> dict[str, dict[str, Any]]:
    """Name -> experiment file's content, each with sweep axes."""
    probed = {"tiers": TIERS, "samples": 2}
    return {
        "packs": made({}, SYNTHETIC, {PACK: [*PACKS], "cache.disk.capacity": ["96MiB", "448MiB"]}),
        "packs-open": made({"cpu": "96MiB"}, OPEN | {"rate_per_s": 4.0}, {PACK: [*PACKS]}),
        "packs-sessions": made({"gpu": "96MiB"}, SESSIONS, {PACK: [*PACKS]}),
        "packs-trace": made({}, TRACE, {PACK: [*PACKS]}),
        "packs-personas": made({"cpu": "96MiB"}, PERSONAS, {PACK: [*PACKS], "cache.chunk_tokens": [32, 256]}),
        "grain": made(
            {}, SYNTHETIC, {"cache.block_tokens": [16, 32], "cache.chunk_tokens": [32, 64], PACK: [PACKS[0], "arc"]}
        ),
        "eviction": made(
            {"eviction": {}},
            SYNTHETIC,
            {
                "cache.eviction.policy": ["lru", "arc"],
                "cache.eviction.watermark": [0.5, 0.8],
                "cache.eviction.ratio": [0.1, 0.4],
            },
        ),
        "capacities": made(
            {}, SYNTHETIC, {"cache.gpu": ["96MiB", "1GiB"], "cache.cpu": ["64MiB", "1GiB"], PACK: [PACKS[0], "lru"]}
        ),
        "no-disk": made({"disk": None}, SYNTHETIC, {"cache.cpu": ["128MiB", "1GiB"], PACK: [PACKS[0], "lru"]}),
        "gpu-only": made({"disk": None, "cpu": None}, SYNTHETIC, {"cache.gpu": ["48MiB", "512MiB"]}),
        "arrivals": made(
            {},
            OPEN | {"rate_per_s": 1.0},
            {"workload.arrivals": ["constant", "poisson"], "workload.rate_per_s": [1.0, 20.0]},
        ),
        "closed": made({}, SYNTHETIC, {"workload.concurrency": [1, 16], "workload.warm": [True, False]}),
        "hits": made({}, SYNTHETIC, {"workload.hit_rate": [0.0, 0.25, 1.0], "workload.zipf": [0.0, 1.5]}),
        "scheduler": made(
            {"gpu": "64MiB"},
            SESSIONS | {"rate_per_s": 30.0, "output_tokens": 160},
            {"engines.sim.max_batched_tokens": [256, 2048], "engines.sim.max_sequences": [2, 64]},
        ),
        "hardware": made(
            {"disk": {"capacity": "448MiB", "odirect": True}},
            TRACE | {"limit": 60, "concurrency": 6},
            {"engines.sim.hardware": ["cpu-2core", "rtx-a5000-nfs", "rtx-4000ada-ssd"]},
        ),
        "prefix": made(
            {"gpu": "512MiB", "cpu": "512MiB", "disk": {"capacity": "1GiB"}},
            PREFIX,
            {"workload.hit_rate": [0.25, 1.0], "workload.concurrency": [1, 3], "seed": [11, 12]},
            measure=probed,
        ),
        "prefix-odirect": made(
            {"gpu": "512MiB", "cpu": "512MiB", "disk": {"capacity": "1GiB", "odirect": True}},
            PREFIX,
            {"cache.chunk_tokens": [64, 512]},
            measure=probed | {"tiers": ["recompute", "gpu", "cpu", "disk_cold"], "warm_up": 1},
        ),
        "cluster": made({"gpu": "96MiB"}, OPEN | {"rate_per_s": 12.0}, CLUSTER | {PACK: [PACKS[0], "lru"]}),
        "cluster-sessions": made({"gpu": "96MiB"}, SESSIONS | {"rate_per_s": 9.0}, CLUSTER),
    }


# Name, size and further settings of the experiments that ship; of those with axes, each point is run.
SHIPPED: tuple[tuple[str, str | None, dict[str, Any]], ...] = (
    ("quickstart", None, {}),
    ("thesis_exp1_prompt_length", None, {}),
    ("thesis_exp1_prompt_length", "paper", {"measure.until": {"min_samples": 3, "max_samples": 4}}),
    ("thesis_exp2_hit_rate", None, {}),
    ("thesis_exp2_hit_rate", "paper", {"measure.samples": 2}),
    ("thesis_exp3_chunk_size", None, {}),
    ("thesis_exp4_file_systems", None, {}),
    ("thesis_exp5_storage_backends", None, {}),
    # A simulated disk has no trace: the simulator refuses what the file asks for.
    ("thesis_exp6_io_pattern", None, {"storage.trace": False}),
    ("cluster_routing", "small", {}),
    ("mooncake_trace", "small", {"workload.trace": "tiny_conversation"}),
    ("storage_only", None, {"workload.users": 3, "cache.disk.capacity": "256MiB", "measure.budget": "60s"}),
)
FULL_TRACE: tuple[tuple[str, str | None, dict[str, Any]], ...] = (
    ("mooncake_trace", "small", {}),
    ("mooncake_trace", None, {"workload.limit": 1500}),
    ("cluster_routing", None, {"workload.limit": 600}),
)


def shipped(root: Path, with_full_trace: bool) -> dict[str, dict[str, Any]]:
    """Name -> content of the experiment files below root, with a size's keys and the further settings put in."""
    found = {}
    for name, size, settings in SHIPPED + (FULL_TRACE if with_full_trace else ()):
        content = yaml.safe_load((root / f"configs/experiments/{name}.yaml").read_text())
        sizes = content.pop("sizes", {})
        for key, value in ((sizes[size] if size else {}) | settings).items():
            if key.startswith("sweep."):
                content.setdefault("sweep", {})[key.removeprefix("sweep.")] = value
            else:
                assign(content, key, value)
        trace = "-trace" if (name, size, settings) in FULL_TRACE else ""
        found[f"{name}{f'-{size}' if size else ''}{trace}"] = content
    return found


def renamed(content: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """The file with other names for some keys, those of its axes included. names: each key and its new name."""
    fresh: dict[str, Any] = yaml.safe_load(yaml.safe_dump(content))
    for key, new in names.items():
        *parents, last = key.split(".")
        section: Any = fresh
        for part in parents:
            section = section.get(part) or {}
        if last in section:
            assign(fresh, new, section.pop(last))
    if axes := fresh.get("sweep"):
        fresh["sweep"] = {names.get(key, key): values for key, values in axes.items()}
    return fresh


def assign(content: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for part in parents:
        if content.get(part) is None:
            content[part] = {}
        content = content[part]
    content[last] = value
