"""Fixtures of the tests that trace."""

import subprocess
from collections.abc import Iterator

import pytest

from harness.collectors.bpf import TRACEFS


@pytest.fixture
def tracefs() -> Iterator[None]:
    """Mounts tracefs if it is not mounted, and unmounts it again."""
    there = any(place.is_dir() for place in TRACEFS)
    if not there:
        subprocess.run(["mount", "-t", "tracefs", "tracefs", str(TRACEFS[0].parent)], check=True)
    yield
    if not there:
        subprocess.run(["umount", str(TRACEFS[0].parent)], check=True)
