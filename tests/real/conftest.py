"""Fixtures of the tests on real engines and devices."""

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
    """Mounts tracefs if it is not mounted, and unmounts it again. One test at a time: each needs it until its end."""
    # Beside the scratch folders, one of which each worker has.
    with (Path(tempfile.gettempdir()).parent / "kv-tests-tracefs.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        there = any(place.is_dir() for place in TRACEFS)
        if not there:
            subprocess.run(["mount", "-t", "tracefs", "tracefs", str(TRACEFS[0].parent)], check=True)
        yield
        if not there:
            subprocess.run(["umount", str(TRACEFS[0].parent)], check=True)


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
