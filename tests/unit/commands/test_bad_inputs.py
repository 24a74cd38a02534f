"""Bad inputs to the benchmark's commands: one line on stderr with what, where and the cure, exit code 2, no folder."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from harness.commands.app import main
from harness.results.capacity import Capacity, CapacityAnswer, write_capacity

SUITE, SUBMIT = "harness suite mlperf --only cpu --out out", "harness run mlperf_submission --engine sim --out out"
SEARCH = "harness capacity mlperf_suite --engine sim --out out --goal 'e2e_p95<5s'"
PERSONA = "name: a, context_tokens: [32, 64], output_tokens: [1, 8]"

# A line, what it says is wrong and where, and words of the cure.
LINES = [
    # sizes
    (f"{SUITE} --set cache.cpu=4", "cache.cpu: 4 is not a size", "write it like 8GiB"),
    (f"{SUITE} --set cache.cpu=4gib", "cache.cpu: '4gib'", "did you mean '4GiB'?"),
    (f"{SUITE} --set cache.cpu=-4GiB", "cache.cpu: '-4GiB' is negative", "above zero"),
    (f"{SUITE} --set cache.cpu=4s", "cache.cpu: '4s' is not a size", "write it like 8GiB"),
    (f"{SUBMIT} --set cache.disk.capacity=0B", "capacity 0", "cache"),
    (f"{SUBMIT} --set cache.disk.capacity=512KiB", "cache.disk", "enlarge"),
    (f"{SUBMIT} --set cache.disk=null", "mode tiers", "cache."),
    (f"{SUBMIT} --set cache.cpu=1MiB --set cache.disk=null", "cache.cpu", "enlarge"),
    (f"{SUBMIT} --set cache.disk.path=/no/such/place", "/no/such/place", "cache.disk"),
    (f"{SUBMIT} --set cache.disk.capacity=900TiB", "cache.disk", "free"),
    (f"{SUBMIT} --set cache.chunk_tokens=40", "chunk_tokens", "multiple"),
    # times
    (f"{SUITE} --set workload.duration=20", "workload.duration: 20 is not a time", "write it like 30s"),
    (f"{SUITE} --set workload.duration=1s", "workload.warm_up", "longer workload.duration"),
    (f"{SUITE} --set workload.duration=0s --set workload.warm_up=null", "workload.duration", "longer than 0 s"),
    (f"{SUBMIT} --set engines.sim.tiers.token_time=2", "engines.sim.tiers.token_time", "write it like 30s"),
    # shares and ranges
    (f"{SUITE} --set workload.new_conversation=20", "workload.new_conversation", "less than or equal to 1"),
    (f"{SUITE} --set workload.new_conversation=20%", "workload.new_conversation", "'20%'"),
    (f"{SUITE} --set 'workload.system={{share: 2}}'", "workload.system.share", "less than or equal to 1"),
    (f"{SUITE} --set 'workload.documents={{share: -1}}'", "workload.documents.share", "greater than or equal to 0"),
    (f"{SUITE} --set 'workload.personas=[{{{PERSONA}, share: 0}}]'", "workload.personas.0.share", "greater than 0"),
    (f"{SUITE} --set engines.sim.tiers.tier_share=80", "engines.sim.tiers.tier_share", "less than or equal to 1"),
    (
        f"{SUITE} --set 'workload.personas=[{{name: a, context_tokens: [64, 32], output_tokens: [1, 8]}}]'",
        "context_tokens of a",
        "low <= high",
    ),
    # personas, users, models
    (f"{SUITE} --set workload.personas=robots", "'robots' is no set of personas", "use mlperf or mixed"),
    (f"{SUITE} --set 'workload.personas=[{{name: a}}]'", "workload.personas.0.context_tokens: is missing", "add it"),
    (f"{SUITE} --set workload.personas=[]", "workload.personas: is empty", "name at least one"),
    (f"{SUITE} --set 'workload.personas=[{{{PERSONA}}}, {{{PERSONA}}}]'", "workload.personas", "twice"),
    (f"{SUITE} --set workload.users=0", "workload.users: 0", "greater than or equal to 1"),
    (f"{SUITE} --set workload.users=many", "workload.users: 'many'", "integer"),
    (f"{SUITE} --set model=llama-9", "llama-9: configs/models has no file of that name", "it has deepseek-v3"),
    (f"{SUBMIT} --set engines.sim.tiers.max_writes=-1", "engines.sim.tiers.max_writes: -1", "or equal to 0"),
    (f"{SUBMIT} --set engines.sim.tiers.entry=page", "engines.sim.tiers.entry: 'page'", "'chunk' or 'turn'"),
    (f"{SUBMIT} --set workload.user=5", "workload.user: unknown key", "move it there, or remove it"),
    (f"{SUBMIT} --set 'workload={{kind: trace, trace: /no.json}}'", "no such trace file (/no.json)", "check the path"),
    # tests, sizes and folders
    ("harness suite mlperf --only tape --out out", "--only tape: is no test", "use some of gpu, cpu"),
    ("harness suite mlperf --size huge --out out", "huge", "its sizes: full"),
    ("harness suite mlperf --only cpu --out taken", "--out taken: exists already", "choose another folder"),
    ("harness suite storage", "storage", "mlperf"),
    # targets
    ("harness capacity mlperf_suite --engine sim --out out", "--mode slo: needs a target", "add --goal"),
    (f"{SEARCH} --goal 'e2e_p95<5'", "'5' is not a time", "write it like 30s"),
    (f"{SEARCH} --goal 'e2e_p95>5s'", "is no goal", "write it like ttft_p90<500ms"),
    (f"{SEARCH} --goal 'e2e_p42<5s'", "is no goal", "mean, p50, p90, p95, p99"),
    (f"{SEARCH} --goal 'throughput>200'", "is no goal", "throughput>200tokens/s"),
    (f"{SEARCH} --goal 'tape:e2e_p95<5s'", "'tape' is no state", "use one of"),
    (f"{SEARCH} --goal fast", "'fast' is no goal", "write it like"),
    (f"{SEARCH} --key workload.user", "--key workload.user: is no whole number", "workload.users"),
    (f"{SEARCH} --most 2", "--most 2", "give a --most above it"),
    (f"{SEARCH} --tolerance 5", "--tolerance 5", "a share"),
    (f"{SEARCH} --repeats 1", "--repeats 1", "2 repeats or more"),
    (f"{SEARCH} --against taken", "taken", "name a run's folder"),
    ("harness capacity quickstart --engine sim --goal 'ttft_p95<1s' --key workload.concurrency", "prefix", "use e.g."),
    # exports
    ("harness export --csv all.csv", "no folder given", "name one"),
    ("harness export taken --csv all.csv", "taken", "name a run's folder"),
    ("harness export taken", "no table asked for", "--csv, --xlsx or --parquet"),
    ("harness export taken --xlsx all.xls", "--xlsx all.xls", "end in .xlsx"),
    ("harness export none --csv all.csv", "none: no such folder", "harness list runs"),
    ("harness size llama-3.1-8b --users 0", "--users 0", "at least 1"),
]  # fmt: skip


def said(line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", shlex.split(line))
    with pytest.raises(SystemExit) as ended:
        main()
    code = ended.value.code
    assert isinstance(code, int)
    return code, capsys.readouterr().err


@pytest.mark.parametrize(("line", "what", "cure"), LINES, ids=[line for line, _, _ in LINES])
def test_one_line_names_what_where_and_the_cure(
    line: str,
    what: str,
    cure: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    code, text = said(line, monkeypatch, capsys)
    assert code == 2, text
    assert len(text.splitlines()) == 1 and text.startswith("harness: ") and "Traceback" not in text
    assert what in text and cure in text, text
    assert [path.name for path in tmp_path.iterdir()] == ["taken"], "nothing is left behind"


def test_there_are_at_least_forty() -> None:
    assert len({line for line, _, _ in LINES}) == len(LINES) >= 40


def test_an_unfinished_search_is_nothing_to_hold_against(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_capacity(
        tmp_path,
        Capacity(
            mode="slo", key="workload.users", engine="sim", goals=(), tolerance=0.1, complete=False,
            answer=CapacityAnswer(load=None, low=None, high=None), steps=(),
        ),
    )  # fmt: skip
    code, text = said(f"{SEARCH} --against {tmp_path}", monkeypatch, capsys)
    assert code == 2 and len(text.splitlines()) == 1
