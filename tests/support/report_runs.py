"""Hand-made run folders for tests of their readers: rows with round figures, any verdict, any state."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from harness.records import Counters, HostSample, Sample
from harness.results.folder import RunFolder
from harness.results.manifest import CellEntry, Manifest
from traces.request import RequestRecord, TokensByTier, Verdict

NOTHING_REPORTED: TokensByTier = {}
_SAMPLES = itertools.count()


def row(
    tier: str | None,
    ttft_s: float | None,
    *,
    cell: str = "base",
    at_s: float = 0.0,
    lag_s: float = 0.0,
    verdict: Verdict | None = "proven",
    by_tier: TokensByTier = NOTHING_REPORTED,
    **fields: Any,
) -> RequestRecord:
    """A measured request of 4,097 tokens, a sample of its own, or one of a free load; ttft_s None: it failed."""
    first_s = None if ttft_s is None else at_s + lag_s + ttft_s
    defaults: dict[str, Any] = {"prompt_tokens": 4097, "output_tokens": 1, "id": f"{tier}-{at_s:g}"}
    defaults |= {"sample": 0 if tier is None else next(_SAMPLES), "error": "timed out" if ttft_s is None else None}
    claim = verdict if tier is not None and ttft_s is not None else None
    return RequestRecord(
        cell=cell,
        expected_tier=tier,
        verdict=claim,
        scheduled_s=at_s,
        sent_s=at_s + lag_s,
        first_chunk_s=first_s,
        first_token_s=first_s,
        last_token_s=first_s,
        tokens_by_tier=by_tier,
        **(defaults | fields),
    )


def sample(tier: str, index: int, verdict: Verdict | None = "proven", **fields: Any) -> Sample:
    defaults: dict[str, Any] = {"observed": Counters(computed_tokens=1), "expected": Counters(computed_tokens=1)}
    defaults |= {"cell": "base", "host": HostSample(steal_share=0.01, foreign_cpu_share=0.02)}
    times: dict[str, Any] = {"started_s": float(index), "ended_s": index + 1.0}
    return Sample(tier=tier, index=index, verdict=verdict, **times, **(defaults | fields))


def cell(key: str = "base", overrides: Mapping[str, Any] | None = None, **fields: Any) -> CellEntry:
    return CellEntry(key=key, overrides=dict(overrides or {}), status="complete", **fields)


def manifest(cells: Iterable[CellEntry] = (), **changes: Any) -> Manifest:
    known: dict[str, Any] = {"run_id": "tiers-fake-1", "name": "tiers", "engine": "fake", "status": "complete"}
    return Manifest(**(known | {"seed": 7, "cells": list(cells) or [cell()]} | changes))


def folder_of(
    path: Path,
    rows: Iterable[RequestRecord] = (),
    samples: Iterable[Sample] = (),
    **manifest_changes: Any,
) -> Path:
    """Writes a run folder and returns its path."""
    run = RunFolder.create(path, manifest(**manifest_changes))
    run.append_rows(rows)
    for each in samples:
        run.append_sample(each)
    run.close()
    return path
