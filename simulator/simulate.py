"""The simulator's Python face: requests in, completions out, in virtual time.

    simulator = Simulator(load_model("tiny-llama"), load_calibration("cpu-2core"), "vllm-0.32", "lmcache-0.5.6-mp",
                          gpu_blocks=4096, block_tokens=32, chunk_tokens=256, cpu_bytes=1 << 30,
                          max_num_batched_tokens=2048, max_num_seqs=256)
    simulator.submit(request, at_s=0.0)
    completions = simulator.advance()

It knows no HTTP, no files of results and no wall clock. The same calls give the same answers, to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Generic, NamedTuple, TypeVar

import msgspec

from simulator import _core
from simulator.calibration import COST, Calibration
from simulator.columns import CompletionColumns, RequestColumns
from simulator.levels import DiskWays, Level, check_levels, core_levels, engine_facing, private_levels, standard_levels
from simulator.models import ModelSpec
from simulator.policies import EnginePolicy, TierPolicy, engine_policy, tier_policy
from traces.request import Request, reply_stream
from traces.tiers import PAGE_CACHE, tier_names

Result = TypeVar("Result")
Core = TypeVar("Core", _core.Engine, _core.Cluster)
# What the core empties.
_EMPTIED = (*tier_names(), PAGE_CACHE)


class Note(NamedTuple):
    """One action of the core, its request ("": none), and the numbers that describe it."""

    what: str
    request: str
    numbers: list[int]


class Queues(NamedTuple):
    """Numbers of requests that run, and of requests that wait to run or for a transfer."""

    running: int
    waiting: int


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A request's result. Times are the simulator's seconds; None: it did not happen.

    computed, gpu, cpu, pool, disk, remote: prompt tokens by where their KV came from, as the engine decided at the
    first admission. They sum up to prompt_tokens (all 0 with an error); pool, remote None: there is no such tier.
    token_s: empty without record_token_times. instance: which instance of a cluster served the request; 0 elsewhere.
    """

    id: str
    first_token_s: float | None
    last_token_s: float | None
    token_s: tuple[float, ...]
    prompt_tokens: int
    output_tokens: int
    computed: int
    gpu: int
    cpu: int
    disk: int
    pool: int | None = None
    remote: int | None = None
    preemptions: int
    error: str | None
    instance: int = 0


