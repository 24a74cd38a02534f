"""The Rust core, as simulate.py sees it."""

from collections.abc import Sequence

from typing_extensions import Buffer

from traces.request import Segment

_Times = tuple[float | None, float | None, tuple[float, ...]]
_Counts = tuple[int, int, int, int, int, int, int]

_Note = tuple[str, str, list[int]]

def cache_hits(eviction: str, capacity: int, keys: Buffer) -> bytes: ...

class Engine:
    now_s: float
    idle: bool
    next_event_s: float | None
    queues: tuple[int, int]
    def __init__(self, config: object) -> None: ...
    def submit(self, id: str, prompt: Sequence[Segment], output_tokens: int, reply_id: int, at_s: float) -> None: ...
    def advance(self, until_s: float) -> list[tuple[str, _Times, _Counts, str | None]]: ...
    def submit_many(
        self,
        ids: Sequence[str],
        segments: tuple[Buffer, Buffer, Buffer],
        output_tokens: Buffer,
        reply_ids: Buffer,
        at_s: Buffer,
    ) -> None: ...
    def advance_many(self, until_s: float) -> tuple[list[str], list[bytes], list[bytes], dict[int, str]]: ...
    def take_tokens(self) -> list[tuple[str, int]]: ...
    def reset(self, gpu: bool, cpu: bool, disk: bool, page_cache: bool) -> None: ...
    def counters(self) -> tuple[tuple[int, int, int], tuple[int, int, int], tuple[int, int, int]]: ...
    def take_journal(self) -> tuple[list[_Note], list[_Note]]: ...
