"""Bad experiments: one line with file, place and cure, exit code 2, nothing started, nothing written over."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from harness.errors import ConfigError
from harness.experiment.read import load_experiment
from harness.experiment.units import format_compared

GOOD = """\
name: good
seed: 1
model: tiny-llama
workload:
  kind: prefix
  prompt_tokens: 4097
  hit_rate: 1.0
measure:
  tiers: [recompute, gpu, cpu, disk]
  samples: 3
cache:
  block_tokens: 32
  chunk_tokens: 256
  gpu: 1GiB
  cpu: 1GiB
  disk: {capacity: 4GiB}
sweep:
  workload.hit_rate: [0.0, 0.5, 1.0]
sizes:
  paper: {workload.prompt_tokens: 8193}
"""
FREE = GOOD.replace("  tiers: [recompute, gpu, cpu, disk]\n  samples: 3\n", "  request_timeout: 60s\n").replace(
    "  kind: prefix\n  prompt_tokens: 4097\n  hit_rate: 1.0\n",
    "  kind: synthetic\n  requests: 10\n  prompt_tokens: 4097\n  hit_rate: 0.5\n  concurrency: 2\n",
)


def paced(more: str) -> str:
    """An accelerator, and what it does not go with."""
    return f"seed: 1\nengines: {{vllm: {{accelerator: rtx-a5000-nfs, {more}}}}}"


# (name, text to replace, replacement, place that the message has to name, words of the cure or the value)
REPLACEMENTS = [
    ("accelerator and GPU", "seed: 1", paced("device: gpu"), "engines.vllm", "remove one of them"),
    ("accelerator and weights", "seed: 1", paced("model_path: /"), "engines.vllm", "model gives the shape"),
    ("accelerator in process", "seed: 1", paced("connector: in_process"), "engines.vllm", "use mp"),
    ("paced link by pickle", "seed: 1", paced("transport: pickle"), "engines.vllm", "needs transport: shm"),
    ("accelerator and attach", "seed: 1", paced("attach: {url: 'http://h:1'}"), "engines.vllm", "or remove attach"),
    ("no client", "seed: 1", "seed: 1\nengines: {vllm: {clients: 0}}", "engines.vllm.clients", "0 is refused"),
    ("too many clients", "seed: 1", "seed: 1\nengines: {sglang: {clients: 65}}", "engines.sglang.clients",
     "65 is refused"),
    ("half a client", "seed: 1", "seed: 1\nengines: {openai: {url: 'http://h', model: m, clients: 1.5}}",
     "engines.openai.clients", "1.5 is refused"),
    ("clients of the simulator", "seed: 1", "seed: 1\nengines: {sim: {clients: 2}}", "engines.sim.clients",
     "unknown key here: another section or kind has it; move it there, or remove it"),
    ("unknown key", "samples: 3", "smaples: 3", "measure.smaples", "did you mean 'samples'"),
    ("unknown section", "seed: 1", "sede: 1", "sede", "did you mean 'seed'"),
    ("unknown key without a neighbour", "seed: 1", "qqqqqq: 1", "qqqqqq", "remove it"),
    ("no name", "name: good\n", "", "name", "is missing; add it"),
    ("name with a slash", "name: good", "name: ../evil", "name", "refused; use only a-z, 0-9, _ and -"),
    ("name in another script", "name: good", "name: 日本語", "name", "use only a-z, 0-9, _ and -, at most 64"),
    ("size with a mistyped unit", "cpu: 1GiB", "cpu: 1Gib", "cache.cpu", "did you mean '1GiB'"),
    ("name upper case", "name: good", "name: Good", "name", "refused"),
    ("name is a number", "name: good", "name: 12", "name", "refused"),
    ("seed negative", "seed: 1", "seed: -1", "seed", "greater than or equal to 0"),
    ("seed text", "seed: 1", "seed: one", "seed", "'one'"),
    ("seed a fraction", "seed: 1", "seed: 1.5", "seed", "1.5"),
    ("seed a boolean", "seed: 1", "seed: true", "seed", "True"),
    ("model empty", "model: tiny-llama", "model: ''", "model", "refused"),
    ("no kind", "  kind: prefix\n", "", "workload", "needs kind"),
    ("kind unknown", "kind: prefix", "kind: prefxi", "workload", "one of prefix, synthetic"),
    ("prompt negative", "prompt_tokens: 4097", "prompt_tokens: -4", "workload.prompt_tokens", "-4"),
    ("prompt zero", "prompt_tokens: 4097", "prompt_tokens: 0", "workload.prompt_tokens", "0 is refused"),
    ("prompt a size", "prompt_tokens: 4097", "prompt_tokens: 4KiB", "workload.prompt_tokens", "'4KiB'"),
    ("prompt huge", "prompt_tokens: 4097", "prompt_tokens: 99999999999", "workload.prompt_tokens", "less than"),
    ("prompt missing", "  prompt_tokens: 4097\n", "", "workload.prompt_tokens", "is missing"),
    ("prompt null", "prompt_tokens: 4097", "prompt_tokens: null", "workload.prompt_tokens", "None"),
    ("prompt a list", "prompt_tokens: 4097", "prompt_tokens: [1]", "workload.prompt_tokens", "list"),
    ("prompt below a chunk", "prompt_tokens: 4097", "prompt_tokens: 200", "workload", "at least 257"),
    ("hit rate above 1", "hit_rate: 1.0", "hit_rate: 1.5", "workload.hit_rate", "less than or equal to 1"),
    ("hit rate negative", "hit_rate: 1.0", "hit_rate: -0.1", "workload.hit_rate", "greater than or equal to 0"),
    ("hit rate percent", "hit_rate: 1.0", "hit_rate: 50%", "workload.hit_rate", "'50%'"),
    ("hit rate nan", "hit_rate: 1.0", "hit_rate: .nan", "workload.hit_rate", "refused"),
    ("hit rate between chunks", "hit_rate: 1.0", "hit_rate: 0.9", "hit_rate", "0.875 or 0.9375"),
    ("concurrency zero", "hit_rate: 1.0", "hit_rate: 1.0\n  concurrency: 0", "workload.concurrency", "0 is refused"),
    ("key of another kind", "hit_rate: 1.0", "hit_rate: 1.0\n  zipf: 1.0", "workload.zipf", "unknown key"),
    ("tier unknown", "[recompute, gpu, cpu, disk]", "[recompute, tape]", "measure.tiers.1", "'tape'"),
    ("tier twice", "[recompute, gpu, cpu, disk]", "[gpu, gpu]", "measure", "twice"),
    ("no tiers", "[recompute, gpu, cpu, disk]", "[]", "", "measure.tiers is empty"),
    ("tiers a word", "[recompute, gpu, cpu, disk]", "gpu", "measure.tiers", "refused"),
    ("samples zero", "samples: 3", "samples: 0", "measure.samples", "0 is refused"),
    ("samples and until", "samples: 3", "samples: 3\n  until: {half_width: 0.05}", "measure", "exclude each other"),
    ("neither samples nor until", "  samples: 3\n", "", "", "add one, e.g. samples"),
    ("until too wide", "samples: 3", "until: {half_width: 5}", "measure.until.half_width", "5"),
    ("until metric unknown", "samples: 3", "until: {metric: itl}", "measure.until.metric", "'itl'"),
    ("until max below min", "samples: 3", "until: {min_samples: 9, max_samples: 3}", "measure.until", "raise it"),
    ("budget without a unit", "samples: 3", "samples: 3\n  budget: 60", "measure.budget", "write it like 30s"),
    ("budget with a size", "samples: 3", "samples: 3\n  budget: 8GiB", "measure.budget", "write it like 30s"),
    ("budget negative", "samples: 3", "samples: 3\n  budget: -3s", "measure.budget", "is negative; write a time above"),
    ("timeout zero", "samples: 3", "samples: 3\n  request_timeout: 0s", "measure", "longer than 0 s"),
    ("gpu without a unit", "gpu: 1GiB", "gpu: 1073741824", "cache.gpu", "write it like 8GiB"),
    ("gpu unknown unit", "gpu: 1GiB", "gpu: 1XiB", "cache.gpu", "write it like 8GiB"),
    ("gpu negative", "gpu: 1GiB", "gpu: -1GiB", "cache.gpu", "is negative"),
    ("gpu a time", "gpu: 1GiB", "gpu: 30s", "cache.gpu", "write it like 8GiB"),
    ("gpu missing", "  gpu: 1GiB\n", "", "cache.gpu", "is missing"),
    ("capacity zero", "gpu: 1GiB", "gpu: 0GiB", "cache", "capacity 0"),
    ("disk capacity zero", "{capacity: 4GiB}", "{capacity: 0B}", "cache", "capacity 0"),
    ("chunk not of whole blocks", "block_tokens: 32", "block_tokens: 48", "cache", "multiple"),
    ("block zero", "block_tokens: 32", "block_tokens: 0", "cache.block_tokens", "0 is refused"),
    ("disk without capacity", "{capacity: 4GiB}", "{}", "cache.disk.capacity", "is missing"),
    ("disk a word", "{capacity: 4GiB}", "fast", "cache.disk", "'fast'"),
    ("disk adapter unknown", "{capacity: 4GiB}", "{capacity: 4GiB, adapter: ramfs}", "cache.disk.adapter", "'ramfs'"),
    ("cpu tier without cpu", "  cpu: 1GiB\n  disk: {capacity: 4GiB}\n", "", "", "cache.cpu is not set"),
    ("disk tier without disk", "  disk: {capacity: 4GiB}\n", "", "", "cache.disk is not set"),
    ("warm disk with odirect", "{capacity: 4GiB}", "{capacity: 4GiB, odirect: true}", "", "use disk_cold"),
    ("cache missing", GOOD[GOOD.index("cache:") : GOOD.index("sweep:")], "", "cache", "is missing"),
    ("cache a list", GOOD[GOOD.index("cache:") : GOOD.index("sweep:")], "cache: [1]\n", "cache", "list"),
    ("key given twice", "seed: 1", "seed: 1\nseed: 2", "seed", "given twice"),
    ("nested key given twice", "gpu: 1GiB", "gpu: 1GiB\n  gpu: 2GiB", "cache.gpu", "given twice"),
    ("tab", "  kind: prefix", "\tkind: prefix", "", "not valid YAML"),
    ("bracket left open", "[recompute, gpu, cpu, disk]", "[recompute", "", "not valid YAML"),
    ("sweep a list", "sweep:\n  workload.hit_rate: [0.0, 0.5, 1.0]", "sweep: [1]", "sweep", "list of values"),
    ("sweep values no list", "[0.0, 0.5, 1.0]", "0.5", "sweep.workload.hit_rate", "must be a list"),
    ("sweep empty", "[0.0, 0.5, 1.0]", "[]", "sweep.workload.hit_rate", "at least one value"),
    ("sweep value twice", "[0.0, 0.5, 1.0]", "[0.5, 0.5]", "sweep.workload.hit_rate", "twice"),
    ("sweep unknown key", "workload.hit_rate:", "workload.hit_rat:", "workload.hit_rat", "did you mean 'hit_rate'"),
    ("sweep bad value", "[0.0, 0.5, 1.0]", "[0.0, 7]", "workload.hit_rate", "workload.hit_rate=7"),
    ("sweep through a value", "workload.hit_rate:", "seed.x:", "seed.x", "shorten the key"),
    ("sizes a list", "sizes:\n  paper: {workload.prompt_tokens: 8193}", "sizes: [1]", "sizes", "must map"),
    ("core text", "seed: 1", "seed: 1\nengines: {vllm: {cores: {engine: [a]}}}", "engines.vllm.cores.engine.0", "'a'"),
    ("key in the config", "seed: 1", "seed: 1\nengines: {openai: {url: http://x, model: m, api_key_env: sk-1}}",
     "engines.openai.api_key_env", "must name an environment variable"),
    ("url without scheme", "seed: 1", "seed: 1\nengines: {openai: {url: localhost, model: m}}",
     "engines.openai.url", "'localhost'"),
    ("secret in env", "seed: 1", "seed: 1\nengines: {vllm: {env: {HF_TOKEN: abc}}}", "engines.vllm", "export it"),
    ("secret in a flag", "seed: 1", "seed: 1\nengines: {vllm: {args: [--api-key=abc]}}", "engines.vllm", "export it"),
    ("password in a url", "seed: 1", "seed: 1\nengines: {vllm: {attach: {url: 'http://u:p@h'}}}",
     "attach.url", "leave them out"),
    ("device without a limit", "seed: 1", "seed: 1\nstorage: {device: {file_system: xfs}}",
     "storage.device", "give it a bandwidth"),
    ("device without a rate's unit", "seed: 1", "seed: 1\nstorage: {device: {bandwidth: 400MiB}}",
     "storage.device.bandwidth", "did you mean '400MiB/s'"),
    ("device at no speed", "seed: 1", "seed: 1\nstorage: {device: {bandwidth: 0MiB/s}}", "storage.device", "leave it"),
    ("device too small", "seed: 1", "seed: 1\nstorage: {device: {iops: 9, size: 1MiB}}", "storage.device", "320MiB"),
    ("device below its tier", "seed: 1", "seed: 1\nstorage: {device: {iops: 9, size: 1GiB}}", "", "does not fit"),
    ("device and a path", "disk: {capacity: 4GiB}", "disk: {capacity: 4GiB, path: /mnt}\nstorage: {device: {iops: 9}}",
     "", "keep one"),
    ("env not text", "seed: 1", "seed: 1\nengines: {vllm: {env: {A: 1}}}", "engines.vllm.env.A", "1 is refused"),
]  # fmt: skip
FREE_REPLACEMENTS = [
    ("tiers on a free load", "request_timeout: 60s", "tiers: [gpu]", "", "measure.tiers needs workload.kind prefix"),
    ("samples on a free load", "request_timeout: 60s", "samples: 3", "", "remove them"),
    ("closed without concurrency", "  concurrency: 2\n", "", "", "needs workload.concurrency"),
    ("closed with a rate", "concurrency: 2", "concurrency: 2\n  rate_per_s: 3", "", "remove it"),
    ("poisson without a rate", "concurrency: 2", "arrivals: poisson", "", "needs workload.rate_per_s"),
    ("arrivals unknown", "concurrency: 2", "arrivals: bursty", "workload.arrivals", "'bursty'"),
    ("must reach an absent tier", "request_timeout: 60s\ncache:", "must_reach: disk\ncache:", "cache.disk", ""),
    ("no requests", "requests: 10", "requests: 0", "workload.requests", "0 is refused"),
    ("zipf negative", "concurrency: 2", "concurrency: 2\n  zipf: -1", "workload.zipf", "-1"),
]


def test_an_axis_can_be_set(tmp_path: Path) -> None:
    path = tmp_path / "good.yaml"
    path.write_text(GOOD)
    plan = load_experiment(path, overrides=["sweep.seed=[4, 5]", "sweep.workload.hit_rate=[0.5]"])
    assert [cell.overrides for cell in plan.cells()] == [
        {"workload.hit_rate": 0.5, "seed": 4},
        {"workload.hit_rate": 0.5, "seed": 5},
    ]
    assert not load_experiment(path, overrides=["sweep.seed=[4, 5]", "seed=3", "workload.hit_rate=0.5"]).axes
    with pytest.raises(ConfigError, match=r"sweep\.seed: must be a list"):
        load_experiment(path, overrides=["sweep.seed=4"])


def test_a_typo_comes_before_what_it_leaves_missing(tmp_path: Path) -> None:
    path = tmp_path / "typo.yaml"
    path.write_text(GOOD.replace("prompt_tokens: 4097", "prompt_tokns: 4097"))
    assert re.search(
        r"workload\.prompt_tokns: unknown key; did you mean 'prompt_tokens'\? \(and 1 more\)$", refusal(path)
    )
    path.write_text(GOOD.replace("hit_rate: 1.0", "hit_rate: 1.0\n  rate_per_s: 2"))
    assert "workload.rate_per_s: unknown key here: another section or kind has it" in refusal(path)


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_experiment(path).cells()
    return str(caught.value)


def check(tmp_path: Path, good: str, old: str, new: str, place: str, cure: str) -> None:
    assert good.count(old) >= 1, f"{old!r} is not in the experiment"
    path = tmp_path / "experiment.yaml"
    path.write_text(good.replace(old, new, 1))
    text = refusal(path)
    assert "\n" not in text and str(path) in text, text
    assert place in text and cure in text, text


def test_the_experiments_that_are_spoiled_below_are_good(tmp_path: Path) -> None:
    for text in (GOOD, FREE):
        path = tmp_path / "experiment.yaml"
        path.write_text(text)
        if text is GOOD:
            assert len(load_experiment(path).cells()) == 3
        else:
            load_experiment(path)


@pytest.mark.parametrize(
    ("old", "new", "place", "cure"), [c[1:] for c in REPLACEMENTS], ids=[c[0] for c in REPLACEMENTS]
)
def test_refused(tmp_path: Path, old: str, new: str, place: str, cure: str) -> None:
    check(tmp_path, GOOD, old, new, place, cure)


@pytest.mark.parametrize(
    ("old", "new", "place", "cure"), [c[1:] for c in FREE_REPLACEMENTS], ids=[c[0] for c in FREE_REPLACEMENTS]
)
def test_refused_on_a_free_load(tmp_path: Path, old: str, new: str, place: str, cure: str) -> None:
    good = FREE if "must_reach" not in new else FREE.replace("  disk: {capacity: 4GiB}\n", "")
    check(tmp_path, good, old, new, place, cure)


@pytest.mark.parametrize(
    ("content", "cure"),
    [
        (b"", "holds no mapping"),
        (b"- a\n- b\n", "holds no mapping"),
        (b"just words", "holds no mapping"),
        (b"\xff\xfe\x00", "readable UTF-8"),
        (b"a: " + b"[" * 5000, "cannot be read|nested too deeply|not valid YAML"),
        (b"!!python/object/apply:os.system ['true']", "not valid YAML"),
    ],
)
def test_not_an_experiment_at_all(tmp_path: Path, content: bytes, cure: str) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_bytes(content)
    text = refusal(path)
    assert "\n" not in text and str(path) in text and re.search(cure, text), text


def test_missing_file_and_folder(tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path / "absent.yaml")
    assert "is a folder" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("override", "cure"),
    [
        ("workload.prompt_tokens", "not KEY=VALUE"),
        ("=3", "not KEY=VALUE"),
        ("workload.prompt_tokns=3", "did you mean 'prompt_tokens'"),
        ("seed=[", "not valid YAML"),
        ("sweep={}", "cannot be overridden"),
        ("cache.gpu=12", "write it like 8GiB"),
        ("seed.deeper=1", "shorten the key"),
    ],
)
def test_overrides_refused(tmp_path: Path, override: str, cure: str) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text(GOOD)
    with pytest.raises(ConfigError, match=re.escape(cure)):
        load_experiment(path, [override])


def test_a_size_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text(GOOD)
    with pytest.raises(ConfigError, match="its sizes: paper"):
        load_experiment(path, size="huge")


def harness(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "harness", *args]
    return subprocess.run(program, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("change", "args", "cure"),
    [
        ({"seed": -1}, (), "seed"),
        ({"model": "no-such-model"}, (), "no-such-model"),
        ({"engines": {"sim": {"hardware": "no-such-hardware"}}}, (), "no-such-hardware"),
        ({"engines": {"sim": {"tier_policy": "no-such-policy"}}}, (), "no-such-policy"),
        ({"cache": {"gpu": "1MiB", "cpu": "1GiB", "disk": {"capacity": "4GiB"}}}, (), "cache.gpu"),
        ({"cache": {"gpu": "1GiB", "cpu": "100MiB", "disk": {"capacity": "4GiB"}}}, (), "cache.cpu"),
        ({"cache": {"gpu": "1GiB", "cpu": "1GiB", "disk": {"capacity": "9MiB"}}}, (), "cache.disk"),
        ({}, ("--engine", "openai"), "engines.openai"),
        ({"workload": {"kind": "trace", "trace": "no-such-trace"}, "measure": {}}, (), "no-such-trace"),
        ({"workload": {"kind": "trace", "trace": "../../etc/passwd"}, "measure": {}}, (), "passwd"),
        ({}, ("--set", "seed=x"), "seed"),
        ({}, ("--size", "huge"), "huge"),
    ],
)
def test_the_command_refuses_and_leaves_nothing(
    tmp_path: Path, change: dict[str, object], args: tuple[str, ...], cure: str
) -> None:
    experiment = {**yaml.safe_load(GOOD), **change}
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(experiment))
    engine = () if "--engine" in args else ("--engine", "sim")
    done = harness("run", "experiment.yaml", *engine, *args, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert cure in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["experiment.yaml"]


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "experiment.yaml").write_text(GOOD)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine").write_text("precious")
    done = harness("run", "experiment.yaml", "--engine", "fake", "--out", "taken", cwd=tmp_path)
    assert done.returncode == 2 and "exists already" in done.stderr
    assert (tmp_path / "taken" / "mine").read_text() == "precious"
    assert sorted(p.name for p in (tmp_path / "taken").iterdir()) == ["mine"]


def test_sizes_that_a_message_compares_read_as_unequal() -> None:
    assert format_compared(14 * 2**30 + 4096, 14 * 2**30) == ["14.000004GiB", "14GiB"]
    assert format_compared(2**30, 2**30) == ["1GiB", "1GiB"]
