"""Fixtures of the tests on real engines and devices."""

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.collectors.bpf import TRACEFS
from tests.support.real_runs import end_harnesses


@pytest.fixture
def tracefs() -> Iterator[None]:
    """Mounts tracefs if it is not mounted. Of the tests that trace beside one another, the last to end unmounts it."""
    mounted = str(TRACEFS[0].parent)
    # Beside the scratch folders, one of which each of them has.
    with (Path(tempfile.gettempdir()).parent / "kv-tests-tracefs.lock").open("a+") as shared:
        while not any(place.is_dir() for place in TRACEFS):
            fcntl.flock(shared, fcntl.LOCK_EX)
            if not any(place.is_dir() for place in TRACEFS):
                subprocess.run(["mount", "-t", "tracefs", "tracefs", mounted], check=True)
                shared.write("ours")
                shared.flush()
            fcntl.flock(shared, fcntl.LOCK_SH)  # not in one move: another test may unmount it meanwhile
        fcntl.flock(shared, fcntl.LOCK_SH)
        yield
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(shared, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shared.seek(0)
            if shared.read():
                subprocess.run(["umount", mounted], check=True)
                shared.truncate(0)


@pytest.fixture(autouse=True)
def no_run_outlives_its_test() -> Iterator[None]:
    yield
    end_harnesses()


@pytest.fixture(scope="session", autouse=True)
def own_scratch() -> Iterator[None]:
    """A folder for temporary files of this worker alone: what is left there, its own tests left."""
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = folder = tempfile.mkdtemp(prefix="kv-tests-")  # short: vLLM's sockets are in it
    tempfile.tempdir = None  # it would remember the folder before
    yield
    shutil.rmtree(folder)
    tempfile.tempdir = None
    if before is None:
        del os.environ["TMPDIR"]
    else:
        os.environ["TMPDIR"] = before
