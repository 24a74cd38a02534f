"""Waves, places for sessions, pauses and chance in a Load: exact small cases, and agreement with a naive reference."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from tests.unit.traces.test_load import Sent, drive, names, request
from traces.load import Blocked, Done, Load, Send, WaitUntil
from traces.request import Request


def told(sent: Sequence[Sent]) -> list[tuple[str, float, float]]:
    return [(row.request.id, row.scheduled_s, row.sent_s) for row in sent]


def seconds(**by_name: float) -> Callable[[Request], float]:
    return lambda asked: by_name[asked.id]


# ---- waves


def test_a_wave_begins_when_the_slowest_of_the_one_before_has_completed() -> None:
    load = Load([request("c", wave=1), request("a"), request("b"), request("d", wave=1)], concurrency=3)
    sent = drive(load, seconds(a=5.0, b=1.0, c=1.0, d=1.0))
    # c and d were meant to go at the release of their wave, although two slots had been free for longer.
    assert told(sent) == [("a", 0.0, 0.0), ("b", 0.0, 0.0), ("c", 5.0, 5.0), ("d", 5.0, 5.0)]


def test_the_last_request_of_a_wave_holds_the_next_one_back() -> None:
    load = Load([request("a"), request("b", wave=1)])
    assert load.next(0.0) == Send(load.requests[0], 0.0)
    assert load.next(0.5) == Blocked()
    load.completed("a", 1.0)
    assert load.next(3.0) == Send(load.requests[1], 1.0)
    assert load.next(3.0) == Done()
    load.completed("b", 4.0)
    assert load.next(4.0) == Done()


def test_waves_go_by_their_numbers_which_need_not_follow_each_other() -> None:
    load = Load([request("c", wave=40), request("a", wave=-2), request("b", wave=7)])
    assert told(drive(load, lambda _: 2.0)) == [("a", 0.0, 0.0), ("b", 2.0, 2.0), ("c", 4.0, 4.0)]


def test_a_lone_wave_of_any_number_begins_at_once() -> None:
    assert told(drive(Load([request("a", wave=3), request("b", 1.0, wave=3)]), lambda _: 9.0)) == [
        ("a", 0.0, 0.0),
        ("b", 1.0, 1.0),
    ]


def test_a_time_counts_within_a_wave_only_after_its_release() -> None:
    load = Load([request("a"), request("early", 2.0, wave=1), request("late", 7.0, wave=1)])
    assert told(drive(load, lambda _: 4.0)) == [("a", 0.0, 0.0), ("early", 4.0, 4.0), ("late", 7.0, 7.0)]


def test_a_turn_waits_for_its_wave_and_for_its_delay() -> None:
    def second(delay_s: float, at_s: float | None = None) -> Sent:
        turns = [request("s0", None, "s"), request("slow"), request("s1", at_s, "s", 1, delay_s, wave=1)]
        return drive(Load(turns), seconds(s0=1.0, slow=4.0, s1=1.0))[-1]

    assert second(0.0).scheduled_s == second(3.0).scheduled_s == 4.0
    assert second(10.0).scheduled_s == second(10.0).sent_s == 11.0
    assert second(0.0, at_s=6.0).sent_s == 6.0


def test_a_turn_of_the_same_wave_goes_before_the_wave_ends() -> None:
    turns = [request("s0", None, "s"), request("s1", None, "s", 1, 1.0), request("n", wave=1)]
    assert told(drive(Load(turns), lambda _: 2.0)) == [("s0", 0.0, 0.0), ("s1", 3.0, 3.0), ("n", 5.0, 5.0)]


def test_in_a_wave_sessions_go_on_in_the_order_given_and_then_new_ones_begin() -> None:
    load = Load(
        [
            request("a0", None, "a"),
            request("b0", None, "b"),
            request("c1", None, "c", wave=1),
            request("b1", None, "b", 1, wave=1),
            request("a1", None, "a", 1, wave=1),
            request("x1", wave=1),
        ],
        concurrency=1,
    )
    assert names(drive(load, lambda _: 1.0)) == ["a0", "b0", "b1", "a1", "c1", "x1"]


def test_a_session_cannot_go_back_to_an_earlier_wave() -> None:
    turns = [request("s0", None, "s", wave=2), request("t", wave=1), request("s1", None, "s", 1, wave=1)]
    with pytest.raises(ValueError, match="session 's' goes from wave 2 back to wave 1"):
        Load(turns)


# ---- places for sessions


def test_a_session_begins_when_another_one_has_ended() -> None:
    load = Load(
        [
            request("a0", None, "a"),
            request("b0", None, "b"),
            request("c0", None, "c"),
            request("a1", None, "a", 1, 3.0),
            request("b1", None, "b", 1, 9.0),
        ],
        active_sessions=2,
    )
    # a holds its place while its user thinks, from 1 to 4, and ends at 5.
    assert told(drive(load, lambda _: 1.0)) == [
        ("a0", 0.0, 0.0),
        ("b0", 0.0, 0.0),
        ("a1", 4.0, 4.0),
        ("c0", 5.0, 5.0),
        ("b1", 10.0, 10.0),
    ]


def test_a_session_without_a_place_keeps_no_other_request_back() -> None:
    load = Load([request("a", 0.0, "a"), request("b", 1.0, "b"), request("x", 2.0), request("y")], active_sessions=1)
    assert load.next(0.0) == Send(load.requests[0], 0.0)
    assert load.next(0.0) == Send(load.requests[3], 0.0)
    assert load.next(0.5) == WaitUntil(1.0)
    assert load.next(1.0) == WaitUntil(2.0)
    assert load.next(2.5) == Send(load.requests[2], 2.0)
    assert load.next(2.5) == Blocked()
    load.completed("x", 3.0)
    assert load.next(3.0) == Blocked(), "what has no session frees no place"
    load.completed("a", 4.0)
    assert load.next(5.0) == Send(load.requests[1], 1.0), "b had a time of its own, and is late"
    assert load.next(5.0) == Done()


def test_a_session_due_at_0_keeps_that_time_while_it_waits_for_a_place() -> None:
    load = Load([request("a", 0.0, "a"), request("b", 0.0, "b")], active_sessions=1)
    assert load.next(0.0) == Send(load.requests[0], 0.0)
    assert load.next(0.0) == Blocked()
    load.completed("a", 0.5)
    assert load.next(0.5) == Send(load.requests[1], 0.0)


def test_each_freed_place_has_its_own_time() -> None:
    load = Load([request(name, None, name) for name in "abcd"], concurrency=4, active_sessions=2)
    assert isinstance(load.next(0.0), Send) and isinstance(load.next(0.0), Send)
    assert load.next(0.5) == Blocked()
    load.completed("b", 1.0)
    load.completed("a", 1.25)
    assert [load.next(2.0), load.next(2.0)] == [Send(load.requests[2], 1.0), Send(load.requests[3], 1.25)]


def test_a_session_needs_a_slot_and_a_place() -> None:
    load = Load([request("x"), request("a", None, "a"), request("b", None, "b")], concurrency=2, active_sessions=1)
    # At 1 a ends: the place and a slot are free. x keeps the other slot.
    assert told(drive(load, seconds(x=9.0, a=1.0, b=1.0))) == [("x", 0.0, 0.0), ("a", 0.0, 0.0), ("b", 1.0, 1.0)]
    load = Load([request("a", None, "a"), request("b", None, "b"), request("x")], concurrency=1, active_sessions=1)
    # b lacks a slot first: its place has been free since 2, and so has the slot.
    assert told(drive(load, lambda _: 2.0)) == [("a", 0.0, 0.0), ("b", 2.0, 2.0), ("x", 4.0, 4.0)]


def test_sessions_that_wait_begin_in_the_order_given_and_those_with_a_time_first() -> None:
    load = Load(
        [request(name, None, name) for name in "abcd"] + [request("t", 0.0, "t"), request("u", 1.5, "u")],
        active_sessions=1,
    )
    assert names(drive(load, lambda _: 1.0)) == ["t", "a", "u", "b", "c", "d"]


def test_two_places_that_become_free_at_once_keep_the_order_given() -> None:
    load = Load([request(name, None, name) for name in "abcdef"], active_sessions=2)
    assert names(drive(load, lambda _: 1.0)) == ["a", "b", "c", "d", "e", "f"]
    load = Load([request(name, None, name) for name in "abcdef"], active_sessions=2)
    assert [load.next(0.0), load.next(0.0)] == [Send(r, 0.0) for r in load.requests[:2]]
    assert load.next(0.0) == Blocked()
    load.completed("a", 1.0)
    load.completed("b", 1.0)
    assert [load.next(1.0), load.next(1.0)] == [Send(r, 1.0) for r in load.requests[2:4]]


def test_places_must_suffice_for_the_sessions_that_span_waves() -> None:
    rounds = [request(f"{name}{wave}", None, name, wave, wave=wave) for wave in range(2) for name in "abc"]
    with pytest.raises(ValueError, match=r"active_sessions must be at least 3, not 2: 3 sessions hold .* wave 0 ends"):
        Load(rounds, active_sessions=2)
    assert names(drive(Load(rounds, active_sessions=3), lambda _: 1.0)) == ["a0", "b0", "c0", "a1", "b1", "c1"]
    # d and e lie within wave 1, after two of the three have ended there: they need one place more than who goes on.
    later = [request("a2", None, "a", 2, wave=2), request("d", None, "d", wave=1), request("e", None, "e", wave=1)]
    assert sorted(names(drive(Load([*rounds, *later], active_sessions=3), lambda _: 1.0))) == sorted(
        r.id for r in [*rounds, *later]
    )
    with pytest.raises(ValueError, match="must be at least 4, not 3: 3 sessions"):
        Load([*rounds, request("d", None, "d", wave=0)], active_sessions=3)


@pytest.mark.parametrize("setting", ["concurrency", "active_sessions"])
def test_a_limit_of_nothing_is_refused(setting: str) -> None:
    with pytest.raises(ValueError, match=f"{setting} must be at least 1, not 0"):
        Load([], **{setting: 0})  # type: ignore[arg-type]


# ---- pauses and chance


def test_a_pause_follows_each_send() -> None:
    load = Load([request(name) for name in "abcd"], gaps_s=(1.0, 0.0, 2.5))
    assert load.next(0.25) == Send(load.requests[0], 0.0)
    assert load.next(0.25) == WaitUntil(1.25)
    assert load.next(2.0) == Send(load.requests[1], 1.25), "it was meant to go at the end of the pause"
    assert load.next(2.0) == Send(load.requests[2], 2.0)
    assert load.next(4.0) == WaitUntil(4.5)
    assert load.next(4.5) == Send(load.requests[3], 4.5)
    assert load.next(4.5) == Done()


def test_after_the_last_pause_nothing_waits() -> None:
    assert [row.sent_s for row in drive(Load([request(name) for name in "abc"], gaps_s=(3.0,)), lambda _: 9.0)] == [
        0.0,
        3.0,
        3.0,
    ]


def test_a_request_waits_for_its_time_and_for_the_pause() -> None:
    load = Load([request("a", 0.0), request("b", 1.0), request("c", 9.0)], gaps_s=(2.0, 2.0))
    assert told(drive(load, lambda _: 1.0)) == [("a", 0.0, 0.0), ("b", 2.0, 2.0), ("c", 9.0, 9.0)]


def test_chance_chooses_evenly_among_all_that_may_go() -> None:
    first: Counter[str] = Counter()
    for seed in range(600):
        load = Load([request("a", 0.0), request("b", 1.0), request("c"), request("late", 5.0)], shuffle_seed=seed)
        sent = [load.next(1.0) for _ in range(3)]
        assert load.next(1.0) == WaitUntil(5.0)
        assert sorted((s.request.id, s.scheduled_s) for s in sent if isinstance(s, Send)) == [
            ("a", 0.0),
            ("b", 1.0),
            ("c", 0.0),
        ]
        assert isinstance(sent[0], Send)
        first[sent[0].request.id] += 1
    assert all(abs(first[name] - 200) < 50 for name in "abc"), first


def test_chance_gives_a_free_place_to_any_session_that_waits() -> None:
    second: Counter[str] = Counter()
    for seed in range(600):
        sent = drive(
            Load([request(name, None, name) for name in "abcd"], active_sessions=1, shuffle_seed=seed), lambda _: 1.0
        )
        assert [row.sent_s for row in sent] == [0.0, 1.0, 2.0, 3.0]
        second[names(sent)[1]] += 1
    assert all(abs(second[name] - 150) < 45 for name in "abcd"), second


@pytest.mark.parametrize("seed", range(20))
def test_chance_sends_nothing_before_its_time_and_nothing_later(seed: int) -> None:
    times_s = [0.0] * 5 + [float(time_s) for time_s in random.Random(seed).sample(range(1, 40), 20)]
    load = Load([request(f"r{n}", at_s) for n, at_s in enumerate(times_s)], shuffle_seed=seed)
    assert all(row.sent_s == row.scheduled_s == row.request.at_s for row in drive(load, lambda _: 1.0))


def test_the_same_seed_gives_the_same_order() -> None:
    orders = [names(drive(Load([request(n) for n in "abcdefgh"], 2, shuffle_seed=5), lambda _: 1.0)) for _ in range(2)]
    assert orders[0] == orders[1] != list("abcdefgh")


# ---- any mix, against a naive reference


class Reference:
    """The same rules by looking at all of the past at each step: slow, and without any state of its own."""

    def __init__(
        self,
        requests: Sequence[Request],
        concurrency: int | None,
        active_sessions: int | None,
        gaps_s: Sequence[float],
        service_s: Callable[[Request], float],
    ) -> None:
        self.requests, self.concurrency, self.active_sessions = requests, concurrency, active_sessions
        self.gaps_s, self.service_s = gaps_s, service_s
        self.now_s = 0.0
        self.sent: list[Sent] = []
        self.ended: list[Sent] = []

    def play(self) -> list[Sent]:
        while len(self.sent) < len(self.requests):
            ready = [(key, r) for r in self.requests if (key := self.key(r)) is not None]
            if self.can_send() and (now := [one for one in ready if max(one[0][1], self.gap_end_s()) <= self.now_s]):
                self.send(*min(now, key=lambda one: one[0]))
                continue
            running = sorted(set(range(len(self.sent))) - {self.sent.index(s) for s in self.ended},
                             key=lambda n: (self.sent[n].completed_s, n))  # fmt: skip
            moments = [max(key[1], self.gap_end_s()) for key, _ in ready] if self.can_send() else []
            if moments and (not running or min(moments) <= self.sent[running[0]].completed_s):
                self.now_s = min(moments)
            else:
                self.ended.append(self.sent[running[0]])
                self.now_s = max(self.now_s, self.ended[-1].completed_s)
        return self.sent

    def key(self, asked: Request) -> tuple[bool, float, int] | None:
        """What a request goes by: no time, due time, order. None: it cannot go before some request ends."""
        ended_s = {sent.request.id: sent.completed_s for sent in self.ended}
        order = self.requests.index(asked)
        own = [r for r in self.requests if r.session == asked.session is not None]
        before = own[: own.index(asked)] if asked in own else []
        earlier = [r for r in self.requests if r.wave < asked.wave]
        if asked.id in {sent.request.id for sent in self.sent}:
            return None
        if any(r.id not in ended_s for r in (*before, *earlier)):
            return None
        if asked in own and not before and self.active_sessions is not None:
            live = {s.request.session for s in self.sent} - {None} - {r.session for r in self.finals()}
            if len(live) >= self.active_sessions:
                return None
        released_s = max((ended_s[r.id] for r in earlier), default=0.0)
        if before:
            return False, max(ended_s[before[-1].id] + asked.delay_s, asked.at_s or 0.0, released_s), order
        return (True, 0.0, order) if asked.at_s is None else (False, max(asked.at_s, released_s), order)

    def finals(self) -> list[Request]:
        """The last turns that have ended, in the order of their ends."""
        last = {r.session: r.id for r in self.requests if r.session is not None}
        return [
            s.request for s in self.ended if s.request.session is not None and last[s.request.session] == s.request.id
        ]

    def can_send(self) -> bool:
        return self.concurrency is None or len(self.sent) - len(self.ended) < self.concurrency

    def gap_end_s(self) -> float:
        count = len(self.sent)
        return self.sent[-1].sent_s + self.gaps_s[count - 1] if 0 < count <= len(self.gaps_s) else 0.0

    def send(self, key: tuple[bool, float, int], asked: Request) -> None:
        free_s = [key[1]]
        if key[0]:
            free_s = [max((s.completed_s for s in self.ended if s.request.wave < asked.wave), default=0.0)]
            if self.concurrency is not None:
                free_s.append(([0.0] * self.concurrency + [s.completed_s for s in self.ended])[len(self.sent)])
            if self.active_sessions is not None and asked.session is not None:
                opened = len({s.request.session for s in self.sent} - {None})
                ends_s = [s.completed_s for s in self.ended if s.request in self.finals()]
                free_s.append(([0.0] * self.active_sessions + ends_s)[opened])
        scheduled_s = max(*free_s, self.gap_end_s())
        self.sent.append(Sent(asked, scheduled_s, self.now_s, self.now_s + self.service_s(asked)))


def random_load(rng: random.Random) -> list[Request]:
    turns: Counter[str] = Counter()
    wave_of: dict[str, int] = {}
    requests = []
    for index in range(rng.randint(1, 25)):
        session = rng.choice([None, "s", "t", "u", "v", "w"])
        wave = rng.choice([0, 0, 0, 1, 2, 5])
        if session is not None:
            wave = wave_of[session] = (
                max(wave, wave_of.get(session, 0)) if rng.random() < 0.7 else wave_of.get(session, 0)
            )
            turns[session] += 1
        at_s = rng.choice([None, None, rng.choice([0.0, 1.0, 2.0]), rng.uniform(0, 8)])
        delay_s = rng.choice([0.0, 1.0, rng.expovariate(1)])
        requests.append(request(f"r{index}", at_s, session, turns[session or ""], delay_s, wave))
    return requests


@pytest.mark.parametrize("seed", range(400))
def test_any_mix_agrees_with_the_reference(seed: int) -> None:
    rng = random.Random(seed)
    requests, concurrency = random_load(rng), rng.choice([None, 1, 2, 4])
    gaps_s = [rng.choice([0.0, 0.5, 1.0]) for _ in range(rng.choice([0, 0, 3, len(requests)]))]
    active_sessions = enough_places(requests, rng.choice([None, 1, 1, 2, 3]))
    took_s = {r.id: rng.choice([0.0, 0.5, 1.0, rng.expovariate(0.5)]) for r in requests}

    load = Load(requests, concurrency, active_sessions=active_sessions, gaps_s=gaps_s)
    sent = drive(load, lambda asked: took_s[asked.id])
    ours = Reference(requests, concurrency, active_sessions, gaps_s, lambda asked: took_s[asked.id]).play()
    assert told(sent) == told(ours)
    holds_its_promises(sent, requests, concurrency, active_sessions)


@pytest.mark.parametrize("seed", range(200))
def test_any_mix_by_chance_keeps_every_promise(seed: int) -> None:
    rng = random.Random(seed)
    requests, concurrency = random_load(rng), rng.choice([None, 1, 2, 4])
    active_sessions = enough_places(requests, rng.choice([None, 1, 2]))
    load = Load(requests, concurrency, active_sessions=active_sessions, shuffle_seed=seed)
    sent = drive(load, lambda _: rng.choice([0.25, rng.expovariate(0.5)]))
    holds_its_promises(sent, requests, concurrency, active_sessions)


def enough_places(requests: list[Request], wanted: int | None) -> int | None:
    """The wanted number, or the smallest one above it that the load can end with."""
    while wanted is not None:
        try:
            Load(requests, active_sessions=wanted)
        except ValueError:
            wanted += 1
        else:
            break
    return wanted


def holds_its_promises(
    sent: list[Sent], requests: list[Request], concurrency: int | None, active_sessions: int | None
) -> None:
    assert sorted(names(sent)) == sorted(r.id for r in requests), "none lost, none twice"
    spans: dict[str, tuple[float, float]] = {}
    for row in sent:
        wave_before = [other.completed_s for other in sent if other.request.wave < row.request.wave]
        assert row.sent_s >= max(wave_before, default=0.0)
        assert row.sent_s >= row.scheduled_s >= (row.request.at_s or 0.0)
        if session := row.request.session:
            begin_s, end_s = spans.get(session, (row.sent_s, 0.0))
            spans[session] = (begin_s, max(end_s, row.completed_s))
    for row in sent:
        running = sum(other.sent_s <= row.sent_s < other.completed_s for other in sent)
        assert concurrency is None or running <= concurrency
        live = sum(begin_s <= row.sent_s < end_s for begin_s, end_s in spans.values())
        assert active_sessions is None or live <= active_sessions
