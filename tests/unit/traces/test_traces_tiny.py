"""The small trace in the package is what this seeded generator makes, byte for byte.

To make it again:  python tests/unit/traces/test_traces_tiny.py > traces/data/tiny_conversation.jsonl
"""

from __future__ import annotations

import json
import random
import sys
from hashlib import sha256
from typing import Any

from traces.catalogue import DATA, catalogue
from traces.formats import open_trace

SEED = 20261121
REQUESTS = 200
SYSTEM_TOKENS = (1800, 2600, 700)  # three assistants, asked for in the proportions below
SYSTEM_WEIGHTS = (6, 3, 1)
BLOCK = 512


def _lognormal(rng: random.Random, median: float, sigma: float, low: int, high: int) -> int:
    return min(high, max(low, round(median * rng.lognormvariate(0.0, sigma))))


def _session(rng: random.Random, session: int, start_ms: float) -> list[dict[str, Any]]:
    """A session's requests; content names what each block holds, to be numbered later."""
    assistant = rng.choices(range(3), SYSTEM_WEIGHTS)[0]
    length, now_ms = SYSTEM_TOKENS[assistant], start_ms
    if rng.random() < 0.15:  # a document is pasted in
        length += _lognormal(rng, 4000, 0.5, 1500, 9000)
    rows: list[dict[str, Any]] = []
    while True:
        length += _lognormal(rng, 250, 1.0, 8, 4000)
        output = _lognormal(rng, 180, 0.8, 4, 1000)
        full, rest = divmod(length, BLOCK)
        content: list[tuple[object, ...]] = [
            ("system", assistant, b) if (b + 1) * BLOCK <= SYSTEM_TOKENS[assistant] else ("session", session, b)
            for b in range(full)
        ]
        if rest:
            content.append(("end", session, len(rows)))
        rows.append({"at": now_ms, "input": length, "output": output, "content": content})
        if rng.random() < 0.3:
            return rows
        length += output
        now_ms += 2000 + 20 * output + rng.expovariate(1 / 25_000)


def make_tiny() -> bytes:
    rng = random.Random(SEED)
    rows: list[dict[str, Any]] = []
    start_ms = 0.0
    for session in range(120):
        rows += _session(rng, session, start_ms)
        start_ms += rng.expovariate(1 / 6000)
    rows.sort(key=lambda row: row["at"])
    numbers: dict[tuple[object, ...], int] = {}
    lines = []
    for row in rows[:REQUESTS]:
        ids = [numbers.setdefault(key, len(numbers)) for key in row["content"]]
        line = {"timestamp": round(row["at"]), "input_length": row["input"], "output_length": row["output"]}
        lines.append(json.dumps({**line, "hash_ids": ids}) + "\n")
    return "".join(lines).encode()


def test_the_file_is_what_the_generator_makes() -> None:
    made = make_tiny()
    assert (DATA / "tiny_conversation.jsonl").read_bytes() == made
    entry = catalogue()["tiny_conversation"]
    assert (entry.sha256, entry.bytes) == (sha256(made).hexdigest(), len(made))


def test_it_looks_like_a_conversation() -> None:
    requests = open_trace(DATA / "tiny_conversation.jsonl").requests
    assert len(requests) == REQUESTS
    seen: set[int] = set()
    reused = total = 0
    for request in requests:
        ids = [segment.hash_id for segment in request.prompt]
        known = [hash_id in seen for hash_id in ids]
        # Sharing is by prefix: once a block is new, all after it are.
        assert known == sorted(known, reverse=True)
        reused, total = reused + sum(known), total + len(ids)
        seen.update(ids)
    assert 0.4 < reused / total < 0.8
    first_blocks = [request.prompt[0].hash_id for request in requests]
    assert len(set(first_blocks)) == len(SYSTEM_TOKENS)


if __name__ == "__main__":
    sys.stdout.buffer.write(make_tiny())
