"""Sessions whose turns wait for turns that they name: agents and their sub-agents, side by side."""

from __future__ import annotations

import random

import msgspec
import pytest

from tests.unit.traces.test_load import Sent, drive, request
from traces.load import Load
from traces.request import Request


def turn(name: str, *after: str, delay_s: float = 0.0, session: str = "s") -> Request:
    return msgspec.structs.replace(request(name, session=session, delay_s=delay_s), after=after)


# The agent asks a, begins two sub-agents (b and b2; c), and goes on with d when both have ended.
TREE = [turn("a"), turn("b", "a"), turn("c", "a", delay_s=2.0), turn("b2", "b"), turn("d", "b2", "c", delay_s=1.0)]
SERVICE_S = {"a": 1.0, "b": 5.0, "c": 1.0, "b2": 5.0, "d": 1.0}


def by_name(sent: list[Sent]) -> dict[str, Sent]:
    return {one.request.id: one for one in sent}


def test_turns_go_side_by_side_and_wait_for_all_that_they_name() -> None:
    sent = by_name(drive(Load(TREE), lambda one: SERVICE_S[one.id]))
    assert {name: one.sent_s for name, one in sent.items()} == {"a": 0.0, "b": 1.0, "c": 3.0, "b2": 6.0, "d": 12.0}
    slots = by_name(drive(Load(TREE, concurrency=1), lambda one: SERVICE_S[one.id]))
    assert {name: one.sent_s for name, one in slots.items()} == {"a": 0.0, "b": 1.0, "c": 6.0, "b2": 7.0, "d": 13.0}


def test_a_session_keeps_its_place_until_its_last_branch_has_ended() -> None:
    """c ends last, and nothing waits for it."""
    left = [turn("a"), turn("c", "a"), turn("d", "a")]
    other = [turn("x", session="t"), turn("y", session="t")]
    sent = by_name(drive(Load([*left, *other], active_sessions=1), lambda one: 30.0 if one.id == "c" else 1.0))
    assert {name: one.sent_s for name, one in sent.items()} == {"a": 0.0, "c": 1.0, "d": 1.0, "x": 31.0, "y": 32.0}


def test_what_has_completed_in_an_earlier_attempt_is_waited_for_no_more() -> None:
    """Of d's two, c is done; what waits for done turns alone follows the turn before it, so a session has one begin."""
    sent = by_name(drive(Load([TREE[1], *TREE[3:]]), lambda one: SERVICE_S[one.id]))
    assert {name: one.sent_s for name, one in sent.items()} == {"b": 0.0, "b2": 5.0, "d": 11.0}


@pytest.mark.parametrize("seed", range(20))
def test_any_tree_is_sent_once_in_its_order_within_its_limits(seed: int) -> None:
    chance = random.Random(seed)
    requests = []
    for session in range(6):
        names: list[str] = []
        for number in range(chance.randrange(1, 9)):
            name = f"{session}-{number}"
            after = chance.sample(names, min(len(names), chance.randrange(0, 3)))
            requests.append(turn(name, *after, session=f"{session}", delay_s=chance.choice((0.0, 1.5))))
            names.append(name)
    places, slots = chance.choice((None, 1, 2)), chance.choice((None, 1, 3))
    load = Load(requests, slots, active_sessions=places)
    sent = drive(load, lambda one: random.Random(one.id).choice((0.5, 1.0, 4.0)))
    found = by_name(sent)
    assert len(sent) == len(found) == len(requests)
    before: dict[str | None, str] = {}
    for one in requests:
        names = list(one.after) or ([before[one.session]] if one.session in before else [])
        ended_s = max((found[name].completed_s for name in names), default=None)
        assert ended_s is None or found[one.id].sent_s >= ended_s + one.delay_s
        before[one.session] = one.id
    live = [(min(times), max(ends)) for times, ends in _spans(sent)]
    for begin_s, _ in live:
        assert places is None or sum(begun <= begin_s < ended for begun, ended in live) <= places
        assert slots is None or sum(one.sent_s <= begin_s < one.completed_s for one in sent) <= slots


def _spans(sent: list[Sent]) -> list[tuple[list[float], list[float]]]:
    spans: dict[str | None, tuple[list[float], list[float]]] = {}
    for one in sent:
        times, ends = spans.setdefault(one.request.session, ([], []))
        times.append(one.sent_s)
        ends.append(one.completed_s)
    return list(spans.values())
