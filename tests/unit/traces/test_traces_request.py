"""Requests, their token streams, and the figures of a row."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from traces.request import Request, RequestRecord, Segment, TokenSource, stable_id


def test_a_recipe_expands_to_its_tokens() -> None:
    prompt = (Segment(7, 100), Segment(2**63 - 1, 1), Segment(7, 40))
    ids = TokenSource(seed=1, vocab_size=1000).expand(prompt)
    assert len(ids) == Request(id="a", prompt=prompt, output_tokens=1).prompt_tokens == 141
    assert all(256 <= token < 1000 for token in ids)
    assert ids[101:] == ids[:40], "a segment is the leading part of its stream"


def test_a_stream_is_the_same_however_much_of_it_was_seen_before() -> None:
    growing, fresh = TokenSource(3, 50_000), TokenSource(3, 50_000)
    short = growing.expand((Segment(9, 10),))
    long = growing.expand((Segment(9, 5000),))
    assert long[:10] == short == fresh.expand((Segment(9, 10),))
    for hash_id in range(5000):  # more than the source remembers
        growing.expand((Segment(hash_id, 1),))
    assert growing.expand((Segment(9, 5000),)) == long == fresh.expand((Segment(9, 5000),))


def test_a_stream_is_that_of_a_generator_of_its_own() -> None:
    source = TokenSource(3, 50_000)
    for hash_id, tokens in ((0, 1), (9, 33), (2**63 - 1, 7), (9, 101)):
        own = np.random.Generator(np.random.Philox(key=[3, hash_id]))
        assert source.expand((Segment(hash_id, tokens),)) == own.integers(256, 50_000, size=tokens).tolist()


def test_streams_differ_by_seed_and_by_hash_id() -> None:
    one = TokenSource(1, 50_000).expand((Segment(1, 64),))
    assert TokenSource(2, 50_000).expand((Segment(1, 64),)) != one
    assert TokenSource(1, 50_000).expand((Segment(2, 64),)) != one


def test_a_vocabulary_of_reserved_ids_only_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size 256 must be larger than the 256 reserved ids"):
        TokenSource(1, 256)


def test_stable_ids_are_63_bits_and_fixed() -> None:
    # printf 'prefix\x1f1\x1f2' | b2sum -l 64, without its last bit
    assert stable_id("prefix", 1, 2) == 3180399669365381600
    assert stable_id("a", "b") != stable_id("ab")
    assert all(0 <= stable_id(n) < 2**63 for n in range(1000))


def row(**values: Any) -> RequestRecord:
    return RequestRecord(**{"id": "a", "scheduled_s": 1.0, "sent_s": 1.5, "prompt_tokens": 4, **values})


def test_the_figures_of_a_row_count_from_the_actual_send() -> None:
    full = row(first_token_s=2.0, last_token_s=5.0, output_tokens=7)
    assert (full.ttft_s, full.e2e_s, full.tpot_s) == (0.5, 3.5, 0.5)


@pytest.mark.parametrize(
    "values",
    [{}, {"first_token_s": 2.0}, {"first_token_s": 2.0, "last_token_s": 2.0, "output_tokens": 1}, {"error": "x"}],
)
def test_a_figure_that_is_not_there_is_none(values: dict[str, Any]) -> None:
    assert row(**values).tpot_s is None
    assert (row(**values).ttft_s is None) == ("first_token_s" not in values)
    assert (row(**values).e2e_s is None) == ("last_token_s" not in values)


def test_a_row_survives_json() -> None:
    full = row(first_token_s=2.0, token_s=(2.0, 2.5), session="s", turn=1, error=None)
    assert msgspec.json.decode(msgspec.json.encode(full), type=RequestRecord) == full
