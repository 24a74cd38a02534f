"""What a trace's files and its clock say, without bpftrace."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.collectors.bpf import BpfTrace


@pytest.mark.parametrize("asleep_s", [0, 3600])
def test_a_caller_that_loses_its_core_does_not_move_the_events(tmp_path: Path, asleep_s: int) -> None:
    """Most looks at the clock take long before and after; the moment is that of the one that does not."""
    since_boot = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()
    ready_ns = time.monotonic_ns() + asleep_s * 10**9
    (tmp_path / "block.jsonl").write_text(json.dumps({"type": "printf", "data": f"ready {ready_ns}\n"}) + "\n")
    waits_s: Iterator[tuple[float, float]] = iter([(0.1, 0.0), (0.0, 0.1), (0.0, 0.0), *[(0.1, 0.0)] * 100])

    def clock() -> float:
        before_s, after_s = next(waits_s)
        time.sleep(before_s)
        now_s = time.monotonic() - 5.0
        time.sleep(after_s)
        return now_s

    zero_ns = BpfTrace(tmp_path, device_number=1, pids=[]).zero_ns(clock)
    assert zero_ns == pytest.approx(5 * 10**9 + (since_boot if asleep_s else 0), abs=2e7)
