"""What a storage device did, in sentences: of runs whose disk was a real one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from harness.experiment.units import format_bytes
from harness.records import OperationFigures, StorageFigures
from harness.report.words import digits, duration, plural
from harness.results.summary import Summary

_NAMES = {"wall_clock": "Output", "per_io_time": "Output per I/O time", "storage": "KV moved"}


def storage_lines(summary: Summary, labels: Mapping[str, str]) -> list[str]:
    """Sentences on every cell that a real device served."""
    return [line for cell in summary.cells if cell.storage for line in _lines(cell.storage, labels[cell.key])]


def _lines(figures: StorageFigures, label: str) -> Iterator[str]:
    for name, one in (figures.throughput or {}).items():
        rate = "unknown" if one.tokens_per_s is None else f"{digits(one.tokens_per_s)} tokens/s"
        yield f"{label}: {_NAMES.get(name, name)}: {rate} ({one.formula})."
    if figures.requests_cut_off:
        yield f"{label}: {plural(figures.requests_cut_off, 'request')} cut off by measure.budget, in no figure."
    for way, moved in (("read", figures.read), ("write", figures.write)):
        if moved.operations:
            yield f"{label}: {_moved(way, moved, figures.moved_over_s)}"
    if figures.failed_operations:
        worst = next(iter(figures.errors))
        yield f"{label}: {plural(figures.failed_operations, 'operation')} failed, e.g. {worst}."
    if figures.page_cache:
        yield f"{label}: through the page cache: {figures.page_cache}."


def _moved(way: str, figures: OperationFigures, over_s: float | None) -> str:
    """Bytes asked for, moved and counted by the device; latency in full and in its two parts."""
    device = figures.device_bytes
    counted = "its device does not say" if device is None else f"its device counted {format_bytes(device)}"
    rate = f" ({format_bytes(figures.moved_bytes / over_s)}/s)" if over_s else ""
    total, alone = figures.latency_s.total, figures.latency_s.device
    parts = ", ".join(f"{name} {duration(total[name])} ({duration(alone[name])})" for name in ("p50", "p99", "p99.9"))
    return (
        f"{plural(figures.operations, way)}, {format_bytes(figures.asked_bytes)} asked for,"
        f" {format_bytes(figures.moved_bytes)} moved{rate}, {counted}; latency (of it the device): {parts}."
    )
