"""What a run says of itself whose times are not this machine's own: whose they are, and which curves say nothing."""

from __future__ import annotations

from typing import Any

from harness.records import MAX_LATE_SHARE, AcceleratorFacts, Counters, late_share
from harness.report.axes import Axis, value_text, varied_axes
from harness.results.provenance import Made, is_simulated
from harness.results.summary import CellFigures, Summary

FLAT = "not modelled here: flat by construction"
# Two times that agree to so many digits are one time: a virtual clock's sums differ in the last ones.
_DIGITS = 6


def how_made(summary: Summary) -> Made:
    """How a run's times came to be. Mode storage moves its bytes on a real device, under a simulated engine. With a
    reference accelerator, a real engine waits for a GPU's time. Tiers without an engine are all real."""
    if not is_simulated(summary.engine):
        return "paced" if any(cell.accelerator for cell in summary.cells) else "measured"
    found = [cell.storage for cell in summary.cells if cell.storage]
    if found and all(each.kv for each in found):
        return "measured"
    return "device measured, engine simulated" if found else "simulated"


def in_figures(summary: Summary) -> str:
    """What stands before a metric's name in a table, an axis or a title: 'simulated ', 'paced ', or nothing."""
    return f"{made} " if (made := how_made(summary)) in ("simulated", "paced") else ""


def simulated_notes(summary: Summary) -> list[str]:
    """Sentences that stand before the findings of a simulated or paced run; none of a measured one."""
    made = how_made(summary)
    if made == "measured":
        alone = is_simulated(summary.engine)
        return ["No engine runs: times are those of reading and writing KV in real tiers, and no engine's."] * alone
    if made == "paced":
        return _paced_notes(summary)
    if made != "simulated":
        return ["The storage device is real; the engine and its other tiers are simulated."]
    presets = dict.fromkeys(cell.preset for cell in summary.cells if cell.preset)
    told = [
        f"Simulated with {preset.name}, which stands for {preset.machine} ({preset.date}): a prediction, not a"
        f" measurement. {preset.standing[:1].upper()}{preset.standing[1:]}."
        for preset in presets
    ]
    return told or ["Simulated: a prediction, not a measurement."]


def _paced_notes(summary: Summary) -> list[str]:
    told = [
        f"Paced by {each}: engine, cache server and storage are real; steps{_link(each)} take the time of"
        f" {each.machine}, by constants that were fitted on {each.fitted_on} ({each.date}){_assumed(each)}."
        f"{f' {each.doubt}' if each.doubt else ''}"
        for each in dict.fromkeys(cell.accelerator for cell in summary.cells if cell.accelerator)
    ]
    share = late_share(Counters.of(group.counters) for cell in summary.cells for group in cell.tiers.values())
    if share is None:
        return told
    if share > MAX_LATE_SHARE:
        told.append(
            f"Steps ended {share:.1%} of their time late, more than {MAX_LATE_SHARE:.0%}: this machine was too slow for"
            " this accelerator, and these times are not its. Give the engine a core of its own, or name a slower one."
        )
    return told


def _link(accelerator: AcceleratorFacts) -> str:
    return " and the link to CPU RAM" if accelerator.link == "paced" else ""


def _assumed(accelerator: AcceleratorFacts) -> str:
    """The constants that no time of this GPU shows."""
    return f"; scaled or assumed, not fitted: {', '.join(accelerator.assumed)}" if accelerator.assumed else ""


def flat_axes(summary: Summary) -> list[Axis]:
    """Axes of a simulated sweep along which no time changes, whatever else was varied.

    The preset has no term for such an axis (a chunk size, a file system), or none that this load reaches: a curve along
    it is flat by construction and says nothing of a machine.
    """
    if how_made(summary) != "simulated":
        return []
    return [axis for axis in varied_axes(summary.cells) if _is_flat(summary.cells, axis)]


def flat_notes(summary: Summary) -> list[str]:
    return [
        f"{axis.name} changes no simulated time: the preset has no term for it, or none that this load reaches. Its"
        " curve is flat by construction, and no finding."
        for axis in flat_axes(summary)
    ]


def axis_title(summary: Summary, axis: Axis) -> str:
    """The axis' name, with what a reader has to know of a flat one."""
    return f"{axis.name} ({FLAT})" if axis in flat_axes(summary) else axis.name


def flat_cells(summary: Summary) -> dict[str, str]:
    """Cell key → the key of the first cell that differs from it along flat axes alone: their figures repeat."""
    flat = {axis.key for axis in flat_axes(summary)}
    first: dict[tuple[tuple[str, str], ...], str] = {}
    found = {}
    for cell in summary.cells if flat else ():
        others = tuple((key, value_text(value)) for key, value in cell.overrides.items() if key not in flat)
        if (origin := first.setdefault(others, cell.key)) != cell.key:
            found[cell.key] = origin
    return found


def flat_mark(summary: Summary) -> str:
    """What tables say of them; '' where there are none."""
    names = ", ".join(axis.name for axis in flat_axes(summary))
    return f"{names}: {FLAT}; rows that differ in nothing else repeat each other." if names else ""


def _is_flat(cells: list[CellFigures], axis: Axis) -> bool:
    """Whether cells that differ in this axis alone have the same times; not where no two of them have any."""
    groups: dict[tuple[tuple[str, str], ...], list[dict[str, Any]]] = {}
    for cell in cells:
        others = tuple((key, value_text(value)) for key, value in cell.overrides.items() if key != axis.key)
        if times := _times(cell):
            groups.setdefault(others, []).append(times)
    compared = [group for group in groups.values() if len(group) > 1]
    return bool(compared) and all(times == group[0] for group in compared for times in group)


def _times(cell: CellFigures) -> dict[str, Any]:
    """Mean, median and largest of each latency by tier, rounded."""
    return {
        f"{tier} {name}": tuple(f"{value:.{_DIGITS}g}" for value in (found.mean, found.p50, found.max))
        for tier, figures in cell.tiers.items()
        for name, found in figures.metrics.items()
        if found is not None and name != "send_lag_s"
    }
