"""`cache.tiers`: the tiers below the GPU as one list, the long form of the keys that say the same apart.

tiers: [{name: cpu, capacity: 6GiB}, {name: remote, capacity: 10TB, shared: true, policy: lru, device: disk}]
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from traces.tiers import all_tiers

# Where the keys of a list's entry stand in the short form; all others are those of the tier's own section.
_ELSEWHERE = {"policy": "policies", "device": "devices"}


def expanded(config: Mapping[str, Any]) -> dict[str, Any]:
    """The experiment in the short form. ValueError: what, where and the cure, in one line."""
    cache = config.get("cache")
    if not isinstance(cache, Mapping) or cache.get("tiers") is None:
        return dict(config)
    known = [tier.name for tier in all_tiers() if tier.offload]
    if both := [name for name in known if cache.get(name) is not None]:
        raise ValueError(f"cache.tiers and cache.{both[0]} both say what is below the GPU; keep one of the two forms")
    entries = cache["tiers"]
    if not isinstance(entries, list) or len(entries) > len(known):
        example = "[{name: cpu, capacity: 1GiB}]"
        raise ValueError(f"cache.tiers must be a list of at most {len(known)} tiers, e.g. {example}")
    found: dict[str, Any] = {}
    settings: dict[str, dict[str, Any]] = {place: {} for place in _ELSEWHERE.values()}
    shared = []
    for number, entry in enumerate(entries):
        name, rest = _named(entry, number, known, list(found))
        if rest.pop("shared", False):
            shared.append(name)
        for key, place in _ELSEWHERE.items():
            if (value := rest.pop(key, None)) is not None:
                settings[place][name] = value
        found[name] = rest["capacity"] if _is_memory(name) else rest
    return _merged(config, {key: value for key, value in cache.items() if key != "tiers"} | found, settings, shared)


def _named(entry: Any, number: int, known: list[str], before: list[str]) -> tuple[str, dict[str, Any]]:
    """An entry's name and its other keys."""
    where = f"cache.tiers[{number}]"
    if not isinstance(entry, Mapping):
        raise ValueError(f"{where} holds a value, not a mapping; write {{name: cpu, capacity: 1GiB}}")
    name = entry.get("name")
    if name not in known:
        near = difflib.get_close_matches(str(name), known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(known)}"
        raise ValueError(f"{where}.name: {name!r} is no tier below the GPU; {hint}")
    if before and known.index(name) <= known.index(before[-1]):
        order = ", ".join(known)
        raise ValueError(f"{where}.name: {name} cannot be below {before[-1]}; name each once, in the order {order}")
    if "capacity" not in entry:
        raise ValueError(f"{where}.capacity is missing; add the size of {name}, e.g. 1GiB")
    if not isinstance(entry.get("shared", False), bool):
        raise ValueError(f"{where}.shared: {entry['shared']!r} is refused; write true or false")
    own = {"name", "capacity", "shared", *_ELSEWHERE}
    if _is_memory(name) and (unknown := [key for key in entry if key not in own]):
        raise ValueError(f"{where}.{unknown[0]}: memory has no such key; remove it")
    return name, {key: value for key, value in entry.items() if key != "name"}


def _is_memory(name: str) -> bool:
    return any(tier.name == name and tier.kind == "memory" for tier in all_tiers())


def _merged(
    config: Mapping[str, Any], cache: dict[str, Any], settings: Mapping[str, dict[str, Any]], shared: list[str]
) -> dict[str, Any]:
    deployment, engines = config.get("deployment") or {}, config.get("engines") or {}
    if shared and deployment.get("shared"):
        raise ValueError("deployment.shared and cache.tiers both say what is shared; keep one of them")
    sim = engines.get("sim") or {}
    for place, values in settings.items():
        if values and sim.get(place):
            raise ValueError(f"engines.sim.{place} and cache.tiers both name them; keep one of them")
        sim = {**sim, place: values} if values else sim
    whole = {**config, "cache": cache}
    if shared:
        whole["deployment"] = {**deployment, "shared": shared}
    return {**whole, "engines": {**engines, "sim": sim}} if sim else whole
