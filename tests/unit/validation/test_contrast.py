"""`harness compare` of unlike set-ups under one load: what is matched, what differs, and by what factor."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.commands.report import report as report_command
from harness.commands.validate import compare as compare_command
from harness.errors import NotComparable
from harness.report.validation.contrast import contrast_findings, factor, ratio_lines
from harness.report.words import with_interval
from harness.results.manifest import encode_manifest, read_manifest
from harness.stats import Ratio
from harness.validation.contrast import Contrast, are_unlike, contrast
from harness.validation.points import read_side
from tests.support.noisy_runs import changed_rows, noisy_copy, sim_run, wrong_calibration

CACHE: dict[str, Any] = {"gpu": "1GiB", "cpu": "1GiB", "disk": {"capacity": "4GiB"}, "chunk_tokens": 128}
PREFIX: dict[str, Any] = {
    "name": "contrasted",
    "workload": {"kind": "prefix", "prompt_tokens": 3073, "hit_rate": 1.0},
    "measure": {"tiers": ["recompute", "gpu", "cpu"], "samples": 8},
    "cache": CACHE,
}
FREE: dict[str, Any] = {
    "name": "contrasted",
    "workload": {"kind": "synthetic", "requests": 150, "prompt_tokens": 513, "hit_rate": 0.5, "prefixes": 4,
                 "concurrency": 2, "output_tokens": 2},
    "cache": {"gpu": "64MiB", "cpu": "1GiB", "chunk_tokens": 64},
}  # fmt: skip


def with_cache(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return config | {"cache": config["cache"] | changes}


@pytest.fixture(scope="module")
def chunks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Runs with chunks of 128 and of 256 tokens."""
    made = tmp_path_factory.mktemp("chunks")
    a, b = (sim_run(made / f"{n}", with_cache(PREFIX, chunk_tokens=n)) for n in (128, 256))
    return a, b


