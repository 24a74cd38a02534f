"""Loads that quote the engine's own answers, from the file to the rows: what is hit, and who is refused."""

from pathlib import Path
from typing import Any

import pytest

from harness.errors import ConfigError, PreflightError
from harness.experiment.loads import free_load
from harness.experiment.read import load_experiment
from harness.measure.run import run
from harness.results.manifest import read_manifest
from tests.unit.measure.test_run_loop import Quiet, measured, request
from traces.request import RequestRecord, reply_stream

CACHE = {"gpu": "1GiB", "block_tokens": 16, "chunk_tokens": 64}
ROUNDS: dict[str, Any] = {
    "kind": "rounds",
    "clients": 3,
    "rounds": 4,
    "first_tokens": 100,
    "turn_tokens": 50,
    "output_tokens": 40,
    "parallel": 1,
    "order": "fifo",
}
SESSIONS = {"kind": "sessions", "sessions": 3, "turns": 4, "user_tokens": 50, "output_tokens": 40, "concurrency": 1}
QA = {"kind": "qa", "users": 3, "rounds": 4, "rate_per_s": 1.0, "history_tokens": 100, "question_tokens": 50,
      "output_tokens": 40, "system_tokens": 0, "duration": "60s"}  # fmt: skip


def rows_of(tmp_path: Path, workload: dict[str, Any], answers: str) -> list[RequestRecord]:
    folder = tmp_path / answers
    folder.mkdir()
    asked = workload | {"answers": answers}
    return measured(run(request(folder, engine="sim", workload=asked, measure={}, cache=CACHE), Quiet()))


@pytest.mark.parametrize("workload", [ROUNDS, SESSIONS, QA], ids=["rounds", "sessions", "qa"])
def test_quoted_answers_hit_what_was_decoded_and_others_do_not(tmp_path: Path, workload: dict[str, Any]) -> None:
    quoted, synthetic = (rows_of(tmp_path, workload, answers) for answers in ("quoted", "synthetic"))
    sent = {(row.id, row.turn, row.prompt_tokens) for row in quoted}
    assert sent == {(row.id, row.turn, row.prompt_tokens) for row in synthetic}, "only what an answer is differs"
    for rows, answered in ((quoted, 40), (synthetic, 1)):
        held: dict[str | None, int] = {}
        for row in sorted(rows, key=lambda row: row.sent_s):
            assert row.error is None and row.cached_tokens == held.get(row.session, 0) // 16 * 16, row.id
            # The KV of an answer's last token is never computed.
            held[row.session] = row.prompt_tokens + answered - 1
    assert sum(row.cached_tokens or 0 for row in quoted) > sum(row.cached_tokens or 0 for row in synthetic)


def test_a_prompt_names_the_requests_that_it_quotes(tmp_path: Path) -> None:
    for workload in (ROUNDS, SESSIONS, QA):
        request(tmp_path, workload=workload | {"answers": "quoted"}, measure={}, cache=CACHE)
        loaded = free_load(load_experiment(tmp_path / "experiment.yaml").experiment)
        ids = {one.id for one in loaded.requests}
        for one in loaded.requests:
            streams = [segment.hash_id for segment in one.prompt if segment.tokens == 40]
            assert [reply_stream(name) for name in one.quotes] == streams[len(streams) - len(one.quotes) :]
            assert set(one.quotes) <= ids and (one.quotes or one.turn == 0 or workload is QA)


@pytest.mark.parametrize(
    ("engine", "cure"),
    [
        ("fake", "token by token; use answers synthetic"),
        ("openai", "token by token; set engines.openai.token_ids true if the server takes return_token_ids"),
    ],
)
def test_an_engine_that_does_not_tell_its_answers_is_refused(tmp_path: Path, engine: str, cure: str) -> None:
    engines = {"openai": {"url": "http://127.0.0.1:9", "model": "m"}}
    asked = ROUNDS | {"answers": "quoted"}
    with pytest.raises(PreflightError) as refused:
        run(request(tmp_path, engine=engine, workload=asked, measure={}, cache=CACHE, engines=engines), Quiet())
    assert "cell base: answers quoted: engine" in str(refused.value) and cure in str(refused.value)
    assert "\n" not in str(refused.value) and not (tmp_path / "out").exists()


def test_answers_that_no_load_knows_are_refused(tmp_path: Path) -> None:
    for workload, wrong in ((ROUNDS, "real"), (SESSIONS, "none"), (QA, "none")):
        with pytest.raises(ConfigError, match=rf"workload\.answers: '{wrong}' is refused"):
            request(tmp_path, workload=workload | {"answers": wrong}, measure={}, cache=CACHE)


def test_a_load_that_quotes_does_not_go_on_after_an_interruption(tmp_path: Path) -> None:
    """Its answers were not kept. (The simulator begins again instead, and gives the same ones.)"""
    asked = ROUNDS | {"answers": "quoted"}
    folder = run(request(tmp_path, engine="sim", workload=asked, measure={}, cache=CACHE), Quiet())
    before = (folder / "rows.jsonl").read_bytes()
    manifest = (folder / "manifest.json").read_text().replace('"complete"', '"started"')
    (folder / "manifest.json").write_text(manifest)
    run(request(tmp_path, engine="sim", resume=folder, workload=asked, measure={}, cache=CACHE), Quiet())
    assert (folder / "rows.jsonl").read_bytes() == before and read_manifest(folder).status == "complete"
    (folder / "manifest.json").write_text(manifest)
    engines = {"openai": {"url": "http://127.0.0.1:9", "model": "m", "token_ids": True}}
    again = request(tmp_path, engine="openai", resume=folder, workload=asked, measure={}, cache=CACHE, engines=engines)
    with pytest.raises(PreflightError, match=r"cell base: 12 requests of a load that quotes .* start a new run"):
        run(again, Quiet())
