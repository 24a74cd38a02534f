"""What real devices did, in sentences: of runs whose disk was a real one, or all of whose tiers were."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from harness.experiment.units import format_bytes
from harness.report.words import THIN_NOTE, digits, duration, percentile_text, plural, too_few
from harness.results.summary import Summary
from harness.storage_records import KvFigures, OperationFigures, StorageFigures

_PERCENTILES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999}
_WHOLE = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "p99.9": 0.999}
_NAMES = {"wall_clock": "Output", "per_io_time": "Output per I/O time", "storage": "KV moved"}


def storage_lines(summary: Summary, labels: Mapping[str, str]) -> list[str]:
    """Sentences on every cell that a real device served."""
    return [line for cell in summary.cells if cell.storage for line in _lines(cell.storage, labels[cell.key])]


def _lines(figures: StorageFigures, label: str) -> Iterator[str]:
    for name, one in (figures.throughput or {}).items():
        rate = "unknown" if one.tokens_per_s is None else f"{digits(one.tokens_per_s)} tokens/s"
        yield f"{label}: {_NAMES.get(name, name)}: {rate} ({one.formula})."
    if figures.requests_cut_off:
        yield f"{label}: {plural(figures.requests_cut_off, 'request')} cut off when the time was over, in no figure."
    for way, moved in (("read", figures.read), ("write", figures.write)):
        if moved.operations:
            yield f"{label}: {moved_line(way, moved, figures.moved_over_s)}"
    if figures.kv is not None:
        yield from (f"{label}: {line}" for line in kv_lines(figures.kv))
    if figures.failed_operations:
        worst = next(iter(figures.errors))
        yield f"{label}: {plural(figures.failed_operations, 'operation')} failed, e.g. {worst}."
    if figures.page_cache:
        yield f"{label}: through the page cache: {figures.page_cache}."


def kv_lines(kv: KvFigures) -> Iterator[str]:
    """What requests did with KV entries, which tiers have them, and what a request's time was spent on."""
    asked, hit = sum(one.asked for one in kv.hits.values()), sum(one.hit for one in kv.hits.values())
    kinds = ", ".join(f"{kind} {one.hit:,} of {one.asked:,}" for kind, one in kv.hits.items())
    yield f"entries found: {hit:,} of {asked:,} ({kinds})."
    amplified = "" if kv.amplification is None else f"; {digits(kv.amplification)} tokens read for each one generated"
    yield (
        f"decode read {format_bytes(kv.decode_read_bytes)}, prefill wrote {format_bytes(kv.prefill_write_bytes)} and"
        f" read {format_bytes(kv.load_read_bytes)}; {format_bytes(kv.demoted_bytes)} moved down,"
        f" {format_bytes(kv.dropped_bytes)} dropped{amplified}."
    )
    for name, tier in kv.by_tier.items():
        ways = ", ".join(
            f"{way} {_shares(one.transfer_s, one.operations)}"
            for way, one in (("reads", tier.read), ("writes", tier.write))
            if one.operations
        )
        taken = tier.write.taken_bytes
        above = f"; of its writes, {format_bytes(taken)} were taken straight from memory above" if taken else ""
        stands = ", which stands in RAM," if name == "gpu" and tier.device != "gpu" else ""
        yield (
            f"{name}{stands} holds {tier.entries:,} entries, {format_bytes(tier.held_bytes)};"
            f" whole entries: {ways or 'none moved'}{above}."
        )
    yield bottleneck(kv)


def bottleneck(kv: KvFigures) -> str:
    """What the mean request spent its time on; the longest part comes first."""
    parts = {"waiting in the queue": kv.queue_s, "moving KV": kv.io_s, "generating tokens": kv.generation_s}
    means = {name: part.get("mean") for name, part in parts.items()}
    whole = kv.end_to_end_s.get("mean")
    if not whole or any(mean is None for mean in means.values()):
        return "no request finished in the measured time."
    first, *rest = sorted(means.items(), key=lambda item: -(item[1] or 0.0))
    others = ", ".join(f"{name} {duration(mean or 0.0)}" for name, mean in rest)
    return f"{first[0]} takes {duration(first[1] or 0.0)} of a request's {duration(whole)} on average; {others}."


def _shares(seconds: Mapping[str, float | None], n: int) -> str:
    return ", ".join(f"{name} {percentile_text(seconds.get(name), n, share)}" for name, share in _WHOLE.items())


def moved_line(way: str, figures: OperationFigures, over_s: float | None) -> str:
    """Bytes asked for, moved and counted by the device; latency in full and in its two parts."""
    device = figures.device_bytes
    counted = "its device does not say" if device is None else f"its device counted {format_bytes(device)}"
    rate = f" ({format_bytes(figures.moved_bytes / over_s)}/s)" if over_s else ""
    total, alone = figures.latency_s.total, figures.latency_s.device
    n = figures.operations
    parts = ", ".join(
        f"{name} {percentile_text(total[name], n, share)} ({percentile_text(alone[name], n, share)})"
        for name, share in _PERCENTILES.items()
    )
    if any(too_few(n, share) for share in _PERCENTILES.values()):
        parts += f" ({THIN_NOTE})"
    return (
        f"{plural(figures.operations, way)}, {format_bytes(figures.asked_bytes)} asked for,"
        f" {format_bytes(figures.moved_bytes)} moved{rate}, {counted}; latency (of it the device): {parts}."
    )
