"""One load on tiers without an engine: each request's reads, writes and pauses, and what came of them.

What a request finds and where its new entries go is decided when it is sent. The same order of sends has the same
decisions, whatever the devices' speed. The digest is over these decisions, request by request in the order of their
ids.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import math
import time
from collections import deque
from collections.abc import Iterator

import msgspec

from harness.engines.base import Emit
from harness.engines.sim.entries import WantedEntry, entries_of
from harness.engines.sim.moves import Entry, EntryEnd
from harness.engines.sim.real_tiers import RealTiers
from harness.engines.sim.tiers_figures import Account, figures_of
from harness.errors import EngineError
from harness.records import CUT_OFF, CUT_SHORT
from harness.storage_records import StorageFigures
from traces.load import Blocked, Done, Load, Send, WaitUntil
from traces.request import Request, RequestRecord, TokensByTier

_SLICE_S = 0.02
_NEVER_WRITTEN = "its request ended before it was written"


class _Serving:
    """A request in flight. stages: what it still has to do, one after another: a name, and entries or seconds."""

    def __init__(self, send: Send, sent_s: float, found: list[Entry], new: list[Entry]) -> None:
        self.send, self.sent_s, self.found, self.new = send, sent_s, found, new
        self.stages = deque[tuple[str, list[Entry] | float]]()
        self.done = Account(send.request)
        self.left, self.stage, self.stage_began_s, self.stage_ended_s = 0, "", sent_s, sent_s
        self.first_token_s: float | None = None
        self.hit_tokens: dict[str, int] = {}
        self.error: str | None = None
        self.wrote = False


class TiersReplay:
    """Times are time.monotonic()'s, but for those of rows. After the deadline nothing begins, and nothing counts."""

    def __init__(self, tiers: RealTiers, budget_s: float | None, load: Load, emit: Emit) -> None:
        self._tiers, self._load, self._emit = tiers, load, emit
        self._moves, self._settings = tiers.moves, tiers.settings
        self._names = [level.name for level in tiers.levels]
        self._start_s = time.monotonic()
        # The earlier of two limits, with what its rows say.
        limits = ((budget_s, CUT_OFF), (load.cut_s, CUT_SHORT))
        known = [(self._start_s + limit_s, why) for limit_s, why in limits if limit_s is not None]
        self._deadline_s, self._why = min(known, default=(math.inf, CUT_OFF))
        window = load.counted_s or (0.0, math.inf)
        self._from_s = self._start_s + window[0]
        self._to_s = min(self._start_s + window[1], self._deadline_s)
        self._served: set[_Serving] = set()
        self._pauses: list[tuple[float, int, _Serving]] = []
        self._number = 0
        self._asked: dict[str, hashlib._Hash] = {}
        self._ended: list[Account] = []
        self._end_s = self._start_s
        self._cut_off = 0
        self._recording = self._over = self._cut = False
        self._held: list[tuple[int, int]] = []

    async def run(self) -> None:
        self._begin_record()
        try:
            while self._goes_on() and (
                not isinstance(action := self._load.next(time.monotonic() - self._start_s), Done) or self._served
            ):
                if isinstance(action, Send):
                    self._send(action)
                else:
                    self._wait(action)
                    await asyncio.sleep(0)
        finally:
            self._over = True
            self._end_record()
            for served in self._served:
                self._abandon(served)
            while self._moves.pending:
                self._moves.poll(_SLICE_S)
        for served in sorted(self._served, key=lambda each: each.sent_s):
            self._cut_off += 1
            self._let_go(served)
            self._load.completed(served.send.request.id, time.monotonic() - self._start_s)
            self._emit(self._row(served, None, self._why))

    def figures(self) -> StorageFigures:
        """The figures of the work that ended in the measured time."""
        until_s = self._to_s if self._to_s < math.inf else None
        by_tier = {
            level.name: (level.device.settings.device, level.device.transfers.record(until_s), held)
            for level, held in zip(self._tiers.levels, self._held, strict=True)
        }
        whole = self._cut or (self._load.counted_s is not None and self._load.unsent > 0)
        elapsed_s = (self._to_s if whole else min(self._end_s, self._to_s)) - self._from_s
        found = figures_of(self._ended, by_tier, elapsed_s, self._tiers.chunk_tokens, self._tiers.slot_bytes)
        return msgspec.structs.replace(
            found, complete=not self._cut, requests_cut_off=self._cut_off, operations_sha256=self._digest()
        )

    def _digest(self) -> str:
        whole = hashlib.sha256()
        for owner in sorted(self._asked):
            whole.update(f"{owner} {self._asked[owner].hexdigest()}\n".encode())
        return whole.hexdigest()

    # ---- the clock

    def _goes_on(self) -> bool:
        now_s = time.monotonic()
        if not self._recording and now_s >= self._from_s and now_s < self._to_s:
            self._begin_record()
        if now_s >= self._to_s:
            self._end_record()
        self._cut = now_s >= self._deadline_s
        return not self._cut

    def _begin_record(self) -> None:
        self._recording = time.monotonic() >= self._from_s
        for transfers in self._moves.transfers:
            transfers.begin_record()

    def _end_record(self) -> None:
        if not self._held:
            self._held = [self._tiers.placement.held(tier) for tier in range(len(self._names))]
            for transfers in self._moves.transfers:
                transfers.end_record()

    def _wait(self, action: WaitUntil | Blocked | Done) -> None:
        """Waits until a transfer or a pause ends, a request is due, or a slice of time is over."""
        now_s = time.monotonic()
        until_s = min(now_s + _SLICE_S, self._deadline_s)
        if isinstance(action, WaitUntil):
            until_s = min(until_s, self._start_s + action.at_s)
        elif not self._served:
            raise EngineError("the load waits for a completion and nothing is in flight: check its sessions")
        if self._pauses:
            until_s = min(until_s, self._pauses[0][0])
        if self._moves.pending:
            self._moves.poll(max(0.0, until_s - now_s))
        else:
            time.sleep(max(0.0, until_s - now_s))
        while self._pauses and self._pauses[0][0] <= time.monotonic():
            due_s, _, served = heapq.heappop(self._pauses)
            served.done.generation_s += due_s - served.stage_began_s
            self._go_on(served, due_s)

    # ---- one request

    def _send(self, send: Send) -> None:
        request, now_s = send.request, time.monotonic()
        wanted = entries_of(request, self._settings.entry, self._tiers.chunk_tokens)
        served = _Serving(send, now_s, [], [])
        served.done.queue_s = max(0.0, now_s - self._start_s - send.scheduled_s)
        self._served.add(served)
        if not self._tiers.fits(wanted):
            served.error = "its KV is larger than the last tier; enlarge the tier"
            return self._end(served, now_s)
        self._decide(served, wanted)
        served.stages.extend(self._stages(served, request))
        return self._go_on(served, now_s)

    def _decide(self, served: _Serving, wanted: list[WantedEntry]) -> None:
        """What is held, and where the rest goes. Everything that makes room begins, as far as it can."""
        placement, moves, owner = self._tiers.placement, self._moves, served.send.request.id
        digest, leading = self._asked.setdefault(owner, hashlib.sha256()), True
        missing = []
        for one in wanted:
            held = one.key in placement
            hit = held and (leading or self._settings.entry == "turn")
            leading = leading and hit
            served.done.look_up(one, hit=hit)
            digest.update(b"%s %d\n" % (b"R" if hit else b"W" if not held else b"-", one.key))
            if hit:
                placement.use(one.key)
                entry = moves.entries[one.key]
                entry.use()
                served.found.append(entry)
            elif not held:
                missing.append(one)
        for one in missing:
            if one.key in placement:  # the same entry twice in one prompt
                continue
            place, room = placement.store(one.key, one.units)
            for move in room:
                digest.update(b"%s %d\n" % (b"X" if move.target is None else b"D", move.key))
                served.done.made_room(move)
                moves.move(move, owner)
            entry = moves.admit(one.key, place, one.tokens)
            entry.use()
            served.new.append(entry)

    def _stages(self, served: _Serving, request: Request) -> Iterator[tuple[str, list[Entry] | float]]:
        settings = self._settings
        yield "load", served.found
        yield "prefill", served.new
        added = request.prompt[-1].tokens
        if settings.prefill_only_tokens is not None and added >= settings.prefill_only_tokens:
            return
        every, left = settings.decode_read_tokens, request.output_tokens
        turn = settings.decode_reads == "turn"
        entries = (served.new or served.found[-1:]) if turn else [*served.found, *served.new]
        if every and turn:
            yield "decode", entries
        while left:
            tokens = min(every or left, left)
            left -= tokens
            if every:
                yield "decode", entries
            if settings.token_time:
                yield "generation", tokens * settings.token_time

    def _go_on(self, served: _Serving, now_s: float) -> None:
        """Begins the next stage that moves bytes or takes time; the request ends when none is left."""
        while served.stages and served.error is None:
            served.stage, what = served.stages.popleft()
            served.stage_began_s = served.stage_ended_s = now_s
            if served.stage in ("decode", "generation") and served.first_token_s is None:
                served.first_token_s = now_s
            if isinstance(what, float):
                self._number += 1
                heapq.heappush(self._pauses, (now_s + what, self._number, served))
                return None
            served.wrote = served.wrote or served.stage == "prefill"
            if what:
                served.left = len(what)
                carry_out = self._moves.write if served.stage == "prefill" else self._moves.read
                for entry in what:
                    carry_out(entry, served.send.request.id, self._one_ended(served, entry))
                return None
        served.first_token_s = served.first_token_s or now_s
        return self._end(served, now_s)

    def _one_ended(self, served: _Serving, entry: Entry) -> EntryEnd:
        def ended(tier: int, error: str | None, at_s: float) -> None:
            if self._over or at_s > self._deadline_s:
                return
            served.stage_ended_s = max(served.stage_ended_s, at_s)
            if error is not None:
                served.error = served.error or error
            else:
                served.done.moved(served.stage, entry.units, entry.tokens)
                if served.stage == "load":
                    name = self._names[tier]
                    served.hit_tokens[name] = served.hit_tokens.get(name, 0) + entry.tokens
            served.left -= 1
            if not served.left:
                served.done.io_s += served.stage_ended_s - served.stage_began_s
                self._go_on(served, served.stage_ended_s)

        return ended

    def _end(self, served: _Serving, now_s: float) -> None:
        self._abandon(served)
        self._let_go(served)
        self._served.discard(served)
        self._emit(self._row(served, now_s, served.error))
        self._load.completed(served.send.request.id, time.monotonic() - self._start_s)
        served.done.end_to_end_s = now_s - self._start_s - served.send.scheduled_s
        if served.error is None and self._from_s <= now_s <= self._to_s:
            self._ended.append(served.done)
        self._end_s = max(self._end_s, now_s)

    def _abandon(self, served: _Serving) -> None:
        """What a request has not begun to write will never be written."""
        if not served.wrote:
            for entry in served.new:
                self._moves.abandon(entry, _NEVER_WRITTEN)

    def _let_go(self, served: _Serving) -> None:
        for entry in (*served.found, *served.new):
            entry.let_go()

    def _row(self, served: _Serving, last_s: float | None, error: str | None) -> RequestRecord:
        request, began_s = served.send.request, self._tiers.began_s
        cached = sum(served.hit_tokens.values())
        sources: TokensByTier = {"computed": request.prompt_tokens - cached}
        sources |= {name: served.hit_tokens.get(name, 0) for name in self._names}
        first_s = None if error or served.first_token_s is None else served.first_token_s - began_s
        return RequestRecord(
            id=request.id,
            scheduled_s=self._start_s - began_s + served.send.scheduled_s,
            sent_s=served.sent_s - began_s,
            first_chunk_s=first_s,
            first_token_s=first_s,
            last_token_s=None if error or last_s is None else last_s - began_s,
            prompt_tokens=request.prompt_tokens,
            output_tokens=None if error else request.output_tokens,
            cached_tokens=None if error else cached,
            tokens_by_tier={} if error else sources,
            session=request.session,
            turn=request.turn,
            error=error,
        )
