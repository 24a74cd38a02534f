"""The Engine seam: one working verb (`replay`) and a lifecycle.

`start · ready · reset · replay · metrics · now_s · stop`, with abilities declared before the run. The run loop knows
nothing else about engines, so the simulator, vLLM and the fake of the tests are measured by the same code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from harness.records import Capabilities, CellRecord, Counters, Resolved
from traces.load import Load
from traces.request import RequestRecord

Emit = Callable[[RequestRecord], None]


@runtime_checkable
class KeepsRecord(Protocol):
    """An engine with more to say than rows and counters."""

    def record(self) -> CellRecord:
        """What belongs into the manifest's entry of the cell that was just measured; begins the next cell's."""


@runtime_checkable
class TellsCause(Protocol):
    """An engine that counts why a tier served less than it holds."""

    def cause(self) -> str | None:
        """The reason and the cure, in one clause, for what was lost between the last two `metrics`; None: nothing."""


@runtime_checkable
class HasProcesses(Protocol):
    """An engine whose processes are on this machine, if the harness started them."""

    def pids(self) -> tuple[int, ...]:
        """Of its children and all their descendants, as they run now."""


@runtime_checkable
class Restarts(Protocol):
    """An engine that can be restarted with its cache server: Capabilities.keeps is not empty."""

    async def restart(self) -> Resolved:
        """Ends all processes and starts them again, with the same settings over the same storage; waits until requests
        would be answered, and sends none. Counters begin at 0 where processes count. Raises EngineError.

        Stores have ended, and no request is under way.
        """


class Engine(Protocol):
    """Lifecycle: start, ready, any number of reset/replay/metrics, stop. stop is safe at any time, twice too."""

    name: str
    capabilities: Capabilities

    async def start(self) -> None:
        """Starts the child processes, if any. Raises EngineError."""

    async def ready(self) -> Resolved:
        """Waits until requests would be answered. Raises EngineError with the log's last lines."""

    async def reset(self, what: frozenset[str]) -> None:
        """Empties tiers ('gpu', 'cpu', 'pool', 'disk') or drops files from the 'page_cache'; waits until done."""

    async def replay(self, load: Load, emit: Emit) -> None:
        """Sends the load and emits one record a request, as each completes. A failed request is a record.

        At load.cut_s it ends what is under way: each such record has the error CUT_SHORT.
        """

    def now_s(self) -> float:
        """The run's clock: what the records' times are on. Virtual for a simulator."""

    async def metrics(self) -> Counters:
        """Totals, after all stores that earlier requests caused have ended."""

    async def stop(self) -> None:
        """Ends what start began; nothing stays running or listening."""