@pytest.fixture(scope="module")
def loads(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same requests without and with a cache server."""
    made = tmp_path_factory.mktemp("loads")
    off, on = (sim_run(made / name, with_cache(FREE, cpu=cpu)) for name, cpu in (("off", None), ("on", "1GiB")))
    return off, on


def contrasted(a: Path, b: Path) -> Contrast:
    return contrast(read_side([a]), read_side([b]))


def measured(source: Path, target: Path, **noise: Any) -> Path:
    """The run with noise, as of an engine that is not simulated."""
    return noisy_copy(source, target, **({"seed": 1, "spread": 0.03} | noise))


def test_another_chunk_size_is_answered_by_a_ratio_with_its_interval(tmp_path: Path, chunks: tuple[Path, Path]) -> None:
    a = measured(chunks[0], tmp_path / "a")
    b = measured(chunks[1], tmp_path / "b", seed=2, slower=0.5)
    assert are_unlike(read_side([a]), read_side([b]))
    found = contrasted(a, b)
    assert [pair.tier for pair in found.pairs] == ["recompute", "gpu", "cpu"] and not found.left_out
    for pair in found.pairs:
        [figure] = pair.figures
        ratio = figure.ratio
        assert ratio.low is not None and ratio.high is not None and ratio.low < 2 < ratio.high
        assert ratio.samples == (8, 8) and ratio.high / ratio.low < 1.2 and ratio.distinct
    assert [(d.key, d.reference, d.candidate) for d in found.differences] == [("cache.chunk_tokens", 128, 256)]
    said = contrast_findings(found)
    assert "What differs: cache.chunk_tokens: 128 in A, 256 in B." in said
    assert "no verdict on whether they are equal" in said[0]
    assert any("how two starts differ is not in it" in line for line in said)


def test_the_command_answers_and_with_a_tolerance_it_refuses(
    tmp_path: Path, chunks: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = measured(chunks[0], tmp_path / "a"), measured(chunks[1], tmp_path / "b", seed=2, slower=0.5)
    assert compare_command(a, b, out=tmp_path / "out") == 0
    said = capsys.readouterr().out
    assert "faster" in said and "pass" not in said and "fail" not in said
    content = json.loads((tmp_path / "out" / "contrast.json").read_text())
    assert len(content["pairs"]) == 3 and "verdict" not in content
    page = (tmp_path / "out" / "report.html").read_text()
    assert "cache.chunk_tokens" in page and "MEASURED" in page and "What differs" in page
    assert compare_command(a, b, out=tmp_path / "strict", tolerance=0.05) == 2
    refusal = capsys.readouterr().err
    assert "different cache sizes: chunk_tokens" in refusal and "leave --tolerance out" in refusal
    assert refusal.count("\n") == 1 and not (tmp_path / "strict").exists()


def test_one_sample_a_side_is_no_answer_unless_it_is_simulated(tmp_path: Path) -> None:
    runs = []
    for name, chunk in (("a", 128), ("b", 256)):
        config = with_cache(PREFIX, chunk_tokens=chunk) | {"measure": {"tiers": ["recompute", "gpu"], "samples": 1}}
        runs.append(sim_run(tmp_path / name, config))
    simulated = contrasted(*runs)
    assert {pair.figures[0].ratio.basis for pair in simulated.pairs} == {"repeats exactly"} and simulated.resolved
    said = " ".join(contrast_findings(simulated))
    assert "a prediction for the presets' machines, not a measurement" in said
    assert "measured" not in said and "proven" not in said
    assert all("simulated, repeats exactly" in line[4] for line in ratio_lines(simulated))
    real = [measured(run, tmp_path / f"{n}") for n, run in enumerate(runs)]
    few = contrasted(*real)
    assert not few.resolved and all("too few samples to compare" in line[4] for line in ratio_lines(few))
    assert compare_command(*real, out=tmp_path / "few") == 3


def test_a_load_with_and_without_the_cache_server_is_paired_by_request(
    tmp_path: Path, loads: tuple[Path, Path]
) -> None:
    a, b = measured(loads[0], tmp_path / "off"), measured(loads[1], tmp_path / "on", seed=2, slower=0.5)
    [pair] = contrasted(a, b).pairs
    by_metric = {figure.metric: figure.ratio for figure in pair.figures}
    assert set(by_metric) == {"ttft_s", "e2e_s", "tpot_s"}
    ratio = by_metric["ttft_s"]
    assert ratio.basis == "requests" and ratio.samples == (150, 150) and ratio.low is not None and ratio.low > 1.5
    assert "cache.cpu" in {each.key for each in contrasted(a, b).differences}
    assert ratio_lines(contrasted(a, b))[0][4].endswith("faster, paired by request")
    assert pair.notes == ("TTFT of 149 requests is shorter in B, of 0 longer (by more than 1 %)",)


def test_the_same_set_up_before_and_after_is_still_asked_for_equality(
    tmp_path: Path, chunks: tuple[Path, Path]
) -> None:
    before, after = measured(chunks[0], tmp_path / "before"), measured(chunks[0], tmp_path / "after", seed=2)
    manifest = read_manifest(after)
    manifest.cells[0].resolved = msgspec.structs.replace(
        manifest.cells[0].resolved or pytest.fail(), versions={"v": "2"}
    )
    manifest.cells[0].config["seed"] = 99
    (after / "manifest.json").write_bytes(encode_manifest(manifest))
    assert not are_unlike(read_side([before]), read_side([after]))
    assert not are_unlike(read_side([before]), read_side([chunks[1]])), "a model is judged by `validate`'s rule"


def test_another_preset_is_another_set_up(tmp_path: Path, chunks: tuple[Path, Path]) -> None:
    slow = sim_run(tmp_path, PREFIX, wrong_calibration(tmp_path / "slow.yaml", 2.0, "token_s"))
    found = contrasted(chunks[0], slow)
    assert [each.key for each in found.differences] == ["engines.sim.hardware"]
    ratios = {pair.tier: pair.figures[0].ratio for pair in found.pairs}
    assert ratios["recompute"].ratio < 0.9 and ratios["recompute"].basis == "repeats exactly"
    assert factor(ratios["recompute"]).endswith("slower, simulated, repeats exactly")


def test_a_sweep_is_matched_by_what_both_sides_varied(tmp_path: Path) -> None:
    swept = PREFIX | {"measure": {"tiers": ["gpu"], "samples": 1}}
    axis = {"sweep": {"cache.cpu": ["1GiB", "2GiB"]}}
    a = sim_run(tmp_path / "a", swept | axis)
    b = sim_run(tmp_path / "b", with_cache(swept, chunk_tokens=256) | axis)
    found = contrasted(a, b)
    assert [pair.reference for pair in found.pairs] == [pair.candidate for pair in found.pairs]
    assert len(found.pairs) == 2 and {each.key for each in found.differences} == {"cache.chunk_tokens"}
    one = sim_run(tmp_path / "one", with_cache(swept, chunk_tokens=64))
    every = contrasted(one, b)
    assert len(every.pairs) == 2, "the one point stands against each"
    assert {each.key for pair in every.pairs for each in pair.differences} == {"cache.cpu"}
    other = sim_run(tmp_path / "c", swept | {"sweep": {"cache.gpu": ["1GiB", "2GiB"]}})
    with pytest.raises(NotComparable, match="no setting that both runs varied tells which belong together"):
        contrasted(a, other)


def test_what_has_no_partner_is_left_out_with_the_reason(tmp_path: Path, chunks: tuple[Path, Path]) -> None:
    config = with_cache(PREFIX, chunk_tokens=256) | {"measure": {"tiers": ["gpu", "disk"], "samples": 1}}
    found = contrasted(chunks[0], sim_run(tmp_path / "b", config))
    assert [pair.tier for pair in found.pairs] == ["gpu"]
    reasons = {(each.side, each.point): each.reason for each in found.left_out}
    assert "B did not measure the state cpu" in reasons["A", "base cpu"]
    assert "A did not measure the state disk" in reasons["B", "base disk"]
    said = contrast_findings(found)
    assert any(line.startswith("Not compared, A: base recompute") for line in said)
    off = with_cache(PREFIX, cpu=None, disk=None) | {"measure": {"tiers": ["gpu"], "samples": 1}}
    alone = contrasted(chunks[0], sim_run(tmp_path / "off", off))
    assert {each.point: each.reason for each in alone.left_out}["base cpu"] == "B has no tier cpu under this load"


def test_another_load_is_not_comparable_and_says_in_what(tmp_path: Path, chunks: tuple[Path, Path]) -> None:
    longer = with_cache(PREFIX, chunk_tokens=256)
    run = sim_run(tmp_path / "b", longer | {"workload": longer["workload"] | {"prompt_tokens": 4097}})
    with pytest.raises(NotComparable, match=r"its workload\.prompt_tokens is 4097, here it is 3073"):
        contrasted(chunks[0], run)
    assert compare_command(chunks[0], run, out=tmp_path / "out") == 2


def test_a_side_that_proves_nothing_has_no_ratio(tmp_path: Path, chunks: tuple[Path, Path]) -> None:
    reason = "computed_tokens moved by 3073, cpu needs 1"
    degraded = changed_rows(chunks[1], tmp_path / "degraded", verdict="contradicted", verdict_reason=reason)
    with pytest.raises(NotComparable, match="proves its tier"):
        contrasted(chunks[0], degraded)


def test_words_never_sell_an_interval_around_1_as_a_difference() -> None:
    unclear = Ratio(ratio=1.1, low=0.9, high=1.3, reference_s=1.1, typical_s=1.0, samples=(5, 5))
    assert factor(unclear).startswith("not shown to differ, 1.1")
    slower = Ratio(ratio=0.5, low=0.4, high=0.6, reference_s=1.0, typical_s=2.0, samples=(200, 200), basis="requests")
    assert factor(slower) == f"{with_interval(slower.turned)} slower, paired by request"


# ---- several runs on one page


def test_several_runs_are_held_against_the_first_on_one_page(
    tmp_path: Path, chunks: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    a = measured(chunks[0], tmp_path / "a")
    b = measured(chunks[1], tmp_path / "b", seed=2, slower=0.5)
    c = measured(chunks[0], tmp_path / "c", seed=3, slower=2.0)
    page = tmp_path / "all.html"
    assert report_command(a, b, c, chunks[1], page=page) == 0
    said = capsys.readouterr().out
    assert "b: What differs: cache.chunk_tokens: 128 in A, 256 in B." in said
    assert "c: What differs: nothing that is kept." in said
    assert "sim: not comparable: one side is measured, the other simulated" in said and str(page) in said
    text = page.read_text()
    assert "this run is" in text and "4 runs" not in text and "3 runs against a" in text
    for name, word in (("b", "faster"), ("c", "slower")):
        assert [word in line for line in said.splitlines() if line.startswith(f"{name}  ")] == [True] * 3
    assert not (a / "report.html").exists(), "their own reports stay as they are"


@pytest.mark.parametrize(
    ("name", "runs", "words"),
    [
        ("one.html", 1, "needs two folders at least"),
        ("page.txt", 2, "name it NAME.html"),
        ("no/page.html", 2, "there is no folder"),
        ("there.html", 2, "exists already"),
    ],
)
def test_a_page_that_cannot_be_made_is_refused(
    name: str, runs: int, words: str, tmp_path: Path, chunks: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there.html").write_text("kept")
    assert report_command(*chunks[:runs], page=tmp_path / name) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1 and (tmp_path / "there.html").read_text() == "kept"


def test_runs_of_which_none_can_be_held_against_the_first_are_refused(
    tmp_path: Path, chunks: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    a = measured(chunks[0], tmp_path / "a")
    assert report_command(a, chunks[1], page=tmp_path / "page.html") == 2
    assert "one side is measured, the other simulated" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()
