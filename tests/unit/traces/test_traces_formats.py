"""Reading traces that are as they should be: what becomes of each field, slicing, scaling, and the real trace."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from tests.support.paths import ROOT
from traces.errors import TraceFileError
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


CHATS = [
    {**common, "output_length": 7, "type": "text"}
    for common in (
        {"chat_id": 3, "parent_chat_id": -1, "timestamp": 2.5, "input_length": 32, "turn": 1, "hash_ids": [1, 2]},
        {"chat_id": 4, "parent_chat_id": -1, "timestamp": 3.0, "input_length": 20, "turn": 1, "hash_ids": [1, 9]},
        {"chat_id": 8, "parent_chat_id": 3, "timestamp": 4.0, "input_length": 48, "turn": 2, "hash_ids": [1, 2, 5]},
        {"chat_id": 9, "parent_chat_id": 77, "timestamp": 4.0, "input_length": 16, "turn": 4, "hash_ids": [6]},
        {"chat_id": 10, "parent_chat_id": 8, "timestamp": 6.5, "input_length": 48, "turn": 3, "hash_ids": [1, 2, 5]},
    )
]


def test_bailian_chats_that_go_on_from_another_are_a_session(tmp_path: Path) -> None:
    """Hash ids mean the same in the whole file; a parent that is not in it begins a session."""
    trace = open_trace(written(tmp_path / "a.jsonl", CHATS))
    assert trace.format == "bailian"
    assert [(r.session, r.turn, r.at_s) for r in trace.requests] == [
        ("3", 0, 0.0),
        ("4", 0, 0.5),
        ("3", 1, 1.5),
        ("77", 0, 1.5),
        ("3", 2, 4.0),
    ]
    assert [r.after for r in trace.requests] == [(), (), ("000000",), (), ("000002",)]
    fork = [*CHATS[:3], {**CHATS[2], "chat_id": 11, "timestamp": 5.0}]
    assert open_trace(written(tmp_path / "b.jsonl", fork)).requests[3].after == ("000000",), "not the chat before"
    assert trace.requests[1].prompt == (Segment(1, 16), Segment(9, 4))
    assert trace.requests[0].prompt == trace.requests[2].prompt[:2] == (Segment(1, 16), Segment(2, 16))
    scaled = opened(tmp_path / "a.jsonl", block_tokens=8)
    assert scaled.requests[1].prompt == (Segment(1, 8), Segment(9, 2))


def call(t: float, ids: list[int], **others: Any) -> dict[str, Any]:
    return {"t": t, "type": "s", "model": "m", "in": 64 * len(ids), "out": 7, "hash_ids": ids, **others}


def session(name: str, *requests: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"id": name, "models": ["m"], "block_size": 64, "requests": list(requests), **others}


def agent(t: float, *requests: dict[str, Any]) -> dict[str, Any]:
    return {"t": t, "type": "subagent", "agent_id": "a", "status": "completed", "requests": list(requests)}


def ids_of(requests: tuple[Request, ...]) -> list[list[int]]:
    return [[segment.hash_id for segment in request.prompt] for request in requests]


def test_weka_hash_ids_are_a_session_s_own_unless_it_says_global(tmp_path: Path) -> None:
    talks = [session("a", call(0.0, [1, 2]), agent(1.0, call(1.0, [1, 2]))), session("b", call(0.0, [1, 2]))]
    first, inner, other = ids_of(open_trace(written(tmp_path / "a.jsonl", talks)).requests)
    assert first == inner and not {*first} & {*other}
    shared = [{**talk, "hash_id_scope": "global"} for talk in talks]
    assert ids_of(open_trace(written(tmp_path / "b.jsonl", shared)).requests) == [[1, 2]] * 3


def test_weka_tokens_behind_the_last_block_are_shared_only_with_an_id(tmp_path: Path) -> None:
    rest = [call(0.0, [1, 2], **{"in": 150}), call(1.0, [1, 2], **{"in": 150}), call(2.0, [1, 2], **{"in": 100})]
    one, two, named = open_trace(written(tmp_path / "a.jsonl", [session("a", *rest)])).requests
    assert [segment.tokens for segment in one.prompt] == [64, 64, 22]
    assert one.prompt[:2] == two.prompt[:2] and one.prompt[2].hash_id != two.prompt[2].hash_id
    assert named.prompt == (one.prompt[0], Segment(one.prompt[1].hash_id, 36))


def test_weka_requests_follow_each_other_after_their_think_times(tmp_path: Path) -> None:
    """Where an agent waits for others, the recorded gap counts: its think time holds that wait."""
    talk = session(
        "a",
        call(0.0, [1], api_time=2.0, think_time=5.0),
        call(4.0, [2], api_time=1.0, think_time=1.5),
        agent(6.0, call(0.0, [3], api_time=3.0), call(5.0, [4], api_time=1.0, think_time=0.25)),
        agent(6.0, call(7.0, [5], api_time=6.0), call(14.0, [6], api_time=1.0)),
        call(20.0, [7], think_time=15.0, out=0),
        agent(20.5, call(20.5, [9], api_time=90.0)),
        call(21.0, [8], think_time=-3.0),
    )
    path = tmp_path / "a.json"
    path.write_text(json.dumps(talk, indent=2), encoding="utf-8")
    trace = open_trace(path)
    assert trace.format == "weka"
    names = {request.prompt[0].hash_id: number for number, request in enumerate(trace.requests)}
    order = [stable_id("weka", "a", one) for one in (1, 2, 3, 5, 4, 6, 7, 9, 8)]
    assert [names[one] for one in order] == list(range(9))
    # Sub-agent 1 counts from its begin at 6 s: its calls are at 6 and 11 s, those of sub-agent 2 at 7 and 14 s. The
    # main agent went on at 20 s, when both had ended; it did not wait for the one that it began at 20.5 s.
    waits = [[int(name) for name in request.after] for request in trace.requests]
    assert waits == [[], [0], [1], [1], [2], [3], [1, 4, 5], [6], [6]]
    assert [request.delay_s for request in trace.requests] == [0.0, 1.5, 1.0, 2.0, 0.25, 1.0, 5.0, 0.5, 0.0]
    assert {request.session for request in trace.requests} == {"a"} and trace.requests[6].output_tokens == 1
    assert [request.turn for request in trace.requests] == list(range(9))
    # The file may say when an agent ended: later than its last request.
    talk["requests"][2]["duration_ms"] = 14_100
    path.write_text(json.dumps(talk), encoding="utf-8")
    assert open_trace(path).requests[6].after == ("000001", "000005")


def test_conversations_without_times_begin_at_a_rate(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", [session(f"{n}", call(0.0, [1]), call(1.0, [1, 2])) for n in range(2000)])
    paced = opened(path, rate_per_s=4.0, seed=3, conversations=1500).requests
    assert len(paced) == 3000
    assert [request.at_s is None for request in paced] == [False, True] * 1500
    begins = [request.at_s for request in paced if request.at_s is not None]
    assert begins[0] == 0.0 and begins == sorted(begins) and begins[-1] == pytest.approx(1499 / 4, rel=0.1)
    assert opened(path, rate_per_s=4.0, seed=3).requests[:3000] == paced
    assert opened(path, rate_per_s=4.0, seed=4).requests[:3000] != paced


CHAT_OPTIONS: list[dict[str, Any]] = [
    {"tokenizer": Path("t.json")},
    {"conversations": 1},
    {"first_turn_only": True},
    {"max_chars": 9},
    {"rate_per_s": 1.0},
]


@pytest.mark.parametrize("options", CHAT_OPTIONS, ids=lambda options: next(iter(options)))
def test_an_option_without_a_meaning_for_the_format_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    (name,) = options
    for rows, kind in ((ROWS, "mooncake"), (CHATS, "bailian"), ([session("a", call(0.0, [1]))], "weka")):
        path = written(tmp_path / "a.jsonl", rows)
        if kind == "weka" and name in ("conversations", "rate_per_s"):
            opened(path, **options)
            continue
        with pytest.raises(TraceFileError) as caught:
            opened(path, **options)
        text = str(caught.value)
        assert text.startswith(f"trace option {name}: has no meaning for a {kind} trace, only for sharegpt")
        assert text.endswith("; leave it out")


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


def tokenizer_file(folder: Path) -> Path:
    """A tokenizer of whole words, as its package writes it."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"one": 0, "two": 1, "[?]": 2}, unk_token="[?]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_a_named_tokenizer_counts_each_message(tmp_path: Path) -> None:
    named = tokenizer_file(tmp_path)
    path = tmp_path / "chat.json"
    talk = chat(("human", "one two one"), ("gpt", "two " * 9), ("human", "one"), ("gpt", ""))
    path.write_text(json.dumps([talk]), encoding="utf-8")
    for place in (named, tmp_path):
        trace = opened(path, tokenizer=place)
        assert [[s.tokens for s in r.prompt] for r in trace.requests] == [[3], [3, 9, 1]]
        assert [r.output_tokens for r in trace.requests] == [9, 1]
        assert trace.tokenizer_sha256 == hashlib.sha256(named.read_bytes()).hexdigest()
    estimated = open_trace(path)
    assert estimated.tokenizer_sha256 is None and estimated.requests[0].prompt_tokens == 3


