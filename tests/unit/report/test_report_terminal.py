"""What a run says in the terminal, and what saying it costs."""

from __future__ import annotations

import io
import time
from typing import Any

import pytest
from rich.console import Console

from harness.report import words
from harness.report.run.terminal import ProgressLine, clock_text, render_summary
from harness.results.summary import summarize
from tests.support.report_runs import cell, manifest, row


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def plain() -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, width=160, force_terminal=False), text


def shown(rows: list[Any], **changes: Any) -> str:
    console, text = plain()
    known = manifest(**changes)
    console.print(render_summary(summarize(known, rows), known))
    return text.getvalue()


def test_the_table_holds_the_figures() -> None:
    rows = [row("gpu", t, cached_tokens=4096) for t in (0.09, 0.10, 0.11)]
    rows += [row("gpu", 9.0, verdict="contradicted", verdict_reason="cpu served it"), row("recompute", 3.0)]
    lines = shown(rows).splitlines()
    table = [" ".join(line.split()) for line in lines]
    assert "base recompute 1 3.00 s 3.00 s* 3.00 s* 3.00 s* 3.00 s* not reported 1 proven 0" in table
    assert "gpu 3 100 ± 25 ms 100 ms 108 ms* 109 ms* 110 ms* 12,288 3 proven, 1 contradicted 1" in table
    assert "5 rows measured, 4 in the figures, 1 left out" in lines
    assert "  1 left out: cpu served it" in lines
    few = "gpu against recompute: too few samples to compare (1 and 3; at least 3 each) at 4,097 prompt tokens"
    assert any(line.startswith(few) for line in lines)
    assert not any("no difference" in line for line in lines)


@pytest.mark.parametrize(
    ("columns", "heads"),
    [
        (72, "tier n TTFT ± 95 % p50 p90 p99"),
        (54, "tier n TTFT ± 95 % p50 verdicts"),
        (34, "tier n TTFT ± 95 %"),
        (27, "tier TTFT ± 95 %"),
    ],
)
def test_a_narrow_terminal_drops_columns_and_never_cuts_the_tier(columns: int, heads: str) -> None:
    text = io.StringIO()
    known = manifest()
    rows = [row(tier, t) for tier in ("disk", "disk_cold") for t in (0.09, 0.10, 0.11)]
    Console(file=text, width=columns).print(render_summary(summarize(known, rows), known))
    lines = [" ".join(line.split()) for line in text.getvalue().splitlines()]
    assert any(line.startswith(heads) for line in lines), lines
    assert sum(line.startswith(("disk 3", "disk 100", "disk_cold 3", "disk_cold 100")) for line in lines) == 2
    assert not any("…" in line for line in lines)


def test_a_narrow_terminal_keeps_every_number_whole() -> None:
    text = io.StringIO()
    known = manifest([cell("n=1", {"n": 1}), cell("n=2", {"n": 2})])
    rows = [row("disk_cold", t, cell=f"n={n}") for n in (1, 2) for t in (0.09, 0.10, 0.11)]
    rows.append(row("disk_cold", 9.0, cell="n=2", verdict="contradicted"))
    Console(file=text, width=80).print(render_summary(summarize(known, rows), known))
    lines = [" ".join(line.split()) for line in text.getvalue().splitlines()]
    assert lines.count("tier n TTFT ± 95 % p50 p90 p99 verdicts") == 2
    assert "disk_cold 3 100 ± 25 ms 100 ms 108 ms* 110 ms* 3 proven" in lines
    assert [line for line in lines if line in ("n=1", "n=2")] == ["n=1", "n=2"]


def test_a_failed_run_without_rows_still_renders() -> None:
    text = shown([], status="failed", error="engine died\x1b]0;title\x07")
    assert "tiers on fake: failed" in text
    assert "engine died ]0;title" in text
    assert "\x1b" not in text


def test_a_name_is_not_read_as_markup() -> None:
    assert "[red]a[/red]" in shown([row("gpu", 0.1, cell="[red]a[/red]")], cells=[cell("[red]a[/red]")])


@pytest.mark.parametrize(
    ("value_s", "text"),
    [
        (0.0467, "46.7 ms"),
        (3.017, "3.02 s"),
        (0.00012, "120 µs"),
        (-2e-17, "0 ms"),
        (0.0, "0 ms"),
        (1234.5, "1,230 s"),
        (None, words.UNKNOWN),
    ],
)
def test_durations_have_the_unit_that_fits(value_s: float | None, text: str) -> None:
    assert words.duration(value_s) == text


@pytest.mark.parametrize(
    ("n", "share", "few"), [(99, 0.99, True), (100, 0.99, False), (9, 0.9, True), (10, 0.9, False), (2, 0.5, False)]
)
def test_a_percentile_needs_a_value_beyond_it(n: int, share: float, few: bool) -> None:
    assert words.too_few(n, share) is few


def test_findings_of_a_sweep_name_its_ends() -> None:
    cells = [cell(str(n), {"workload.prompt_tokens": n}) for n in (513, 4097)]
    rows = [row("gpu", t, cell=str(n)) for n in (513, 4097) for t in (0.0999, 0.1, 0.1001)]
    rows += [row("recompute", t, cell="513") for t in (0.299, 0.3, 0.301)]
    rows += [row("recompute", t, cell="4097") for t in (3.29, 3.3, 3.31)]
    assert words.findings(summarize(manifest(cells), rows)) == [
        f"gpu against recompute: 3.0{words.TIMES} faster at prompt_tokens=513, up to 33{words.TIMES} faster at"
        " prompt_tokens=4097 (typical TTFT, 2 points)."
    ]


