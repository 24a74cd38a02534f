"""The table of published figures: what is fitted, what is predicted, and that nothing is chosen a row."""

import csv
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import yaml

from harness.commands.validate import validate as validate_command
from harness.errors import ConfigError, NotComparable
from harness.measure.run import RunRequest, run
from harness.records import Origin
from harness.report.validation.html import write_comparison
from harness.results.folder import read_rows
from harness.validation.document import read_document
from harness.validation.equivalence import PointResult
from harness.validation.published import Published, Rounds, hit_rates, is_published, round_cells, validate_published
from tests.support.paths import ROOT
from tests.unit.measure.test_run_loop import Quiet

TABLE = Path("configs/validation/published.yaml")


def test_every_row_is_judged_or_named_as_not_predicted(tmp_path: Path) -> None:
    judgement = validate_published(TABLE, tmp_path / "out", 0.05, "", Quiet())
    document = judgement.document
    write_comparison(tmp_path / "out", *judgement)
    with TABLE.with_name("published_figures.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    figures = [point for point in document.points if point.cell.startswith("row ")]
    rows_judged = {int(point.cell.removeprefix("row ")) - 2 for point in figures}
    left = next(note for note in document.notes or () if note.startswith("not predicted"))
    assert len(rows_judged) + left.rpartition(": ")[2].count(",") + 1 == len(rows) and len(rows_judged) >= 24
    for point in figures:
        [figure] = point.figures
        assert figure.reference == float(rows[int(point.cell.removeprefix("row ")) - 2]["value"])
    roles = {point.cell: point.axes["constants"] for point in figures}
    assert sum(role == "fitted" for role in roles.values()) == 15, "as many as both presets have points"
    exact = [p for p in figures if "4000ada" in p.axes["source"] and roles[p.cell] == "fitted"]
    errors = [p.figures[0].error for p in exact]
    assert len(exact) == 4 and all(e is not None and abs(e) < 1e-3 for e in errors), "as many constants as points"
    assert document.verdict == "fail" and read_document(tmp_path / "out") == document
    check_curves([point for point in document.points if point not in figures], document.notes or ())
    check_predicted(document.points, " ".join(document.notes or ()))
    for name in ("report.html", "validation.md", "validation.json"):
        assert str(tmp_path) not in (tmp_path / "out" / name).read_text()


def check_curves(points: list[PointResult], notes: Sequence[str]) -> None:
    """Every row of the curves' table is judged or counted under a reason; a preset has three fitted rows a curve."""
    with TABLE.with_name("published_curves.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    left = [note for note in notes if note.startswith("published_curves.csv, ")]
    assert len(points) + sum(int(note.split()[1]) for note in left) == len(rows)
    roles = Counter((point.axes["source"], point.axes["constants"]) for point in points)
    assert {role for _, role in roles} == {"fitted", "predicted"}
    assert [number for (_, role), number in roles.items() if role == "fitted"] == [3, 3, 3, 3, 2]
    assert roles["curve 10,000 requests at once h100-llama-3.1-8b", "predicted"] == 9
    for point in points:
        row = rows[int(point.cell.removeprefix("curve row ")) - 2]
        [figure] = point.figures
        assert figure.reference == pytest.approx(
            float(row["value"]) * {"ms": 1e-3, "s": 1.0, "tokens/s": 1.0}[row["unit"]]
        )
        assert (figure.metric == "prompt_tokens_per_s") == (row["unit"] == "tokens/s")


def check_predicted(points: Sequence[PointResult], notes: str) -> None:
    """Most rows that no preset was fitted on lie within the margin, and a note explains each of the others."""
    errors = {p.cell: p.figures[0].error or 0.0 for p in points if p.axes["constants"] == "predicted"}
    missed = [cell for cell, error in errors.items() if abs(error) > 0.05]
    assert len(errors) >= 30 and len(missed) <= 0.15 * len(errors)
    assert f"predicted: {len(errors)} rows, {len(errors) - len(missed)} within ± 5%" in notes
    assert missed and not [cell for cell in missed if f"{cell}:" not in notes]


def test_a_row_of_the_curves_without_an_entry_is_refused(tmp_path: Path) -> None:
    copy = tmp_path / TABLE.name
    copy.write_text(TABLE.read_text().replace("source: 'ObjectCache'", "source: 'No such source'"))
    for name in ("published_figures.csv", "published_curves.csv"):
        (tmp_path / name).write_text(TABLE.with_name(name).read_text())
    with pytest.raises(NotComparable, match=r"row \d+ \(ObjectCache, S3 .*is neither under curves.judged nor"):
        validate_published(copy, tmp_path / "out", 0.05, "", Quiet())
    assert not (tmp_path / "out").exists()
    times = tmp_path / "times.yaml"
    times.write_text(TABLE.read_text().replace("storage: recompute}", "metric: TTFT mean}", 1))
    with pytest.raises(NotComparable, match="neither under"):
        validate_published(times, tmp_path / "out", 0.05, "", Quiet())
    times.write_text(TABLE.read_text().replace("requests: 10000", "requests: 1"))
    with pytest.raises(NotComparable, match="row 33 has no value in ms or s at a prompt length; put it under"):
        validate_published(times, tmp_path / "out", 0.05, "", Quiet())


def test_the_command_knows_a_table_from_an_experiment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert is_published(TABLE) and not is_published(Path("configs/experiments/quickstart.yaml"))
    assert not is_published(tmp_path / "nowhere.yaml")
    few = tmp_path / TABLE.name
    few.write_text(TABLE.read_text().replace("requests: 10000", "requests: 20"))
    for name in ("published_figures.csv", "published_curves.csv"):
        (tmp_path / name).write_text(TABLE.with_name(name).read_text())
    assert validate_command(few, out=tmp_path / "out") == 1
    assert "published" in capsys.readouterr().out
    broken = tmp_path / "broken.yaml"
    broken.write_text(TABLE.read_text().replace("size: paper", "size: [paper]"))
    assert validate_command(broken, out=tmp_path / "no") == 2
    assert "rounds.size" in capsys.readouterr().err


def rates_of(tmp_path: Path, rounds: Rounds) -> dict[str, list[list[float]]]:
    made = RunRequest(
        name="rounds", cells=round_cells(rounds), engine="sim", experiment=Origin(path="-"), folder=tmp_path / "rounds"
    )
    return hit_rates(read_rows(run(made, Quiet())), rounds)


def study(tmp_path: Path, seeds: tuple[int, ...], **pools: str) -> Rounds:
    """The paper's conversations for four clients, one at a time, as prefetches take half of the host at most; with
    pools of these sizes."""
    plan = yaml.safe_load(Path("configs/experiments/mooncake_ssd.yaml").read_text())
    plan["sizes"]["paper"] |= {
        "workload.clients": 4,
        "workload.parallel": 1,
        "cache.gpu": "6GiB",
        "cache.cpu": "12GiB",
        "sweep.caches": {name: {"cache.pool": size} for name, size in pools.items()},
    }
    plan.pop("report")  # its reference set-up is none of these
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(plan))
    return Rounds("", str(path), "paper", "", seeds, {name: name for name in pools})


def test_rounds_that_fit_hit_all_but_their_own_turn_and_a_full_pool_loses_some(tmp_path: Path) -> None:
    """Mooncake's pool drops nothing within its lease, and what it has leased and cannot drop finds no room."""
    found = rates_of(tmp_path, study(tmp_path, (1, 2), small="7GiB", large="1TiB"))
    for rates in found["large"]:
        assert rates == pytest.approx([number / (number + 1) for number in range(9)], abs=1e-3)
    assert all(rates[1] == pytest.approx(0.5, abs=1e-3) and rates[8] < 8 / 9 - 0.01 for rates in found["small"])
    assert found["small"][0] != found["small"][1]


def test_a_scheme_that_the_experiment_does_not_have_is_one_line(tmp_path: Path) -> None:
    rounds = msgspec.structs.replace(study(tmp_path, (1,), pool="1TiB"), schemes={"s": "no_such"})
    with pytest.raises(ConfigError, match="has no no_such; name one of its caches"):
        round_cells(rounds)


def test_the_kept_hit_rates_come_out_equal(tmp_path: Path) -> None:
    """What results/validation/published keeps of the study is what the shipped experiment gives."""
    published = msgspec.convert(yaml.safe_load(TABLE.read_text()), Published)
    known = rates_of(tmp_path, published.rounds)
    kept = read_document(ROOT / "results/validation/published")
    checked = 0
    for point in kept.points:
        scheme, _, number = point.axes["source"].partition(" round ")
        if scheme not in known:
            continue
        rates = [by_round[int(number)] for by_round in known[scheme]]
        [figure] = point.figures
        assert figure.candidate == sum(rates) / len(rates)
        assert figure.reason == f"{min(rates):.2f} to {max(rates):.2f} over {len(rates)} random orders"
        checked += 1
    assert checked == 3
