"""Classes of service: shares, who goes first, and a verdict for each class."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.errors import ConfigError
from harness.experiment.loads import free_load
from harness.experiment.read import load_experiment
from harness.measure.run import RunRequest, run
from harness.report.goals import class_lines, goal_rows
from harness.report.refresh import seal
from harness.results.export import request_table
from harness.results.folder import read_rows
from tests.unit.measure.test_run_loop import Quiet, measured
from traces.load import Blocked, Done, Load, Send, WaitUntil
from traces.request import Request, Segment

CONFIG: dict[str, Any] = {
    "name": "classes",
    "workload": {
        "kind": "sessions", "sessions": 400, "turns": 1, "user_tokens": 64, "output_tokens": 4, "concurrency": 2,
        "classes": "mlperf",
    },
    "cache": {"gpu": "256MiB"},
}  # fmt: skip
CLASSES = [
    {"name": "first", "share": 1, "priority": 0, "goals": ["ttft_p50<10s"]},
    {"name": "last", "share": 3, "priority": 5, "goals": ["ttft_p50<1us", "e2e_p90<1h"]},
]


def loaded(folder: Path, **workload: Any) -> Any:
    path = folder / "classes.yaml"
    path.write_text(yaml.safe_dump(CONFIG | {"workload": CONFIG["workload"] | workload}))
    return load_experiment(path).experiment


def test_conversations_have_their_shares_and_turns_stay_in_a_class(tmp_path: Path) -> None:
    requests = free_load(loaded(tmp_path, sessions=2000, turns=2, user_tokens=8)).requests
    by_session: dict[str | None, set[str | None]] = {}
    for one in requests:
        by_session.setdefault(one.session, set()).add(one.service)
    assert all(len(found) == 1 for found in by_session.values())
    counts = Counter(next(iter(found)) for found in by_session.values())
    # Three standard deviations of a binomial share.
    for name, share in {"interactive": 0.15, "responsive": 0.35, "batch": 0.5}.items():
        assert abs(counts[name] / 2000 - share) < 3 * (share * (1 - share) / 2000) ** 0.5
    assert {(one.service, one.priority) for one in requests} == {("interactive", 0), ("responsive", 1), ("batch", 2)}
    assert requests == free_load(loaded(tmp_path, sessions=2000, turns=2, user_tokens=8)).requests
    assert {one.service for one in free_load(loaded(tmp_path, classes=[])).requests} == {None}


def sent(load: Load) -> list[str]:
    """Each request takes a second."""
    order: list[str] = []
    flying: list[tuple[float, str]] = []
    now_s = 0.0
    while not isinstance(action := load.next(now_s), Done) or flying:
        if isinstance(action, Send):
            order.append(action.request.id)
            flying.append((now_s + 1, action.request.id))
            continue
        if isinstance(action, WaitUntil) and (not flying or action.at_s < flying[0][0]):
            now_s = action.at_s
            continue
        assert flying or not isinstance(action, Blocked)
        now_s, name = flying.pop(0)
        load.completed(name, now_s)
    return order


def asked(name: str, priority: int, at_s: float | None = None) -> Request:
    return Request(id=name, prompt=(Segment(1, 8),), output_tokens=1, priority=priority, at_s=at_s)


def test_of_all_that_waits_the_lowest_number_goes_first() -> None:
    one = [asked("c", 2), asked("a", 0), asked("b", 1), asked("d", 2)]
    assert sent(Load(one, concurrency=1)) == ["a", "b", "c", "d"]
    timed = [asked("c", 2, 0.0), asked("d", 2, 0.1), asked("a", 0, 0.5), asked("b", 1, 0.2), asked("e", 0, 9.0)]
    assert sent(Load(timed, concurrency=1)) == ["c", "a", "b", "d", "e"]
    mixed = [asked("x", 1), asked("t", 1, 0.0), asked("y", 0)]
    assert sent(Load(mixed, concurrency=1)) == ["y", "t", "x"]
    assert sent(Load([asked(name, 3) for name in "cab"], concurrency=1)) == ["c", "a", "b"]


def test_each_class_has_its_figures_and_its_verdicts(tmp_path: Path) -> None:
    changes = {**CONFIG, "workload": CONFIG["workload"] | {"classes": CLASSES}}
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(changes))
    plan = load_experiment(path)
    asked_of = RunRequest(
        name="classes", cells=plan.cells(), engine="sim", experiment=plan.origin(), folder=tmp_path / "out"
    )
    folder = run(asked_of, Quiet())
    summary, rows = seal(folder), measured(folder)
    [cell] = summary.cells
    counts = Counter(row.service for row in rows)
    assert set(counts) == {"first", "last"}
    assert {name: found.n for name, found in cell.classes.items() if found} == counts
    assert [(row.tier, row.goal, row.level) for row in goal_rows(summary)] == [
        ("first", "ttft_p50<10s", "good"), ("last", "ttft_p50<1us", "bad"), ("last", "e2e_p90<1h", "good"),
    ]  # fmt: skip
    assert [line.split(":")[1].strip() for line in class_lines(summary)] == ["class first", "class last"]
    assert "class first" in (folder / "report.html").read_text()
    # All are ready from the start: the last class is sent after all of the first.
    by_class = {name: [row.sent_s for row in rows if row.service == name] for name in counts}
    assert max(by_class["first"]) <= min(by_class["last"])
    assert list(request_table([folder])["service"]) == [row.service for row in read_rows(folder)]


@pytest.mark.parametrize(
    ("classes", "words"),
    [
        ("gold", "'gold' is no set of classes; use mlperf, or list them"),
        ([{"name": "a"}, {"name": "a"}], "names a twice"),
        ([{"name": "a", "share": 0}], "workload.classes.0.share"),
        ([{"name": "a", "goals": ["e2e_p95<5"]}], "write it like 30s"),
        ([{"name": "a", "goals": ["gpu:e2e_p95<5s"]}], "leave the state out"),
        ([{"name": "a", "priority": -1}], "workload.classes.0.priority"),
    ],
)
def test_bad_classes_are_refused(tmp_path: Path, classes: Any, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        loaded(tmp_path, classes=classes)
    assert words in str(refused.value) and "\n" not in str(refused.value)
