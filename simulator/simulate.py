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
from simulator.calibration import COST, TRANSFER, Calibration
from simulator.columns import CompletionColumns, RequestColumns
from simulator.columns import reply_stream as reply_stream
from simulator.models import ModelSpec
from simulator.policies import EnginePolicy, TierPolicy, engine_policy, tier_policy
from traces.request import Request
from traces.tiers import PAGE_CACHE

Result = TypeVar("Result")
Core = TypeVar("Core", _core.Engine, _core.Cluster)
Note = tuple[str, str, list[int]]
# What the core empties, in the order of its arguments.
_EMPTIED = ("gpu", "cpu", "disk", PAGE_CACHE)


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a request. Times are the simulator's seconds; None: it did not happen.

    computed, gpu, cpu, disk: prompt tokens by where their KV came from, as decided when the request was first
    admitted; they sum up to prompt_tokens (all 0 with an error). token_s is kept only on request. instance: which one
    of a cluster served it; 0 elsewhere.
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
    preemptions: int
    error: str | None
    instance: int = 0


class Issued(NamedTuple):
    """A disk transfer to make. owner: reply_stream() of the request that waits for it, or whose chunks are written.
    chunks: (key, slot) each; slots lie below the number of chunks that the disk tier holds."""

    id: int
    owner: int
    write: bool
    chunks: list[tuple[int, int]]


class SimCounters(msgspec.Struct, frozen=True, kw_only=True):
    """Running totals, named as a real engine's and cache server's (the harness's Counters); None: no such tier.

    stores_begun, stores_ended: chunks; a store ends when the chunk is in every tier that takes it.
    storage_read_bytes: read from the disk device; a read that the page cache answers adds none.
    """

    computed_tokens: int
    gpu_hit_tokens: int
    external_tokens: int | None
    l1_hit_tokens: int | None
    l2_hit_tokens: int | None
    l2_loaded_chunks: int | None
    stores_begun: int | None
    stores_ended: int | None
    storage_read_bytes: int | None


class Driven(Generic[Core]):
    """What drives one engine or a cluster of them: requests in, completions out, time in between."""

    _core: Core

    @property
    def now_s(self) -> float:
        return self._core.now_s

    @property
    def idle(self) -> bool:
        """True if nothing is asked, computed or stored."""
        return self._core.idle

    def submit(self, request: Request, at_s: float) -> None:
        """Sends a request at `at_s`, now or later. One that can never be served completes with an error.

        ValueError: the moment has passed, a request of that id is in flight, or its instance cannot be chosen.
        """
        if request.instance is not None:
            self._check_pin(request)
        reply = reply_stream(request.id)
        checked(lambda: self._core.submit(request.id, request.prompt, request.output_tokens, reply, at_s))

    def _check_pin(self, request: Request) -> None:
        """ValueError: the request is pinned to an instance that cannot be chosen here."""
        raise NotImplementedError

    def advance(self, until_s: float = math.inf) -> list[Completion]:
        """Runs until `until_s` or the first moment at which requests complete, and returns those.

        inf: until requests complete or nothing is left to do. RuntimeError: requests wait for blocks in vain.
        """
        return [completion_of(row) for row in self._core.advance(until_s)]

    def submit_many(self, requests: RequestColumns) -> None:
        """`submit` for each, in order. ValueError: the first that is refused; those before it have been sent."""
        if not requests.ids:
            return
        r = requests
        segments = (r.hash_ids, r.segment_tokens, r.segment_ends)
        checked(lambda: self._core.submit_many(r.ids, segments, r.output_tokens, r.reply_ids, r.at_s))

    def advance_many(self, until_s: float = math.inf) -> CompletionColumns:
        """Runs until `until_s`, completions or not, and returns them all. inf: until nothing is left to do."""
        return CompletionColumns.of(*self._core.advance_many(until_s))

    def drain(self) -> None:
        """Runs until all stores have ended. ValueError: a request is in flight (take its completion first)."""
        if self._core.advance(self.now_s):
            raise ValueError("drain: requests completed that nobody took; advance until they have")
        while not self.idle:
            if completions := self._core.advance(math.inf):
                raise ValueError(f"drain: request {completions[0][0]!r} was in flight; advance until it completes")

    def reset(self, what: Iterable[str]) -> None:
        """Empties 'gpu', 'cpu', 'disk', or what the 'page_cache' holds. ValueError: unknown, or not idle."""
        names = frozenset(what)
        if unknown := names - frozenset(_EMPTIED):
            raise ValueError(f"reset: {', '.join(sorted(unknown))} is not one of {', '.join(_EMPTIED)}")
        self._core.reset(*(tier in names for tier in _EMPTIED))


