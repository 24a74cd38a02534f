"""Compares the rows and figures that two checkouts computed for the same experiments, value by value.

Values are equal or they differ: floats have no tolerance. What a later commit may name differently is in the tables
below; nothing else is forgiven. Fields and figures that only the candidate has are not compared.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

# Keys of the experiment file: the name at the first commit, and the later one. A side is asked which one it accepts.
# Labels of cells and keys of overrides are compared by the first name.
RENAMED_KEYS = (
    ("engines.sim.instances", "deployment.instances"),
    ("engines.sim.routing", "deployment.routing"),
    ("engines.sim.shared", "deployment.shared"),
)
# A row's fields, and the names that they may have instead.
ROW_FIELDS: dict[str, tuple[str, ...]] = {
    "expected_tier": ("expected_state", "state"),
    "expected_hit_tokens": (),
    "verdict": (),
    "scheduled_s": (),
    "sent_s": (),
    "first_chunk_s": (),
    "first_token_s": (),
    "last_token_s": (),
    "token_s": (),
    "prompt_tokens": (),
    "output_tokens": (),
    "cached_tokens": (),
    "session": (),
    "turn": (),
    "instance": (),
}
# Times of rows whose bytes a real disk moved. They are different in each run.
WALL_CLOCK = ("scheduled_s", "sent_s", "first_chunk_s", "first_token_s", "last_token_s", "token_s")
# The places of figures: names of any commit, and the one that they are compared by.
RENAMED_FIGURES = tuple(
    (re.compile(rf"(?<=/)(?:{names})(?=/|$)"), name)
    for names, name in (
        ("l1_hit_tokens|cpu_hit_tokens|hit_tokens/cpu", "hit_tokens/cpu"),
        ("l2_hit_tokens|disk_hit_tokens|hit_tokens/disk", "hit_tokens/disk"),
        ("gpu_hit_tokens|hit_tokens/gpu", "hit_tokens/gpu"),
        ("l2_loaded_chunks|disk_loaded_chunks|loaded_chunks/disk", "loaded_chunks/disk"),
        ("storage_read_bytes|disk_device_read_bytes|device_read_bytes/disk", "device_read_bytes/disk"),
    )
)
# What names an element of a list, in place of its position.
NAMES = ("key", "cell", "metric", "tier", "id")
# Not figures: facts of the moment and the machine, and what has text for keys.
NO_FIGURES = frozenset(["schema", "git", "host", "attempts", "io_pids", "targets", "left_out_reasons", "overrides"])


def canonical(text: str) -> str:
    """A key or label with the first names of the keys in it."""
    for first, later in RENAMED_KEYS:
        text = text.replace(later, first)
    return text


def cell_name(overrides: Mapping[str, Any], key: str) -> str:
    """A cell by what it overrides; by its key where it overrides nothing."""
    if not overrides:
        return canonical(key)
    return json.dumps({canonical(name): value for name, value in overrides.items()}, sort_keys=True)


class Run:
    """A run folder's content: manifest, rows and summary, decoded."""

    def __init__(self, manifest: Mapping[str, Any], rows: Iterable[Mapping[str, Any]], summary: Any) -> None:
        self.rows, self.summary = list(rows), summary
        self.names: dict[str, str] = {}
        self.absent: dict[str, frozenset[str]] = {}
        for cell in manifest["cells"]:
            name = self.names[cell["key"]] = cell_name(cell["overrides"], cell["key"])
            cache = (cell.get("config") or {}).get("cache") or {}
            self.absent[name] = frozenset(t for t in ("cpu", "disk") if t in cache and cache[t] is None) | {"shared"}


def rows_by_name(run: Run) -> dict[tuple[Any, ...], Mapping[str, Any]]:
    """Rows by cell, phase, sample, attempt and id; a running number separates rows with equal names."""
    found: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    seen: Counter[tuple[Any, ...]] = Counter()
    for row in run.rows:
        name = (run.names[row["cell"]], row["phase"], row["sample"], row.get("attempt", 0), row["id"])
        seen[name] += 1
        found[*name, seen[name]] = row
    return found


