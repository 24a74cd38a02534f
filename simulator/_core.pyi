"""The Rust core, as simulate.py sees it."""

from collections.abc import Sequence

from typing_extensions import Buffer

from traces.request import Segment

_Times = tuple[float | None, float | None, tuple[float, ...]]
_Counts = tuple[int, int, int, int, int, int, int]

_Row = tuple[str, _Times, _Counts, str | None, int]
_Columns = tuple[list[str], list[bytes], list[bytes], dict[int, str]]
_Totals = tuple[tuple[int, int, int], tuple[int, int, int], tuple[int, int, int]]
_Note = tuple[str, str, list[int]]

class Engine:
    now_s: float
    idle: bool
    next_event_s: float | None
    queues: tuple[int, int]
    def __init__(self, config: object) -> None: ...
    def submit(self, id: str, prompt: Sequence[Segment], output_tokens: int, reply_id: int, at_s: float) -> None: ...
    def advance(self, until_s: float) -> list[_Row]: ...
    def submit_many(
        self,
        ids: Sequence[str],
        segments: tuple[Buffer, Buffer, Buffer],
        output_tokens: Buffer,
        reply_ids: Buffer,
        at_s: Buffer,
    ) -> None: ...
    def advance_many(self, until_s: float) -> _Columns: ...
    def take_tokens(self) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]: ...
    def refusal(self, prompt: tuple[Segment, ...], output_tokens: int) -> str | None: ...
    def reset(self, gpu: bool, cpu: bool, disk: bool, page_cache: bool) -> None: ...
    def counters(self) -> _Totals: ...
    def take_journal(self) -> tuple[list[_Note], list[_Note]]: ...

class Cluster:
    now_s: float
    idle: bool
    queues: list[tuple[int, int]]
    def __init__(self, config: object, instances: int, routing: str, share_cpu: bool, share_disk: bool) -> None: ...
    def submit(self, id: str, prompt: Sequence[Segment], output_tokens: int, reply_id: int, at_s: float) -> None: ...
    def advance(self, until_s: float) -> list[_Row]: ...
    def submit_many(
        self,
        ids: Sequence[str],
        segments: tuple[Buffer, Buffer, Buffer],
        output_tokens: Buffer,
        reply_ids: Buffer,
        at_s: Buffer,
    ) -> None: ...
    def advance_many(self, until_s: float) -> _Columns: ...
    def reset(self, gpu: bool, cpu: bool, disk: bool, page_cache: bool) -> None: ...
    def counters(self) -> _Totals: ...
