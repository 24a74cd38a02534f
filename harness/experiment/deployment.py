"""How many engines serve the load, what routes it among them, and which tiers they share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from harness.experiment.fields import FROM_LIST, Strict

# Where these keys stood before: in engines.sim.
MOVED_KEYS = ("instances", "routing", "shared")


class Deployment(Strict):
    """Several engines of one kind behind a router of ours. `cache` gives the size of each instance's own tiers, and of
    each shared tier. prefix-aware, before real engines: what the router has sent is what it takes them to hold.

    instances: engines behind the router.
    routing: by turns; to the fewest unfinished requests; where the session began; or where the longest prefix is held.
    shared: tiers that the instances have in common: with cpu (or pool) and all below it, one cache server for all; with
    disk or remote alone, a cache server each over one folder or store.
    """

    instances: Annotated[int, Field(ge=1, le=100_000)] = 1
    routing: Literal["round-robin", "least-loaded", "session", "prefix-aware"] = "round-robin"
    shared: Annotated[tuple[Literal["cpu", "pool", "disk", "remote"], ...], FROM_LIST] = ()

    def copies(self, tier: str) -> int:
        """How many of a tier there are, each of the size that `cache` says."""
        return 1 if tier in self.shared else self.instances

    @model_validator(mode="after")
    def _consistent(self) -> Deployment:
        if len(set(self.shared)) != len(self.shared):
            raise ValueError("shared names a tier twice; name each once")
        return self


def upgraded(config: dict[str, Any]) -> dict[str, Any]:
    """A kept configuration as today's Experiment has it. Older manifests hold MOVED_KEYS in engines.sim."""
    engines = config.get("engines") or {}
    sim = engines.get("sim") or {}
    config = _with_mode_tiers(config, sim)
    engines = config.get("engines") or {}
    sim = engines.get("sim") or {}
    moved = {key: sim[key] for key in MOVED_KEYS if key in sim}
    if not moved:
        return config
    kept = {key: value for key, value in sim.items() if key not in moved}
    deployment = moved | (config.get("deployment") or {})
    return config | {"deployment": deployment, "engines": engines | {"sim": kept}}


def _with_mode_tiers(config: dict[str, Any], sim: dict[str, Any]) -> dict[str, Any]:
    """Older manifests have tiers without an engine as mode storage with cache.gpu 0."""
    storage, cache = dict(sim.get("storage") or {}), config.get("cache") or {}
    every = storage.pop("decode_read_tokens", None)
    without = sim.get("mode") == "storage" and not cache.get("gpu", 1)
    if every is None and not without:
        return config
    kept = sim | {"storage": storage}
    if without:
        kept |= {"mode": "tiers", "tiers": {} if every is None else {"decode_read_tokens": every}}
    return config | {"engines": (config.get("engines") or {}) | {"sim": kept}}