def test_a_slower_tier_is_called_slower_and_without_recompute_the_slowest_is_compared() -> None:
    rows = [row("recompute", t) for t in (0.099, 0.1, 0.101)] + [row("disk", t) for t in (0.199, 0.2, 0.201)]
    (line,) = words.findings(summarize(manifest(), rows))
    assert line.startswith(f"disk: 2.0{words.TIMES} slower than recompute")
    rows = [row("gpu", t) for t in (0.099, 0.1, 0.101)] + [row("cpu", t) for t in (0.199, 0.2, 0.201)]
    (line,) = words.findings(summarize(manifest(), rows))
    assert line.startswith(f"gpu: 2.0{words.TIMES} faster than cpu")


def test_one_tier_alone_is_only_stated() -> None:
    (line,) = words.findings(summarize(manifest(), [row("gpu", t) for t in (0.09, 0.1, 0.11)]))
    assert line == "gpu: mean TTFT 100 ± 25 ms at 4,097 prompt tokens."


def test_rows_without_a_verdict_are_named() -> None:
    judged = words.evidence(summarize(manifest(), [row("gpu", 0.1), row("gpu", 0.1, verdict=None)]))
    assert judged.level == "warn"
    assert judged.reasons == (("no evidence", 1),)
    assert judged.cures == (
        "Some rows claim a tier and carry no verdict: the run ended before their counters were read.",
    )


def test_without_a_terminal_progress_is_a_line_every_ten_seconds() -> None:
    (console, text), clock = plain(), Clock()
    with ProgressLine(console, clock) as progress:
        progress.start(200, "tiers")
        progress.state("gpu, 4097 tokens")
        for _ in range(150):
            clock.now_s += 0.125
            progress.advance()
        progress.note("engine restarted")
    assert text.getvalue().splitlines() == [
        "tiers · 80 of 200 · gpu, 4097 tokens · about 0:15 left · 0:10 elapsed · 8.00/s",
        "engine restarted",
        "tiers · 150 of 200 · gpu, 4097 tokens · about 0:06 left · 0:19 elapsed · 8.00/s",
    ]


def test_a_second_start_ends_the_first_count() -> None:
    (console, text), clock = plain(), Clock()
    with ProgressLine(console, clock) as progress:
        progress.start(None, "warm")
        progress.advance(3)
        clock.now_s = 2.0
        progress.start(1, "measure")
    assert text.getvalue().splitlines() == ["warm · 3 · 0:02 elapsed · 1.50/s", "measure · 0 of 1 · 0:00 elapsed"]


def test_on_a_terminal_the_bar_shows_the_counts() -> None:
    text, clock = io.StringIO(), Clock()
    with ProgressLine(Console(file=text, width=120, force_terminal=True, color_system=None), clock) as progress:
        progress.start(10, "tiers")
        progress.state("cpu\x1b[2J")
        clock.now_s = 20.0
        progress.advance(1)  # what came before, as the engine's start, says nothing of the time that is left
        clock.now_s = 26.0
        progress.advance(3)
        progress.note("a note")
    written = text.getvalue()
    assert "4 of 10 · cpu [2J · about 0:12 left · 0:26 elapsed · 0.154/s" in written
    assert "a note" in written
    assert "\x1b[2J" not in written


def test_counting_costs_next_to_nothing() -> None:
    console, _ = plain()
    with ProgressLine(console) as progress:
        progress.start(None, "fast")
        began = time.perf_counter()
        for _ in range(30_000):
            progress.advance()
        spent_s = time.perf_counter() - began
    # At 3,000 rows a second these are ten seconds of rows.
    assert spent_s < 0.5


def test_times_read_like_a_clock() -> None:
    assert [clock_text(value) for value in (0.4, 75, 3700)] == ["0:00", "1:15", "1:01:40"]


def test_the_second_of_two_names_is_held_against_the_first_where_they_differ() -> None:
    """One name is not compared; nor is a state that both serve alike."""
    points = [(device, count) for device in ("this", "reference") for count in (1, 2)]
    cells = [cell(f"{d}-{n}", {"device": d, "workload.concurrency": n}) for d, n in points]
    rows = []
    for device, count in points:
        for sample in range(3):
            cold = (0.1 if device == "this" else 0.2 * count) * (1 + sample / 100)
            same: dict[str, Any] = {"cell": f"{device}-{count}", "sample": sample}
            rows += [row("recompute", 0.05 + sample / 1000, **same), row("disk_cold", cold, **same)]
    lines = [line for line in words.findings(summarize(manifest(cells), rows)) if "device=reference" in line]
    two = "disk_cold, device=reference against device=this: 2.0"
    assert (
        lines[-1].startswith(two)
        and "slower at concurrency=1, up to 4.0" in lines[-1]
        and lines[-1].count("device=this") == 1
    )
    assert not any(line.startswith("recompute,") for line in lines)
    half = summarize(manifest(cells[:2]), [each for each in rows if each.cell.startswith("this")])
    assert not any("against device" in line for line in words.findings(half))