class Simulator(Driven[_core.Engine]):
    """One engine with its cache tiers.

    gpu_blocks: as the engine resolves it, vLLM's null block included. cpu_bytes None: nothing is offloaded.
    disk_bytes None: there is no disk tier. odirect: disk reads bypass the page cache. disk_bytes_per_s: what the
    disk's device is limited to, if it is; disk_depth: reads in flight for a request (LMCache's fs: 1, fs_native: 4).
    macro_steps False takes every decode step singly: slower, and the result is the same. journal: keep notes for
    take_journal. external_disk: somebody else makes the disk tier's transfers (take_issued, complete_io). Raises
    ValueError in one line for settings that could serve nothing, and CalibrationError for a constant that these tiers
    need and the calibration lacks.
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
        disk_bytes: int | None = None,
        odirect: bool = False,
        disk_bytes_per_s: float | None = None,
        disk_depth: int = 1,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        record_token_times: bool = False,
        macro_steps: bool = True,
        journal: bool = False,
        external_disk: bool = False,
    ) -> None:
        if disk_bytes is not None and cpu_bytes is None:
            raise ValueError("disk_bytes without cpu_bytes: the disk tier is filled through the CPU tier; give both")
        self.model, self.calibration = model, calibration
        self.engine_policy = engine_policy(engine_pack) if isinstance(engine_pack, str) else engine_pack
        self.tier_policy = tier_policy(tier_pack) if isinstance(tier_pack, str) else tier_pack
        self.gpu_blocks, self.block_tokens, self.chunk_tokens = gpu_blocks, block_tokens, chunk_tokens
        self.cpu_bytes, self.disk_bytes, self.odirect = cpu_bytes, disk_bytes, odirect
        self.disk_bytes_per_s, self.disk_depth = disk_bytes_per_s, disk_depth
        self.external_disk = external_disk
        self.config = SimpleNamespace(
            gpu_blocks=gpu_blocks,
            null_blocks=self.engine_policy.null_blocks,
            block_tokens=block_tokens,
            chunk_tokens=chunk_tokens,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=model.max_position,
            record_token_times=record_token_times,
            macro_steps=macro_steps,
            journal=journal,
            cost=self._cost(),
            tiers=self._tiers(),
        )
        self._core = checked(lambda: _core.Engine(self.config))

    def _check_pin(self, request: Request) -> None:
        if request.instance != 0:
            raise ValueError(f"request {request.id}: is pinned to instance {request.instance}; there is one engine")

    @property
    def next_event_s(self) -> float | None:
        """The next moment at which anything can happen; None: at none. Valid once `advance` returned no completion."""
        return self._core.next_event_s

    @property
    def queues(self) -> tuple[int, int]:
        """Requests that run, and that wait to run or for a transfer."""
        return self._core.queues

    def refusal(self, request: Request) -> str | None:
        """Why the request can never be served (`submit` would complete it with this error); None: it can."""
        return checked(lambda: self._core.refusal(request.prompt, request.output_tokens))

    def take_tokens(self, first: bool) -> list[tuple[str, int]]:
        """(request id, number) of tokens that unfinished requests got since the last call; with record_token_times.

        Of those that got their `first` token among them, or of the others. All are final: `advance` decides nothing
        beyond its `until_s`. A completion's token_s has those after the last call, its output_tokens all.
        """
        return self._core.take_tokens(first)

    def take_issued(self) -> list[Issued]:
        """Disk transfers to make since the last call; with external_disk. Each is to be answered by complete_io."""
        return [Issued(*one) for one in self._core.take_issued()]

    def take_dropped(self) -> list[int]:
        """Keys of chunks that the disk tier has dropped since the last call; before the transfers issued since."""
        return self._core.take_dropped()

    def complete_io(self, transfer: int, at_s: float, failed: Sequence[int] = ()) -> None:
        """A transfer has ended at that moment (or now, if that has passed). failed: keys that a write did not bring to
        the disk, and that the disk tier therefore does not hold. A transfer that nobody waits for changes nothing."""
        checked(lambda: self._core.complete_io(transfer, at_s, list(failed)))

    def take_journal(self) -> tuple[list[Note], list[Note]]:
        """What was done since the last call: by the GPU's block pool and scheduler, and by the tiers.

        (what, request id or "", numbers). Of blocks: "evicted" (a run's key, the block's place in the run), "preempted"
        (). Of tiers: "lookup" (slot, keys), "prefetched" (slot), "answer" (slot, in CPU memory or not of each chunk
        found), "release" and "touch" (keys), "store" (id, keys asked), "storing" (keys begun), "stored" (id, id of the
        disk write), "writes" (keys new to the disk), "written" (id of the disk write), "tick" (count, keys dropped).
        """
        return self._core.take_journal()

    def counters(self) -> SimCounters:
        return self.counters_of(self._core.counters())

    def counters_of(self, totals: _core._Totals) -> SimCounters:
        """The core's totals under their names; None for tiers that these settings leave out."""
        (computed, gpu, external), (cpu, disk, loaded), (begun, ended, read_bytes) = totals
        has_cpu, has_disk = self.cpu_bytes is not None, self.disk_bytes is not None
        return SimCounters(
            computed_tokens=computed,
            gpu_hit_tokens=gpu,
            external_tokens=external if has_cpu else None,
            l1_hit_tokens=cpu * self.chunk_tokens if has_cpu else None,
            l2_hit_tokens=disk * self.chunk_tokens if has_disk else None,
            l2_loaded_chunks=loaded if has_disk else None,
            stores_begun=begun if has_cpu else None,
            stores_ended=ended if has_cpu else None,
            storage_read_bytes=read_bytes if has_disk else None,
        )

    def _cost(self) -> SimpleNamespace:
        constants = {name: self.calibration.constant(name) for name in COST}
        known = self.calibration
        ways = {"synchronous_loads": known.synchronous_loads, "shared_core": known.shared_core}
        return SimpleNamespace(**constants, **ways)

    def _tiers(self) -> SimpleNamespace | None:
        if self.cpu_bytes is None:
            return None
        chunk_bytes = self.chunk_tokens * self.model.kv_bytes_per_token
        has_disk = self.disk_bytes is not None
        modelled = has_disk and not self.external_disk
        has_page_cache = has_disk and not self.odirect
        return SimpleNamespace(
            policy=self.tier_policy,
            chunk_bytes=chunk_bytes,
            chunk_tokens=self.chunk_tokens,
            cpu_chunks=self.cpu_bytes // max(chunk_bytes, 1),
            disk_chunks=None if self.disk_bytes is None else self.disk_bytes // max(chunk_bytes, 1),
            odirect=self.odirect,
            external_disk=self.external_disk,
            cpu_read=self._device("cpu.read", True),
            cpu_write=self._device("cpu.write", True),
            disk_read=self._device("disk.read", modelled),
            disk_write=self._device("disk.write", modelled),
            page_cache_read=self._device("page_cache.read", has_page_cache),
        )

    def _device(self, name: str, used: bool) -> SimpleNamespace:
        """A device's constants; those of a device that nothing uses need not be known."""
        if not used:
            return SimpleNamespace(
                latency_s=0.0, chunk_s=0.0, byte_s=0.0, shared_byte_s=0.0, shared_chunk_s=0.0, depth=1
            )
        latency_s, chunk_s, bytes_per_s, shared_bytes_per_s = (
            self.calibration.constant(f"{name}.{of}") for of in TRANSFER
        )
        if name == "disk.read" and self.disk_bytes_per_s is not None:
            # An operation moves its data no faster than the device; what it costs besides is not hidden by the limit,
            # as LMCache's fs opens, reads and closes one file after another (fs_l2_adapter.py, _execute_load).
            bytes_per_s = min(bytes_per_s, self.disk_bytes_per_s)
            shared_bytes_per_s = min(shared_bytes_per_s, self.disk_bytes_per_s)
        reads_disk = name in ("disk.read", "page_cache.read")
        depth, serial = self.disk_depth if reads_disk else 1, reads_disk and self.calibration.serial_chunks
        return SimpleNamespace(
            latency_s=latency_s,
            chunk_s=chunk_s,
            byte_s=1 / bytes_per_s,
            shared_byte_s=1 / shared_bytes_per_s,
            shared_chunk_s=self.calibration.constant("page_cache.read.chunk_s") if serial else 0.0,
            depth=depth,
        )


def completion_of(row: _core._Row) -> Completion:
    """A completion as the core has it."""
    request_id, (first_s, last_s, token_s), counts, error, instance = row
    prompt, output, computed, gpu, cpu, disk, preemptions = counts
    return Completion(
        id=request_id,
        first_token_s=first_s,
        last_token_s=last_s,
        token_s=token_s,
        prompt_tokens=prompt,
        output_tokens=output,
        computed=computed,
        gpu=gpu,
        cpu=cpu,
        disk=disk,
        preemptions=preemptions,
        error=error,
        instance=instance,
    )


def checked(call: Callable[[], Result]) -> Result:
    """Numbers that do not fit the core's integers (negative, absurdly large) are bad values as well."""
    try:
        return call()
    except (OverflowError, TypeError, BufferError) as error:
        reasons: list[BaseException] = [error]
        while (cause := reasons[-1].__cause__) is not None:
            reasons.append(cause)
        # The last two: which field, and why.
        text = ": ".join(" ".join(str(reason).split()) for reason in reasons[-2:])
        raise ValueError(f"not a usable value: {text}") from error
