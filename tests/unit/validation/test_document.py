"""validation.json: its keys, its one reader, and the documents that were kept as evidence."""

import json
from pathlib import Path

import msgspec
import pytest

from harness.errors import ResultsError
from harness.report.validation.html import lines, markdown, point_labels
from harness.validation.document import SideFacts, document_of, read_document, write_document
from harness.validation.equivalence import Figure, PointResult, verdict_of
from tests.support.paths import ROOT

KEPT = sorted(path.parent for path in (ROOT / "results" / "validation").glob("*/validation.json"))
SIDE = SideFacts(
    engine="sim", runs=("a",), created_at=None, host={}, git=None, versions={}, gpu_blocks=None, block_tokens=None
)


def point(*errors: float | None, gates: bool = True) -> PointResult:
    figures = tuple(
        Figure(
            metric=f"m{number}",
            reference=1.0,
            candidate=1.0 if error is None else 1 + error,
            error=error,
            low=None,
            high=None,
            verdict="pass" if error is not None and abs(error) < 0.05 else "fail",
            samples=1,
            gates=gates,
        )
        for number, error in enumerate(errors)
    )
    return PointResult(
        cell="c",
        tier="gpu",
        axes={},
        figures=figures,
        counts=(),
        noise=(),
        wasserstein_s=None,
        left_out=2,
        verdict=verdict_of(figures),
    )


def test_some_evidence_is_kept() -> None:
    assert len(KEPT) >= 2


@pytest.mark.parametrize("folder", KEPT, ids=lambda folder: str(folder.name))
def test_a_kept_document_is_read_and_written_with_the_same_keys_and_figures(folder: Path, tmp_path: Path) -> None:
    kept = json.loads((folder / "validation.json").read_text())
    written = json.loads(write_document(tmp_path, read_document(folder)).read_text())
    assert written == kept and kept["points"] and kept["metrics"]


@pytest.mark.parametrize("folder", KEPT, ids=lambda folder: str(folder.name))
def test_the_figures_over_all_points_follow_from_the_kept_points(folder: Path) -> None:
    kept = read_document(folder)
    again = document_of(
        kept.points,
        kept.margin,
        name=kept.name,
        command=kept.command,
        reference=kept.reference,
        candidate=kept.candidate,
    )
    assert (again.verdict, again.overall, again.metrics) == (kept.verdict, kept.overall, kept.metrics)
    assert all(each.verdict == verdict_of((*each.figures, *each.counts)) for each in kept.points)


def test_a_key_that_is_not_known_is_left_out_and_an_empty_list_is_not(tmp_path: Path) -> None:
    written = document_of([point(0.01)], 0.05, name="n", command="", reference=SIDE, candidate=SIDE)
    keys = json.loads(write_document(tmp_path, written).read_text())
    assert not {"calibration", "notes", "experiment"} & keys.keys() and "origin" not in keys["reference"]
    assert keys["reference"]["created_at"] is None
    empty = document_of([point(0.01)], 0.05, name="n", command="", reference=SIDE, candidate=SIDE, notes=())
    assert json.loads(write_document(tmp_path, empty).read_text())["notes"] == []
    assert read_document(tmp_path).notes == ()


def test_only_figures_that_count_are_in_the_whole() -> None:
    written = document_of(
        [point(0.01, -0.2), point(None), point(0.5, gates=False)], 0.05,
        name="n", command="", reference=SIDE, candidate=SIDE,
    )  # fmt: skip
    whole = written.overall
    assert written.verdict == "fail" and (whole.points, whole.figures, whole.left_out) == (3, 2, 6)
    assert whole.mape == pytest.approx(0.105) and whole.largest_error == -0.2
    assert whole.shares.passed == pytest.approx(1 / 3) and whole.shares.failed == pytest.approx(2 / 3)
    assert (whole.figure_shares.passed, whole.figure_shares.unresolved) == (0.5, 0.0)
    assert whole.targets == {
        "90% of the points pass": False,
        "at most 10% not resolvable": True,
        "no error above 10%": False,
        "MAPE at most 3%": False,
        "every count equal": True,
    }
    first = written.metrics[0]
    assert (first.metric, first.points, first.gates, first.passed, first.failed) == ("m0", 3, True, 1, 2)
    assert first.mape == pytest.approx(0.255) and first.largest_error == 0.5


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "holds no validation.json; name a folder that `harness validate` wrote"),
        ("{", "cannot be read .*; make the validation again"),
        ("{}", "cannot be read .*missing required field.*; make the validation again"),
    ],
)
def test_what_is_no_document_is_told_in_one_line(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "validation.json").write_text(content)
    with pytest.raises(ResultsError, match=words) as told:
        read_document(tmp_path)
    assert "\n" not in str(told.value)


def test_a_later_schema_is_refused(tmp_path: Path) -> None:
    kept = json.loads((KEPT[0] / "validation.json").read_text())
    (tmp_path / "validation.json").write_text(json.dumps(kept | {"schema": 2}))
    with pytest.raises(ResultsError, match="has schema 2, this version reads 1"):
        read_document(tmp_path)


NAMES_OF_TTFT = {"cpu_vllm": {"ttft_middle_s", "ttft_mean_s"}, "published": {"ttft_printed_s"}}


@pytest.mark.parametrize(("kept", "names"), NAMES_OF_TTFT.items())
def test_a_kept_median_is_called_a_median_and_only_a_loads_mean_a_mean(kept: str, names: set[str]) -> None:
    judged = read_document(ROOT / "results" / "validation" / kept)
    shown = lines(judged, point_labels(judged.points))
    found = {(line.metric, line.tier) for line in shown if line.metric.startswith(tuple(names | {"ttft_mean_s"}))}
    assert {metric for metric, _ in found} == names
    assert {tier for metric, tier in found if metric == "ttft_mean_s"} <= {"load"}
    assert "ttft_mean_s" not in markdown(judged) and "mean TTFT" not in markdown(judged)


def test_a_side_with_a_reference_accelerator_is_never_called_by_its_engine_alone(tmp_path: Path) -> None:
    real = msgspec.structs.replace(SIDE, engine="vllm", runs=("b",))
    paced = msgspec.structs.replace(real, runs=("c",), accelerator="reference accelerator h9, no GPU")
    document = document_of([point(0.01)], 0.05, name="n", command="", reference=real, candidate=paced)
    written = read_document(write_document(tmp_path, document).parent)
    assert written.candidate.accelerator == "reference accelerator h9, no GPU" and written.reference.accelerator is None
    text = markdown(document)
    assert "vllm (reference accelerator h9, no GPU)" in text
