"""The load loop comes before cache servers on its core, where it cannot keep that core busy."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.engines import ENGINES
from harness.engines.fake.engine import FakeEngine
from harness.experiment.fields import Cores
from harness.measure.run import run
from tests.unit.measure.test_run_loop import Quiet, request

CORE = min(os.sched_getaffinity(0))
LOAD = {"kind": "synthetic", "requests": 4, "prompt_tokens": 513, "prefixes": 4}


@pytest.fixture
def sent_first(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each replay, of an engine whose cache server has the client's core: whether the loop came first."""
    first, sent = False, []

    @contextlib.contextmanager
    def before_others() -> Iterator[None]:
        nonlocal first
        first = True
        yield
        first = False

    class Watching(FakeEngine):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.capabilities = msgspec.structs.replace(self.capabilities, virtual_time=False)

        async def replay(self, load: Any, emit: Any) -> None:
            if load.requests[0].id.split("-")[0] != "warm":
                sent.append(first)
            await super().replay(load, emit)

    monkeypatch.setattr("harness.measure.cell.before_others", before_others)
    monkeypatch.setattr("harness.engines.fake.engine.FakeEngine", Watching)
    pinned = dataclasses.replace(ENGINES["fake"], cores=lambda _: Cores(engine=(CORE,), client=(CORE,)))
    monkeypatch.setitem(ENGINES, "fake", pinned)
    return sent


@pytest.mark.parametrize(
    ("given", "first"),
    [
        ({"workload": LOAD | {"concurrency": 1}, "measure": {}}, [True]),
        ({"workload": LOAD | {"concurrency": 2}, "measure": {}}, [False]),
        ({"measure": {"tiers": ["gpu"], "samples": 2}}, [True, True]),
    ],
)
def test_a_load_of_one_request_at_a_time_and_a_tiers_sample_come_first(
    tmp_path: Path, sent_first: list[bool], given: dict[str, Any], first: list[bool]
) -> None:
    """Seen: a cache server's write of 25 MB held up the next request, 159 ms in place of 152."""
    run(request(tmp_path, model="tiny-llama", **given), Quiet())
    assert sent_first == first
