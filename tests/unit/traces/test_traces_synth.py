"""Synthetic load: exact hit rates, stated distributions, the same seed the same load."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest

from traces.errors import SpecError
from traces.request import Request
from traces.synth import SessionSpec, SyntheticSpec, conversation, shared_tokens, synthetic, warmers


def leading_common_tokens(prompt: Request, stored: Request) -> int:
    tokens = 0
    for mine, theirs in zip(prompt.prompt, stored.prompt, strict=False):
        if mine.hash_id != theirs.hash_id:
            break
        tokens += min(mine.tokens, theirs.tokens)
        if mine.tokens != theirs.tokens:
            break
    return tokens


@pytest.mark.parametrize(
    ("prompt_tokens", "hit_rate", "granularity", "expected"),
    [
        (4097, 1.0, 256, 4096),
        (4096, 1.0, 256, 3840),  # the last token is always computed, and with it its chunk
        (4097, 0.75, 256, 3072),
        (4097, 0.5, 256, 2048),
        (1000, 0.4, 1, 400),
        (1000, 0.3333, 16, 336),
        (257, 1.0, 256, 256),
        (513, 0.2, 256, 0),
        (100, 0.0, 256, 0),
    ],
)
def test_the_hit_rate_is_exact(prompt_tokens: int, hit_rate: float, granularity: int, expected: int) -> None:
    spec = SyntheticSpec(
        requests=30, prompt_tokens=prompt_tokens, hit_rate=hit_rate, prefixes=4, granularity_tokens=granularity
    )
    assert shared_tokens(spec) == expected
    warm, load = warmers(spec, 1), synthetic(spec, 1)
    assert len(warm) == (4 if expected else 0)
    assert all(request.prompt_tokens == expected and request.output_tokens == 1 for request in warm)
    for request in load:
        assert request.prompt_tokens == prompt_tokens
        assert max((leading_common_tokens(request, w) for w in warm), default=0) == expected
    # Beyond its prefix a request shares nothing with any other.
    for one, other in itertools.combinations(load, 2):
        assert leading_common_tokens(one, other) in (0, expected)


def test_every_hit_rate_is_the_nearest_that_whole_chunks_allow() -> None:
    for prompt_tokens in (600, 1025, 5000):
        for percent in range(101):
            spec = SyntheticSpec(requests=1, prompt_tokens=prompt_tokens, hit_rate=percent / 100, granularity_tokens=64)
            hit, most = shared_tokens(spec), (prompt_tokens - 1) // 64 * 64
            assert hit % 64 == 0 and hit <= most < prompt_tokens
            assert abs(hit - percent / 100 * most) <= 32


def test_prefixes_are_popular_by_zipf() -> None:
    spec = SyntheticSpec(requests=40_000, prompt_tokens=65, hit_rate=1.0, prefixes=20, zipf=1.1, granularity_tokens=64)
    counts = Counter(request.prompt[0].hash_id for request in synthetic(spec, 3))
    ids = [request.prompt[0].hash_id for request in warmers(spec, 3)]
    seen = np.array([counts[hash_id] for hash_id in ids])
    weights = np.arange(1, 21) ** -1.1
    expected = weights / weights.sum() * spec.requests
    chi_square = float(((seen - expected) ** 2 / expected).sum())
    assert chi_square < 43.8  # 99.9 % of draws, 19 degrees of freedom
    uniform = float(((seen - spec.requests / 20) ** 2 / (spec.requests / 20)).sum())
    assert uniform > 1000


def test_without_zipf_all_prefixes_are_equally_likely() -> None:
    spec = SyntheticSpec(requests=40_000, prompt_tokens=65, hit_rate=1.0, prefixes=20, granularity_tokens=64)
    counts = np.array(list(Counter(r.prompt[0].hash_id for r in synthetic(spec, 3)).values()))
    assert len(counts) == 20
    assert float(((counts - 2000) ** 2 / 2000).sum()) < 43.8


def times(arrivals: Any, rate_per_s: float | None) -> list[float | None]:
    spec = SyntheticSpec(requests=20_000, prompt_tokens=10, arrivals=arrivals, rate_per_s=rate_per_s)
    return [request.at_s for request in synthetic(spec, 5)]


def test_arrivals() -> None:
    assert set(times("closed", None)) == {None}
    assert times("constant", 4.0)[:4] == [0.0, 0.25, 0.5, 0.75]
    poisson = np.array(times("poisson", 4.0), dtype=float)
    gaps = np.diff(poisson)
    assert poisson[0] == 0.0 and (gaps >= 0).all()
    # Mean and deviation of an exponential gap are both 0.25 s; 4 standard errors are 2.8 %.
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() == pytest.approx(0.25, rel=0.05)


def test_the_seed_decides() -> None:
    spec = SyntheticSpec(requests=50, prompt_tokens=600, hit_rate=0.5, prefixes=5, arrivals="poisson", rate_per_s=1)
    talk = SessionSpec(sessions=9, turns=3, user_tokens=5, output_tokens=5, system_tokens=7, think_s=1)
    for one, again, other in (
        (synthetic(spec, 1), synthetic(spec, 1), synthetic(spec, 2)),
        (conversation(talk, 1), conversation(talk, 1), conversation(talk, 2)),
    ):
        assert one == again
        assert [(r.at_s, r.delay_s) for r in one] != [(r.at_s, r.delay_s) for r in other]
        ids = [{segment.hash_id for request in load for segment in request.prompt} for load in (one, other)]
        assert ids[0].isdisjoint(ids[1])


def test_a_conversation_grows() -> None:
    spec = SessionSpec(
        sessions=3, turns=4, system_tokens=100, user_tokens=20, output_tokens=30, arrivals="constant", rate_per_s=0.5
    )
    load = conversation(spec, 1)
    assert len({request.id for request in load}) == len(load) == 12
    sessions = [list(group) for _, group in itertools.groupby(load, key=lambda request: request.session)]
    assert [turns[0].at_s for turns in sessions] == [0.0, 2.0, 4.0]
    for turns in sessions:
        assert [request.turn for request in turns] == [0, 1, 2, 3]
        assert [request.prompt_tokens for request in turns] == [120, 170, 220, 270]
        assert [request.at_s for request in turns[1:]] == [None, None, None]
        for earlier, later in itertools.pairwise(turns):
            assert later.prompt[: len(earlier.prompt)] == earlier.prompt
            assert later.prompt[len(earlier.prompt)].tokens == earlier.output_tokens
    # Only the system prefix is shared between sessions.
    first, second = ({segment.hash_id for segment in turns[-1].prompt} for turns in sessions[:2])
    assert first & second == {load[0].prompt[0].hash_id}


def test_think_times_are_exponential_and_the_first_turn_has_none() -> None:
    spec = SessionSpec(sessions=4000, turns=4, user_tokens=1, output_tokens=1, think_s=8.0)
    load = conversation(spec, 2)
    assert {request.delay_s for request in load if request.turn == 0} == {0.0}
    pauses = np.array([request.delay_s for request in load if request.turn])
    assert pauses.mean() == pytest.approx(8.0, rel=0.04)
    assert pauses.std() == pytest.approx(8.0, rel=0.06)
    assert all(request.at_s is None for request in load)


def test_a_conversation_without_a_system_prefix_shares_nothing() -> None:
    load = conversation(SessionSpec(sessions=2, turns=1, user_tokens=5, output_tokens=1), 1)
    assert load[0].prompt_tokens == 5
    assert load[0].prompt[0].hash_id != load[1].prompt[0].hash_id


IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"requests": 0}, "requests: must be 1 to 10^9 (0)"),
    ({"prompt_tokens": -1}, "prompt_tokens: must be 1 to 10^9 (-1)"),
    ({"prefixes": 0}, "prefixes: must be 1 to 10^9 (0)"),
    ({"output_tokens": 0}, "output_tokens: must be 1 to 10^9 (0)"),
    ({"granularity_tokens": 0}, "granularity_tokens: must be 1 to 10^9 (0)"),
    ({"hit_rate": 1.01}, "hit_rate: must lie in 0..1 (1.01); give a share"),
    ({"hit_rate": -0.1}, "hit_rate: must lie in 0..1 (-0.1)"),
    ({"hit_rate": float("nan")}, "hit_rate: must lie in 0..1 (nan)"),
    ({"zipf": -1.0}, "zipf: must lie in 0..10 (-1.0)"),
    ({"prompt_tokens": 256, "hit_rate": 0.5}, "prompt_tokens: no whole chunk can be hit in a prompt this short (256)"),
    ({"arrivals": "poisson"}, "rate_per_s: poisson arrivals need a rate above 0 (None)"),
    ({"arrivals": "constant", "rate_per_s": 0.0}, "rate_per_s: constant arrivals need a rate above 0 (0.0)"),
    ({"arrivals": "closed", "rate_per_s": 2.0}, "rate_per_s: a closed loop has no rate (2.0)"),
    ({"arrivals": "bursty"}, "arrivals: is unknown ('bursty'); give one of closed, constant, poisson"),
]


@pytest.mark.parametrize(("values", "text"), IMPOSSIBLE)
def test_impossible_values(values: dict[str, Any], text: str) -> None:
    with pytest.raises(SpecError) as caught:
        SyntheticSpec(**{"requests": 1, "prompt_tokens": 1000, **values})
    assert str(caught.value).startswith(text)
    assert "; " in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"sessions": 0}, "sessions: must be 1"),
        ({"turns": 0}, "turns: must be 1"),
        ({"system_tokens": -1}, "system_tokens: must be 0"),
        ({"think_s": -1.0}, "think_s: must be seconds from 0 (-1.0)"),
        ({"think_s": float("inf")}, "think_s: must be seconds from 0 (inf)"),
        ({"arrivals": "poisson"}, "rate_per_s: poisson"),
    ],
)
def test_impossible_sessions(values: dict[str, Any], text: str) -> None:
    with pytest.raises(SpecError) as caught:
        SessionSpec(**{"sessions": 1, "turns": 1, "user_tokens": 1, "output_tokens": 1, **values})
    assert str(caught.value).startswith(text)


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(SpecError, match="seed: must not be negative"):
        synthetic(SyntheticSpec(requests=1, prompt_tokens=1), -1)
