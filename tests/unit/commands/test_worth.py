"""`harness worth` on the simulator: an ordinary run folder, worth.json, and an answer that can be given again."""

import json
from pathlib import Path

import msgspec
import pytest

from harness.errors import ConfigError, PreflightError
from harness.experiment.read import load_experiment
from harness.experiment.worth import worth_cells
from harness.measure.run import RunRequest, run
from harness.results.manifest import encode_manifest, read_manifest
from tests.unit.commands.test_commands import command
from tests.unit.measure.test_run_loop import Quiet

FEW = ("--set", "measure.samples=3")


def test_it_measures_off_and_on_and_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert command("worth", "quickstart", "--engine", "sim", "--tokens", "500", "--tokens", "2048", "--out", str(out), *FEW) == 0  # fmt: skip  # noqa: E501
    said = capsys.readouterr().out
    assert "Simulated with cpu-2core" in said and "worth it from 512 tokens on" in said and "Cost in writes" in said
    manifest = read_manifest(out)
    assert [cell.overrides for cell in manifest.cells] == [
        {"cache.cpu": cpu, "workload.prompt_tokens": length} for cpu in (None, "1GiB") for length in (513, 2049)
    ]
    kept = json.loads((out / "worth.json").read_text())
    assert kept["against"] == "no cache server" and len(kept["points"]) == 3 * 2
    assert {point["outcome"] for point in kept["points"]} == {"faster"}
    assert command("report", str(out)) == 0, "it is an ordinary run"
    capsys.readouterr()
    assert command("worth", str(out), "--json") == 0
    assert json.loads(capsys.readouterr().out) == kept, "the rows give the same answer again"


def test_too_few_samples_are_no_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = ("--tokens", "512", "--set", "measure.samples=2")
    out = tmp_path / "out"
    assert command("worth", "quickstart", "--engine", "sim", *tokens, "--out", str(out)) == 0
    said = capsys.readouterr().out
    assert "speedup (simulated, repeats exactly)" in said and "too few" not in said
    manifest = read_manifest(out)
    (out / "manifest.json").write_bytes(encode_manifest(msgspec.structs.replace(manifest, engine="fake")))
    assert command("worth", str(out)) == 1, "the same rows of an engine that does not repeat exactly"
    assert "too few to compare" in capsys.readouterr().out


def test_an_unfinished_run_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = load_experiment(Path("quickstart"), ["measure.samples=3", "engines.fake.fail_every=0"])
    cells, folder = worth_cells(plan, [512], "fake"), tmp_path / "out"

    class Stops(Quiet):
        def state(self, text: str) -> None:
            if "1GiB" in text:
                raise RuntimeError("stopped on purpose")

    request = RunRequest(name="worth-x", cells=cells, engine="fake", experiment=plan.origin(), folder=folder)
    with pytest.raises(RuntimeError, match="on purpose"):
        run(request, Stops())
    assert command("worth", str(folder)) == 1
    assert "not complete: harness worth --resume" in capsys.readouterr().out
    assert command("worth", "--resume", str(folder)) in (0, 1)
    assert read_manifest(folder).status == "complete" and len(json.loads((folder / "worth.json").read_text())["points"]) == 3  # fmt: skip  # noqa: E501
    assert command("worth", "--resume", str(folder)) == 2
    assert f"harness worth {folder} answers again" in capsys.readouterr().err


def test_lengths_come_from_the_axis_or_the_prompt() -> None:
    def lengths(name: str, *tokens: int) -> list[int]:
        found = worth_cells(load_experiment(Path(name)), tokens, "sim")
        return [cell.experiment.workload.model_dump()["prompt_tokens"] for cell in found[: len(found) // 2]]

    assert lengths("quickstart") == [513, 1025, 2049, 4097]
    assert lengths("quickstart", 300, 512, 1) == [257, 513]
    assert lengths("thesis_exp1_prompt_length") == [513, 1025, 2049, 4097]


def test_an_attached_server_keeps_its_cache_server() -> None:
    attach = "engines.vllm.attach={url: 'http://127.0.0.1:1', lmcache_url: 'http://127.0.0.1:2'}"
    cells = worth_cells(load_experiment(Path("quickstart"), [attach]), [512, 1024], "vllm")
    assert len(cells) == 2 and all(cell.experiment.cache.cpu for cell in cells)
    assert all(cell.experiment.measure.tiers[0] == "recompute" for cell in cells)


@pytest.mark.parametrize(
    ("name", "overrides", "words"),
    [
        ("storage_only", [], "needs? kind prefix|use kind prefix"),
        ("quickstart", ["measure.tiers=[recompute, gpu]"], "no cache behind the engine"),
        ("quickstart", ["cache.cpu=null", "cache.disk=null", "measure.tiers=[gpu]"], "no cache behind the engine"),
    ],
)
def test_what_has_no_cache_to_judge_is_refused(name: str, overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        worth_cells(load_experiment(Path(name), overrides), [], "sim")


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (("worth",), "no experiment given"),
        (("worth", "quickstart"), "no engine given"),
        (("worth", "quickstart", "--engine", "sim", "--tokens", "0"), "--tokens 0"),
        (("worth", "quickstart", "--resume", "x"), "name no experiment"),
    ],
)
def test_a_mistake_is_one_line(tokens: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(*tokens) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


def test_attach_without_a_cache_server_names_what_is_missing_and_where_it_is(tmp_path: Path) -> None:
    plan = load_experiment(Path("quickstart"), ["engines.vllm.attach={url: 'http://127.0.0.1:1'}"])
    request = RunRequest(name="x", cells=plan.cells(), engine="vllm", experiment=plan.origin(), folder=tmp_path / "out")
    with pytest.raises(PreflightError) as refused:
        run(request, Quiet())
    for words in ("lmcache_url", "lmcache_pid", "disk_path", "--http-port", "pgrep", "base_path", "harness init"):
        assert words in str(refused.value)
    assert "\n" not in str(refused.value)
