"""Children end with us, however we end."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from harness.errors import EngineError
from harness.processes import warden
from harness.processes.child import Child, child_environment, outlive
from tests.support.paths import ROOT
from tests.support.processes import alive, all_gone

# A command that starts a grandchild in a session of its own, as engines do with workers, and ignores SIGTERM.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
worker = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)
print('pids', os.getpid(), worker.pid, flush=True)
time.sleep(600)
"""


# What outlives its engine: a core in a process group of its own, deaf to SIGTERM, and a worker in its own session.
CORE = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.setpgid(0, 0)
worker = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)
print('pids', os.getppid(), os.getpid(), worker.pid, flush=True)
time.sleep(600)
"""
ENGINE = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {CORE!r}]); time.sleep(600)"

# A worker that shares memory and is deaf to SIGTERM. Its tracker does not remove the memory: it is killed as well.
SHARING = """
import os, signal, subprocess, sys, time
from multiprocessing import resource_tracker, shared_memory
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ours, theirs = shared_memory.SharedMemory(create=True, size=4096), shared_memory.SharedMemory(sys.argv[1])
for each in (ours, theirs):
    resource_tracker.unregister(each._name, "shared_memory")
print('pids', os.getpid(), flush=True)
open(sys.argv[2], "w").write(ours.name)
time.sleep(600)
"""

LAST_WORDS = """
import sys, time
print('INFO: all is well\\n\\x1b[31mRuntimeError: the pool is poisoned\\x1b[0m\\nINFO: level=critical', flush=True)
time.sleep(0.5)
sys.exit(3)
"""


def pids_in(log: Path) -> list[int]:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if log.exists() and "pids" in (text := log.read_text()) and text.endswith("\n"):
            return [int(pid) for pid in text.split("pids")[1].split()]
        time.sleep(0.02)
    raise AssertionError(f"no pids in {log}")


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


def started(tmp_path: Path, program: str, scratch: Path | None = None) -> Child:
    argv, paths = [sys.executable, "-c", program], [scratch] if scratch else []
    child = Child("toy", argv, log=tmp_path / "log", env=child_environment({}), scratch=paths, grace_s=0.5)
    child.start()
    return child


def wardens_of(child: Child) -> dict[str, int]:
    """The guard, and the warden below it."""
    assert child._guard is not None
    guard = child._guard.pid
    [warden] = Path(f"/proc/{guard}/task/{guard}/children").read_text().split()
    return {"guard": guard, "warden": int(warden)}


@pytest.mark.parametrize("killed", ["warden", "guard", "engine", "core", "guard warden", "guard warden engine core"])
def test_a_killed_process_takes_all_others_and_the_scratch_with_it(tmp_path: Path, killed: str) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()

    async def scenario() -> None:
        child = started(tmp_path, ENGINE, scratch)
        engine, core, worker = pids_in(tmp_path / "log")
        known = {**wardens_of(child), "engine": engine, "core": core, "worker": worker}
        assert child.pid == engine and set(child.pids) == {engine, core, worker}
        for name in killed.split():
            os.kill(known[name], signal.SIGKILL)
        if killed != "core":  # what an engine does about a dead worker is its own affair
            await asyncio.wait_for(child.ended(), 2)
            assert not child.running and child.pid is None
        if killed in ("warden", "guard", "engine"):  # the survivors need no word from the harness
            assert await asyncio.to_thread(all_gone, list(known.values()), 8)
            assert not scratch.exists()
        await child.stop()
        assert not any(map(alive, known.values())) and not scratch.exists()
        await child.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize("killed", ["engine", "warden", "guard warden", ""])
def test_memory_that_killed_workers_shared_goes_with_them_and_no_others(tmp_path: Path, killed: str) -> None:
    used = shared_memory.SharedMemory(create=True, size=4096)  # ours, and mapped by the worker, too
    unused = shared_memory.SharedMemory(create=True, size=4096)
    unused.close()
    worker_argv = ["-c", SHARING, used.name, str(tmp_path / "told")]
    engine = f"import subprocess, sys; subprocess.run([sys.executable, *{worker_argv!r}])"
    child = Child(
        "sharing", [sys.executable, "-c", engine], log=tmp_path / "log", env=child_environment({}), grace_s=0.3
    )

    async def scenario() -> None:
        child.start()
        [worker] = pids_in(tmp_path / "log")
        while not (tmp_path / "told").exists() or not (tmp_path / "told").read_text():
            await asyncio.sleep(0.01)
        segment = Path("/dev/shm") / (tmp_path / "told").read_text()
        assert segment.exists()
        known = {**wardens_of(child), "engine": child.pid or 0}
        for name in killed.split():
            os.kill(known[name], signal.SIGKILL)
        await child.stop()
        assert not alive(worker) and not segment.exists()
        assert (Path("/dev/shm") / used.name).exists() and (Path("/dev/shm") / unused.name).exists()

    try:
        asyncio.run(scenario())
    finally:
        used.close()
        used.unlink()
        unused.unlink()


@pytest.mark.parametrize("second", ["warden", "guard"])
def test_nothing_outlives_the_harness_and_one_of_its_wardens(tmp_path: Path, second: str) -> None:
    scratch, told = tmp_path / "scratch", tmp_path / "told"
    scratch.mkdir()
    program = (
        "import time\nfrom pathlib import Path\n"
        "from tests.unit.processes.test_process import ENGINE, pids_in, started, wardens_of\n"
        f"child = started(Path({str(tmp_path)!r}), ENGINE, Path({str(scratch)!r}))\n"
        f"pids_in(Path({str(tmp_path / 'log')!r}))\n"
        f"print('pids', wardens_of(child)[{second!r}], file=open({str(told)!r}, 'w'), flush=True)\ntime.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], start_new_session=True, cwd=ROOT)
    [warden] = pids_in(told)
    os.kill(parent.pid, signal.SIGKILL)
    os.kill(warden, signal.SIGKILL)
    parent.wait(timeout=20)
    assert all_gone([warden, *pids_in(tmp_path / "log")], within_s=20)
    deadline = time.monotonic() + 5
    while scratch.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not scratch.exists()


def test_work_ends_with_the_child_that_it_needs_and_the_error_is_one_line(tmp_path: Path) -> None:
    async def scenario() -> None:
        child = started(tmp_path, LAST_WORDS)
        began_s = time.monotonic()
        with pytest.raises(EngineError) as caught:
            await outlive([child], asyncio.sleep(60))
        assert time.monotonic() - began_s < 5
        assert str(caught.value) == (
            f"toy ended during the run (exit code 3); {tmp_path / 'log'} ends with the error:"
            " RuntimeError: the pool is poisoned"
        )
        await child.stop()

    asyncio.run(scenario())


def test_a_warning_that_names_an_error_is_not_what_a_child_died_of(tmp_path: Path) -> None:
    """Lines as vLLM, uvicorn and LMCache write them; the first of level and error in a line says what it is."""
    quiet = [
        "WARNING 11-22 20:11:03 [system_utils.py:255] Found ulimit of 1024; it may cause OSError: [Errno 24]",
        "(APIServer pid=7) INFO 11-22 20:11:04 [launcher.py:46] Route: /error, handler of ValueError",
        "[2026-11-22 20:11:04,123] LMCache DEBUG: no KeyError so far",
    ]
    loud = "(EngineCore pid=9) ERROR 11-22 20:11:05 [core.py:712] ValueError: log at WARNING to see more"

    def last_words(*lines: str) -> str:
        child = Child("toy", ["true"], log=tmp_path / "log", env={})
        (tmp_path / "log").write_text("".join(f"{line}\n" for line in lines))
        return child.obituary()

    assert last_words(*quiet).endswith("tells of no error; was memory short?")
    assert last_words(loud, *quiet).endswith(f"ends with the error: {loud}")
    assert last_words("RuntimeError: set the level to INFO", *quiet).endswith("RuntimeError: set the level to INFO")


def test_a_call_that_fails_because_its_server_died_tells_of_the_server(tmp_path: Path) -> None:
    async def scenario() -> None:
        child = started(tmp_path, "import time; time.sleep(600)")

        async def refused() -> None:
            while (pid := child.pid) is None:
                await asyncio.sleep(0.01)
            os.kill(pid, signal.SIGKILL)
            raise EngineError("connection refused")

        with pytest.raises(
            EngineError, match=r"^toy ended during the run \(killed by SIGKILL\); .*/log tells of no error"
        ):
            await outlive([child], refused())
        await child.stop()

    asyncio.run(scenario())


def test_work_that_can_give_up_ends_by_itself_before_the_error(tmp_path: Path) -> None:
    async def scenario() -> None:
        child, told = started(tmp_path, LAST_WORDS), asyncio.get_running_loop().create_future()
        kept: list[str] = []

        async def work() -> None:
            kept.append(await told)

        with pytest.raises(EngineError, match="poisoned") as caught:
            await outlive([child], work(), told.set_result)
        assert kept == [str(caught.value)]
        await child.stop()

    asyncio.run(scenario())


def test_work_that_its_children_outlive_gives_its_result_or_its_own_error(tmp_path: Path) -> None:
    async def answer() -> int:
        return 42

    async def fail() -> None:
        raise EngineError("of its own")

    async def scenario() -> None:
        child = started(tmp_path, "import time; time.sleep(600)")
        assert await outlive([child], answer()) == 42 == await outlive([], answer())
        with pytest.raises(EngineError, match="of its own"):
            await outlive([child], fail())
        assert child.running
        await child.stop()

    asyncio.run(scenario())


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


def test_what_a_folder_of_scratch_lists_is_deleted_with_it(tmp_path: Path) -> None:
    """Shared memory under a name that the command draws: its SIGKILL leaves no process that has it mapped."""
    scratch, drawn, others = tmp_path / "scratch", tmp_path / "drawn", tmp_path / "others"
    scratch.mkdir()
    drawn.write_bytes(b"x")
    others.write_bytes(b"x")

    async def live() -> None:
        child = Child("sleeper", ["sleep", "60"], log=tmp_path / "log", env=dict(os.environ), scratch=[scratch])
        child.start()
        try:
            while child.pid is None:
                await asyncio.sleep(0.01)
            warden.also_delete(scratch, [])
            warden.also_delete(scratch, [drawn])
            warden.also_delete(scratch, [drawn])
            assert warden.listed(scratch) == [drawn]
            os.kill(child.pid, signal.SIGKILL)
            await child.ended()
        finally:
            await child.stop()

    asyncio.run(live())
    assert not scratch.exists() and not drawn.exists() and others.exists()


def test_engines_may_write_byte_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    environment = child_environment({"A": "b"})
    assert "PYTHONDONTWRITEBYTECODE" not in environment and environment["A"] == "b"


@pytest.mark.parametrize("killed", ["", "guard warden"])
def test_what_is_stored_stays_where_another_child_deletes_it(tmp_path: Path, killed: str) -> None:
    scratch, stored = tmp_path / "scratch", tmp_path / "stored"

    async def scenario(keep: bool) -> None:
        for folder in (scratch, stored):
            folder.mkdir(exist_ok=True)
        argv = ["sleep", "600"]
        child = Child("toy", argv, log=tmp_path / "log", env=child_environment({}), scratch=[scratch], stored=[stored])
        child.start()
        while child.pid is None:
            await asyncio.sleep(0.01)
        pids = wardens_of(child)
        if killed:
            os.kill(pids["warden"], signal.SIGSTOP)  # else it would delete all as soon as the guard is gone
        for name in killed.split():  # with both of them gone, it is the harness that deletes
            os.kill(pids[name], signal.SIGKILL)
        await child.stop(keep=keep)
        await child.stop(keep=keep)

    asyncio.run(scenario(keep=True))
    assert stored.exists() and not scratch.exists()
    asyncio.run(scenario(keep=False))
    assert not stored.exists() and not scratch.exists()


HANDS_OVER = """
import asyncio, sys, time
from pathlib import Path
import harness.processes.child as p
log, stored, until = Path(sys.argv[1]), [Path(sys.argv[2])], sys.argv[3]
def child(name):
    one = p.Child(name, ["sleep", "600"], log=log, env=p.child_environment({}), stored=stored)
    one.start()
    while one.pid is None:
        time.sleep(0.01)
    return one
def reached(step):
    print(step, flush=True)
    if step == until:
        time.sleep(600)
old, keeper = child("server"), child("keeper")
reached("kept")
asyncio.run(old.stop(keep=True))
reached("ended")
new = child("server")
reached("again")
asyncio.run(keeper.stop(keep=True))
reached("handed back")
"""


@pytest.mark.parametrize("step", ["kept", "ended", "again", "handed back"])
def test_what_is_handed_over_is_deleted_wherever_the_harness_is_killed(tmp_path: Path, step: str) -> None:
    stored = tmp_path / "stored"
    stored.mkdir()
    argv = [sys.executable, "-c", HANDS_OVER, str(tmp_path / "log"), str(stored), step]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        while parent.stdout.readline().strip() != step:
            assert parent.poll() is None
        assert stored.exists()
        parent.kill()
    deadline = time.monotonic() + 20
    while stored.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not stored.exists()
