"""Children end with us, however we end."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.errors import EngineError
from harness.processes.child import Child, child_environment

# A command that starts a grandchild in a session of its own, as engines do with workers, and ignores SIGTERM.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
worker = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)
print('pids', os.getpid(), worker.pid, flush=True)
time.sleep(600)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def pids_in(log: Path) -> list[int]:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if log.exists() and "pids" in (text := log.read_text()):
            return [int(pid) for pid in text.split("pids")[1].split()[:2]]
        time.sleep(0.02)
    raise AssertionError(f"no pids in {log}")


def all_gone(pids: list[int], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(alive, pids))


def test_stop_ends_the_command_and_its_escaped_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.processes.child._GRACE_S", 0.5)
    child = Child("stubborn", [sys.executable, "-c", STUBBORN], log=tmp_path / "log", env=child_environment({}))
    child.start()
    pids = pids_in(tmp_path / "log")
    assert child.pid == pids[0] and all(map(alive, pids))
    asyncio.run(child.stop())
    assert not any(map(alive, pids)) and not child.running
    asyncio.run(child.stop())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_the_harness(tmp_path: Path, how: signal.Signals) -> None:
    log = tmp_path / "log"
    program = (
        "import sys, time\nfrom pathlib import Path\nimport harness.processes.child as p\np._GRACE_S = 0.5\n"
        f"argv, log = [sys.executable, '-c', {STUBBORN!r}], Path({str(log)!r})\n"
        "c = p.Child('x', argv, log=log, env=p.child_environment({}))\n"
        "c.start()\ntime.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], start_new_session=True, stderr=subprocess.DEVNULL)
    pids = pids_in(log)
    os.kill(parent.pid, how)
    parent.wait(timeout=20)
    assert all_gone(pids, within_s=20)


def test_a_command_that_dies_is_told_with_its_last_words(tmp_path: Path) -> None:
    child = Child("brief", [sys.executable, "-c", "print('the disk is on fire'); raise SystemExit(3)"],
                  log=tmp_path / "log", env=child_environment({}))  # fmt: skip
    child.start()

    async def never() -> bool:
        return False

    with pytest.raises(EngineError, match=r"(?s)exit code 3.*do this.*the disk is on fire"):
        asyncio.run(child.wait_until(never, 20, "do this"))
    asyncio.run(child.stop())


def test_a_missing_command_is_told(tmp_path: Path) -> None:
    child = Child("ghost", ["no-such-command-here"], log=tmp_path / "log", env=child_environment({}))
    child.start()

    async def never() -> bool:
        return False

    with pytest.raises(EngineError, match=r"(?s)exit code 127.*No such file"):
        asyncio.run(child.wait_until(never, 20, "install it"))


def test_a_deadline_is_kept_and_the_cores_are_set(tmp_path: Path) -> None:
    program = "import os, time; print('on', sorted(os.sched_getaffinity(0)), flush=True); time.sleep(600)"
    child = Child("slow", [sys.executable, "-c", program], log=tmp_path / "log", env=child_environment({}), cores=[0])
    child.start()

    async def spoke() -> bool:
        return bool(child.last_lines())

    async def never() -> bool:
        return False

    async def scenario() -> None:
        await child.wait_until(spoke, 20, "")
        with pytest.raises(EngineError, match=r"not ready within 0.3 s"):
            await child.wait_until(never, 0.3, "wait longer")
        await child.stop()

    asyncio.run(scenario())
    assert child.last_lines() == ["on [0]"]


def test_scratch_is_deleted_with_the_child(tmp_path: Path) -> None:
    folder, file = tmp_path / "chunks", tmp_path / "segment"
    folder.mkdir()
    (folder / "one.data").write_text("x")
    file.write_text("x")
    child = Child("c", ["true"], log=tmp_path / "log", env=child_environment({}), scratch=[folder, file])
    child.start()
    asyncio.run(child.stop())
    assert not folder.exists() and not file.exists() and (tmp_path / "log").exists()


def test_engines_may_write_byte_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    environment = child_environment({"A": "b"})
    assert "PYTHONDONTWRITEBYTECODE" not in environment and environment["A"] == "b"
