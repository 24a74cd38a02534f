"""What a run says in the terminal: its progress while it measures, its table when it is done."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from harness.report.asked import asked_lines
from harness.report.axes import cell_labels
from harness.report.goals import class_lines, goal_lines
from harness.report.io.storage_words import storage_lines
from harness.report.run.header import header_facts
from harness.report.run.loads import TurnsInTerminal, load_findings
from harness.report.run.tables import FigureRow, FlowRow, client_lines, figure_rows, flow_rows, lag_rows
from harness.report.run.turns import turn_word
from harness.report.simulated import how_made
from harness.report.words import NOT_REPORTED, THIN_NOTE, digits, evidence, plural
from harness.results.manifest import Manifest
from harness.results.summary import Summary

_LINE_EVERY_S = 10.0
_REDRAWS_PER_S = 4
_COLORS = {"good": "green", "simulated": "magenta", "warn": "yellow", "bad": "red"}
_MAX_ROWS = 200
_MEAN = "TTFT ± 95 %"
_WORDS = ("cell", "tier", "verdicts")
_ALL_COLUMNS = ("cell", "tier", "n", _MEAN, "p50", "p90", "p95", "p99", "hit tokens", "verdicts", "left out")
# From how many columns of the terminal on all cells share a table, and what it holds.
_WIDE = ((120, _ALL_COLUMNS), (110, tuple(name for name in _ALL_COLUMNS if name != "p95")))
# In a narrow terminal the first of these that fits, each cell with a table of its own.
_NARROWER = (
    ("tier", "n", _MEAN, "p50", "p90", "p95", "p99", "verdicts"),
    ("tier", "n", _MEAN, "p50", "p90", "p99", "verdicts"),
    ("tier", "n", _MEAN, "p50", "p90", "verdicts"),
    ("tier", "n", _MEAN, "p50", "verdicts"),
    ("tier", "n", _MEAN),
    ("tier", _MEAN),
)
_UNLIMITED = 10_000  # columns


def render_summary(summary: Summary, manifest: Manifest) -> RenderableType:
    """The run's figures as a table, with what the evidence is worth and what it shows."""
    judged = evidence(summary)
    made = how_made(summary)
    head = f"{manifest.name} on {summary.engine}: {summary.status}{'' if made == 'measured' else f', {made}'}"
    parts: list[RenderableType] = [Text(printable(head), style="bold")]
    parts += [Text(printable(f"  {label}: {value}"), style="dim") for label, value in header_facts(manifest)]
    if manifest.error:
        parts.append(Text(printable(manifest.error), style="red"))
    rows = figure_rows(summary)
    if rows:
        parts.append(_Figures(rows[:_MAX_ROWS]))
    if len(rows) > _MAX_ROWS:
        parts.append(Text(f"the first {_MAX_ROWS} of {len(rows):,} lines; summary.json has all"))
    if any(percentile.thin for row in rows for percentile in row.percentiles):
        parts.append(Text(THIN_NOTE, style="dim"))
    parts += [Text(printable(_flow(flow))) for flow in flow_rows(summary)[:_MAX_ROWS]]
    if any(cell.turns for cell in summary.cells):
        parts.append(TurnsInTerminal(summary, turn_word(manifest)))
    parts.append(Text(judged.headline, style=_COLORS[judged.level]))
    parts += [Text(printable(f"  {number:,} left out: {reason}")) for reason, number in judged.reasons]
    parts += [Text(f"  {cure}") for cure in judged.cures]
    if cut_off := summary.rows.cut_off:
        ended = plural(cut_off, "request")
        parts.append(Text(f"  {ended} cut off when the time was over, as it was asked: in no figure"))
    late = [row for row in lag_rows(summary) if row.late]
    if late:
        worst = f"{plural(len(late), 'line')} with a p99 send lag above 5 % of the median TTFT, e.g. {late[0].tier}"
        parts.append(Text(f"Sent late: {worst} {late[0].p99}; give the load loop a core of its own", style="yellow"))
    parts += [Text(printable(line)) for line in client_lines(summary)[:_MAX_ROWS]]
    labels = cell_labels(summary.cells)
    said = [
        *load_findings(summary),
        *asked_lines(summary, labels),
        *class_lines(summary),
        *storage_lines(summary, labels),
    ]
    parts += [Text(printable(line)) for line in said]
    parts += [Text(printable(line), style=_COLORS[level]) for line, level in goal_lines(summary)]
    return Group(*parts)


def _flow(flow: FlowRow) -> str:
    preempted = "" if flow.preemptions in ("0", NOT_REPORTED) else f", preemptions {flow.preemptions}"
    ceiling = f" ({flow.ceiling})" if flow.ceiling else ""
    tokens = f"output tokens {flow.output_tokens}, all tokens {flow.all_tokens}, hit rate {flow.hit_rate}{ceiling}"
    return f"{flow.cell}: requests {flow.requests}, {tokens}{preempted}"


