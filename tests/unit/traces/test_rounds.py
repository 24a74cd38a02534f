"""Rounds of conversations: what is asked, in which order, and what the Load makes of it."""

import itertools
from typing import Any

import pytest

from harness.experiment.loads import free_load
from harness.experiment.model import Experiment
from tests.unit.traces.test_load import drive
from traces.errors import SpecError
from traces.rounds import RoundSpec, rounds_load


def spec(**settings: Any) -> RoundSpec:
    return RoundSpec(**{"clients": 4, "rounds": 3, "first_tokens": 100, "parallel": 2, **settings})


def experiment(**settings: Any) -> Experiment:
    workload = {"kind": "rounds", "clients": 4, "rounds": 3, "first_tokens": 100, "parallel": 2, **settings}
    return Experiment.model_validate({"name": "rounds", "seed": 3, "workload": workload, "cache": {"gpu": "1GiB"}})


def test_each_prompt_holds_all_earlier_turns_and_answers() -> None:
    load = rounds_load(spec(turn_tokens=30, output_tokens=7), seed=1)
    by_client = [[r for r in load.requests if r.session == f"{client:06d}"] for client in range(4)]
    for turns in by_client:
        assert [r.turn for r in turns] == [r.wave for r in turns] == [0, 1, 2]
        assert [r.prompt_tokens for r in turns] == [100, 137, 174]
        assert turns[1].prompt[: len(turns[0].prompt)] == turns[0].prompt
        assert turns[2].prompt[: len(turns[1].prompt)] == turns[1].prompt
    assert len({segment.hash_id for r in load.requests for segment in r.prompt}) == 4 * 5, "clients share nothing"
    assert len({r.id for r in load.requests}) == 12
    plain = rounds_load(spec(answers="none"), seed=1)
    assert sorted({r.prompt_tokens for r in plain.requests}) == [100, 200, 300]


def test_every_round_has_an_order_of_its_own_or_that_of_the_numbers() -> None:
    load = rounds_load(spec(clients=30), seed=1)
    orders = [[r.session for r in load.requests if r.turn == number] for number in range(3)]
    assert all({*order} == {f"{c:06d}" for c in range(30)} and len(order) == 30 for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert rounds_load(spec(clients=30), seed=1) == load != rounds_load(spec(clients=30), seed=2)
    fifo = rounds_load(spec(order="fifo"), seed=1)
    assert [r.session for r in fifo.requests] == [f"{c:06d}" for c in range(4)] * 3
    assert fifo.shuffle_seed is load.shuffle_seed is None


@pytest.mark.parametrize("order", ["random", "fifo"])
def test_a_barrier_parts_the_rounds_and_parallel_bounds_them(order: str) -> None:
    load = free_load(experiment(order=order))
    sent = drive(load.schedule(load.requests), lambda r: 1.0 + int(r.session or 0))
    ends_s = [max(s.completed_s for s in sent if s.request.turn == number) for number in range(3)]
    begins_s = [min(s.sent_s for s in sent if s.request.turn == number) for number in range(3)]
    assert begins_s[1:] == ends_s[:-1]
    assert all(s.sent_s == s.scheduled_s for s in sent), "who waits for a place is not late"
    assert max(sum(o.sent_s <= s.sent_s < o.completed_s for o in sent) for s in sent) == 2


def test_without_a_barrier_a_quick_client_is_ahead() -> None:
    load = free_load(experiment(barrier=False, order="fifo"))
    sent = drive(load.schedule(load.requests), lambda r: 9.0 if r.session == "000000" else 1.0)
    slow_s = next(s.completed_s for s in sent if s.request.session == "000000")
    assert any(s.request.turn > 0 and s.completed_s < slow_s for s in sent)


def test_without_a_barrier_a_random_order_is_the_seeds() -> None:
    orders = set()
    for seed in range(5):
        chance = free_load(experiment(barrier=False).model_copy(update={"seed": seed}))
        assert chance.shuffle_seed == seed
        sent = drive(chance.schedule(chance.requests), lambda _: 1.0)
        orders.add(tuple(s.request.id for s in sent))
    assert len(orders) == 5


def test_pauses_have_the_stated_rate() -> None:
    load = rounds_load(spec(clients=50, rounds=40, rate_per_s=16.0), seed=1)
    assert len(load.gaps_s) == 50 * 40 - 1
    assert sum(load.gaps_s) / len(load.gaps_s) == pytest.approx(1 / 16, rel=0.1)
    assert rounds_load(spec(), seed=1).gaps_s == ()
    slow = free_load(experiment(rate_per_s=0.01))
    sent = drive(slow.schedule(slow.requests), lambda _: 1e-6)
    gaps_s = [b.sent_s - a.sent_s for a, b in itertools.pairwise(sent)]
    assert gaps_s == pytest.approx(slow.gaps_s)


def begun_before_the_first_ends(asked: Experiment) -> int:
    """With one slot and no thinking: how many conversations have begun when the first one ends."""
    load = free_load(asked)
    sent = drive(load.schedule(load.requests), lambda _: 1.0)
    assert all(row.scheduled_s == row.sent_s for row in sent), "a slot was free, and a turn ready"
    last = {row.request.session: at for at, row in enumerate(sent)}
    return len({row.request.session for row in sent[: min(last.values()) + 1]})


def test_the_order_says_how_many_conversations_are_live() -> None:
    def sessions(order: str, seed: int = 3) -> Experiment:
        workload = {"kind": "sessions", "sessions": 9, "turns": 3, "concurrency": 1, "order": order}
        made = {"name": "sessions", "seed": seed, "workload": workload, "cache": {"gpu": "1GiB"}}
        return Experiment.model_validate(made)

    def rounds(order: str) -> Experiment:
        return experiment(clients=9, parallel=1, barrier=False, order=order)

    for asked in (sessions, rounds):
        live = {order: begun_before_the_first_ends(asked(order)) for order in ("depth", "fifo", "random")}
        assert live["depth"] == 1 < live["random"] <= live["fifo"] == 9
    loads = [free_load(sessions("random", seed)) for seed in range(5)]
    orders = {tuple(row.request.id for row in drive(one.schedule(one.requests), lambda _: 1.0)) for one in loads}
    assert len(orders) == 5


def test_depth_at_a_barrier_is_refused() -> None:
    with pytest.raises(SpecError, match="order: depth needs barrier False"):
        spec(order="depth")
    with pytest.raises(ValueError, match=r"workload\.order depth needs workload\.barrier false"):
        experiment(order="depth")


@pytest.mark.parametrize("name", ["clients", "rounds", "first_tokens", "parallel"])
def test_nothing_to_ask_is_refused(name: str) -> None:
    with pytest.raises(SpecError, match=rf"{name}: must be at least 1 \(0\)"):
        spec(**{name: 0})


def test_sessions_take_places() -> None:
    workload = {"kind": "sessions", "sessions": 6, "turns": 3, "think": "2s", "active_sessions": 2}
    asked = Experiment.model_validate({"name": "sessions", "workload": workload, "cache": {"gpu": "1GiB"}})
    load = free_load(asked)
    sent = drive(load.schedule(load.requests), lambda _: 1.0)
    spans = [[s for s in sent if s.request.session == f"{n:06d}"] for n in range(6)]
    for row in sent:
        assert sum(turns[0].sent_s <= row.sent_s < turns[-1].completed_s for turns in spans) <= 2
