"""Reads experiment files: YAML, overrides, sizes and sweep axes in; checked Experiments out.

    plan = load_experiment(Path("configs/experiments/quickstart.yaml"), overrides=["seed=2"])
    plan.experiment      # the point that `run` measures
    plan.cells()         # every point that `sweep` measures

Every complaint is one line: FILE:LINE: KEY: what is wrong; the cure.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml
from pydantic import BaseModel, ValidationError

from harness.errors import ConfigError
from harness.experiment.deployment import MOVED_KEYS
from harness.experiment.fields import PATTERN_WORDS, Strict
from harness.experiment.model import Experiment
from harness.experiment.report import reference_cells
from harness.experiment.workloads import WORKLOAD_KINDS
from harness.records import Origin
from simulator.models import CONFIGS
from traces.tiers import all_states, all_tiers

_OWN_KEYS = ("sweep", "sizes")
_MAX_CELLS = 10_000
_MAX_FILE_BYTES = 4 * 2**20


class Cell(msgspec.Struct, frozen=True):
    """One point of a sweep: the overrides that make it, and the experiment they give."""

    key: str
    overrides: dict[str, Any]
    experiment: Experiment


class Plan(msgspec.Struct, frozen=True):
    """An experiment file as read: its base point and its sweep axes.

    axes: by key, its values; an axis of named values has their names. named: what each such name sets.
    """

    path: Path
    raw: dict[str, Any]
    lines: dict[tuple[str, ...], int]
    axes: dict[str, tuple[Any, ...]]
    named: dict[str, dict[str, dict[str, Any]]]
    experiment: Experiment

    def origin(self) -> Origin:
        """Which file this was, for the manifest."""
        return Origin(path=str(self.path), sha256=hashlib.sha256(self.path.read_bytes()).hexdigest())

    def cells(self) -> list[Cell]:
        """Every combination of the axes, the last axis fastest; one cell without axes."""
        if not self.axes:
            return [self.base_cell()]
        return [self._cell(key, overrides) for key, overrides in self.points()]

    def points(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each cell's key and overrides."""
        for point in itertools.product(*self.axes.values()):
            overrides = dict(zip(self.axes, point, strict=True))
            yield ",".join(f"{key}={value}" for key, value in overrides.items()), overrides

    def base_cell(self) -> Cell:
        return Cell("base", {}, self.experiment)

    def _cell(self, label: str, overrides: dict[str, Any]) -> Cell:
        raw, settings = copy.deepcopy(self.raw), dict[str, Any]()
        for axis, value in overrides.items():
            settings |= self.named[axis][value] if axis in self.named else {axis: value}
        for key, value in settings.items():
            _assign(raw, key, value, self.path)
        _drop_with_null_tiers(raw, settings, self.experiment)
        try:
            return Cell(label, overrides, _validated(raw, self.path, self.lines))
        except ConfigError as error:
            raise ConfigError(f"{error} (in the sweep's cell {label})") from None


def load_experiment(path: Path, overrides: Iterable[str] = (), size: str | None = None) -> Plan:
    """Reads one experiment file. overrides: `key.path=value`, values in YAML; size: one of the file's `sizes`.

    Raises ConfigError.
    """
    path = shipped(path)
    raw, lines = _read(path)
    sizes, axes = raw.pop("sizes", None) or {}, raw.pop("sweep", None) or {}
    if not isinstance(axes, dict):
        raise ConfigError(f"{path}:{lines.get(('sweep',), 1)}: sweep: must map a key to a list of values")
    for key, value in _size_overrides(path, sizes, size).items():
        if key.startswith("sweep."):
            axes = _with_axis(axes, key.removeprefix("sweep."), value, path)
        else:
            _assign(raw, key, value, path)
    for override in overrides:
        key, value = _parse_override(override)
        if key.startswith("sweep."):
            axes = _with_axis(axes, key.removeprefix("sweep."), value, Path("--set"))
            continue
        axes = {axis: values for axis, values in axes.items() if axis != key}
        _assign(raw, key, value, Path("--set"))
    experiment = _validated(raw, path, lines)
    named = {str(axis): values for axis, values in axes.items() if isinstance(values, dict)}
    plan = Plan(path, raw, lines, _axes(path, axes, lines), named, experiment)
    _check_cell_count(plan)
    _check_against(plan)
    return plan


def shipped(path: Path) -> Path:
    """The file of a shipped experiment or validation, for its plain name; any other path as it is."""
    if path.suffix or len(path.parts) != 1 or path.exists():
        return path
    files = (CONFIGS / folder / f"{path}.yaml" for folder in ("experiments", "validation"))
    return next((file for file in files if file.is_file()), path)


def _meant(path: Path) -> str:
    """The shipped name that a wrong one begins, or is nearly."""
    names = sorted(file.stem for file in (CONFIGS / "experiments").glob("*.yaml"))
    begun = [name for name in names if name.startswith(path.stem)]
    near = begun[:1] or difflib.get_close_matches(path.stem, names, n=1)
    return f"did you mean {near[0]}? " if near else ""


