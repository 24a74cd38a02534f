"""The header of a run: what served it and where, as the engine resolved it; for a simulator, whose machine it is."""

from __future__ import annotations

from harness.errors import ResultsError
from harness.experiment.units import format_bytes
from harness.records import Resolved
from harness.report.words import NOT_REPORTED
from harness.results.manifest import CellEntry, Manifest
from harness.results.provenance import Git, is_simulated

_NAMES = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "hicache": "HiCache",
    "lmcache": "LMCache",
    "sim": "simulator",
    "openai": "OpenAI-compatible server",
}
_RULES = ("engine_policy", "tier_policy", "calibration")


def header_facts(manifest: Manifest) -> list[tuple[str, str]]:
    """(label, value) of the facts that a figure cannot be read without, in their order.

    A fact comes from what the engine said of itself once it ran; 'not reported' where it said nothing. Points of a
    sweep that differ have their values side by side.
    """
    cells = [cell for cell in manifest.cells if cell.resolved is not None] or manifest.cells[:1]
    told = [_facts(manifest, cell, cell.resolved or Resolved()) for cell in cells]
    labels = dict.fromkeys(label for facts in told for label in facts)
    merged = {label: _told([facts.get(label) for facts in told]) for label in labels}
    merged |= {"made": manifest.created_at or "", "commit": _commit(manifest.git)}
    return [(label, value) for label, value in merged.items() if value]


def _facts(manifest: Manifest, cell: CellEntry, found: Resolved) -> dict[str, str | None]:
    """The facts of one point."""
    facts = {"engine": _engine(manifest, found), "cache server": _cache_server(manifest, found)}
    if is_simulated(manifest.engine):
        if preset := found.preset:
            facts["preset"] = f"{preset.name}, of {preset.date}"
            facts |= {"preset's machine": preset.machine, "preset's validation": preset.standing}
    else:
        if accelerator := found.accelerator:
            facts["accelerator"] = f"{accelerator} ({accelerator.machine}; link {accelerator.link})"
            facts["accelerator's validation"] = accelerator.standing
        if found.replaced:
            facts["not the engine's own"] = _replaced(found)
        facts["runs on"] = _machine(manifest, cell)
    return facts | {"model": cell.model, "disk": _disk(cell, found, modelled=is_simulated(manifest.engine))}


def _replaced(found: Resolved) -> str:
    """Each stand-in by file and line, and what it stands for."""
    return "; ".join(f"{each.ours} for {each.theirs} ({each.why})" for each in found.replaced)


def _told(values: list[str | None]) -> str:
    """What the points say, each value once."""
    return "; ".join(dict.fromkeys(value for value in values if value))


def _engine(manifest: Manifest, found: Resolved) -> str:
    name = _NAMES.get(manifest.engine, manifest.engine)
    if is_simulated(manifest.engine):
        rules = found.versions.get("engine_policy")
        return f"{name} of {rules}" if rules else f"{name}: no engine, the tiers alone"
    return f"{name} {found.versions.get(manifest.engine, f'(version {NOT_REPORTED})')}"


def _cache_server(manifest: Manifest, found: Resolved) -> str | None:
    if is_simulated(manifest.engine):
        rules = found.versions.get("tier_policy")
        return f"simulated, of {rules}" if rules else None
    others = {name: version for name, version in found.versions.items() if name not in (manifest.engine, *_RULES)}
    through = f" ({found.connector})" if found.connector else ""
    return ", ".join(f"{_NAMES.get(name, name)} {version}" for name, version in others.items()) + through or None


def _machine(manifest: Manifest, cell: CellEntry) -> str:
    """The accelerator where the engine was started on one, else the CPU."""
    host = manifest.host
    section = (cell.config.get("engines") or {}).get(manifest.engine) or {}
    cores = f", {host.cores} core{'' if host.cores == 1 else 's'}" if host.cores else ""
    processor = f"{host.cpu or f'CPU {NOT_REPORTED}'}{cores}"
    if section.get("attach"):
        return f"a server that ran already; this machine: {', '.join((*host.gpus, processor))}"
    if section.get("device") != "gpu":
        return processor
    return f"{', '.join(host.gpus) or f'GPU {NOT_REPORTED}'}; {processor}"


def _disk(cell: CellEntry, found: Resolved, *, modelled: bool) -> str | None:
    """Size, file system and device of the disk tier; None without one."""
    if not found.disk_bytes:
        return None
    size = format_bytes(found.disk_bytes)
    if modelled and found.store is None:
        return f"{size}, modelled"
    try:
        kind = cell.disk_file_system
    except ResultsError:
        kind = found.disk_file_system
    if cell.device is not None:
        limits = ", ".join(_limit(name, value) for name, value in cell.device.limits.items() if value)
        return f"{size} on {kind or NOT_REPORTED}, paced device ({limits or 'no limit'})"
    return f"{size} on {kind or NOT_REPORTED}, device {found.disk_device or NOT_REPORTED}"


def _limit(name: str, value: float) -> str:
    """('read_bytes_per_s', 104857600.0) → 'read 100MiB/s'."""
    if name.endswith("bytes_per_s"):
        return f"{name.removesuffix('bytes_per_s').replace('_', ' ').strip()} {format_bytes(value)}/s".strip()
    return f"{name.replace('_', ' ')} {value:g}"


def _commit(git: Git) -> str:
    return f"{git.commit[:12]}{' with uncommitted changes' if git.dirty else ''}" if git.commit else ""
