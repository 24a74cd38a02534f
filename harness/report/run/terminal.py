"""What a run says in the terminal: its progress while it measures, its table when it is done."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from types import TracebackType

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from harness.report.axes import cell_labels
from harness.report.io.storage_words import storage_lines
from harness.report.run.tables import FigureRow, FlowRow, figure_rows, flow_rows, lag_rows
from harness.report.words import NOT_REPORTED, digits, evidence, findings, plural
from harness.results.manifest import Manifest
from harness.results.summary import Summary

_LINE_EVERY_S = 10.0
_REDRAWS_PER_S = 4
_COLORS = {"good": "green", "warn": "yellow", "bad": "red"}
_MAX_ROWS = 200
_WIDE = 110


def render_summary(summary: Summary, manifest: Manifest) -> RenderableType:
    """The run's figures as a table, with what the evidence is worth and what it shows."""
    judged = evidence(summary)
    head = f"{manifest.name} on {summary.engine}: {summary.status}"
    parts: list[RenderableType] = [Text(printable(head), style="bold")]
    if manifest.error:
        parts.append(Text(printable(manifest.error), style="red"))
    rows = figure_rows(summary)
    if rows:
        parts.append(_Figures(rows[:_MAX_ROWS]))
    if len(rows) > _MAX_ROWS:
        parts.append(Text(f"the first {_MAX_ROWS} of {len(rows):,} lines; summary.json has all"))
    if any(percentile.thin for row in rows for percentile in row.percentiles):
        parts.append(Text("* fewer values than this percentile needs: no more than the largest one seen", style="dim"))
    parts += [Text(printable(_flow(flow))) for flow in flow_rows(summary)[:_MAX_ROWS]]
    parts.append(Text(judged.headline, style=_COLORS[judged.level]))
    parts += [Text(printable(f"  {number:,} left out: {reason}")) for reason, number in judged.reasons]
    parts += [Text(f"  {cure}") for cure in judged.cures]
    late = [row for row in lag_rows(summary) if row.late]
    if late:
        worst = f"{plural(len(late), 'line')} with a p99 send lag above 5 % of the median TTFT, e.g. {late[0].tier}"
        parts.append(Text(f"Sent late: {worst} {late[0].p99}; give the load loop a core of its own", style="yellow"))
    parts += [
        Text(printable(line)) for line in [*findings(summary), *storage_lines(summary, cell_labels(summary.cells))]
    ]
    return Group(*parts)


def _flow(flow: FlowRow) -> str:
    preempted = "" if flow.preemptions in ("0", NOT_REPORTED) else f", preemptions {flow.preemptions}"
    tokens = f"output tokens {flow.output_tokens}, hit rate {flow.hit_rate}"
    return f"{flow.cell}: requests {flow.requests}, {tokens}{preempted}"


class _Figures:
    """The figures as one table; in a narrow terminal as one for each cell, without the columns that repeat others."""

    def __init__(self, rows: list[FigureRow]) -> None:
        self._rows = rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.max_width >= _WIDE:
            yield _table(self._rows, wide=True)
            return
        for cell, rows in itertools.groupby(self._rows, key=lambda row: row.cell):
            yield Text(printable(cell))
            yield _table(list(rows), wide=False)


def _table(rows: list[FigureRow], wide: bool) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("cell", "tier") if wide else ("tier",):
        table.add_column(name)
    for name in ("n", "TTFT ± 95 %", "p50", "p90", "p99", *(("hit tokens",) if wide else ())):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdicts")
    if wide:
        table.add_column("left out", justify="right")
    previous = None
    for row in rows:
        percentiles = (Text(f"{p.text}*" if p.thin else p.text, "dim" if p.thin else "") for p in row.percentiles)
        common = (Text(printable(row.tier)), Text(f"{row.n:,}"), Text(row.mean), *percentiles)
        if wide:
            cell = Text("" if row.cell == previous else printable(row.cell))
            left_out = Text(f"{row.left_out:,}", style="yellow" if row.left_out else "")
            table.add_row(cell, *common, Text(row.hit_tokens), Text(row.verdicts), left_out)
        else:
            table.add_row(*common, Text(row.verdicts))
        previous = row.cell
    return table


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
        self._done, self._total = 0, total
        self._started_s = self._printed_s = self._clock()
        self._printed = -1

    def advance(self, n: int = 1) -> None:
        self._done += n
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
        gone_s = max(0.0, now_s - self._started_s)
        done, total = self._done, self._total
        words = [f"{done:,}" if total is None else f"{done:,} of {total:,}"]
        if self._state:
            words.append(self._state)
        if total is not None and 0 < done < total:
            words.append(f"about {clock_text(gone_s / done * (total - done))} left")
        words.append(f"{clock_text(gone_s)} gone")
        if done and gone_s > 0:
            words.append(f"{digits(done / gone_s)}/s")
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
