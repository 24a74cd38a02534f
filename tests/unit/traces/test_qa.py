"""Question answering: who is there when, what each prompt holds, and what the Load makes of late answers."""

import itertools
import math
from collections import Counter
from typing import Any

import pytest

from harness.experiment.loads import FreeLoad, free_load
from harness.experiment.model import Experiment
from tests.unit.traces.test_load import drive
from traces.errors import SpecError
from traces.qa import QaSpec, qa_requests
from traces.request import Request

PUBLISHED: dict[str, Any] = {"users": 15, "rounds": 20, "rate_per_s": 2.0, "history_tokens": 400}


def spec(**settings: Any) -> QaSpec:
    return QaSpec(**{**PUBLISHED, "system_tokens": 100, "duration_s": 1200.0, **settings})


def load(**settings: Any) -> FreeLoad:
    workload = {"kind": "qa", **PUBLISHED, "duration": "1200s", **settings}
    return free_load(
        Experiment.model_validate({"name": "qa", "seed": 3, "workload": workload, "cache": {"gpu": "1GiB"}})
    )


def by_user(requests: tuple[Request, ...]) -> dict[str, list[Request]]:
    found: dict[str, list[Request]] = {}
    for one in requests:
        found.setdefault(one.session or "", []).append(one)
    return found


def test_a_user_lives_142_seconds_and_a_new_one_joins_every_9() -> None:
    users = by_user(qa_requests(spec(), seed=1))
    firsts = [turns[0] for turns in users.values() if turns[0].turn == 0]
    gaps_s = {round(b.at_s - a.at_s, 9) for a, b in itertools.pairwise(firsts) if a.at_s is not None and b.at_s}
    assert firsts[0].at_s == 0.0 and gaps_s == {9.5}
    assert {one.interval_s for turns in users.values() for one in turns[1:]} == {7.5}
    assert {one.at_s for turns in users.values() for one in turns[1:]} == {None}
    whole = [turns for turns in users.values() if len(turns) == 20]
    assert whole and [one.turn for one in whole[0]] == list(range(20))


def test_at_the_start_the_users_stand_in_the_middle_of_their_sessions() -> None:
    users = by_user(qa_requests(spec(), seed=1))
    assert len([turns for turns in users.values() if turns[0].turn or not turns[0].at_s]) == 15
    for number in range(15):
        turns = users[f"{number:06d}"]
        offset_s = (14 - number) * 9.5
        first = turns[0]
        assert first.turn == math.ceil(offset_s / 7.5) and first.at_s == pytest.approx(first.turn * 7.5 - offset_s)
        assert len(turns) == 20 - first.turn
        # The turns that it would have had are in its first prompt.
        assert first.prompt_tokens == 100 + 400 + first.turn * (20 + 100) + 20


def test_prompts_grow_and_users_share_the_systems_tokens_alone() -> None:
    requests = qa_requests(spec(), seed=1)
    for turns in by_user(requests).values():
        for one, following in itertools.pairwise(turns):
            assert following.prompt[: len(one.prompt)] == one.prompt
            assert [segment.tokens for segment in following.prompt[len(one.prompt) :]] == [100, 20]
    holders: dict[int, set[str]] = {}
    for one in requests:
        for segment in one.prompt:
            holders.setdefault(segment.hash_id, set()).add(one.session or "")
    assert sorted(Counter(map(len, holders.values()))) == [1, len(by_user(requests))]
    assert len({one.id for one in requests}) == len(requests)


def test_the_schedule_asks_at_its_rate_from_the_first_second_to_the_last() -> None:
    asked = load()
    assert asked.asked_per_s == len(asked.requests) / 1200 == pytest.approx(2 * 20 / 19, rel=0.005)
    sent = drive(asked.schedule(asked.requests), lambda _: 1.0)
    assert len(sent) == len(asked.requests) and sent[-1].sent_s < 1200
    for begin_s in range(0, 1100, 95):
        assert sum(begin_s <= row.sent_s < begin_s + 95 for row in sent) == pytest.approx(200, abs=3), begin_s
    assert len(asked.warmers) == 10 and {one.prompt_tokens for one in asked.warmers} == {100}


def test_who_waits_for_late_answers_asks_less_and_never_catches_up() -> None:
    asked = load(duration="300s")
    schedule = asked.schedule(asked.requests)
    sent = drive(schedule, lambda _: 11.0)
    assert schedule.unsent == len(asked.requests) - len(sent) > 0 and schedule.unfinished > 0
    for turns in by_user(tuple(row.request for row in sent)).values():
        times_s = [row.sent_s for row in sent if row.request.session == turns[0].session]
        assert all(b - a == pytest.approx(11.0) for a, b in itertools.pairwise(times_s))


def test_the_same_seed_gives_the_same_questions() -> None:
    assert qa_requests(spec(), seed=1) == qa_requests(spec(), seed=1) != qa_requests(spec(), seed=2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"users": 0}, r"users: must be at least 1 \(0\)"),
        ({"rounds": 1}, r"rounds: must be at least 2 \(1\)"),
        ({"rate_per_s": 0.0}, r"rate_per_s: must be above 0 \(0.0\)"),
        ({"duration_s": math.inf}, r"duration_s: must be above 0 \(inf\)"),
        ({"rate_per_s": 1e6}, r"duration_s: 1200 s hold 1.2e\+09 requests; shorten it"),
    ],
)
def test_a_load_that_cannot_be_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        spec(**settings)
