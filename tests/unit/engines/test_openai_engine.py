"""`--engine openai`: any server, free loads only, and a key that stays where it was."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from msgspec import UNSET

from harness.errors import EngineError, PreflightError, SettingsError
from harness.measure.run import run
from harness.report.refresh import seal
from harness.results.export import request_table
from harness.results.summary import read_summary
from tests.support.paths import ROOT
from tests.unit.measure.test_run_loop import Quiet, measured, request

KEY = "sk-very-secret-0123456789"
WORKLOAD = {"kind": "synthetic", "requests": 40, "prompt_tokens": 513, "hit_rate": 0.5, "concurrency": 4,
            "output_tokens": 3}  # fmt: skip


@pytest.fixture
def server() -> Iterator[str]:
    command = [sys.executable, "-m", "tests.support.instant_server", "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield f"http://127.0.0.1:{process.stdout.readline().split()[1]}"
    process.terminate()
    process.wait()


def settings(url: str, **more: Any) -> dict[str, Any]:
    return {"openai": {"url": url, "model": "any", **more}}


def test_a_free_load_is_measured_and_the_key_is_nowhere(
    tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    engines = settings(server, api_key_env="MY_KEY")
    folder = run(request(tmp_path, engine="openai", engines=engines, workload=WORKLOAD, measure={}), Quiet())
    seal(folder)
    rows = measured(folder)
    assert len(rows) == 40 and all(row.error is None and row.output_tokens == 3 for row in rows)
    assert all(row.sent_s >= row.scheduled_s and row.first_token_s is not None for row in rows)
    assert all(row.verdict is None and row.tokens_by_tier == {} for row in rows)
    for file in folder.rglob("*"):
        assert not file.is_file() or KEY.encode() not in file.read_bytes(), file


def test_several_clients_send_the_load_and_rows_and_summary_name_them(
    tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    found = {}
    for clients in (1, 2):
        (home := tmp_path / str(clients)).mkdir()
        engines = settings(server, api_key_env="MY_KEY", clients=clients)
        found[clients] = run(request(home, engine="openai", engines=engines, workload=WORKLOAD, measure={}), Quiet())
        seal(found[clients])
        assert not any(KEY.encode() in file.read_bytes() for file in found[clients].rglob("*") if file.is_file())
    one, two = (read_summary(folder).cells[0] for folder in found.values())
    assert [(lag.tier, lag.client, lag.n) for lag in two.clients] == [("load", 0, 20), ("load", 1, 20)]
    assert all(0 <= lag.p50 <= lag.p99 for lag in two.clients) and one.clients == ()
    assert b"client" not in (found[1] / "rows.jsonl").read_bytes()
    assert sorted(row.client for row in measured(found[2]) if row.client is not UNSET) == [0] * 20 + [1] * 20
    assert b"client" not in (found[1] / "summary.json").read_bytes() and not list((found[1] / "logs").iterdir())
    columns = [pq.read_schema(folder / "requests.parquet").names for folder in found.values()]
    assert ["client" in names for names in columns] == [False, True]
    assert set(request_table([found[2]])["client"]) == {0, 1} and "client" not in request_table([found[1]])


def test_tiers_are_refused(tmp_path: Path, server: str) -> None:
    with pytest.raises(PreflightError, match="cannot prove"):
        run(request(tmp_path, engine="openai", engines=settings(server)), Quiet())


def test_a_missing_key_and_a_dead_url_are_told(tmp_path: Path) -> None:
    dead = "http://127.0.0.1:9"
    with pytest.raises(SettingsError, match="the environment has no NO_SUCH_KEY"):
        engines = settings(dead, api_key_env="NO_SUCH_KEY")
        run(request(tmp_path, engine="openai", engines=engines, workload=WORKLOAD, measure={}), Quiet())
    assert not (tmp_path / "out").exists()
    with pytest.raises(EngineError, match=r"correct engines\.openai\.url"):
        run(request(tmp_path, engine="openai", engines=settings(dead), workload=WORKLOAD, measure={}), Quiet())
