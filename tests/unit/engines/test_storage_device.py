"""Real devices from Python: bytes there and back, refusals on one line, and nothing left behind however it ends."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from simulator.errors import StoreError
from simulator.gpu_memory import GpuStore
from simulator.storage import CoreStore, Operation, StoreSettings
from tests.support.paths import ROOT

MIB = 1 << 20


def settings(where: Path, **changes: Any) -> StoreSettings:
    usual: dict[str, Any] = {"folder": where, "chunk_bytes": MIB, "slots": 8, "depth": 4, "reserve_bytes": 0}
    return StoreSettings(**(usual | changes))


def operations(write: bool, count: int = 8) -> list[Operation]:
    return [Operation(i, write, i % 8, i % 8) for i in range(count)]


@pytest.mark.parametrize("io", ["auto", "threads"])
@pytest.mark.parametrize("direct", [True, False])
def test_what_was_written_is_read_again(tmp_path: Path, io: str, direct: bool) -> None:
    with CoreStore(settings(tmp_path, io=io, direct=direct, fsync=True, verify=True)) as store:
        assert io == "auto" or store.io == "threads"
        assert direct or store.buffered_because == "direct I/O was not asked for"
        for write in (True, False):
            ended = store.run(operations(write, 40))
            assert sorted(one.id for one in ended) == list(range(40))
            assert all(one.error is None and one.bytes == MIB and one.write is write for one in ended)
            assert all(one.queued_s <= one.began_s <= one.ended_s <= time.monotonic() for one in ended)
        [wrong] = store.run([Operation(0, False, 1, 2)])
        assert wrong.error is not None and "differs" in wrong.error
        assert list(tmp_path.iterdir()) == []


def test_polling_gives_what_has_ended_and_no_more(tmp_path: Path) -> None:
    with CoreStore(settings(tmp_path)) as store:
        assert store.poll(1, 0.0) == [] and store.pending == 0
        store.submit(operations(True))
        ended = store.poll(3, 10.0)
        assert len(ended) >= 3 and store.pending == 8 - len(ended)
        assert len(ended) + len(store.poll(8, 10.0)) == 8
    with pytest.raises(ValueError, match="closed"):
        store.submit(operations(True))


def test_another_thread_is_refused(tmp_path: Path) -> None:
    with CoreStore(settings(tmp_path)) as store, ThreadPoolExecutor(1) as other:
        with pytest.raises(RuntimeError, match="the thread that made it"):
            other.submit(store.run, operations(True)).result()
        assert all(one.error is None for one in store.run(operations(True)))


def test_a_kept_file_stays_and_is_never_written_over(tmp_path: Path) -> None:
    with CoreStore(settings(tmp_path, keep_files=True)) as store:
        store.run(operations(True))
        with pytest.raises(StoreError, match="exists already; delete it"):
            CoreStore(settings(tmp_path, keep_files=True))
    [kept] = tmp_path.iterdir()
    assert kept.stat().st_size == 8 * MIB


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"chunk_bytes": -1}, "chunk_bytes must be at least 1"),
        ({"slots": 0}, "slots must be at least 1"),
        ({"depth": 0}, "depth must be at least 1"),
        ({"depth": 5000}, "depth from 1 to 4096"),
        ({"slots": 1 << 62}, "too large"),
        ({"reserve_bytes": 1 << 60}, "reserve"),
        ({"folder": Path("/nowhere/at/all")}, "no folder"),
        ({"device": "tape"}, "tape"),
        ({"io": "magic"}, "magic"),
    ],
)
def test_what_cannot_work_is_refused_on_one_line(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    with pytest.raises(StoreError) as refused:
        CoreStore(settings(tmp_path, **changes))
    assert words in str(refused.value) and "\n" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_a_gpu_without_torch_or_cuda_is_refused_on_one_line(tmp_path: Path) -> None:
    if importlib.util.find_spec("torch") is not None:
        pytest.skip("torch is installed here")
    with pytest.raises(StoreError, match="needs torch"):
        GpuStore(settings(tmp_path, device="gpu"))


def test_a_file_cut_short_midway_is_a_failed_operation(tmp_path: Path) -> None:
    with CoreStore(settings(tmp_path, keep_files=True)) as store:
        store.run(operations(True))
        os.truncate(store.path or "", 4 * MIB)
        ended = store.run(operations(False))
        assert sorted(one.id for one in ended if one.error is None) == [0, 1, 2, 3]
        assert all("truncated" in one.error for one in ended if one.error is not None)


WRITER = """
import sys, time
from pathlib import Path
from simulator.storage import CoreStore, Operation, StoreSettings
store = CoreStore(StoreSettings(folder=Path(sys.argv[1]), chunk_bytes=1 << 20, slots=64, reserve_bytes=0))
print("ready", flush=True)
while True:
    store.run([Operation(i, True, i, i) for i in range(64)])
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_nothing_stays_behind_however_the_process_ends(tmp_path: Path, number: signal.Signals) -> None:
    before = os.statvfs(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    time.sleep(0.3)
    process.send_signal(number)
    assert process.wait(20) != 0
    process.stdout.close()
    assert list(tmp_path.iterdir()) == []
    assert os.statvfs(tmp_path).f_files == before.f_files


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root")
@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("ramfs", "", None),
        ("tmpfs", "size=4M", "exceed the"),
        ("tmpfs", "size=64M,ro", "read-only"),
    ],
)
def test_file_systems_that_cannot(tmp_path: Path, kind: str, options: str, words: str | None) -> None:
    """ramfs has no O_DIRECT: said, and done without. A full or read-only one is refused."""
    mount = ["mount", "-t", kind, *(["-o", options] if options else []), kind, str(tmp_path)]
    subprocess.run(mount, check=True)
    try:
        if words is None:
            with CoreStore(settings(tmp_path, preallocate=False, verify=True)) as store:
                assert store.buffered_because == "the file system has no O_DIRECT"
                assert all(one.error is None for one in store.run(operations(True)) + store.run(operations(False)))
        else:
            with pytest.raises(StoreError, match=words):
                CoreStore(settings(tmp_path))
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
