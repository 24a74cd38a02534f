"""What a comparison comes to, as one document: overall, per metric, per point, and where both sides came from.

    written = document(comparison, reference, candidate, name="cpu_vllm", command="harness compare a b")
    write_document(folder, written)                # validation.json
    read_document(folder).overall.shares.passed    # share of the points that pass

Nothing else knows the file's keys. The reports are made from the document.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from harness.errors import ResultsError
from harness.records import Origin, Resolved
from harness.results import provenance
from harness.results.folder import write_atomically
from harness.stats import Equivalence
from harness.validation.equivalence import Comparison, Figure, PointResult, worst
from harness.validation.points import Side
from harness.validation.resampling import CONFIDENCE

SCHEMA = 1
NAME = "validation.json"
EXIT_CODES: dict[Equivalence, int] = {"pass": 0, "fail": 1, "not resolvable": 3}
# What a validation of this project aims at, with ± 5 %: of points, and of their times that count.
MOST_PASS, LARGEST_ERROR, LARGEST_MAPE, MOST_UNRESOLVED = 0.90, 0.10, 0.03, 0.10


class SideFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where the rows of a side came from. host: facts of the machine, without its name. None: not known.

    The file has every key but the last two. origin: of published figures, the documents that they stand in.
    accelerator: what stood for a real engine's GPU, in words.
    """

    engine: str
    runs: tuple[str, ...]
    created_at: str | None
    host: dict[str, Any]
    git: provenance.Git | None
    versions: dict[str, str | None]
    gpu_blocks: int | None
    block_tokens: int | None
    origin: str | None = None
    accelerator: str | None = None


class CalibrationFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The calibration that the simulator ran with. good, verdict: what it says of its own fit. sha256: of its file;
    None for a preset."""

    name: str
    date: str
    machine: str
    method: str
    good: bool | None
    verdict: str | None
    sha256: str | None
    fitted_points: int


class Shares(msgspec.Struct, frozen=True, kw_only=True):
    """Share of each verdict; all 0 where there was nothing to judge."""

    passed: float = msgspec.field(name="pass")
    failed: float = msgspec.field(name="fail")
    unresolved: float = msgspec.field(name="not resolvable")


class MetricSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One metric over all points that have it: how many got each verdict, and its relative errors.

    gates: whether it counts for the whole at any point. None: no point has an error.
    """

    metric: str
    points: int
    gates: bool
    passed: int = msgspec.field(name="pass")
    failed: int = msgspec.field(name="fail")
    unresolved: int = msgspec.field(name="not resolvable")
    mape: float | None
    largest_error: float | None


class Overall(msgspec.Struct, frozen=True, kw_only=True):
    """All points. figures, mape, largest_error (relative): of the times that count; None without any.

    counts, counts_equal: tokens and bytes by tier. left_out: rows. targets: which of the aims are met, by name.
    """

    points: int
    shares: Shares
    figures: int
    figure_shares: Shares
    mape: float | None
    largest_error: float | None
    counts: int
    counts_equal: int
    left_out: int
    targets: dict[str, bool]


