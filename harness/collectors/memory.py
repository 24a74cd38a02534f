"""How much memory new processes can take on this machine."""

from __future__ import annotations

from pathlib import Path


def available_memory_bytes() -> int | None:
    """Bytes that new processes can take without swapping; None if the kernel does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