class Issued(NamedTuple):
    """A disk transfer that the caller makes. owner: reply_stream() of the request that waits for it, or whose chunks it
    writes. chunks: (key, slot) each; slots lie below the number of chunks that the disk tier holds."""

    id: int
    owner: int
    write: bool
    chunks: list[tuple[int, int]]


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Running totals by tier: "gpu", "cpu", "pool", "disk", "remote", as far as the engine has them.

    hit_tokens: prompt tokens that look-ups found in each tier; of the GPU: that admitted requests took. loaded_chunks:
    chunks that the tiers read from each tier below the one next to the GPU. read_bytes: read from each such tier's
    device; a read that the page cache answers adds none. stores_begun, stores_ended: chunks; a store ends when the
    chunk is in every tier that takes it. external_tokens: prompt tokens that came from tiers below the GPU.
    """

    computed_tokens: int
    external_tokens: int
    hit_tokens: dict[str, int]
    loaded_chunks: dict[str, int]
    read_bytes: dict[str, int]
    stores_begun: int
    stores_ended: int


class SimCounters(msgspec.Struct, frozen=True, kw_only=True):
    """`Totals` under the names of a real engine and cache server (the harness's Counters); None: no such tier."""

    computed_tokens: int
    gpu_hit_tokens: int
    external_tokens: int
    l1_hit_tokens: int | None
    pool_hit_tokens: int | None
    pool_loaded_chunks: int | None
    l2_hit_tokens: int | None
    l2_loaded_chunks: int | None
    remote_hit_tokens: int | None
    remote_loaded_chunks: int | None
    remote_read_bytes: int | None
    stores_begun: int | None
    stores_ended: int | None
    storage_read_bytes: int | None


class Driver(Generic[Core]):
    """Drives one engine or a cluster of them: requests in, completions out, time in between."""

    _core: Core

    @property
    def now_s(self) -> float:
        return self._core.now_s

    @property
    def idle(self) -> bool:
        """True if no request is unfinished and no transfer is in flight."""
        return self._core.idle

    def submit(self, request: Request, at_s: float) -> None:
        """Sends a request at `at_s`, now or later. A request that can never be served completes with an error.

        The request's `instance` goes before every routing. ValueError: that instance does not exist, the moment has
        passed, or a request of that id is in flight.
        """
        asked, reply = (request.id, request.prompt, request.output_tokens), reply_stream(request.id)
        checked(lambda: self._core.submit(*asked, reply, at_s, request.instance))

    def advance(self, until_s: float = math.inf) -> list[Completion]:
        """Runs until `until_s` or the first moment at which requests complete, and returns those.

        inf: until requests complete or nothing is left to do. RuntimeError: requests wait for blocks that never become
        free.
        """
        return [completion_of(done) for done in self._core.advance(until_s)]

    def submit_many(self, requests: RequestColumns) -> None:
        """Submits each, in order. ValueError: the first refused request; the simulator has sent those before it."""
        if requests.ids:
            checked(lambda: self._core.submit_many(requests))

    def advance_many(self, until_s: float = math.inf) -> CompletionColumns:
        """Runs until `until_s`, completions or not, and returns them all. inf: until nothing is left to do."""
        return CompletionColumns.of(self._core.advance_many(until_s))

    def drain(self) -> None:
        """Runs until all stores have ended. ValueError: a request is in flight (take its completion first)."""
        if self._core.advance(self.now_s):
            raise ValueError("drain: requests have completed and are not taken yet; advance first")
        while not self.idle:
            if completions := self._core.advance(math.inf):
                raise ValueError(f"drain: request {completions[0].id!r} was in flight; advance until it completes")

    def reset(self, what: Iterable[str]) -> None:
        """Empties tiers ('gpu', 'cpu', …), or what the 'page_cache' holds. ValueError: unknown, or not idle."""
        names = frozenset(what)
        if unknown := names - frozenset(_EMPTIED):
            raise ValueError(f"reset: {', '.join(sorted(unknown))} is not one of {', '.join(_EMPTIED)}")
        self._core.reset(sorted(names))


class Simulator(Driver[_core.Engine]):
    """One engine with its cache tiers.

    gpu_blocks: the engine's resolved number, with vLLM's null block. cpu_bytes, pool_bytes, disk_bytes: the levels
    below the GPU; None: there is no such level. A disk may be next to the GPU. tier_pack: of the level next to the GPU;
    pool_pack: of a pool behind that, and of the disk behind such a pool. levels: the levels themselves, in place of
    these four. odirect: disk reads bypass the page cache. disk_bytes_per_s: the limit of the disk's device, if it has
    one. disk_depth: workers that read chunks, for all requests in their order (LMCache's fs_native: 4); 1: each request
    reads by itself (fs). macro_steps False simulates every decode step by itself: slower, with the same result.
    journal: keep notes for take_journal. external_disk: the caller makes the disk tier's transfers (take_issued,
    complete_io). seed: of the host's times, where the calibration says that they vary.
    Raises ValueError in one line for settings that could serve nothing, and
    CalibrationError for a constant that these tiers need and the calibration lacks.
    """

    def __init__(
        self,
        model: ModelSpec,
        calibration: Calibration,
        engine_pack: EnginePolicy | str,
        tier_pack: TierPolicy | str,
        *,
        gpu_blocks: int,
        block_tokens: int,
        chunk_tokens: int,
        cpu_bytes: int | None = None,
        pool_bytes: int | None = None,
        disk_bytes: int | None = None,
        pool_pack: TierPolicy | str = "mooncake-0.3.13",
        levels: Sequence[Level] = (),
        odirect: bool = False,
        disk_bytes_per_s: float | None = None,
        disk_depth: int = 1,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        record_token_times: bool = False,
        macro_steps: bool = True,
        journal: bool = False,
        external_disk: bool = False,
        seed: int = 0,
    ) -> None:
        self.model, self.calibration = model, calibration
        self.engine_policy = engine_policy(engine_pack) if isinstance(engine_pack, str) else engine_pack
        first, below = (tier_policy(pack) if isinstance(pack, str) else pack for pack in (tier_pack, pool_pack))
        sizes = {"cpu": cpu_bytes, "pool": pool_bytes, "disk": disk_bytes}
        self.pool_policy = below
        self.levels = tuple(levels) or standard_levels(first, below, sizes)
        check_levels(self.levels)
        self.tier_policy = engine_facing(self.levels[0]) if self.levels else first
        self.gpu_blocks, self.block_tokens, self.chunk_tokens = gpu_blocks, block_tokens, chunk_tokens
        self.odirect = odirect
        self.disk_bytes_per_s, self.disk_depth = disk_bytes_per_s, disk_depth
        self.external_disk, self.seed = external_disk, seed
        rules = {name: value for name, value in msgspec.structs.asdict(self.engine_policy).items() if name != "name"}
        self.config = SimpleNamespace(
            gpu_blocks=gpu_blocks,
            block_tokens=block_tokens,
            chunk_tokens=chunk_tokens,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=model.max_position,
            record_token_times=record_token_times,
            macro_steps=macro_steps,
            stores_replies=self.tier_policy.stores_replies,
            lookup_polls=self.tier_policy.connector.lookup_polls,
            wake_polls=self.tier_policy.connector.wake_polls,
            load_polls=self.tier_policy.connector.load_polls,
            journal=journal,
            cost=self._cost(),
            tiers=self._tiers(),
            **rules,
        )
        self._core = checked(lambda: _core.Engine(self.config))

    def bytes_of(self, tier: str) -> int | None:
        """The capacity of a level; None: there is no such level."""
        return next((level.capacity_bytes for level in self.levels if level.name == tier), None)

    @property
    def next_event_s(self) -> float | None:
        """The moment of the next event; None: there is none. Valid once `advance` has returned no completion."""
        return self._core.next_event_s

    @property
    def queues(self) -> Queues:
        return queues_of(self._core.queues)

    def refusal(self, request: Request) -> str | None:
        """Why the request can never be served (`submit` would complete it with this error); None: it can."""
        return checked(lambda: self._core.refusal(request.prompt, request.output_tokens))

    def take_tokens(self, first: bool) -> list[tuple[str, int]]:
        """(request id, number) of tokens that unfinished requests got since the last call; with record_token_times.

        first: the requests that got their first token among them; else the others. All are final: `advance` decides
        nothing beyond its `until_s`. A completion's token_s has the tokens after the last call, its output_tokens all.
        """
        return list(self._core.take_tokens(first).items())

    def take_issued(self) -> list[Issued]:
        """Disk transfers to make since the last call; with external_disk. The caller answers each by complete_io."""
        issued = self._core.take_issued()
        return [
            Issued(one.id, one.owner, one.write, [(chunk.key, chunk.slot) for chunk in one.chunks]) for one in issued
        ]

    def take_dropped(self) -> list[int]:
        """Keys of chunks that the disk tier has dropped since the last call; before the transfers issued since."""
        return self._core.take_dropped()

    def complete_io(self, transfer: int, at_s: float, failed: Sequence[int] = ()) -> None:
        """A transfer has ended at that moment (or now, if that has passed). failed: keys that a write did not bring to
        the disk, so that the disk tier does not hold them. A transfer that is not in flight changes nothing."""
        checked(lambda: self._core.complete_io(transfer, at_s, list(failed)))

    def take_journal(self) -> tuple[list[Note], list[Note]]:
        """Notes since the last call: of the GPU's block pool and scheduler, and of the tiers.

        Notes of blocks, with their numbers:

            evicted     a run's key, the block's place in the run
            preempted   none

        Notes of tiers, with their numbers:

            lookup      slot, keys
            prefetched  slot
            answer      slot, then for each chunk found whether CPU memory holds it
            release     keys
            touch       keys
            store       id, keys asked
            storing     keys begun
            stored      id, id of the disk write
            writes      keys new to the disk
            written     id of the disk write
            tick        count, keys dropped
        """
        notes = self._core.take_journal()
        return [note_of(note) for note in notes.engine], [note_of(note) for note in notes.tiers]

    def totals(self) -> Totals:
        return totals_of(self._core.totals(), self)

    def counters(self) -> SimCounters:
        return counters_of(self.totals())

    def _cost(self) -> SimpleNamespace:
        known = self.calibration
        constants = {name: known.constant(name) for name in COST if name != "poll_s"} | {"poll_s": self._poll_s()}
        ways = {name: getattr(known, name) for name in ("synchronous_loads", "shared_core", "yields_core")}
        return SimpleNamespace(**constants, **ways, host_spread=known.host_spread, seed=self.seed % 2**64)

    def _poll_s(self) -> float:
        """A connector that answers at once never polls, and a fit to its points cannot know what a poll takes. Nor can
        one to an engine that asks otherwise."""
        known = self.calibration
        if self.levels and self.tier_policy.connector.lookup_polls > 0:
            return known.constant("poll_s")
        asks_alike = self.engine_policy.reads_ahead and engine_policy(known.fitted_on.engine_policy).reads_ahead
        return known.constants["poll_s"] or 0.0 if asks_alike else 0.0

    def _tiers(self) -> SimpleNamespace | None:
        if not self.levels:
            return None
        ways = DiskWays(self.odirect, self.disk_bytes_per_s, self.disk_depth, self.external_disk)
        return SimpleNamespace(
            policy=self.tier_policy,
            chunk_bytes=self._chunk_bytes,
            chunk_tokens=self.chunk_tokens,
            levels=core_levels(self.levels, self.calibration, self._chunk_bytes, ways),
            private_levels=private_levels(self.levels),
        )

    @property
    def _chunk_bytes(self) -> int:
        return self.chunk_tokens * self.model.kv_bytes_per_token


def completion_of(done: _core.Completion) -> Completion:
    hits = done.hit_tokens
    return Completion(
        id=done.id,
        first_token_s=done.first_token_s,
        last_token_s=done.last_token_s,
        token_s=done.token_s,
        prompt_tokens=done.prompt_tokens,
        output_tokens=done.output_tokens,
        computed=done.computed,
        gpu=hits["gpu"],
        cpu=hits.get("cpu", 0),
        pool=hits.get("pool"),
        remote=hits.get("remote"),
        disk=hits.get("disk", 0),
        preemptions=done.preemptions,
        error=done.error,
        instance=done.instance,
    )


def queues_of(queues: _core.Queues) -> Queues:
    return Queues(queues.running, queues.waiting)


def note_of(note: _core.Note) -> Note:
    return Note(note.what, note.request, note.numbers)


def totals_of(totals: _core.Totals, of: Simulator) -> Totals:
    """An engine that looks into its own tiers itself (prefills_first) counts what it takes from each, and so do some
    cache servers; others count all that they find."""
    levels = totals.levels
    lower = dict(list(levels.items())[1:])
    if of.engine_policy.prefills_first or of.tier_policy.counts_taken:
        hit_tokens = {tier: level.taken_tokens for tier, level in levels.items()}
    else:
        hit_tokens = {tier: level.hit_chunks * of.chunk_tokens for tier, level in levels.items()}
    return Totals(
        computed_tokens=totals.computed_tokens,
        external_tokens=totals.external_tokens,
        hit_tokens={"gpu": totals.gpu_hit_tokens, **hit_tokens},
        loaded_chunks={tier: level.loaded_chunks for tier, level in lower.items()},
        read_bytes={tier: level.read_bytes for tier, level in lower.items()},
        stores_begun=totals.stores_begun,
        stores_ended=totals.stores_ended,
    )


def counters_of(totals: Totals) -> SimCounters:
    has_tiers = len(totals.hit_tokens) > 1
    return SimCounters(
        computed_tokens=totals.computed_tokens,
        gpu_hit_tokens=totals.hit_tokens["gpu"],
        external_tokens=totals.external_tokens,
        l1_hit_tokens=totals.hit_tokens.get("cpu"),
        pool_hit_tokens=totals.hit_tokens.get("pool"),
        pool_loaded_chunks=totals.loaded_chunks.get("pool"),
        l2_hit_tokens=totals.hit_tokens.get("disk"),
        l2_loaded_chunks=totals.loaded_chunks.get("disk"),
        remote_hit_tokens=totals.hit_tokens.get("remote"),
        remote_loaded_chunks=totals.loaded_chunks.get("remote"),
        remote_read_bytes=totals.read_bytes.get("remote"),
        stores_begun=totals.stores_begun if has_tiers else None,
        stores_ended=totals.stores_ended if has_tiers else None,
        storage_read_bytes=totals.read_bytes.get("disk"),
    )


def checked(call: Callable[[], Result]) -> Result:
    """Calls the core. ValueError also for numbers that do not fit its integers (negative, absurdly large)."""
    try:
        return call()
    except (OverflowError, TypeError, BufferError) as error:
        reasons: list[BaseException] = [error]
        while (cause := reasons[-1].__cause__) is not None:
            reasons.append(cause)
        # The last two are the field's name and the reason.
        text = ": ".join(" ".join(str(reason).split()) for reason in reasons[-2:])
        raise ValueError(f"not a usable value: {text}") from error
