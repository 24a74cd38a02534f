"""Whatever is wrong with a trace file, the answer is one line: the file, the line, what is wrong, and the cure."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from traces.errors import TraceFileError
from traces.formats import TraceOptions, open_trace

GOOD = {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]}
OWN = {"id": "a", "prompt": [[1, 10]], "output_tokens": 1}
CHAT = {"id": "x", "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}


def mooncake(**changes: Any) -> bytes:
    """Two good lines, then one with the changes (a value of ... takes the key away)."""
    row = {key: value for key, value in {**GOOD, "timestamp": 9, **changes}.items() if value is not ...}
    return b"".join(json.dumps(r).encode() + b"\n" for r in (GOOD, GOOD, row))


def own(**changes: Any) -> bytes:
    row = {key: value for key, value in {**OWN, "id": "b", **changes}.items() if value is not ...}
    return b"".join(json.dumps(r).encode() + b"\n" for r in (OWN, row))


def chat(*entries: Any) -> bytes:
    """A good conversation on line 2, the entries from line 3 on."""
    return b"[\n" + b",\n".join(json.dumps(e).encode() for e in (CHAT, *entries)) + b"\n]\n"


CHAT_ROW = {
    "chat_id": 1,
    "parent_chat_id": -1,
    "timestamp": 1.5,
    "input_length": 40,
    "output_length": 5,
    "type": "text",
    "turn": 1,
    "hash_ids": [1, 2, 3],
}
CALL = {"t": 0.0, "type": "s", "model": "m", "in": 128, "out": 5, "hash_ids": [1, 2]}
AGENT = {"t": 2.0, "type": "subagent", "agent_id": "a", "status": "completed", "models": [], "requests": [CALL]}
SESSION = {"id": "x", "models": ["m"], "block_size": 64, "hash_id_scope": "local", "requests": [CALL, AGENT]}


def bailian(**changes: Any) -> bytes:
    """A good line, then one that goes on from it, with the changes."""
    row = {**CHAT_ROW, "chat_id": 2, "parent_chat_id": 1, "timestamp": 9, "turn": 2, **changes}
    row = {key: value for key, value in row.items() if value is not ...}
    return b"".join(json.dumps(r).encode() + b"\n" for r in (CHAT_ROW, row))


def weka(**changes: Any) -> bytes:
    """A good session, then one with the changes."""
    row = {key: value for key, value in {**SESSION, "id": "y", **changes}.items() if value is not ...}
    return b"".join(json.dumps(r).encode() + b"\n" for r in (SESSION, row))


def call(**changes: Any) -> bytes:
    """A good session, then one whose second request has the changes."""
    row = {key: value for key, value in {**CALL, **changes}.items() if value is not ...}
    return weka(requests=[CALL, row])


def spread(session: dict[str, Any]) -> bytes:
    """One session over many lines, as kv-cache-tester writes it; each key on a line of its own."""
    return json.dumps(session, indent=1).encode()


LINE = json.dumps(GOOD).encode() + b"\n"

# name: (content, line or None for the file as a whole, a part of what is wrong, a part of the cure)
MALFORMED: dict[str, tuple[bytes, int | None, str, str]] = {
    "not JSON": (LINE + b"hello\n", 2, "is not JSON: ", "write valid JSON"),
    "not JSON at all": (b"time,tokens\n1,2\n", 1, "is not JSON: ", "write valid JSON"),
    "cut off": (LINE + LINE[:30], 2, "is not JSON: Input data was truncated", "write valid JSON"),
    "two objects a line": (LINE + LINE.strip() + LINE, 2, "trailing characters", "one object a line"),
    "NaN": (mooncake().replace(b": 9", b": NaN"), 3, "is not JSON: ", "without NaN"),
    "Infinity": (mooncake().replace(b": 9", b": Infinity"), 3, "is not JSON: ", "Infinity"),
    "beyond a float": (mooncake().replace(b": 9", b": 1e999"), 3, "timestamp: Number out of range", "millisec"),
    "line is a list": (LINE + b"[1, 2]\n", 2, "Expected `object`, got `array` ([1, 2])", "each line needs"),
    "deep nesting": (LINE + b'{"timestamp": ' + b"[" * 9999, 2, "got `array` (", "give milliseconds"),
    "deep nesting at once": (b'{"a": ' + b"[" * 99999, 1, "is not JSON: ", "write valid JSON"),
    "no timestamp": (mooncake(timestamp=...), 3, "missing required field `timestamp`", "each line needs"),
    "no input_length": (mooncake(input_length=...), 3, "missing required field", "each line needs"),
    "no output_length": (mooncake(output_length=...), 3, "missing required field", "each line needs"),
    "no hash_ids": (mooncake(hash_ids=...), 3, "missing required field `hash_ids`", "each line needs"),
    "unknown key": (mooncake(session=4), 3, "contains unknown field `session`", "exactly timestamp"),
    "text for a number": (mooncake(input_length="70"), 3, "input_length: Expected `int`, got `str` (70)", "whole"),
    "true for a number": (mooncake(output_length=True), 3, "got `bool` (True)", "whole number from 1"),
    "fraction of a token": (mooncake(input_length=7.5), 3, "input_length: Expected `int`", "whole number"),
    "null timestamp": (mooncake(timestamp=None), 3, "timestamp: Expected `float`, got `null` (None)", "millisec"),
    "negative timestamp": (mooncake(timestamp=-1), 3, "timestamp: Expected `float` >= 0.0 (-1)", "milliseconds"),
    "negative length": (mooncake(input_length=-7), 3, "input_length: Expected `int` >= 1 (-7)", "drop the line"),
    "input_length 0": (mooncake(input_length=0), 3, "input_length: Expected `int` >= 1 (0)", "drop the line"),
    "output_length 0": (mooncake(output_length=0), 3, "output_length: Expected `int` >= 1 (0)", "drop the line"),
    "too few ids": (mooncake(hash_ids=[1]), 3, "700 tokens take 2 ids (1 given)", "one id per 512 tokens"),
    "too many ids": (mooncake(hash_ids=[1, 2, 3]), 3, "take 2 ids (3 given)", "one id per 512 tokens"),
    "no ids": (mooncake(hash_ids=[]), 3, "take 2 ids (0 given)", "one id per 512 tokens"),
    "negative id": (mooncake(hash_ids=[1, -2]), 3, "hash_ids[1]: Expected `int` >= 0 (-2)", "from 0 to 2^63-1"),
    "id beyond 63 bits": (mooncake(hash_ids=[1, 2**63]), 3, f"({2**63})", "from 0 to 2^63-1"),
    "id is text": (mooncake(hash_ids=["x", 2]), 3, "hash_ids[0]: Expected `int`, got `str` (x)", "whole numbers"),
    "ids are no list": (mooncake(hash_ids=7), 3, "hash_ids: Expected `array`, got `int` (7)", "give a list"),
    "huge length": (mooncake(input_length=10**30), 3, "input_length: ", "whole number from 1 to 100000000"),
    "huge timestamp": (mooncake(timestamp=1e300), 3, "timestamp: Expected `float` <= 1", "give milliseconds"),
    "time goes backwards": (LINE + mooncake().splitlines()[2] + b"\n" + LINE, 3, "(0 after 9)", "sort the lines"),
    "error after blank lines": (LINE + b"\n \r\n" + b"{}\n", 4, "missing required field", "each line needs"),
    "empty": (b"", None, "is empty (0 bytes)", "at least one request"),
    "blank": (b"\n \n\n", None, "is empty (4 bytes)", "at least one request"),
    "gzip": (gzip.compress(LINE), None, "is gzip-compressed", "gunzip"),
    "binary": (LINE + b"PAR1\x00\x01\x02", 2, "is a binary file (a NUL byte)", "give JSON or JSONL"),
    "UTF-16": (LINE.decode().encode("utf-16"), 1, "is a binary file", "UTF-8"),
    "Latin-1": (LINE + b'{"id": "caf\xe9"}\n', 2, "is not UTF-8 (byte 0xe9)", "convert it to UTF-8"),
    "unknown format": (
        b'{"when": 1, "what": 2}\n',
        1,
        'no known format ({"when": 1',
        "mooncake, bailian, weka, sharegpt, own",
    ),
    "a number": (b"42\n", 1, "is of no known format (42)", "mooncake, bailian, weka, sharegpt, own"),
    "own: duplicate id": (own(id="a"), 2, "id: is that of line 1 too ('a')", "an id of its own"),
    "own: empty id": (own(id=""), 2, "id: Expected `str` of length >= 1 ()", "1 to 200 characters"),
    "own: no id": (own(id=...), 2, "missing required field `id`", "each line needs id"),
    "own: empty prompt": (own(prompt=[]), 2, "prompt: Expected `array` of length >= 1 ([])", "[hash id, tokens]"),
    "own: half a segment": (own(prompt=[[1]]), 2, "prompt[0]: Expected `array` of length 2", "[hash id, tokens]"),
    "own: segment of 0": (own(prompt=[[1, 0]]), 2, "prompt[0][1]: Expected `int` >= 1 (0)", "tokens from 1"),
    "own: no output": (own(output_tokens=0), 2, "output_tokens: Expected `int` >= 1 (0)", "whole number from 1"),
    "own: negative time": (own(at_s=-0.5), 2, "at_s: Expected `float` >= 0.0 (-0.5)", "seconds from 0"),
    "own: negative delay": (own(delay_s=-1), 2, "delay_s: Expected `float` >= 0.0 (-1)", "seconds from 0"),
    "own: unknown key": (own(tokens=4), 2, "contains unknown field `tokens`", "each line needs id"),
    "own: turn without session": (own(turn=3), 2, "turn: has no session (3)", "name the session"),
    "own: turn out of order": (
        own(session="s", turn=2) + json.dumps({**OWN, "id": "c", "session": "s", "turn": 1}).encode(),
        3,
        "turn: is out of order (1 after 2 in session 's')",
        "sort the lines of a session by turn",
    ),
    "own: turn twice": (
        own(session="s", turn=2) + json.dumps({**OWN, "id": "c", "session": "s", "turn": 2}).encode(),
        3,
        "turn: is out of order (2 after 2 in session 's')",
        "sort the lines of a session by turn",
    ),
    "own: after what is not there": (own(session="s", after=["x"]), 2, "after: is no earlier request", "stand above"),
    "own: after another session's": (own(session="s", after=["a"]), 2, "of the session ('a')", "of the session that"),
    "own: after is a name": (own(session="s", after="a"), 2, "after: Expected `array`, got `str` (a)", "list of ids"),
    "chat: not JSON": (b'[{"id": "x",\n"conversations": oops}]\n', 2, "is not JSON (", "one list of conversations"),
    "chat: cut off": (b'[{"id": "x",\n"conversations": [\n', 2, "is not JSON (", "one list of conversations"),
    "chat: deep nesting": (b"[" * 99999, 1, "is not JSON (", "one list of conversations"),
    "chat: no list of objects": (chat(7), 3, "Expected `object`, got `int` (7)", "each conversation needs id"),
    "chat: no id": (chat({"conversations": []}), 3, "missing required field `id`", "each conversation needs id"),
    "chat: value is a number": (
        chat(CHAT, {"id": "y", "conversations": [{"from": "human", "value": 3}]}),
        4,
        "conversations[0].value: Expected `str`, got `int` (3)",
        "both texts",
    ),
    "chat: over many lines": (
        json.dumps([CHAT, CHAT, {"id": "y", "conversations": 3}], indent=1).encode(),
        28,
        "conversations: Expected `array`, got `int` (3)",
        "each conversation needs id",
    ),
    "chat: unknown speaker": (
        chat({"id": "y", "conversations": [{"from": "robot", "value": "beep"}]}),
        3,
        "unknown speaker ('robot')",
        "use one of human, ",
    ),
    "chat: no requests": (b"[]", None, "holds no requests (0)", "at least one"),
    "chat: no turns": (b'[{"id": 1, "conversations": []}]', None, "holds no requests (0)", "at least one"),
    "bailian: no chat_id": (bailian(chat_id=...), 2, "missing required field `chat_id`", "exactly chat_id"),
    "bailian: no parent": (
        bailian(parent_chat_id=...),
        2,
        "missing required field `parent_chat_id`",
        "exactly chat_id",
    ),
    "bailian: no hash_ids": (bailian(hash_ids=...), 2, "missing required field `hash_ids`", "exactly chat_id"),
    "bailian: unknown key": (bailian(user=4), 2, "contains unknown field `user`", "exactly chat_id, parent_chat_id"),
    "bailian: chat twice": (bailian(chat_id=1), 2, "chat_id: is that of line 1 too (1)", "a number of its own"),
    "bailian: own parent": (bailian(parent_chat_id=2), 2, "parent_chat_id: is the chat itself (2)", "after the one"),
    "bailian: parent comes later": (
        bailian(parent_chat_id=7) + json.dumps({**CHAT_ROW, "chat_id": 7, "timestamp": 9}).encode(),
        3,
        "chat_id: an earlier line goes on from it (7)",
        "put each chat after the one that it goes on from",
    ),
    "bailian: chat is text": (bailian(chat_id="a"), 2, "chat_id: Expected `int`, got `str` (a)", "number of its own"),
    "bailian: parent -2": (bailian(parent_chat_id=-2), 2, "parent_chat_id: Expected `int` >= -1 (-2)", "or -1"),
    "bailian: backwards": (bailian(timestamp=1), 2, "timestamp: time goes backwards (1 after 1.5)", "sort the lines"),
    "bailian: negative time": (bailian(timestamp=-1), 2, "timestamp: Expected `float` >= 0.0 (-1)", "give seconds"),
    "bailian: milliseconds of 2026": (bailian(timestamp=1.8e12), 2, "timestamp: Expected `float` <= 1", "give seconds"),
    "bailian: blocks of 512": (bailian(hash_ids=[1]), 2, "40 tokens take 3 ids (1 given)", "one id per 16 tokens"),
    "bailian: no output": (bailian(output_length=0), 2, "output_length: Expected `int` >= 1 (0)", "drop the line"),
    "bailian: kind is a number": (bailian(type=3), 2, "type: Expected `str`, got `int` (3)", "such as text"),
    "bailian: turn is text": (bailian(turn="2"), 2, "turn: Expected `int`, got `str` (2)", "a whole number"),
    "two formats": (
        json.dumps({**GOOD, "prompt": "hi"}).encode(),
        1,
        "has keys of mooncake (hash_ids, input_length, output_length, timestamp) and of own (prompt)",
        "keep the keys of one format",
    ),
    "weka: cut off": (weka()[:-30], 2, "is not JSON: Input data was truncated", "write valid JSON"),
    "weka: no id": (weka(id=...), 2, "missing required field `id`", "each session needs id, block_size and requests"),
    "weka: id twice": (weka(id="x"), 2, "id: is that of line 1 too ('x')", "an id of its own"),
    "weka: no block size": (weka(block_size=...), 2, "missing required field `block_size`", "each session needs id"),
    "weka: blocks of 0": (weka(block_size=0), 2, "block_size: Expected `int` >= 1 (0)", "from 1 to 65536"),
    "weka: other blocks": (
        weka(block_size=128, requests=[]),
        2,
        "block_size: is not the 64 of line 1 (128)",
        "sessions of one block size",
    ),
    "weka: unknown scope": (weka(hash_id_scope="team"), 2, "hash_id_scope: Invalid enum value 'team'", "local ("),
    "weka: unknown key": (weka(user=1), 2, "contains unknown field `user`", "docs/traces.md"),
    "weka: requests are no list": (
        weka(requests=3),
        2,
        "requests: Expected `array`, got `int` (3)",
        "list of requests",
    ),
    "weka: request is a number": (weka(requests=[3]), 2, "requests[0]: Expected `object`, got `int`", "each request"),
    "weka: no type": (call(type=...), 2, "requests[1]: Object missing required field `type`", "each request needs t"),
    "weka: unknown type": (call(type="z"), 2, "requests[1].type: Invalid value 'z' (z)", "n, s or subagent"),
    "weka: no length": (call(**{"in": ...}), 2, "requests[1]: Object missing required field `in`", "each request"),
    "weka: length 0": (call(**{"in": 0}), 2, "requests[1].in: Expected `int` >= 1 (0)", "drop the request"),
    "weka: negative output": (call(out=-1), 2, "requests[1].out: Expected `int` >= 0 (-1)", "from 0 to"),
    "weka: too few ids": (call(hash_ids=[1]), 2, "hash_ids: 128 tokens take 2 ids (1 given)", "one id per 64 tokens"),
    "weka: too many ids": (call(hash_ids=[1, 2, 3]), 2, "128 tokens take 2 ids (3 given)", "one id per 64 tokens"),
    "weka: negative id": (call(hash_ids=[1, -2]), 2, "requests[1].hash_ids[1]: Expected `int` >= 0 (-2)", "2^63-1"),
    "weka: negative time": (call(t=-1), 2, "requests[1].t: Expected `float` >= 0.0 (-1)", "session's begin"),
    "weka: negative api_time": (call(api_time=-1), 2, "requests[1].api_time: Expected `float` >= 0.0", "leave it out"),
    "weka: think_time is text": (
        call(think_time="1"),
        2,
        "requests[1].think_time: Expected `float | null`",
        "each req",
    ),
    "weka: agent in an agent": (
        weka(requests=[{**AGENT, "requests": [AGENT]}]),
        2,
        "requests[0].requests[0].type: Invalid value 'subagent'",
        "a sub-agent has none of its own",
    ),
    "weka: agent without requests": (
        weka(requests=[{key: value for key, value in AGENT.items() if key != "requests"}]),
        2,
        "requests[0]: Object missing required field `requests`",
        "a sub-agent t, type and requests",
    ),
    "weka: over many lines": (
        spread({**SESSION, "requests": [CALL, {**CALL, "out": "5"}]}),
        20,
        "requests[1].out: Expected `int`, got `str` (5)",
        "from 0 to 100000000",
    ),
    "weka: agent's request over many lines": (
        spread({**SESSION, "requests": [{**AGENT, "requests": [CALL, {**CALL, "in": 300}]}]}),
        27,
        "hash_ids: 300 tokens take 4 ids (2 given)",
        "one id per 64 tokens",
    ),
    "weka: no requests": (json.dumps({**SESSION, "requests": []}).encode(), None, "holds no requests (0)", "at least"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed(case: str, tmp_path: Path) -> None:
    content, line, problem, cure = MALFORMED[case]
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceFileError) as caught:
        open_trace(path)
    text = str(caught.value)
    where, _, said = text.partition(str(path))[2].partition(": ")
    assert where == ("" if line is None else f":{line}")
    assert "\n" not in text and len(text) < 400
    what, _, advice = said.rpartition("; ")
    assert problem in what, text
    assert cure in advice, text


SLICES = {
    "start beyond": (TraceOptions(start=3), "start is beyond the file's 3 requests (3)", "a start below 3"),
    "limit beyond": (TraceOptions(limit=4), "more than the 3 requests from 0 on (4)", "a limit of at most 3"),
    "both": (TraceOptions(start=2, limit=2), "more than the 1 requests from 2 on (2)", "a limit of at most 1"),
    "all too long": (TraceOptions(max_prompt_tokens=699), "(699; the shortest is 700)", "to at least 700"),
}


@pytest.mark.parametrize("case", SLICES)
def test_a_slice_that_the_file_does_not_have(case: str, tmp_path: Path) -> None:
    options, problem, cure = SLICES[case]
    path = tmp_path / "trace.jsonl"
    path.write_bytes(mooncake())
    with pytest.raises(TraceFileError) as caught:
        open_trace(path, options=options)
    text = str(caught.value)
    assert text.startswith(f"{path}: ") and problem in text and cure in text


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"start": -1}, "start: must not be negative (-1); give 0"),
    ({"limit": 0}, "limit: must be 1 to 100000000 (0); leave it out"),
    ({"block_tokens": 0}, "block_tokens: must be 1 to 100000000 (0)"),
    ({"max_output_tokens": -5}, "max_output_tokens: must be 1 to 100000000 (-5)"),
    ({"max_prompt_tokens": 10**9}, "max_prompt_tokens: must be 1 to 100000000 (1000000000)"),
    ({"time_scale": 0.0}, "time_scale: must be a factor above 0 and at most 1e+06 (0.0); give 1.0"),
    ({"time_scale": float("nan")}, "time_scale: must be a factor above 0 and at most 1e+06 (nan)"),
    ({"output_scale": float("inf")}, "output_scale: must be a factor above 0 and at most 1e+06 (inf)"),
    ({"conversations": 0}, "conversations: must be 1 to 100000000 (0); leave it out"),
    ({"max_chars": 0}, "max_chars: must be 1 to 100000000 (0); leave it out"),
    ({"rate_per_s": 0.0}, "rate_per_s: must be a factor above 0 and at most 1e+06 (0.0); leave it out"),
]


@pytest.mark.parametrize(("values", "text"), OPTIONS)
def test_an_impossible_option(values: dict[str, Any], text: str) -> None:
    with pytest.raises(TraceFileError) as caught:
        TraceOptions(**values)
    assert str(caught.value).startswith(f"trace option {text}")


def test_a_directory_a_missing_file_and_a_device(tmp_path: Path) -> None:
    cases = {
        tmp_path: "is a directory (not a file); name one trace file in it",
        tmp_path / "none.jsonl": "cannot be read (No such file or directory); check the path",
        tmp_path / "a\0b": "cannot be read (embedded null byte); check the path",
        Path("/dev/null"): "is a device, pipe or socket (not a file); save it",
    }
    for path, text in cases.items():
        with pytest.raises(TraceFileError) as caught:
            open_trace(path)
        assert str(caught.value).startswith(f"{path}: {text}")


@pytest.mark.parametrize(
    "content",
    [mooncake(), own(session="s", turn=1, delay_s=2.5), chat(CHAT), bailian(), weka(), spread(SESSION)],
    ids=["mooncake", "own", "sharegpt", "bailian", "weka", "weka spread"],
)
def test_damaged_bytes_are_read_or_refused_in_one_line(content: bytes, tmp_path: Path) -> None:
    rng = random.Random(7)
    path = tmp_path / "trace.jsonl"
    refused = 0
    for _ in range(1000):
        damaged = bytearray(content)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(damaged))
            damage = rng.choice([b"", b"-", b"9" * 25, b"\\u", b"[", b'"', b"\xff", b"\n"])
            damaged[at : at + rng.randint(0, 2)] = damage
        path.write_bytes(damaged)
        try:
            open_trace(path)
        except TraceFileError as error:
            refused += 1
            assert str(error).startswith(str(path)) and "\n" not in str(error) and "; " in str(error)
    assert refused > 500