class _Figures:
    """The figures as one table; in a narrow terminal as one for each cell, without the columns that repeat others."""

    def __init__(self, rows: list[FigureRow]) -> None:
        self._rows = rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if wide := next((names for least, names in _WIDE if options.max_width >= least), None):
            yield _table(self._rows, wide)
            return
        narrow = next((names for names in _NARROWER if self._fits(console, options, names)), _NARROWER[-1])
        for _, grouped in itertools.groupby(self._rows, key=lambda row: row.cell):
            rows = list(grouped)
            yield Text(printable(_cell(rows[0])))
            yield _table(rows, narrow)

    def _fits(self, console: Console, options: ConsoleOptions, names: Sequence[str]) -> bool:
        anything = options.update(width=_UNLIMITED)
        return Measurement.get(console, anything, _table(self._rows, names)).maximum <= options.max_width


def _table(rows: list[FigureRow], names: Sequence[str]) -> Table:
    """The columns of these names. No cell is cut; in a narrow table verdicts stand below each other."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in names:
        table.add_column(name, justify="left" if name in _WORDS else "right", no_wrap=True)
    previous = None
    for row in rows:
        percentiles = (Text(f"{p.text}*" if p.thin else p.text, "dim" if p.thin else "") for p in row.percentiles)
        columns = {
            "cell": Text("" if row.cell == previous else printable(_cell(row))),
            "tier": Text(printable(row.tier)),
            "n": Text(f"{row.n:,}"),
            _MEAN: Text(row.mean),
            **dict(zip(("p50", "p90", "p95", "p99"), percentiles, strict=True)),
            "hit tokens": Text(row.hit_tokens),
            "verdicts": Text(row.verdicts if "cell" in names else row.verdicts.replace(", ", ",\n")),
            "left out": Text(f"{row.left_out:,}", style="yellow" if row.left_out else ""),
        }
        table.add_row(*(columns[name] for name in names))
        previous = row.cell
    return table


def _cell(row: FigureRow) -> str:
    return f"{row.cell} (flat)" if row.repeats else row.cell


def printable(text: str) -> str:
    """Text from outside without control characters, which a terminal would obey."""
    return "".join(char if char.isprintable() else " " for char in text)


class ProgressLine:
    """A bar on stderr: done of total, rate, what is measured now, elapsed and remaining time.

        with ProgressLine() as progress:
            progress.start(120, "prefix-tiers")
            progress.state("disk, 4097 tokens")
            progress.advance()

    Where stderr is no terminal it prints a plain line at most every 10 s. Counting costs an addition: the bar is
    drawn by its own thread, from the counts.
    """

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console or Console(file=sys.stderr)
        self._clock = clock
        self._live: Live | None = None
        self._label, self._state = "", ""
        self._done, self._total = 0, None  # type: tuple[int, int | None]
        self._started_s = self._printed_s = clock()
        self._printed = -1
        self._first: tuple[float, int] | None = None

    def __enter__(self) -> ProgressLine:
        if self._console.is_terminal:
            self._live = Live(
                console=self._console, get_renderable=self._bar, refresh_per_second=_REDRAWS_PER_S, transient=True
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._print_last()

    def start(self, total: int | None, label: str) -> None:
        """Begins a count of its own, in place of the one before. total None: unknown."""
        self._print_last()
        self._label, self._state = printable(label), ""
        self._done, self._total, self._first = 0, total, None
        self._started_s = self._printed_s = self._clock()
        self._printed = -1

    def advance(self, n: int = 1) -> None:
        self._done += n
        if self._first is None and n:
            self._first = (self._clock(), self._done)
        if self._live is None:
            self._print_if_due()

    def state(self, text: str) -> None:
        """What is measured now: the cell, the tier, the phase."""
        self._state = printable(text)
        if self._live is None:
            self._print_if_due()

    def note(self, text: str) -> None:
        """A line of its own, above the bar."""
        self._console.print(Text(printable(text)), soft_wrap=True)

    def _print_if_due(self) -> None:
        now_s = self._clock()
        if now_s - self._printed_s >= _LINE_EVERY_S:
            self._print(now_s)

    def _print_last(self) -> None:
        """What a count ended with, unless its last line said so."""
        if self._label and self._printed != self._done:
            self._print(self._clock())

    def _print(self, now_s: float) -> None:
        self._printed_s, self._printed = now_s, self._done
        self.note(" · ".join([self._label, *self._words(now_s)]))

    def _words(self, now_s: float) -> list[str]:
        elapsed_s = max(0.0, now_s - self._started_s)
        done, total = self._done, self._total
        words = [f"{done:,}" if total is None else f"{done:,} of {total:,}"]
        if self._state:
            words.append(self._state)
        # From the first rows on: an engine that started, and rows of an earlier attempt, say nothing of the rest.
        if total is not None and self._first is not None and self._first[1] < done < total:
            each_s = (now_s - self._first[0]) / (done - self._first[1])
            words.append(f"about {clock_text(each_s * (total - done))} left")
        words.append(f"{clock_text(elapsed_s)} elapsed")
        if done and elapsed_s > 0:
            words.append(f"{digits(done / elapsed_s)}/s")
        return words

    def _bar(self) -> RenderableType:
        if not self._label:
            return Text("")
        row = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=self._total, completed=self._done, width=12, pulse=self._total is None)
        row.add_row(Text(self._label, style="bold"), bar, Text(" · ".join(self._words(self._clock())), no_wrap=True))
        return row


def clock_text(value_s: float) -> str:
    """75 → '1:15'; 3 700 → '1:01:40'."""
    minutes, seconds = divmod(round(value_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