def _read(path: Path) -> tuple[dict[str, Any], dict[tuple[str, ...], int]]:
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ConfigError(f"{path}: larger than {_MAX_FILE_BYTES} bytes; is this an experiment file?")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file; {_meant(path)}`harness list experiments` shows those that ship"
        ) from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder; name the experiment file in it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); give a readable UTF-8 file") from None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        lines = _lines(node, path)
        raw = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else f"{path}"
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{where}: not valid YAML ({problem}); check indentation and quotes there") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply; an experiment needs no more than five levels") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: holds no mapping; start with `name: …`, see configs/experiments/quickstart.yaml")
    return raw, lines


def _lines(node: Any, path: Path, place: tuple[str, ...] = ()) -> dict[tuple[str, ...], int]:
    """Key path → line. Refuses a key given twice, which YAML readers silently let the last one win, and aliases."""
    found: dict[tuple[str, ...], int] = {}
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            key = (*place, str(key_node.value))
            if key in found:
                raise ConfigError(f"{path}:{key_node.start_mark.line + 1}: {'.'.join(key)}: given twice; keep one")
            found[key] = key_node.start_mark.line + 1
            if len(key) > 12:
                raise RecursionError
            found |= _lines(value_node, path, key)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            found |= _lines(item, path, (*place, str(index)))
    return found


def _size_overrides(path: Path, sizes: Any, size: str | None) -> Mapping[str, Any]:
    if not isinstance(sizes, dict) or not all(isinstance(v, dict) for v in sizes.values()):
        raise ConfigError(f"{path}: sizes: must map a name to `key: value` overrides")
    if size is None:
        return {}
    if size not in sizes:
        known = ", ".join(map(str, sizes)) or "none"
        raise ConfigError(f"{path}: has no size {size!r}; its sizes: {known}")
    chosen: Mapping[str, Any] = sizes[size]
    return chosen


def _parse_override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text}: not KEY=VALUE; write it like --set workload.prompt_tokens=4097")
    try:
        return key.strip(), yaml.safe_load(value)
    except yaml.YAMLError:
        raise ConfigError(f"--set {text}: the value is not valid YAML; quote it") from None


def _assign(raw: dict[str, Any], key: str, value: Any, source: Path) -> None:
    *parents, last = str(key).split(".")
    if (parents and parents[0] in _OWN_KEYS) or (last in _OWN_KEYS and not parents):
        raise ConfigError(
            f"{source}: {key}: sizes and all axes at once cannot be overridden; name one axis, e.g. sweep.seed=[1, 2]"
        )
    target = raw
    for part in parents:
        if target.get(part) is None:
            target[part] = {}
        target = target[part]
        if not isinstance(target, dict):
            raise ConfigError(f"{source}: {key}: {part} holds a value, not a section; shorten the key")
    target[last] = value


def _drop_with_null_tiers(raw: dict[str, Any], overrides: Mapping[str, Any], base: Experiment) -> None:
    """A cell whose axis sets a tier to null also loses what needs that tier, so that a cache can be swept off and on.

    KV reaches a pool, a disk and a store through the RAM next to the engine: without that there is none of them, and no
    eviction.
    What an axis itself sets stays as it is.
    """
    gone = {tier.name for tier in all_tiers() if overrides.get(f"cache.{tier.name}", ...) is None}
    if not gone:
        return
    nearest = "cpu" if base.cache.cpu or not base.cache.pool else "pool"
    for tier in ("pool", "disk", "remote") if nearest in gone and base.cache.gpu else ():
        if not any(key.startswith(f"cache.{tier}") for key in overrides):
            gone.add(tier)
            raw["cache"][tier] = None
    for tier, key in (("cpu", "cache.eviction"), ("disk", "storage")):
        *section, name = key.split(".")
        place = raw[section[0]] if section else raw
        swept = any(f"{axis}.".startswith(f"{key}.") for axis in overrides)
        if tier in gone and place.get(name) is not None and not swept:
            place[name] = None
    measure = raw.get("measure") or {}
    if measure.get("must_reach") in gone:
        measure["must_reach"] = None
    served = {state.name for state in all_states() if not state.needs & gone}
    left = [name for name in measure.get("tiers") or [] if name in served]
    if left and "measure.tiers" not in overrides:
        measure["tiers"] = left


def _with_axis(axes: Mapping[str, Any], axis: str, values: Any, source: Path) -> dict[str, Any]:
    """The axes with one of them replaced; null removes it. Of an axis of named values, a list of names chooses some."""
    known = axes.get(axis)
    if values is None:
        return {other: kept for other, kept in axes.items() if other != axis}
    if isinstance(known, dict) and isinstance(values, list):
        if absent := [name for name in values if name not in known]:
            raise ConfigError(f"{source}: sweep.{axis} has no {absent[0]!r}; it has {', '.join(map(str, known))}")
        values = {name: known[name] for name in values}
    return {**axes, axis: values}


