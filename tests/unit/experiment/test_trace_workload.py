"""What a trace workload asks for is what is sent: its options reach the file's reader, and its limits the load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.experiment.loads import FreeLoad, free_load
from harness.experiment.model import Experiment
from traces.errors import SpecError
from traces.load import Send, WaitUntil

CALLS = [{"t": 4.0 * n, "type": "s", "in": 64, "out": 3, "hash_ids": [n], "think_time": 1.5} for n in range(3)]


def loaded(trace: str, seed: int = 5, **options: Any) -> FreeLoad:
    workload = {"kind": "trace", "trace": trace, **options}
    content = {"name": "t", "seed": seed, "model": "tiny-llama", "workload": workload, "cache": {"gpu": "1GiB"}}
    return free_load(Experiment.model_validate(content))


@pytest.fixture
def sessions(tmp_path: Path) -> str:
    path = tmp_path / "sessions.jsonl"
    lines = (json.dumps({"id": f"{n}", "block_size": 64, "requests": CALLS}) + "\n" for n in range(6))
    path.write_text("".join(lines), encoding="utf-8")
    return str(path)


def test_sessions_without_times_take_turns_at_the_places(sessions: str) -> None:
    found = loaded(sessions, active_sessions=2, conversations=4)
    load = found.schedule(found.requests)
    first, second = load.next(0.0), load.next(0.0)
    assert isinstance(first, Send) and isinstance(second, Send)
    assert [first.request.session, second.request.session] == ["0", "1"]
    load.completed(first.request.id, 10.0)
    assert load.next(10.0) == WaitUntil(11.5), "the session thinks, and keeps its place"
    assert len(found.requests) == 12


def test_the_seed_says_when_conversations_begin(sessions: str) -> None:
    begins = [[r.at_s for r in loaded(sessions, seed, rate_per_s=2.0).requests] for seed in (5, 5, 6)]
    assert begins[0] == begins[1] != begins[2]


def test_a_trace_without_conversations_has_no_places_for_them() -> None:
    with pytest.raises(SpecError, match=r"active_sessions: the trace tiny_conversation has no conversations \(3\); "):
        loaded("tiny_conversation", active_sessions=3)
