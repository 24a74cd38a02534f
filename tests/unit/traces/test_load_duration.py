"""The end of a load by time, turns at a pace of their own, and what became ready first: exact small cases."""

from __future__ import annotations

import msgspec
import pytest

from tests.unit.traces.test_load import Sent, drive, names, request
from traces.load import Done, Load, Send, WaitUntil
from traces.request import Request


def turns(session: str, count: int, interval_s: float = 0.0, delay_s: float = 0.0) -> list[Request]:
    made = [request(f"{session}{turn}", None, session, turn, delay_s if turn else 0.0) for turn in range(count)]
    return [made[0], *(msgspec.structs.replace(each, interval_s=interval_s) for each in made[1:])]


def told(sent: list[Sent]) -> list[tuple[str, float, float]]:
    return [(row.request.id, row.scheduled_s, row.sent_s) for row in sent]


# ---- a pace of their own


def test_a_user_asks_at_a_pace_and_a_late_answer_moves_it_once() -> None:
    took_s = {"a0": 1.0, "a1": 25.0, "a2": 1.0, "a3": 1.0}
    sent = drive(Load(turns("a", 4, interval_s=10.0)), lambda asked: took_s[asked.id])
    # a1 is answered at 35 s, after two more of its moments: a2 goes then, a3 a whole interval later, and none twice.
    assert told(sent) == [("a0", 0.0, 0.0), ("a1", 10.0, 10.0), ("a2", 35.0, 35.0), ("a3", 45.0, 45.0)]


def test_a_late_sender_does_not_move_a_pace() -> None:
    load = Load(turns("a", 2, interval_s=10.0))
    assert load.next(4.0) == Send(load.requests[0], 0.0)
    load.completed("a0", 5.0)
    assert load.next(5.0) == WaitUntil(10.0)


def test_a_turn_keeps_its_delay_and_its_pace() -> None:
    sent = drive(Load(turns("a", 3, interval_s=10.0, delay_s=4.0)), lambda asked: 8.0 if asked.id == "a0" else 1.0)
    assert told(sent) == [("a0", 0.0, 0.0), ("a1", 12.0, 12.0), ("a2", 22.0, 22.0)]


# ---- the end


def test_nothing_is_sent_from_the_end_on_and_what_is_under_way_ends_in_its_own_time() -> None:
    load = Load(
        [request(name, at_s) for name, at_s in (("a", 0.0), ("b", 4.0), ("c", 5.0), ("d", 6.0))], duration_s=5.0
    )
    assert names(drive(load, lambda _: 3.0)) == ["a", "b"]
    assert (load.unsent, load.unfinished, load.cut_s) == (2, 1, None)


def test_no_sender_waits_beyond_the_end() -> None:
    load = Load([request("a"), request("b")], concurrency=1, duration_s=5.0, drain=False)
    assert (load.next(0.0), load.next(1.0)) == (Send(load.requests[0], 0.0), WaitUntil(5.0))
    assert load.next(5.0) == Done()
    assert load.cut_s == 5.0
    load.completed("a", 5.0)
    assert (load.unsent, load.unfinished) == (1, 1)


def test_what_has_all_been_sent_is_still_ended_unless_it_drains() -> None:
    for drain, then in ((False, WaitUntil(5.0)), (True, Done())):
        load = Load([request("a")], duration_s=5.0, drain=drain)
        assert [load.next(0.0), load.next(1.0)] == [Send(load.requests[0], 0.0), then]
        load.completed("a", 2.0)
        assert (load.next(2.0), load.unfinished) == (Done(), 0)


def test_a_load_that_ends_in_time_does_not_notice_its_limit() -> None:
    asked = [*turns("a", 3, interval_s=2.0), *turns("b", 3), request("c", 4.0)]
    limited = Load(asked, concurrency=2, duration_s=100.0)
    assert told(drive(limited, lambda _: 1.0)) == told(drive(Load(asked, concurrency=2), lambda _: 1.0))
    assert (limited.unsent, limited.unfinished) == (0, 0)


# ---- what became ready first


def test_first_ready_first_lets_every_session_begin_before_one_goes_on() -> None:
    asked = [each for session in "abc" for each in turns(session, 2)]
    assert names(drive(Load(asked, concurrency=1), lambda _: 1.0)) == ["a0", "a1", "b0", "b1", "c0", "c1"]
    sent = drive(Load(asked, concurrency=1, fifo=True), lambda _: 1.0)
    assert names(sent) == ["a0", "b0", "c0", "a1", "b1", "c1"]
    # A turn that waits for its slot was meant to go when the slot became free.
    assert all(row.scheduled_s == row.sent_s for row in sent)


@pytest.mark.parametrize("fifo", [False, True])
def test_with_slots_for_all_the_order_of_what_is_ready_is_the_same(fifo: bool) -> None:
    asked = [each for session in "abc" for each in turns(session, 2)]
    sent = drive(Load(asked, concurrency=3, fifo=fifo), lambda r: {"a": 3.0, "b": 1.0, "c": 2.0}[r.session or ""])
    assert names(sent) == ["a0", "b0", "c0", "b1", "c1", "a1"]