def _axes(path: Path, axes: Mapping[str, Any], lines: Mapping[tuple[str, ...], int]) -> dict[str, tuple[Any, ...]]:
    for key, values in axes.items():
        where = f"{path}:{lines.get(('sweep', str(key)), 1)}: sweep.{key}"
        if isinstance(values, dict) and not all(isinstance(settings, dict) for settings in values.values()):
            raise ConfigError(f"{where}: must map each name to `key: value` settings, e.g. fast: {{cache.cpu: 8GiB}}")
        if not isinstance(values, list | dict) or not values:
            raise ConfigError(f"{where}: must be a list with at least one value, e.g. [1, 2]")
        if len({repr(v) for v in values}) != len(values):
            raise ConfigError(f"{where}: names a value twice; every point is measured once")
    return {str(key): tuple(values) for key, values in axes.items()}


def _check_cell_count(plan: Plan) -> None:
    count = 1
    for values in plan.axes.values():
        count *= len(values)
    if count > _MAX_CELLS:
        raise ConfigError(f"{plan.path}: the sweep has {count} points; at most {_MAX_CELLS}: shorten an axis")


def _check_against(plan: Plan) -> None:
    """A sweep has the cell that its report holds the others against."""
    against, points = plan.experiment.report.against, dict(plan.points())
    if against is None or len(points) < 2 or reference_cells(points, against):
        return
    where = f"{plan.path}:{plan.lines.get(('report', 'against'), 1)}: report.against"
    some = [str(value) for values in plan.axes.values() for value in values][:6]
    raise ConfigError(
        f"{where}: {against} is no cell's key and no value of one axis alone; name one, e.g. {', '.join(some)}, or null"
    )


def _validated(raw: dict[str, Any], path: Path, lines: Mapping[tuple[str, ...], int]) -> Experiment:
    try:
        return Experiment.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(_one_line(error, path, lines)) from None


def _one_line(error: ValidationError, path: Path, lines: Mapping[tuple[str, ...], int]) -> str:
    # A mistyped key also leaves its right name missing: the typo is the cause, and comes first.
    problems = sorted(error.errors(include_url=False), key=lambda problem: problem["type"] != "extra_forbidden")
    first = problems[0]
    place = _place(first["loc"])
    line = next((lines[place[:n]] for n in range(len(place), 0, -1) if place[:n] in lines), None)
    where = f"{path}:{line}" if line else f"{path}"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    key = f"{'.'.join(place)}: " if place else ""
    return f"{where}: {key}{_explain(first, place)}{more}".replace("\n", " ")


def _place(loc: tuple[int | str, ...]) -> tuple[str, ...]:
    """A pydantic location as a key path: without the tag that names the workload's kind, and without types, which
    pydantic names where a value may have one of several."""
    parts = [part for part in map(str, loc) if "[" not in part]
    if len(parts) > 1 and parts[0] == "workload" and parts[1] in WORKLOAD_KINDS:
        del parts[1]
    return tuple(parts)


def _explain(problem: Any, place: tuple[str, ...]) -> str:
    kind, value = problem["type"], problem["input"]
    shown = repr(value) if not isinstance(value, dict | list) else type(value).__name__
    if len(shown) > 80:
        shown = f"{shown[:77]}…"
    if kind == "extra_forbidden":
        if ".".join(place[:-1]) == "engines.sim" and place[-1] in MOVED_KEYS:
            return f"stands in a section of its own now; write deployment.{place[-1]}"
        known = _known_keys(Experiment)
        if place[-1] in known:
            return "unknown key here: another section or kind has it; move it there, or remove it"
        near = difflib.get_close_matches(place[-1], known, n=1)
        return "unknown key; " + (f"did you mean {near[0]!r}?" if near else "remove it")
    if kind == "missing":
        return "is missing; add it"
    if kind == "value_error":
        return str(problem["ctx"]["error"])
    if kind == "string_pattern_mismatch":
        return f"{shown} is refused; {PATTERN_WORDS[problem['ctx']['pattern']]}"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return f"needs kind: one of {', '.join(WORKLOAD_KINDS)}"
    return f"{shown} is refused: {_lower(problem['msg'])}; correct the value"


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _known_keys(model: type[BaseModel]) -> set[str]:
    """All keys of any section: what a mistyped key may have meant."""
    sections: list[type[BaseModel]] = [model, Strict]
    for section in sections:
        sections += section.__subclasses__()
    return {name for section in sections for name in section.model_fields}


def changed(experiment: Experiment, **sections: dict[str, Any]) -> Experiment:
    """The experiment with some keys of its sections replaced, checked anew."""
    config = experiment.model_dump(mode="json")
    for section, values in sections.items():
        config[section] = config[section] | values
    return Experiment.model_validate_json(msgspec.json.encode(config), context={"resolved": True})
