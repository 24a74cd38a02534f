"""`harness init`: the file that it writes is explained key by key, and runs; without a terminal it never asks."""

import contextlib
import fcntl
import http.server
import json
import os
import pty
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.engines.proposal import NamedServers, Proposal, Wanted
from harness.engines.sglang.proposal import propose_sglang
from harness.engines.sim.settings import SimSettings
from harness.engines.vllm.found import disk_path_of, find_cache, find_server
from harness.engines.vllm.proposal import propose_vllm
from harness.errors import ConfigError
from harness.experiment.cache import Cache
from harness.experiment.read import load_experiment
from harness.processes.child import listener
from simulator.errors import ModelError
from simulator.models import load_model
from tests.unit.commands.test_commands import command

VLLM_METRICS = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="1000"} 1.0\n'
MODELS = {"data": [{"id": "mine", "root": "/nowhere/mine", "max_model_len": 3000}]}
STATUS = {"chunk_size": 128, "storage_manager": {"l1_manager": {"memory_total_bytes": 2**31}}}


@contextlib.contextmanager
def server(pages: dict[str, str]) -> Iterator[str]:
    """A server on loopback with these pages."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path in pages else 404)
            self.end_headers()
            self.wfile.write(pages.get(self.path, "").encode())

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


@pytest.fixture
def servers() -> Iterator[tuple[str, str]]:
    """The URLs of a stand-in for vLLM and of one for LMCache."""
    with (
        server({"/metrics": VLLM_METRICS, "/v1/models": json.dumps(MODELS)}) as vllm,
        server({"/status": json.dumps(STATUS)}) as lmcache,
    ):
        yield vllm, lmcache


SERVER_INFO = {
    "version": "0.5.23", "model_path": "/nowhere/mine", "page_size": 64, "max_total_num_tokens": 4096,
    "max_req_input_len": 3000, "enable_hierarchical_cache": True, "hicache_write_policy": "write_through",
    "hicache_storage_backend": "file", "hicache_storage_prefetch_policy": "timeout",
}  # fmt: skip


def of_sglang(tmp_path: Path, disk_path: str | None = None, model: str | None = "tiny-llama", **told: Any) -> Proposal:
    """What is proposed for an SGLang that says this of itself."""
    pages = {"/server_info": json.dumps(SERVER_INFO | told), "/metrics": "sglang:hicache_host_total_tokens 16384.0\n"}
    with server(pages) as url:
        servers = NamedServers(url, None, None, disk_path)
        return propose_sglang(Wanted(model, tmp_path / "mine-model.yaml", attached=servers))


def proposed(tmp_path: Path, **answers: Any) -> Proposal:
    base = Wanted("tiny-llama", tmp_path / "mine-model.yaml")
    return propose_vllm(base._replace(**answers))


def test_the_written_file_is_explained_and_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command("init", "mine.yaml", "--engine", "sim") == 0
    said = capsys.readouterr().out
    assert "harness run mine.yaml --engine sim" in said and "harness worth mine.yaml --engine sim" in said
    text = Path("mine.yaml").read_text()
    lines = text.splitlines()
    explained = [n for n, line in enumerate(lines) if "  # " in line or lines[n - 1].lstrip().startswith("# ")]
    assert len(explained) == len(lines) - 1, "every key has a comment"
    assert max(map(len, lines)) <= 120
    quick = ("--set", "measure.samples=1", "--out", "out")
    assert command("run", "mine.yaml", "--engine", "sim", *quick) == 0
    assert "rows simulated, not measured, each served by the tier it claims" in capsys.readouterr().out


def test_nothing_is_overwritten_and_nothing_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("precious")
    assert command("init", "mine.yaml") == 2
    assert "--force" in capsys.readouterr().err and Path("mine.yaml").read_text() == "precious"
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asked, and there is no terminal"))
    assert command("init", "mine.yaml", "--force") == 0
    assert load_experiment(Path("mine.yaml")).experiment.name == "mine"


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (("mine.txt",), "name it mine.yaml"),
        (("no/such/mine.yaml",), "there is no folder"),
        (("mine.yaml", "--engine", "sim", "--attach", "http://127.0.0.1:1"), "--attach is for vllm"),
        (("mine.yaml", "--attach", "http://127.0.0.1:1"), "no vLLM answers there"),
        (("mine.yaml", "--engine", "vllm", "--disk", "nosuch"), "--disk nosuch: is no folder"),
        (("mine.yaml", "--engine", "sim", "--hardware", "nosuch"), "nosuch"),
        (("mine.yaml", "--model", "nosuch"), "nosuch"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(
    tokens: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert command("init", *tokens) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1 and not list(tmp_path.iterdir())


def on_a_terminal(folder: Path, *keys: str) -> tuple[int, str]:
    """`harness init mine.yaml` on a terminal of its own: its exit code and screen. Each text goes in at a question."""
    master, terminal = pty.openpty()
    running = subprocess.Popen(
        [sys.executable, "-m", "harness", "init", "mine.yaml"], cwd=folder, stdin=terminal, stdout=terminal,
        stderr=terminal, start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        env=os.environ | {"TERM": "dumb", "COLUMNS": "200", "NO_COLOR": "1"},
    )  # fmt: skip
    os.close(terminal)
    screen, answered, waiting = "", 0, list(keys)
    # Reading from a terminal whose last process has ended is an I/O error.
    with contextlib.suppress(OSError):
        while shown := os.read(master, 4096):
            screen += shown.decode()
            if waiting and screen[answered:].rstrip().endswith("):"):
                os.write(master, waiting.pop(0).encode())
                answered = len(screen)
    os.close(master)
    assert not waiting, screen
    return running.wait(timeout=30), screen.replace("\r\n", "\n")


def test_answers_on_a_terminal_are_what_is_written(tmp_path: Path) -> None:
    code, screen = on_a_terminal(tmp_path, "sim\n", "rtx-4000ada-ssd\n", "llama-3.2-3b\n")
    assert code == 0, screen
    assert "attach: a vLLM that runs already" in screen and "wrote mine.yaml: sim, model llama-3.2-3b" in screen
    experiment = load_experiment(tmp_path / "mine.yaml").experiment
    assert experiment.model == "llama-3.2-3b"
    assert experiment.engines.of(SimSettings).hardware == "rtx-4000ada-ssd"


def test_a_wrong_answer_is_asked_for_again(tmp_path: Path) -> None:
    code, screen = on_a_terminal(tmp_path, "nosuch\n", "sim\n", "no-preset\n", "cpu-2core\n", "no-model\n", "\n")
    assert code == 0 and screen.count("What serves the load") == 2, screen
    assert screen.count("Preset of the machine") == 2 and "no-preset" in screen
    assert screen.count("Model (`harness list models`") == 2 and "Traceback" not in screen
    assert load_experiment(tmp_path / "mine.yaml").experiment.engines.of(SimSettings).hardware == "cpu-2core"


def test_a_wrong_folder_and_a_server_that_does_not_answer_are_asked_for_again(tmp_path: Path) -> None:
    code, screen = on_a_terminal(tmp_path, "vllm\n", "\n", "nosuch\n", ".\n")
    assert code == 0 and screen.count("Folder for the disk tier") == 2 and "nosuch: is no folder" in screen
    (tmp_path / "mine.yaml").unlink()
    code, screen = on_a_terminal(tmp_path, "attach\n", "http://127.0.0.1:1\n", "\x03")
    assert code == 130 and screen.count("Its URL") == 2 and "no vLLM answers there" in screen


@pytest.mark.parametrize(("key", "code", "says"), [("\x03", 130, "interrupted"), ("\x04", 2, "no answer came")])
def test_an_answer_that_is_broken_off_ends_in_one_line(key: str, code: int, says: str, tmp_path: Path) -> None:
    ended, screen = on_a_terminal(tmp_path, "sim\n", key)
    last = screen.splitlines()[-1]
    assert ended == code and last.startswith("harness: ") and says in last
    assert "Traceback" not in screen and not list(tmp_path.iterdir())


@pytest.mark.parametrize("preset", ["cpu-2core", "rtx-4000ada-ssd", "rtx-a5000-nfs"])
def test_every_preset_gets_its_own_model_and_runs(
    preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command("init", "mine.yaml", "--engine", "sim", "--hardware", preset) == 0
    assert command("run", "mine.yaml", "--engine", "sim", "--set", "measure.samples=1", "--out", "out") == 0
    assert "cannot run here yet" not in capsys.readouterr().err


def test_a_started_vllm_has_its_disk_where_it_was_asked(tmp_path: Path) -> None:
    offer = proposed(tmp_path, model="llama-3.1-8b", disk=tmp_path, device="gpu")
    cache = Cache.model_validate(offer.cache)
    assert cache.disk is not None and cache.disk.path == str(tmp_path)
    assert offer.section["device"] == "gpu" and cache.block_tokens == 16
    assert any("random weights" in note for note in offer.notes)
    per_token = load_model("llama-3.1-8b").kv_bytes_per_token
    assert cache.gpu >= 4 * 4097 * per_token, "several prompts fit"


def test_a_folder_of_weights_gives_the_models_shape(tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 8192}
    weights = tmp_path / "llama"
    weights.mkdir()
    (weights / "config.json").write_text(json.dumps(shape | {"torch_dtype": "float16"}))
    offer = proposed(tmp_path, model=str(weights), device="cpu")
    assert offer.section["model_path"] == str(weights) and not offer.notes
    spec = load_model(offer.model)
    assert (spec.name, spec.kv_bytes_per_token, spec.head_dim) == ("llama", 2 * 2 * 2 * 16 * 2, 16)
    (weights / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="decoder-only"):
        proposed(tmp_path, model=str(weights))


def test_running_servers_say_their_sizes(tmp_path: Path, servers: tuple[str, str]) -> None:
    vllm, lmcache = servers
    attached = NamedServers(vllm, lmcache, 4711, "/mnt/nvme/kv")
    offer = proposed(tmp_path, attached=attached)
    cache = Cache.model_validate(offer.cache)
    assert (cache.block_tokens, cache.chunk_tokens, cache.cpu) == (16, 128, 2**31)
    assert cache.gpu == 1000 * 16 * load_model("tiny-llama").kv_bytes_per_token
    assert offer.section["attach"] == {
        "url": vllm, "lmcache_url": lmcache, "lmcache_pid": 4711, "disk_path": "/mnt/nvme/kv"
    }  # fmt: skip
    assert offer.prompt_tokens == 2945, "23 chunks and one token of the 3,000 that it takes"
    assert offer.tiers == ["recompute", "gpu", "cpu", "disk", "disk_cold"]
    assert any("deletes the chunk files in /mnt/nvme/kv" in note for note in offer.notes)


def test_what_is_not_known_of_running_servers_is_not_proven(tmp_path: Path, servers: tuple[str, str]) -> None:
    vllm, lmcache = servers
    alone = proposed(tmp_path, attached=NamedServers(vllm, None, None, None))
    assert alone.tiers == ["recompute", "gpu"] and "--lmcache-url" in alone.notes[0]
    assert Cache.model_validate(alone.cache).cpu is None
    no_disk = proposed(tmp_path, attached=NamedServers(vllm, lmcache, 1, None))
    assert no_disk.tiers == ["recompute", "gpu", "cpu"]
    assert any("--disk-path" in note for note in no_disk.notes)
    with pytest.raises(ConfigError, match="--model is missing: the server loads /nowhere/mine"):
        proposed(tmp_path, model=None, attached=NamedServers(vllm, lmcache, 1, None))


def test_an_sglang_that_the_harness_starts_is_paced_without_a_gpu(tmp_path: Path) -> None:
    offer = propose_sglang(Wanted("tiny-llama", tmp_path / "mine-model.yaml", disk=tmp_path, device="cpu"))
    cache = Cache.model_validate(offer.cache)
    assert offer.section["accelerator"] == "rtx-a5000-nfs" and "times are paced" in offer.notes[0]
    assert cache.block_tokens == cache.chunk_tokens == 64 and cache.cpu == 3 * cache.gpu
    assert cache.disk is not None and cache.disk.path == str(tmp_path)
    assert offer.tiers == ["recompute", "gpu", "cpu", "disk", "disk_cold"]
    on_gpu = propose_sglang(Wanted("tiny-llama", tmp_path / "mine-model.yaml", device="gpu"))
    assert "accelerator" not in on_gpu.section and "random weights" in on_gpu.notes[0]


def test_a_running_sglang_says_its_sizes_and_its_policies(tmp_path: Path) -> None:
    offer = of_sglang(tmp_path, disk_path="/mnt/nvme/pages")
    cache, per_token = Cache.model_validate(offer.cache), load_model("tiny-llama").kv_bytes_per_token
    assert (cache.block_tokens, cache.gpu, cache.cpu) == (64, 4096 * per_token, 16384 * per_token)
    attach = offer.section["attach"]
    assert attach["disk_path"] == "/mnt/nvme/pages" and attach["pid"] == os.getpid()
    assert offer.section["hicache"] == {"write": "write_through", "prefetch": "timeout"}
    assert offer.tiers == ["recompute", "gpu", "cpu", "disk", "disk_cold"]
    assert offer.prompt_tokens == 32 * 64 + 1, "half of what the GPU holds"
    assert any("deletes the page files in /mnt/nvme/pages" in note for note in offer.notes)


def test_what_is_not_known_of_a_running_sglang_is_not_proven(tmp_path: Path) -> None:
    alone = of_sglang(tmp_path, enable_hierarchical_cache=False, hicache_storage_backend=None)
    assert alone.tiers == ["recompute", "gpu"] and "no HiCache" in alone.notes[0]
    unknown = of_sglang(tmp_path)
    assert unknown.tiers == ["gpu", "cpu"] and any("--disk-path" in note for note in unknown.notes)
    pool = of_sglang(tmp_path, hicache_storage_backend="mooncake")
    assert pool.tiers == ["gpu", "cpu"] and "mooncake can be neither emptied nor proven" in pool.notes[0]
    with pytest.raises(ConfigError, match="--model is missing: the server loads /nowhere/mine"):
        of_sglang(tmp_path, model=None)
    refused = {"are a vLLM's": "http://h:1", "no SGLang answers there": None}
    for words, lmcache in refused.items():
        servers = NamedServers("http://127.0.0.1:1", lmcache, None, None)
        with pytest.raises(ConfigError, match=words):
            propose_sglang(Wanted("tiny-llama", tmp_path / "mine-model.yaml", attached=servers))


def test_the_process_behind_an_address_is_found(servers: tuple[str, str]) -> None:
    import os

    assert listener(servers[1]) == os.getpid() and find_cache(servers[1]).pid == os.getpid()
    assert listener("http://10.9.8.7:80") is None, "another machine's processes cannot be seen"
    assert find_server(servers[0]).max_tokens == 3000
    with pytest.raises(ConfigError, match="no LMCache server answers there"):
        find_cache(servers[0])


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        (["server", "--l2-adapter", '{"type": "fs", "base_path": "/mnt/kv"}'], "/mnt/kv"),
        (["server", '--l2-adapter={"type": "fs", "base_path": "kv"}'], "kv"),
        (["server", "--l2-adapter", "nonsense"], None),
        (["server", "--l2-adapter"], None),
        (["server"], None),
    ],
)
def test_the_folder_is_read_from_the_servers_command(arguments: list[str], path: str | None) -> None:
    assert disk_path_of(arguments) == path
