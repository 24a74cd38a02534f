"""What a comparison comes to, as one document: overall, per metric, per point, and where both sides came from.

validation.json holds it; the reports are made from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from harness.records import Resolved
from harness.results import provenance
from harness.results.folder import write_atomically
from harness.stats import Equivalence
from harness.validation.equivalence import CONFIDENCE, Comparison, Figure, PointResult
from harness.validation.points import Side

SCHEMA = 1
EXIT_CODES: dict[Equivalence, int] = {"pass": 0, "fail": 1, "not resolvable": 3}
# What a validation of this project aims at, with ± 5 %: of points, and of their times that count.
MOST_PASS, LARGEST_ERROR, LARGEST_MAPE, MOST_UNRESOLVED = 0.90, 0.10, 0.03, 0.10
VERDICTS: tuple[Equivalence, ...] = ("pass", "fail", "not resolvable")


class Judged(NamedTuple):
    """A finished comparison: the document, and the two sides whose rows a report may draw; None: it has no rows."""

    content: dict[str, Any]
    reference: Side | None = None
    candidate: Side | None = None


def document(comparison: Comparison, reference: Side, candidate: Side, **more: Any) -> dict[str, Any]:
    """`more`: what only the caller knows, e.g. name, command, calibration."""
    sides = {"reference": _side(reference), "candidate": _side(candidate)}
    return content_of(comparison.points, comparison.margin, comparison.verdict, **sides, **more)


def content_of(points: Sequence[PointResult], margin: float, verdict: Equivalence, **more: Any) -> dict[str, Any]:
    """The document from judged points. `more` has to hold name, reference and candidate."""
    content = {
        "schema": SCHEMA,
        "created_at": provenance.now(),
        "git": provenance.git(),
        **more,
        "margin": margin,
        "confidence": CONFIDENCE,
        "verdict": verdict,
        "overall": overall(points),
        "metrics": by_metric(points),
        "points": [msgspec.to_builtins(point) | {"verdict": point.verdict} for point in points],
    }
    return dict(msgspec.to_builtins(content))


def overall(points: Sequence[PointResult]) -> dict[str, Any]:
    """Shares of points by verdict, and the errors of their times that count. mape, largest_error: relative; None
    without a figure."""
    judged = [f for point in points for f in point.figures if f.gates and f.error is not None]
    counted = [f for point in points for f in point.counts]
    worst = max(judged, key=lambda f: abs(f.error or 0.0), default=None)
    whole: dict[str, Any] = {
        "points": len(points),
        "shares": _shares([point.verdict for point in points]),
        "figures": len(judged),
        "figure_shares": _shares([f.verdict for f in judged]),
        "mape": _mape(judged),
        "largest_error": None if worst is None else worst.error,
        "counts": len(counted),
        "counts_equal": sum(f.verdict == "pass" for f in counted),
        "left_out": sum(point.left_out for point in points),
    }
    return whole | {"targets": _targets(whole)}


def _targets(whole: dict[str, Any]) -> dict[str, bool]:
    """Which of the aims are met, by name."""
    shares, largest, mape = whole["shares"], abs(whole["largest_error"] or 0.0), whole["mape"]
    return {
        f"{MOST_PASS:.0%} of the points pass": shares["pass"] >= MOST_PASS,
        f"at most {MOST_UNRESOLVED:.0%} not resolvable": shares["not resolvable"] <= MOST_UNRESOLVED,
        f"no error above {LARGEST_ERROR:.0%}": largest <= LARGEST_ERROR,
        f"MAPE at most {LARGEST_MAPE:.0%}": mape is not None and mape <= LARGEST_MAPE,
        "every count equal": whole["counts_equal"] == whole["counts"],
    }


def by_metric(points: Sequence[PointResult]) -> list[dict[str, Any]]:
    """One line a metric: how many points, their verdicts, MAPE and largest error; whether it counts for the whole."""
    found: dict[str, list[Figure]] = {}
    for point in points:
        for figure in (*point.figures, *point.counts):
            found.setdefault(figure.metric, []).append(figure)
    return [
        {
            "metric": metric,
            "points": len(figures),
            "gates": any(f.gates for f in figures),
            **{verdict: sum(f.verdict == verdict for f in figures) for verdict in VERDICTS},
            "mape": _mape(figures),
            "largest_error": max((f.error for f in figures if f.error is not None), key=abs, default=None),
        }
        for metric, figures in found.items()
    ]


def write_document(folder: Path, content: dict[str, Any]) -> Path:
    path = folder / "validation.json"
    write_atomically(path, msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")
    return path


def _mape(figures: Sequence[Figure]) -> float | None:
    errors = [abs(f.error) for f in figures if f.error is not None]
    return sum(errors) / len(errors) if errors else None


def _shares(verdicts: Sequence[str]) -> dict[str, float]:
    counted = Counter(verdicts)
    return {verdict: counted[verdict] / len(verdicts) if verdicts else 0.0 for verdict in VERDICTS}


def _side(side: Side) -> dict[str, Any]:
    """Where the rows of a side came from. The engine's resolved sizes are those of its first cell."""
    manifest = side.manifest
    host = {key: value for key, value in msgspec.structs.asdict(manifest.host).items() if key != "hostname"}
    resolved = next((cell.resolved for cell in manifest.cells if cell.resolved), Resolved())
    return {
        "engine": side.engine,
        "runs": [one.run_id for one in side.manifests],
        "created_at": manifest.created_at,
        "host": host,
        "git": manifest.git,
        "versions": {"kv-harness": manifest.versions.get("kv-harness"), **resolved.versions},
        "gpu_blocks": resolved.gpu_blocks,
        "block_tokens": resolved.block_tokens,
    }
