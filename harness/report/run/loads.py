"""Free loads in words and tables: against a named cell, over trials, and by turn in a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from harness.experiment.units import format_bytes
from harness.report.axes import cell_labels, short_names, shortened, value_text
from harness.report.run.break_even import break_even_lines
from harness.report.simulated import in_figures, simulated_notes
from harness.report.words import (
    NOT_REPORTED,
    UNKNOWN,
    digits,
    duration,
    findings,
    percent,
    plural,
    with_interval,
)
from harness.results.against import RATES, AgainstCell
from harness.results.summary import CellFigures, Summary
from harness.results.trials import TrialFigures, TrialSpread
from harness.stats import Ratio

_MINUS = "\N{MINUS SIGN}"
_RATE_WORDS = dict(zip(RATES, ("prompt tokens/s", "output tokens/s", "total tokens/s", "requests/s"), strict=True))
_FIGURE_WORDS = {
    "ttft_mean_s": "mean TTFT",
    "ttft_p50_s": "TTFT p50",
    "ttft_p95_s": "TTFT p95",
    "tpot_mean_s": "mean TPOT",
    "prompt_tokens_per_s": "prompt tokens/s",
    "output_tokens_per_s": "output tokens/s",
    "total_tokens_per_s": "total tokens/s",
    "requests_per_s": "requests/s",
    "hit_rate": "hit rate",
    "storage_read_bytes": "read from the device",
    "storage_read_p95_s": "read p95",
    "storage_write_bytes": "written to the device",
    "storage_write_p95_s": "write p95",
    "storage_tokens_per_s": "KV tokens moved/s",
    "wall_clock_tokens_per_s": "output tokens/s",
    "per_io_time_tokens_per_s": "output tokens/s of I/O time",
    "decode_read_bytes": "decode read",
    "prefill_write_bytes": "prefill written",
}
_MAX_LINES = 6
_MAX_TURNS, _MAX_COLUMNS = 12, 8
_LABEL = 24


class AgainstRow(msgspec.Struct, frozen=True):
    """One cell against another, as text. rates: in the order of RATES. basis: what the interval of ttft rests on."""

    cell: str
    against: str
    ttft: str
    rates: tuple[str, ...]
    basis: str


class TrialRow(msgspec.Struct, frozen=True):
    """One figure of one cell over its trials, as text."""

    cell: str
    figure: str
    median: str
    spread: str
    interval: str
    cv: str
    values: str


def load_findings(summary: Summary) -> list[str]:
    """The findings of a run; what its author asked to hold against what stands before them, and trials behind."""
    said, first = findings(summary), len(simulated_notes(summary))
    return [*said[:first], *against_lines(summary), *said[first:], *trial_lines(summary)]


# ---- against a named cell


def against_lines(summary: Summary) -> list[str]:
    """A sentence a cell: by what share mean TTFT, and by what factor the prompt tokens a second, differ."""
    by_key, made = {cell.key: cell for cell in summary.cells}, in_figures(summary)
    lines = [f"{_against_words(cell, by_key[found.cell], found, made)}." for cell, found in _against(summary)]
    more = len(lines) - _MAX_LINES
    lines = [*lines[:_MAX_LINES], f"{plural(more, 'more cell')} in the table."] if more > 0 else lines
    return lines + break_even_lines(summary)


def _against_words(cell: CellFigures, reference: CellFigures, found: AgainstCell, made: str) -> str:
    exact = found.ttft is not None and found.ttft.basis == "repeats exactly"
    said = "simulated, repeats exactly: " if exact else made
    parts = [f"{said}mean TTFT {change(found.ttft)}"] if found.ttft else []
    if rate := found.rates.get(RATES[0]):
        parts.append(f"{_RATE_WORDS[RATES[0]]} {with_interval(rate)}")
    shared = {key for key, value in cell.overrides.items() if reference.overrides.get(key) == value}
    at = f" at {_values(cell, shared)}" if shared else ""
    ours, theirs = (_values(each, cell.overrides.keys() - shared) for each in (cell, reference))
    return f"{ours} against {theirs}{at}: {', '.join(parts)}{_doubt(found.ttft)}{_unlike(found)}"


def _unlike(found: AgainstCell) -> str:
    if found.unlike_tokens is None:
        return ""
    theirs, ours = (
        f"{each.prompt:,} and {UNKNOWN if each.output is None else f'{each.output:,}'}" for each in found.unlike_tokens
    )
    return f"; no rate of tokens compares: prompt and output tokens are {ours} against {theirs}, for the same requests"


def _doubt(ratio: Ratio | None) -> str:
    if ratio is None or ratio.basis == "repeats exactly":
        return ""
    if ratio.reason is not None:
        return f" ({ratio.reason}: measure.trials gives an interval)"
    return "" if ratio.distinct else "; TTFT is not shown to differ"


def against_rows(summary: Summary) -> list[AgainstRow]:
    labels = cell_labels(summary.cells)
    return [
        AgainstRow(
            cell=labels[cell.key],
            against=labels[found.cell],
            ttft=change(found.ttft),
            rates=tuple(with_interval(found.rates[name]) if name in found.rates else UNKNOWN for name in RATES),
            basis=_basis(found.ttft),
        )
        for cell, found in _against(summary)
    ]


def _against(summary: Summary) -> Iterator[tuple[CellFigures, AgainstCell]]:
    for cell in summary.cells:
        if cell.against is not None:
            yield cell, cell.against


def change(ratio: Ratio | None) -> str:
    """By what share a time is lower or higher than the reference's: '−57 % (−60 to −53 %)'."""
    if ratio is None:
        return UNKNOWN
    turned = ratio.turned
    middle = _signed(turned.ratio)
    if turned.low is None or turned.high is None or turned.low == turned.high:
        return f"{middle} %"
    return f"{middle} % ({_signed(turned.low)} to {_signed(turned.high)} %)"


