"""How much memory this machine has to give."""

from __future__ import annotations

from pathlib import Path


def available_memory_bytes() -> int | None:
    """What new processes could take; None where the kernel does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
