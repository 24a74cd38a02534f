"""Load: every request exactly once, in time, in turn, in a free slot, and with the time it was meant to go."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from traces.load import Blocked, Done, Load, Send, WaitUntil
from traces.request import Request, Segment
from traces.synth import SessionSpec, conversation


def request(
    name: str,
    at_s: float | None = None,
    session: str | None = None,
    turn: int = 0,
    delay_s: float = 0.0,
    wave: int = 0,
) -> Request:
    return Request(
        id=name,
        prompt=(Segment(1, 1),),
        output_tokens=1,
        at_s=at_s,
        session=session,
        turn=turn,
        delay_s=delay_s,
        wave=wave,
    )


@dataclass(frozen=True)
class Sent:
    request: Request
    scheduled_s: float
    sent_s: float
    completed_s: float


def drive(load: Load, service_s: Callable[[Request], float]) -> list[Sent]:
    """A perfect sender on a virtual clock, to the end; fails if the load waits for nothing."""
    now_s, sent = 0.0, []
    running: list[tuple[float, int, Request]] = []

    def complete() -> None:
        nonlocal now_s
        done_s, _, finished = heapq.heappop(running)
        now_s = max(now_s, done_s)
        load.completed(finished.id, now_s)

    while not isinstance(action := load.next(now_s), Done):
        if isinstance(action, Send):
            done_s = now_s + service_s(action.request)
            sent.append(Sent(action.request, action.scheduled_s, now_s, done_s))
            heapq.heappush(running, (done_s, len(sent), action.request))
        elif isinstance(action, WaitUntil) and (not running or action.at_s <= running[0][0]):
            assert action.at_s > now_s
            now_s = action.at_s
        else:
            assert running, "blocked, and nothing is running that could end it"
            complete()
    while running:
        complete()
    assert isinstance(load.next(now_s), Done)
    return sent


def names(sent: list[Sent]) -> list[str]:
    return [row.request.id for row in sent]


def test_open_loop_sends_at_the_stated_times_in_order() -> None:
    load = Load([request("a", 2.0), request("b", 0.5), request("c", 2.0), request("d", 0.0)])
    sent = drive(load, lambda _: 10.0)
    assert [(row.request.id, row.sent_s, row.scheduled_s) for row in sent] == [
        ("d", 0.0, 0.0),
        ("b", 0.5, 0.5),
        ("a", 2.0, 2.0),
        ("c", 2.0, 2.0),
    ]


def test_a_late_sender_does_not_move_the_intended_time() -> None:
    load = Load([request("a", 1.0), request("b", 1.5)])
    assert load.next(0.0) == WaitUntil(1.0)
    assert load.next(7.0) == Send(load.requests[0], 1.0)
    assert load.next(7.0) == Send(load.requests[1], 1.5)
    assert load.next(7.0) == Done()


def test_closed_loop_keeps_the_slots_full() -> None:
    sent = drive(Load([request(name) for name in "abcde"], concurrency=2), lambda r: 3.0 if r.id == "a" else 1.0)
    assert [(row.request.id, row.scheduled_s, row.sent_s) for row in sent] == [
        ("a", 0.0, 0.0),
        ("b", 0.0, 0.0),
        ("c", 1.0, 1.0),
        ("d", 2.0, 2.0),
        ("e", 3.0, 3.0),
    ]


def test_each_freed_slot_has_its_own_time() -> None:
    """Two completions before the sender comes round: each next request belongs to one of them."""
    load = Load([request(name) for name in "abcd"], concurrency=2)
    assert isinstance(load.next(0.0), Send) and isinstance(load.next(0.0), Send)
    assert load.next(0.5) == Blocked()
    load.completed("b", 1.0)
    load.completed("a", 1.25)
    assert [load.next(2.0), load.next(2.0)] == [Send(load.requests[2], 1.0), Send(load.requests[3], 1.25)]


def test_without_a_limit_untimed_requests_were_all_meant_to_go_at_once() -> None:
    load = Load([request("a"), request("b")])
    assert load.next(0.0) == Send(load.requests[0], 0.0)
    load.completed("a", 4.0)
    assert load.next(5.0) == Send(load.requests[1], 0.0)


def test_a_turn_follows_the_one_before_after_its_delay() -> None:
    turns = [request("s0", 1.0, "s"), request("s1", None, "s", 1, 2.5), request("s2", 20.0, "s", 2, 0.5)]
    sent = drive(Load(turns), lambda _: 4.0)
    # s1 at 1 + 4 + 2.5; s2 would be ready at 12, but not before its own time.
    assert [(row.scheduled_s, row.sent_s) for row in sent] == [(1.0, 1.0), (7.5, 7.5), (20.0, 20.0)]


def test_a_slice_that_begins_in_the_middle_of_a_session() -> None:
    turns = [request("x"), request("s4", None, "s", 4, 9.0), request("s5", None, "s", 5, 1.0)]
    sent = drive(Load(turns, concurrency=1), lambda _: 2.0)
    # The first turn there has no predecessor: it was meant to go when its slot became free.
    assert [(row.request.id, row.scheduled_s) for row in sent] == [("x", 0.0), ("s4", 2.0), ("s5", 5.0)]


def test_sessions_under_way_go_on_before_new_ones_begin() -> None:
    load = conversation(SessionSpec(sessions=3, turns=3, user_tokens=1, output_tokens=1), seed=1)
    assert names(drive(Load(load, concurrency=1), lambda _: 1.0)) == [r.id for r in load]


def test_a_slot_is_not_kept_idle_while_a_user_thinks() -> None:
    load = [request("a0", None, "a"), request("a1", None, "a", 1, 5.0), request("b"), request("c"), request("d")]
    sent = drive(Load(load, concurrency=1), lambda _: 2.0)
    # a1 is due at 7, when c is under way; it goes before d, and its lateness shows.
    assert [(row.request.id, row.scheduled_s, row.sent_s) for row in sent] == [
        ("a0", 0.0, 0.0),
        ("b", 2.0, 2.0),
        ("c", 4.0, 4.0),
        ("d", 6.0, 6.0),
        ("a1", 7.0, 8.0),
    ]


def test_nothing_to_send() -> None:
    assert Load([]).next(0.0) == Done()


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match="concurrency must be at least 1, not 0"):
        Load([], concurrency=0)
    load = Load([request("a"), request("a")])
    load.next(0.0)
    with pytest.raises(ValueError, match="'a' is in flight already"):
        load.next(0.0)
    with pytest.raises(KeyError):
        load.completed("b", 1.0)
    load.completed("a", 1.0)
    with pytest.raises(KeyError):
        load.completed("a", 1.0)


def random_requests(rng: random.Random) -> list[Request]:
    requests = []
    turns: dict[str, int] = {}
    for index in range(rng.randint(1, 60)):
        session = rng.choice([None, None, "s", "t", "u", "v"])
        turn = 0 if session is None else turns.get(session, rng.choice([0, 0, 3]))
        if session is not None:
            turns[session] = turn + 1
        at_s = rng.choice([None, rng.choice([0.0, 1.0, 2.0]), rng.uniform(0, 30)])
        requests.append(request(f"r{index}", at_s, session, turn, rng.choice([0.0, rng.expovariate(1)])))
    return requests


@pytest.mark.parametrize("seed", range(300))
def test_any_mix(seed: int) -> None:
    rng = random.Random(seed)
    requests, concurrency = random_requests(rng), rng.choice([None, 1, 2, 5])
    sent = drive(Load(requests, concurrency), lambda _: rng.choice([0.0, 0.5, rng.expovariate(0.5)]))

    assert sorted(names(sent)) == sorted(r.id for r in requests), "none lost, none twice"
    assert [row.sent_s for row in sent] == sorted(row.sent_s for row in sent)
    last: dict[str, Sent] = {}
    for row in sent:
        before = last.get(row.request.session) if row.request.session else None
        assert 0.0 <= row.scheduled_s <= row.sent_s
        assert row.sent_s >= (row.request.at_s or 0.0)
        if before is not None:
            assert row.request.turn == before.request.turn + 1
            assert row.scheduled_s == max(before.completed_s + row.request.delay_s, row.request.at_s or 0.0)
        elif row.request.at_s is not None:
            assert row.scheduled_s == row.request.at_s
        if row.request.session:
            last[row.request.session] = row
    in_flight_is_bounded_and_slots_are_used(sent, concurrency)


def in_flight_is_bounded_and_slots_are_used(sent: list[Sent], concurrency: int | None) -> None:
    for index, row in enumerate(sent):
        running = sum(other.completed_s > row.sent_s for other in sent[:index])
        assert concurrency is None or running < concurrency
        if concurrency is None:
            assert row.sent_s == row.scheduled_s, "an open loop holds nothing back"
        elif row.sent_s > row.scheduled_s:
            # Sent late: at the moments in between, every slot was taken by requests that were due as well.
            moment = (row.sent_s + row.scheduled_s) / 2
            assert sum(o.sent_s <= moment < o.completed_s for o in sent) == concurrency


@pytest.mark.parametrize("action", [Send(request("a"), 1.0), WaitUntil(1.0), Blocked(), Done()])
def test_an_action_is_a_value_that_nobody_changes(action: Send | WaitUntil | Blocked | Done) -> None:
    assert action == replace(action) and hash(action) == hash(replace(action)) and not hasattr(action, "__dict__")
