"""The Rust core, as the simulator's Python modules see it."""

from collections.abc import Sequence
from pathlib import Path

from typing_extensions import Buffer

from simulator.columns import RequestColumns
from simulator.storage import Operation
from traces.request import Segment

def cache_hits(eviction: str, capacity: int, keys: Buffer) -> bytes: ...
def most_hits(hash_ids: Buffer, tokens: Buffer, ends: Buffer, capacity: int) -> list[int]: ...

# A request: its id, prompt, output tokens and reply's stream.
_Asked = tuple[str, Sequence[Segment], int, int]

def probed(
    config: object, first: Sequence[_Asked], emptied: Sequence[str], together: Sequence[_Asked], seeds: Sequence[int]
) -> list[tuple[float, float, list[tuple[float, float]]]]:
    """By a fresh engine for each seed: `first` one after another, then the `emptied` tiers forget, then `together` at
    one moment. That moment, the end of all, and the first and the last token of each, in seconds."""

class Completion:
    id: str
    first_token_s: float | None
    last_token_s: float | None
    token_s: tuple[float, ...]
    prompt_tokens: int
    output_tokens: int
    computed: int
    hit_tokens: dict[str, int]
    preemptions: int
    error: str | None
    instance: int

class CompletionColumns:
    ids: list[str]
    first_token_s: bytes
    last_token_s: bytes
    prompt_tokens: bytes
    output_tokens: bytes
    computed: bytes
    hit_tokens: dict[str, bytes]
    preemptions: bytes
    instances: bytes
    errors: dict[int, str]

class LevelTotals:
    hit_chunks: int
    taken_tokens: int
    loaded_chunks: int
    read_bytes: int

class Totals:
    computed_tokens: int
    gpu_hit_tokens: int
    external_tokens: int
    stores_begun: int
    stores_ended: int
    levels: dict[str, LevelTotals]

class Queues:
    running: int
    waiting: int

class Note:
    what: str
    request: str
    numbers: list[int]

class Journals:
    engine: list[Note]
    tiers: list[Note]

class IssuedChunk:
    key: int
    slot: int

class Issued:
    id: int
    owner: int
    write: bool
    chunks: list[IssuedChunk]

class Engine:
    now_s: float
    idle: bool
    next_event_s: float | None
    queues: Queues
    def __init__(self, config: object) -> None: ...
    def submit(
        self,
        id: str,
        prompt: Sequence[Segment],
        output_tokens: int,
        reply_id: int,
        at_s: float,
        instance: int | None,
    ) -> None: ...
    def advance(self, until_s: float) -> list[Completion]: ...
    def submit_many(self, requests: RequestColumns) -> None: ...
    def advance_many(self, until_s: float) -> CompletionColumns: ...
    def take_tokens(self, first: bool) -> dict[str, int]: ...
    def refusal(self, prompt: tuple[Segment, ...], output_tokens: int) -> str | None: ...
    def take_issued(self) -> list[Issued]: ...
    def take_dropped(self) -> list[int]: ...
    def complete_io(self, id: int, at_s: float, failed: Sequence[int]) -> None: ...
    def reset(self, tiers: Sequence[str]) -> None: ...
    def totals(self) -> Totals: ...
    def take_journal(self) -> Journals: ...

class Cluster:
    now_s: float
    idle: bool
    queues: list[Queues]
    def __init__(self, config: object, instances: int, routing: str, sharing: str) -> None: ...
    def submit(
        self,
        id: str,
        prompt: Sequence[Segment],
        output_tokens: int,
        reply_id: int,
        at_s: float,
        instance: int | None,
    ) -> None: ...
    def advance(self, until_s: float) -> list[Completion]: ...
    def submit_many(self, requests: RequestColumns) -> None: ...
    def advance_many(self, until_s: float) -> CompletionColumns: ...
    def reset(self, tiers: Sequence[str]) -> None: ...
    def totals(self) -> Totals: ...
    def totals_of(self, instance: int) -> Totals: ...

class Ended:
    id: int
    write: bool
    queued_s: float
    began_s: float
    ended_s: float
    bytes: int
    error: str | None

class About:
    slot_bytes: int
    io: str
    buffered_because: str | None
    path: Path | None

class Store:
    about: About
    pending: int
    def __init__(self, config: object) -> None: ...
    def take_from(self, other: Store) -> int | None: ...
    def submit(self, ops: Sequence[Operation]) -> None: ...
    def poll(self, least: int, timeout_s: float) -> list[Ended]: ...
    def run(self, ops: Sequence[Operation]) -> list[Ended]: ...
    def forget(self, keys: Sequence[int]) -> None: ...
    def close(self) -> None: ...
