"""What tests of tracing share."""

import subprocess
from collections.abc import Iterator

import pytest

from harness.collectors.bpf import TRACEFS


@pytest.fixture
def tracefs() -> Iterator[None]:
    """Mounted where it was not, and unmounted again."""
    there = any(place.is_dir() for place in TRACEFS)
    if not there:
        subprocess.run(["mount", "-t", "tracefs", "tracefs", str(TRACEFS[0].parent)], check=True)
    yield
    if not there:
        subprocess.run(["umount", str(TRACEFS[0].parent)], check=True)