class Document(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A finished comparison. The file leaves out experiment, calibration and notes where they are None."""

    schema: int
    created_at: str
    git: provenance.Git | None
    reference: SideFacts
    candidate: SideFacts
    name: str
    command: str
    experiment: Origin | None = None
    calibration: CalibrationFacts | None = None
    notes: tuple[str, ...] | None = None
    margin: float
    confidence: float
    verdict: Equivalence
    overall: Overall
    metrics: tuple[MetricSummary, ...]
    points: tuple[PointResult, ...]


class Judgement(NamedTuple):
    """A finished comparison: the document, and the two sides whose rows a report may draw; None: it has no rows."""

    document: Document
    reference: Side | None = None
    candidate: Side | None = None


def document(comparison: Comparison, reference: Side, candidate: Side, **more: Any) -> Document:
    """`more`: what only the caller knows: name, command, and any of experiment, calibration, notes."""
    return document_of(
        comparison.points, comparison.margin, reference=side_facts(reference), candidate=side_facts(candidate), **more
    )


def document_of(points: Sequence[PointResult], margin: float, **more: Any) -> Document:
    """The document from judged points. `more` has to hold name, command, reference and candidate."""
    return Document(
        schema=SCHEMA,
        created_at=provenance.now(),
        git=provenance.git(),
        margin=margin,
        confidence=CONFIDENCE,
        verdict=worst([point.verdict for point in points]),
        overall=overall(points),
        metrics=by_metric(points),
        points=tuple(points),
        **more,
    )


def overall(points: Sequence[PointResult]) -> Overall:
    judged = [f for point in points for f in point.figures if f.gates and f.error is not None]
    counted = [f for point in points for f in point.counts]
    worst_figure = max(judged, key=lambda f: abs(f.error or 0.0), default=None)
    whole = Overall(
        points=len(points),
        shares=_shares([point.verdict for point in points]),
        figures=len(judged),
        figure_shares=_shares([f.verdict for f in judged]),
        mape=_mape(judged),
        largest_error=None if worst_figure is None else worst_figure.error,
        counts=len(counted),
        counts_equal=sum(f.verdict == "pass" for f in counted),
        left_out=sum(point.left_out for point in points),
        targets={},
    )
    return msgspec.structs.replace(whole, targets=_targets(whole))


def _targets(whole: Overall) -> dict[str, bool]:
    """Which of the aims are met, by name."""
    return {
        f"{MOST_PASS:.0%} of the points pass": whole.shares.passed >= MOST_PASS,
        f"at most {MOST_UNRESOLVED:.0%} not resolvable": whole.shares.unresolved <= MOST_UNRESOLVED,
        f"no error above {LARGEST_ERROR:.0%}": abs(whole.largest_error or 0.0) <= LARGEST_ERROR,
        f"MAPE at most {LARGEST_MAPE:.0%}": whole.mape is not None and whole.mape <= LARGEST_MAPE,
        "every count equal": whole.counts_equal == whole.counts,
    }


def by_metric(points: Sequence[PointResult]) -> tuple[MetricSummary, ...]:
    """One line a metric, in the order in which the points have them."""
    found: dict[str, list[Figure]] = {}
    for point in points:
        for figure in (*point.figures, *point.counts):
            found.setdefault(figure.metric, []).append(figure)
    return tuple(_metric(metric, figures) for metric, figures in found.items())


def _metric(metric: str, figures: Sequence[Figure]) -> MetricSummary:
    verdicts = Counter(f.verdict for f in figures)
    return MetricSummary(
        metric=metric,
        points=len(figures),
        gates=any(f.gates for f in figures),
        passed=verdicts["pass"],
        failed=verdicts["fail"],
        unresolved=verdicts["not resolvable"],
        mape=_mape(figures),
        largest_error=max((f.error for f in figures if f.error is not None), key=abs, default=None),
    )


def write_document(folder: Path, written: Document) -> Path:
    path = folder / NAME
    write_atomically(path, msgspec.json.format(msgspec.json.encode(written), indent=1) + b"\n")
    return path


def read_document(folder: Path) -> Document:
    """Raises ResultsError where the folder holds no document of this schema."""
    path = folder / NAME
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Document)
    except FileNotFoundError:
        raise ResultsError(f"{folder}: holds no {NAME}; name a folder that `harness validate` wrote") from None
    except (OSError, msgspec.DecodeError) as error:
        raise ResultsError(f"{path}: cannot be read ({error}); make the validation again") from None
    if found.schema != SCHEMA:
        raise ResultsError(f"{path}: has schema {found.schema}, this version reads {SCHEMA}; use the commit it names")
    return found


def _mape(figures: Sequence[Figure]) -> float | None:
    errors = [abs(f.error) for f in figures if f.error is not None]
    return sum(errors) / len(errors) if errors else None


def _shares(verdicts: Sequence[Equivalence]) -> Shares:
    counted, total = Counter(verdicts), len(verdicts) or 1
    return Shares(
        passed=counted["pass"] / total,
        failed=counted["fail"] / total,
        unresolved=counted["not resolvable"] / total,
    )


def side_facts(side: Side) -> SideFacts:
    """Where a side came from. The engine's resolved sizes are those of its first cell."""
    manifest = side.manifest
    resolved = next((cell.resolved for cell in manifest.cells if cell.resolved), Resolved())
    return SideFacts(
        engine=side.engine,
        runs=tuple(one.run_id for one in side.manifests),
        created_at=manifest.created_at,
        host={
            key: value
            for key, value in msgspec.json.decode(msgspec.json.encode(manifest.host)).items()
            if key != "hostname"
        },
        git=manifest.git,
        versions={"kv-harness": manifest.versions.get("kv-harness"), **resolved.versions},
        gpu_blocks=resolved.gpu_blocks,
        block_tokens=resolved.block_tokens,
        accelerator=str(resolved.accelerator) if resolved.accelerator else None,
    )