def test_what_is_taken_of_conversations(tmp_path: Path) -> None:
    """500 prompts of the first human messages, cut to 2048 characters, is how the studies' scripts take ShareGPT."""
    path = tmp_path / "chat.json"
    talks = [
        chat(("human", f"{n}" * 40), ("gpt", "yes"), ("human", "and?"), ("gpt", "no"))
        if n % 2
        else chat(("human", "-"))
        for n in range(8)
    ]
    path.write_text(json.dumps(talks), encoding="utf-8")
    taken = opened(path, conversations=3, first_turn_only=True, max_chars=16)
    assert [(r.id, r.session, r.turn) for r in taken.requests] == [
        ("000000", "000001:c", 0),
        ("000001", "000003:c", 0),
        ("000002", "000005:c", 0),
    ]
    assert taken.requests[2].prompt == (Segment(stable_id("text", "5" * 16), 4),)
    assert opened(path, conversations=4).requests == open_trace(path).requests
    with pytest.raises(TraceFileError, match=r"more than the 4 that ask for an answer \(5\); ask for at most 4"):
        opened(path, conversations=5)


def test_a_tokenizer_that_cannot_be_used_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "chat.json"
    path.write_text(json.dumps([chat(("human", "a"), ("gpt", "b"))]), encoding="utf-8")
    named = tokenizer_file(tmp_path)

    def refusal(tokenizer: Path) -> str:
        with pytest.raises(TraceFileError) as caught:
            opened(path, tokenizer=tokenizer)
        text = str(caught.value)
        assert text.startswith(f"trace option tokenizer: {tmp_path}/") and "\n" not in text
        return text

    assert "there is no such file" in refusal(tmp_path / "none.json")
    assert "is no tokenizer (" in refusal(path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert refusal(named).endswith("(not installed); run: pip install 'kv-harness[tokenizer]'")


def test_every_reader_is_reached_by_content(tmp_path: Path) -> None:
    contents = {
        "mooncake": json.dumps(ROWS[0]),
        "sharegpt": json.dumps([chat(("human", "a"), ("gpt", "b"))]),
        "own": '{"id": "a", "prompt": [[1, 2]], "output_tokens": 3}',
        "bailian": json.dumps(CHATS[0]),
        "weka": json.dumps(session("a", call(0.0, [1]))),
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
