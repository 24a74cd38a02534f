"""Carries out what a Placement decides, on real devices: bytes move when the slots that they need are free.

A placement decides at once; devices take time. So a slot's next entry waits until the one before has left it: until it
has been written, nothing reads it there any more and, if it moves down, its bytes have arrived below. What waits, waits
for earlier decisions or for a device only: nothing can wait for itself.

A read takes an entry where it lies when the read begins. What a request uses is not dropped before the request ends.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence

from harness.engines.sim.entries import slot_keys
from harness.engines.sim.placement import Move, Place
from harness.engines.sim.transfers import Finished, Taken, Transfers

Call = Callable[[], None]
# Told of a transfer's tier, its error if any, and when it ended (time.monotonic()).
EntryEnd = Callable[[int, str | None, float], None]


class Gate:
    """Opens once, and then makes the calls that wait for it."""

    def __init__(self) -> None:
        self.open = False
        self._waiting: list[Call] = []

    def then(self, call: Call) -> None:
        """Makes the call: now if the gate is open, else when it opens."""
        if self.open:
            call()
        else:
            self._waiting.append(call)

    def set(self) -> None:
        if not self.open:
            self.open = True
            waiting, self._waiting = self._waiting, []
            for call in waiting:
                call()


def after_all(gates: Collection[Gate], call: Call) -> None:
    """Makes the call once all gates are open."""
    shut = [gate for gate in gates if not gate.open]
    left = len(shut)

    def one_opened() -> None:
        nonlocal left
        left -= 1
        if not left:
            call()

    if not shut:
        call()
    for gate in shut:
        gate.then(one_opened)


class Stay:
    """An entry's time in the slots of a tier. free: the slots' entries before it have left. gone: it has left."""

    def __init__(self, place: Place, before: Collection[Gate]) -> None:
        self.place, self.before = place, before
        self.gone = Gate()
        self.readers = 0
        self.leaving = False

    def leave(self) -> None:
        self.leaving = True
        self.read_ended(0)

    def read_ended(self, readers: int = 1) -> None:
        self.readers -= readers
        if self.leaving and not self.readers:
            self.gone.set()


class Entry:
    """One KV entry. stay: where it will be by the last decision; here: where it is. error: why its bytes are lost.

    written: its first write has ended, well or not. there: it has arrived where the last decision sends it. unused: no
    request needs it; a fresh gate whenever one does."""

    def __init__(self, key: int, units: int, tokens: int, stay: Stay) -> None:
        self.key, self.units, self.tokens = key, units, tokens
        self.stay = self.here = stay
        self.written = self.there = Gate()
        self.error: str | None = None
        self.users = 0
        self.unused = Gate()
        self.unused.set()

    def use(self) -> None:
        self.users += 1
        if self.unused.open:
            self.unused = Gate()

    def let_go(self) -> None:
        self.users -= 1
        if not self.users:
            self.unused.set()


class Moves:
    """Transfers of entries between requests and tiers, and from tier to tier.

    transfers: of each tier, the nearest first. max_writes: entries that requests write at once; None: any number. lost:
    told of each key whose bytes a device lost."""

    def __init__(self, transfers: Sequence[Transfers], max_writes: int | None, lost: Callable[[int], None]) -> None:
        self.transfers = transfers
        self.entries: dict[int, Entry] = {}
        self._lost = lost
        self._last = [dict[int, Gate]() for _ in transfers]
        self._dropping: dict[int, Gate] = {}
        self._ends: list[dict[int, Callable[[Finished], None]]] = [{} for _ in transfers]
        self._next = 0
        self._permits = max_writes
        self._queued = deque[Call]()

    @property
    def pending(self) -> bool:
        return any(one.pending for one in self.transfers)

    def slot_keys_by_tier(self) -> list[list[int]]:
        """The names of all slots' contents."""
        found: list[list[int]] = [[] for _ in self.transfers]
        for entry in self.entries.values():
            found[entry.here.place.tier] += slot_keys(entry.key, entry.units)
        return found

    # ---- decisions, in their order

    def admit(self, key: int, place: Place, tokens: int) -> Entry:
        """A new entry that `write` will write."""
        entry = Entry(key, len(place.slots), tokens, self._stay(place, key))
        self.entries[key] = entry
        return entry

    def move(self, move: Move, owner: str) -> None:
        """An entry leaves its place as soon as it can."""
        entry = self.entries[move.key]
        source, arrived = entry.stay, entry.there
        if move.target is None:
            del self.entries[move.key]
            self._dropping[move.key] = source.gone
            after_all([arrived, entry.unused], lambda: self._drop(entry, source))
            return
        entry.stay, entry.there = self._stay(move.target), Gate()
        target, there = entry.stay, entry.there
        after_all([arrived, *target.before], lambda: self._copy(entry, source, target, there, owner))

    def abandon(self, entry: Entry, why: str) -> None:
        """A new entry is not going to be written."""
        self._lose(entry, why)
        entry.written.set()
        after_all(entry.here.before, entry.here.leave)

    # ---- what requests do

    def write(self, entry: Entry, owner: str, done: EntryEnd) -> None:
        """Writes a new entry when its slots are free."""

        def ended(finished: Finished) -> None:
            self._permit_back()
            if finished.error is not None:
                self._fail(entry, finished.error)
            entry.written.set()
            done(stay.place.tier, finished.error, finished.ended_s)

        stay = entry.here
        after_all(stay.before, lambda: self._with_permit(lambda: self._begin(entry, stay, True, owner, ended)))

    def read(self, entry: Entry, owner: str, done: EntryEnd) -> None:
        """Reads an entry as soon as it has been written."""

        def ready() -> None:
            if entry.error is not None:
                return done(entry.here.place.tier, entry.error, time.monotonic())
            stay = entry.here
            stay.readers += 1

            def ended(finished: Finished) -> None:
                stay.read_ended()
                if finished.error is not None and entry.error is None:
                    self._fail(entry, finished.error)
                done(stay.place.tier, finished.error, finished.ended_s)

            return self._begin(entry, stay, False, owner, ended)

        entry.written.then(ready)

    def poll(self, timeout_s: float) -> None:
        """Goes on with what has ended; waits for something if nothing has. Memory answers before a file."""
        until_s = time.monotonic() + timeout_s
        busy = [tier for tier, one in enumerate(self.transfers) if one.pending]
        for tier in busy:
            alone = tier == busy[-1] and len(busy) == 1
            for finished in self.transfers[tier].poll(until_s - time.monotonic() if alone else 0.0):
                self._ends[tier].pop(finished.id)(finished)

    # ---- one step each

    def _stay(self, place: Place, key: int | None = None) -> Stay:
        """key: of a new entry. An older one of the same name must have left: their slots' contents have one name."""
        last = self._last[place.tier]
        before = [last[slot] for slot in place.slots if slot in last and not last[slot].open]
        if key is not None and key in self._dropping:
            before.append(self._dropping.pop(key))
        stay = Stay(place, before)
        last.update(dict.fromkeys(place.slots, stay.gone))
        return stay

    def _copy(self, entry: Entry, source: Stay, target: Stay, there: Gate, owner: str) -> None:
        """The entry's bytes go from one tier to another; they are in both until the write below has ended.

        Bytes in memory go straight into the tier below, as a GPU's copy engine or a disk's controller takes them. From
        a GPU's own memory they are read first."""
        if entry.error is not None:
            there.set()
            return target.leave()

        def written(finished: Finished) -> None:
            if finished.error is None:
                entry.here = target
            elif entry.error is None:
                self._fail(entry, finished.error)
            if entry.error is not None:
                target.leave()
            source.leave()
            self._forget(source, entry)
            there.set()

        def taken(finished: Finished) -> None:
            source.read_ended()
            written(finished)

        def was_read(finished: Finished) -> None:
            source.read_ended()
            if finished.error is not None:
                return written(finished)
            return self._begin(entry, target, True, owner, written)

        source.readers += 1
        if self.transfers[target.place.tier].takes_from(source.place.tier):
            return self._begin(entry, target, True, owner, taken, Taken(*source.place))
        return self._begin(entry, source, False, owner, was_read)

    def _drop(self, entry: Entry, source: Stay) -> None:
        self._forget(source, entry)
        source.leave()
        if self._dropping.get(entry.key) is source.gone:
            del self._dropping[entry.key]

    def _forget(self, stay: Stay, entry: Entry) -> None:
        self.transfers[stay.place.tier].store.forget(slot_keys(entry.key, entry.units))

    def _fail(self, entry: Entry, error: str) -> None:
        """A device lost the entry's bytes."""
        self._lose(entry, error)
        entry.here.leave()

    def _lose(self, entry: Entry, error: str) -> None:
        entry.error = error
        if self.entries.get(entry.key) is entry:
            del self.entries[entry.key]
            self._lost(entry.key)

    def _begin(
        self,
        entry: Entry,
        stay: Stay,
        write: bool,
        owner: str,
        ended: Callable[[Finished], None],
        taken: Taken | None = None,
    ) -> None:
        tier, slots = stay.place
        self._ends[tier][self._next] = ended
        chunks = list(zip(slot_keys(entry.key, entry.units), slots, strict=True))
        self.transfers[tier].begin(self._next, owner, write, chunks, time.monotonic(), taken)
        self._next += 1

    def _with_permit(self, call: Call) -> None:
        if self._permits is None:
            return call()
        self._queued.append(call)
        return self._hand_out()

    def _permit_back(self) -> None:
        if self._permits is not None:
            self._permits += 1
            self._hand_out()

    def _hand_out(self) -> None:
        while self._permits and self._queued:
            self._permits -= 1
            self._queued.popleft()()
