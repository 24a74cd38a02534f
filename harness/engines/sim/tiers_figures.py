"""What finished requests did with KV entries, added up: hits by kind, bytes by purpose, times, throughputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from harness.engines.sim.entries import WantedEntry
from harness.engines.sim.placement import Move
from harness.engines.sim.transfers import percentiles
from harness.storage_records import HitFigures, KvFigures, RealTierFigures, StorageFigures, Throughput
from traces.request import Request


@dataclass(eq=False)
class Account:
    """One request's account. Times in seconds; slots by stage: 'load', 'prefill' or 'decode'."""

    request: Request
    queue_s: float = 0.0
    io_s: float = 0.0
    generation_s: float = 0.0
    end_to_end_s: float = 0.0
    slots: Counter[str] = field(default_factory=Counter)
    read_tokens: int = 0
    demoted_slots: int = 0
    dropped_slots: int = 0
    # By kind of entry: asked, hit, tokens asked, tokens hit.
    looked_up: dict[str, list[int]] = field(default_factory=dict)

    def look_up(self, wanted: WantedEntry, *, hit: bool) -> None:
        counts = self.looked_up.setdefault(wanted.kind, [0, 0, 0, 0])
        for at, count in enumerate((1, int(hit), wanted.tokens, hit * wanted.tokens)):
            counts[at] += count

    def made_room(self, move: Move) -> None:
        if move.target is None:
            self.dropped_slots += len(move.source.slots)
        else:
            self.demoted_slots += len(move.source.slots)

    def moved(self, stage: str, slots: int, tokens: int) -> None:
        self.slots[stage] += slots
        self.read_tokens += 0 if stage == "prefill" else tokens


def figures_of(
    ended: Sequence[Account],
    tiers: Mapping[str, tuple[str, StorageFigures, tuple[int, int]]],
    elapsed_s: float,
    chunk_tokens: int,
    slot_bytes: int,
) -> StorageFigures:
    """tiers: of each, its device's kind, what the device did, and the entries and slots that it held at the end.

    The last one's figures are the result's own."""
    last = list(tiers.values())[-1][1]
    output = sum(one.request.output_tokens for one in ended)
    io_s = sum(one.io_s for one in ended)
    kv_tokens = (last.read.operations + last.write.operations) * chunk_tokens
    throughput = {
        "wall_clock": (output, elapsed_s, "output tokens of finished requests / elapsed time"),
        "per_io_time": (output, io_s, "output tokens of finished requests / sum of their I/O times"),
        "storage": (
            kv_tokens,
            elapsed_s,
            "tokens whose KV the last tier read or wrote, in whole chunks / elapsed time",
        ),
    }
    return msgspec.structs.replace(
        last,
        elapsed_s=elapsed_s,
        cumulative_io_s=io_s,
        failed_operations=sum(figures.failed_operations for _, figures, _ in tiers.values()),
        errors=dict(sum((Counter(figures.errors) for _, figures, _ in tiers.values()), Counter[str]()).most_common(5)),
        requests_finished=len(ended),
        output_tokens=output,
        kv_tokens=kv_tokens,
        throughput={
            name: Throughput(tokens_per_s=tokens / over_s if over_s > 0 else None, formula=formula)
            for name, (tokens, over_s, formula) in throughput.items()
        },
        kv=KvFigures(
            hits=_hits(ended),
            load_read_bytes=sum(one.slots["load"] for one in ended) * slot_bytes,
            prefill_write_bytes=sum(one.slots["prefill"] for one in ended) * slot_bytes,
            decode_read_bytes=sum(one.slots["decode"] for one in ended) * slot_bytes,
            demoted_bytes=sum(one.demoted_slots for one in ended) * slot_bytes,
            dropped_bytes=sum(one.dropped_slots for one in ended) * slot_bytes,
            amplification=sum(one.read_tokens for one in ended) / output if output else None,
            io_s=_spread([one.io_s for one in ended]),
            queue_s=_spread([one.queue_s for one in ended]),
            generation_s=_spread([one.generation_s for one in ended]),
            end_to_end_s=_spread([one.end_to_end_s for one in ended]),
            by_tier={
                name: RealTierFigures(
                    device=device,
                    read=figures.read,
                    write=figures.write,
                    entries=entries,
                    held_bytes=slots * slot_bytes,
                )
                for name, (device, figures, (entries, slots)) in tiers.items()
            },
        ),
    )


def _spread(seconds: Sequence[float]) -> dict[str, float | None]:
    """The mean, and percentiles; None: no request ended."""
    return {"mean": sum(seconds) / len(seconds) if seconds else None, **percentiles(seconds)}


def _hits(ended: Sequence[Account]) -> dict[str, HitFigures]:
    counts: dict[str, list[int]] = {}
    for one in ended:
        for kind, own in one.looked_up.items():
            counts[kind] = [a + b for a, b in zip(counts.get(kind, (0, 0, 0, 0)), own, strict=True)]
    return {
        kind: HitFigures(asked=asked, hit=hit, asked_tokens=asked_tokens, hit_tokens=hit_tokens)
        for kind, (asked, hit, asked_tokens, hit_tokens) in counts.items()
    }