def _signed(ratio: float) -> str:
    share = (ratio - 1) * 100
    text = digits(abs(share), 2 if abs(share) < 100 else 3)
    return text if text == "0" else f"{_MINUS if share < 0 else '+'}{text}"


def _basis(ratio: Ratio | None) -> str:
    if ratio is None:
        return UNKNOWN
    if ratio.reason is not None:
        return ratio.reason
    number = ratio.samples[0]
    return {
        "samples": f"{ratio.samples[0]} and {ratio.samples[1]} trials",
        "sessions": f"{number:,} conversations, in pairs",
        "requests": "requests, in pairs",
        "repeats exactly": "repeats exactly",
    }[ratio.basis]


def _values(cell: CellFigures, keys: Set[str]) -> str:
    """What a cell has on some axes: 'cache=pool, users=4'; its key where it has no axes."""
    names = short_names(list(cell.overrides))
    values = (f"{names[key]}={value_text(value)}" for key, value in cell.overrides.items() if key in keys)
    return ", ".join(values) or cell.key


# ---- over trials


def trial_rows(summary: Summary) -> list[TrialRow]:
    """None for a cell that was measured once."""
    labels = cell_labels(summary.cells)
    return [
        _trial_row(labels[cell.key], name, spread)
        for cell, trials in _trials(summary)
        for name, spread in (trials.figures.items() if len(trials.counted) > 1 else ())
    ]


def _trials(summary: Summary) -> Iterator[tuple[CellFigures, TrialFigures]]:
    for cell in summary.cells:
        if cell.trials is not None:
            yield cell, cell.trials


def _trial_row(cell: str, name: str, spread: TrialSpread) -> TrialRow:
    def text(value: float | None) -> str:
        if name.endswith("_s") and not name.endswith("_per_s"):
            return duration(value)
        if name == "hit_rate":
            return percent(value)
        if name.endswith("_bytes"):
            return UNKNOWN if value is None else format_bytes(value)
        return UNKNOWN if value is None else digits(value)

    interval = UNKNOWN
    if spread.mean_low is not None:
        interval = f"{text(spread.mean_low)} to {text(spread.mean_high)}"
    return TrialRow(
        cell=cell,
        figure=_FIGURE_WORDS[name],
        median=text(spread.median),
        spread=f"{text(spread.mean)} ± {text(spread.sd)}",
        interval=interval,
        cv=percent(spread.cv),
        values=", ".join(map(text, spread.values)),
    )


def trial_lines(summary: Summary) -> list[str]:
    """What was sent how often, and each trial that is in no figure."""
    labels, lines = cell_labels(summary.cells), []
    once = [trials.asked for _, trials in _trials(summary) if trials.once]
    if once:
        lines.append(f"Simulated, repeats exactly: one trial in place of the {once[0]} that measure.trials asks for.")
    for cell, trials in _trials(summary):
        label = labels[cell.key]
        lines += [f"{label}: {left.name} is left out of every figure: {left.reason}." for left in trials.left_out]
        if cell.storage is not None:
            lines.append(f"{label}: the device's figures are those of the last trial; the table has each trial's.")
        missing = trials.asked - len(trials.counted)
        if missing and not trials.once:
            lines.append(f"{label}: figures of {len(trials.counted)} of {plural(trials.asked, 'trial')}.")
    return lines


# ---- by turn, in a terminal


class TurnsInTerminal:
    """A line a turn, a column a cell: as many cells as fit."""

    def __init__(self, summary: Summary, word: str) -> None:
        self._word, self._made = word, in_figures(summary)
        self._labels = cell_labels(summary.cells)
        self._cells = [cell for cell in summary.cells if cell.turns]
        self._turns = sorted({turn.turn for cell in self._cells for turn in cell.turns})

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        anything = options.update(width=10_000)
        number = min(len(self._cells), _MAX_COLUMNS)
        while number > 1 and Measurement.get(console, anything, self._table(number)).maximum > options.max_width:
            number -= 1
        title = f"{self._made}mean TTFT and hit rate by {self._word}, from 0"
        yield Text(f"{title[:1].upper()}{title[1:]}", style="bold")
        yield self._table(number)
        if len(self._turns) > _MAX_TURNS:
            yield Text(f"{_MAX_TURNS} of {plural(len(self._turns), self._word)}; the report has all", style="dim")
        if number < len(self._cells):
            yield Text(f"{plural(len(self._cells) - number, 'more cell')} in the report", style="dim")

    def _table(self, number: int) -> Table:
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        table.add_column(self._word, justify="right", no_wrap=True)
        for cell in self._cells[:number]:
            label = shortened(self._labels[cell.key], _LABEL)
            table.add_column("".join(c if c.isprintable() else " " for c in label), justify="right", no_wrap=True)
        for turn in _evenly(self._turns):
            table.add_row(str(turn), *(_cell_text(cell, turn) for cell in self._cells[:number]))
        return table


def _evenly(turns: Sequence[int]) -> list[int]:
    """At most _MAX_TURNS of them, the first and the last among them."""
    if len(turns) <= _MAX_TURNS:
        return list(turns)
    return [turns[round(place * (len(turns) - 1) / (_MAX_TURNS - 1))] for place in range(_MAX_TURNS)]


def _cell_text(cell: CellFigures, number: int) -> str:
    turn = next((turn for turn in cell.turns if turn.turn == number), None)
    if turn is None or turn.ttft_s is None:
        return UNKNOWN
    hits = NOT_REPORTED if turn.hit_rate is None else percent(turn.hit_rate)
    return f"{duration(turn.ttft_s.mean)} {hits:>7}"
