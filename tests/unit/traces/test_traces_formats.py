"""Reading traces that are as they should be: what becomes of each field, slicing, scaling, and the real trace."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT
from traces.formats import READERS, Trace, TraceOptions, open_trace, write_trace
from traces.request import Request, Segment, stable_id
from traces.synth import SessionSpec, SyntheticSpec, conversation, synthetic

ROWS = [
    {"timestamp": 1000, "input_length": 1024, "output_length": 10, "hash_ids": [7, 8]},
    {"timestamp": 1000, "input_length": 1, "output_length": 1, "hash_ids": [9]},
    {"timestamp": 3500.5, "input_length": 1500, "output_length": 301, "hash_ids": [7, 8, 11]},
]


def written(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def opened(path: Path, **options: Any) -> Trace:
    return open_trace(path, options=TraceOptions(**options))


def test_mooncake(tmp_path: Path) -> None:
    path = written(tmp_path / "some.jsonl")
    trace = open_trace(path)
    assert trace.requests == (
        Request(id="000000", prompt=(Segment(7, 512), Segment(8, 512)), output_tokens=10, at_s=0.0),
        Request(id="000001", prompt=(Segment(9, 1),), output_tokens=1, at_s=0.0),
        Request(
            id="000002", prompt=(Segment(7, 512), Segment(8, 512), Segment(11, 476)), output_tokens=301, at_s=2.5005
        ),
    )
    assert (trace.name, trace.format, trace.total_requests, trace.left_out) == ("some", "mooncake", 3, 0)
    assert trace.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_byte_order_mark_crlf_and_blank_lines_are_no_content(tmp_path: Path) -> None:
    plain = open_trace(written(tmp_path / "a.jsonl"))
    dressed = tmp_path / "b.jsonl"
    text = (tmp_path / "a.jsonl").read_text().replace("\n", "\r\n\r\n")
    dressed.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert open_trace(dressed).requests == plain.requests


def test_block_tokens_scale_full_blocks_exactly_and_the_rest_in_proportion(tmp_path: Path) -> None:
    trace = opened(written(tmp_path / "a.jsonl"), block_tokens=64)
    assert [r.prompt for r in trace.requests] == [
        (Segment(7, 64), Segment(8, 64)),
        (Segment(9, 1),),
        (Segment(7, 64), Segment(8, 64), Segment(11, 476 * 64 // 512)),
    ]


def test_output_and_time_scaling(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl")
    assert [r.output_tokens for r in opened(path, output_scale=0.1).requests] == [1, 1, 30]
    assert [r.output_tokens for r in opened(path, output_scale=2.0, max_output_tokens=25).requests] == [20, 2, 25]
    assert [r.at_s for r in opened(path, time_scale=0.5).requests] == [0.0, 0.0, 2.5005 / 2]


def test_a_slice_keeps_ids_and_begins_at_zero(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl")
    trace = opened(path, start=2, limit=1)
    assert [(r.id, r.at_s) for r in trace.requests] == [("000002", 0.0)]
    assert trace.total_requests == 3


def test_long_prompts_are_left_out_and_counted_never_cut(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl")
    trace = opened(path, max_prompt_tokens=1024)
    assert [(r.id, r.prompt_tokens) for r in trace.requests] == [("000000", 1024), ("000001", 1)]
    assert trace.left_out == 1
    # The bound is on scaled prompts, and the first one kept goes at 0.
    assert opened(path, max_prompt_tokens=188, block_tokens=64).left_out == 0
    short_last = written(tmp_path / "b.jsonl", [ROWS[0], ROWS[2], {**ROWS[1], "timestamp": 9000}])
    rest = opened(short_last, max_prompt_tokens=9)
    assert [(r.id, r.at_s) for r in rest.requests] == [("000002", 0.0)]


def test_the_own_format_gives_equal_requests_back(tmp_path: Path) -> None:
    sessions = SessionSpec(
        sessions=5,
        turns=3,
        system_tokens=9,
        user_tokens=4,
        output_tokens=2,
        think_s=3,
        arrivals="poisson",
        rate_per_s=2,
    )
    shared = SyntheticSpec(requests=20, prompt_tokens=1025, hit_rate=0.5, prefixes=3)
    for requests in (conversation(sessions, 1), synthetic(shared, 2)):
        path = tmp_path / "own.jsonl"
        write_trace(path, requests)
        trace = open_trace(path)
        assert (trace.format, trace.requests) == ("own", requests)


def test_delays_scale_with_time(tmp_path: Path) -> None:
    request = Request(id="a", prompt=(Segment(1, 5),), output_tokens=1, session="s", turn=1, delay_s=3.0)
    write_trace(tmp_path / "own.jsonl", [request])
    assert opened(tmp_path / "own.jsonl", time_scale=2.0).requests[0].delay_s == 6.0


def chat(*messages: tuple[str, str]) -> dict[str, Any]:
    return {"id": "c", "conversations": [{"from": who, "value": text} for who, text in messages]}


def test_sharegpt_conversations_become_sessions(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    talk = chat(("system", "Be brief."), ("human", "12345"), ("gpt", "yes"), ("human", "ünï"), ("gpt", "a" * 9))
    path.write_text(json.dumps([talk, chat(("human", "12345"), ("gpt", ""))], indent=2), encoding="utf-8")
    system, first = Segment(stable_id("text", "Be brief."), 3), Segment(stable_id("text", "12345"), 2)
    answer, second = Segment(stable_id("text", "yes"), 1), Segment(stable_id("text", "ünï"), 2)
    trace = open_trace(path)
    assert trace.format == "sharegpt"
    assert trace.requests == (
        Request(id="000000", prompt=(system, first), output_tokens=1, session="000000:c"),
        Request(id="000001", prompt=(system, first, answer, second), output_tokens=3, session="000000:c", turn=1),
        Request(id="000002", prompt=(first,), output_tokens=1, session="000001:c"),
    )


def test_sharegpt_answers_to_nothing_are_context_only(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    talk = chat(("gpt", "Hello!"), ("human", "one"), ("human", "two"), ("gpt", "ok"), ("gpt", "and"), ("human", "x"))
    path.write_text(json.dumps([talk]), encoding="utf-8")
    (request,) = open_trace(path).requests
    assert [s.hash_id for s in request.prompt] == [stable_id("text", t) for t in ("Hello!", "one", "two")]


def test_every_reader_is_reached_by_content(tmp_path: Path) -> None:
    contents = {
        "mooncake": json.dumps(ROWS[0]),
        "sharegpt": json.dumps([chat(("human", "a"), ("gpt", "b"))]),
        "own": '{"id": "a", "prompt": [[1, 2]], "output_tokens": 3}',
    }
    assert set(contents) == set(READERS)
    for name, content in contents.items():
        path = tmp_path / "file"
        path.write_text(content)
        assert open_trace(path).format == name


def real_trace() -> Path:
    shared = ROOT.parent / "shared" / "traces"
    path = Path(os.environ.get("HARNESS_TRACES") or shared) / "mooncake_conversation.jsonl"
    if not path.is_file():
        pytest.skip("mooncake_conversation.jsonl is in neither $HARNESS_TRACES nor ../shared/traces")
    return path


def test_the_real_trace() -> None:
    trace = open_trace(real_trace())
    assert len(trace.requests) == trace.total_requests == 12_031
    assert sum(r.prompt_tokens for r in trace.requests) == 144_793_823
    assert sum(r.output_tokens for r in trace.requests) == 4_122_048
    assert trace.requests[-1].at_s == 3536.999
    assert len({s.hash_id for r in trace.requests for s in r.prompt}) == 182_790


def test_the_real_trace_scaled_to_a_small_machine() -> None:
    trace = opened(real_trace(), start=100, limit=500, block_tokens=16, max_prompt_tokens=1024, max_output_tokens=8)
    assert len(trace.requests) + trace.left_out == 500
    assert trace.left_out > 0
    assert max(r.prompt_tokens for r in trace.requests) <= 1024
    assert trace.requests[0].at_s == 0.0


def test_the_real_trace_is_read_fast() -> None:
    """0.12 s here; the processor time of the best of three, so that a busy machine does not fail it."""
    path = real_trace()
    seconds = []
    for _ in range(3):
        begin = time.process_time()
        open_trace(path)
        seconds.append(time.process_time() - begin)
    assert min(seconds) < 0.3