def row_values(row: Mapping[str, Any], absent: frozenset[str], wall_clock: bool = False) -> dict[str, Any]:
    """What one request got. absent: tiers that its cell does not have, which say the same by 0, null or no entry.

    The text of an error is not compared: that there is one is.
    """
    values: dict[str, Any] = {"failed": row.get("error") is not None}
    for field, others in ROW_FIELDS.items():
        if not (wall_clock and field in WALL_CLOCK):
            name = next((one for one in (field, *others) if one in row), field)
            values[field] = row.get(name) or None if field == "token_s" else row.get(name)
    for tier, tokens in (row.get("tokens_by_tier") or {}).items():
        values[f"{tier} tokens"] = None if tier in absent and not tokens else tokens
    return values


def compare_rows(before: Run, after: Run, wall_clock: bool = False) -> tuple[int, list[str]]:
    """How many rows were compared, and one line for each that is missing, new or different."""
    ours, theirs = rows_by_name(before), rows_by_name(after)
    found = []
    for name in {**ours, **theirs}:
        label = f"cell {name[0]}, {name[1]} sample {name[2]}, request {name[4]}"
        if name not in ours or name not in theirs:
            found.append(f"{label}: {'only in the candidate' if name not in ours else 'missing in the candidate'}")
            continue
        absent = before.absent[name[0]]
        left, right = (row_values(side[name], absent, wall_clock) for side in (ours, theirs))
        odd = [field for field in {**left, **right} if left.get(field) != right.get(field)]
        if odd:
            found.append(f"{label}: " + "; ".join(f"{f} {_told(left.get(f), right.get(f))}" for f in odd[:4]))
    return len({**ours, **theirs}), found


def _told(left: Any, right: Any) -> str:
    """Both values; of two lists of times, the first that differ."""
    if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        number = next(n for n, pair in enumerate(zip(left, right, strict=True)) if pair[0] != pair[1])
        return f"[{number}] {left[number]!r} -> {right[number]!r}"
    return f"{left!r:.80} -> {right!r:.80}"


def figures(content: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """(place, value) of every number, truth value and verdict in a document; null is like no entry."""
    if isinstance(content, Mapping):
        for key, value in content.items():
            if key not in NO_FIGURES:
                yield from figures(value, f"{place}/{canonical(str(key))}")
    elif isinstance(content, list):
        seen: Counter[str] = Counter()
        for item in content:
            name = _name(item)
            seen[name] += 1
            yield from figures(item, f"{place}/{name}#{seen[name]}")
    elif isinstance(content, int | float) or (isinstance(content, str) and place.endswith("/verdict")):
        for pattern, name in RENAMED_FIGURES:
            place = pattern.sub(name, place)
        yield place, content


def _name(item: Any) -> str:
    if not isinstance(item, Mapping):
        return ""
    if "overrides" in item and "key" in item:
        return cell_name(item["overrides"], item["key"])
    return " ".join(canonical(str(item[name])) for name in NAMES if isinstance(item.get(name), str))


def summary_figures(run: Run, absent: Mapping[str, frozenset[str]]) -> dict[str, Any]:
    """The figures of a run's summary, without the zeros of the tiers that are absent from a cell."""
    found = {}
    for place, value in figures(run.summary):
        cell = place.removeprefix("/cells/").partition("#1/tiers/")[0]
        if value != 0 or place.rpartition("/")[2] not in absent.get(cell, ()):
            found[place] = value
    return found


def compare_figures(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[int, list[str]]:
    """How many figures were compared, and one line for each that the candidate lacks or has another value of."""
    found = [
        f"{place}: {value!r} -> {after[place]!r}" if place in after else f"{place}: {value!r} -> missing"
        for place, value in before.items()
        if place not in after or after[place] != value or isinstance(after[place], str) != isinstance(value, str)
    ]
    return len(before), found


def numbers(text: str) -> dict[str, Any]:
    """The numbers of a printed table, by line that has some and position."""
    lines = [re.findall(r"-?\d[\d,]*(?:\.\d+)?", line) for line in text.splitlines()]
    told = [line for line in lines if line]
    return {f"line {n} number {k}": word for n, line in enumerate(told, 1) for k, word in enumerate(line, 1)}
