"""What the machine did meanwhile, and what of it was ours."""

import os
import time
from pathlib import Path

from harness.collectors.host import between, file_system, read_host
from harness.records import HostSample


def spin(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_our_own_work_is_busy_and_not_foreign() -> None:
    before = read_host(None)
    spin(0.5)
    sample = between(before, read_host(None))
    assert sample.busy_share is not None and sample.foreign_cpu_share is not None and sample.steal_share is not None
    ours = sample.busy_share - sample.foreign_cpu_share
    assert ours >= 0.9 * 0.5 / (os.cpu_count() or 1) / 4 and 0 <= sample.foreign_cpu_share <= sample.busy_share <= 1
    assert (sample.device_read_bytes, sample.device_write_bytes) == (None, None)


def test_bytes_at_the_device_are_counted(tmp_path: Path) -> None:
    before = read_host(tmp_path)
    file = tmp_path / "file"
    file.write_bytes(os.urandom(4 << 20))
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    sample = between(before, read_host(tmp_path))
    # tmpfs and overlays have no device of their own: then nothing is said, which is not zero.
    assert sample.device_write_bytes is None or sample.device_write_bytes >= 4 << 20


def test_no_time_at_all_gives_no_shares() -> None:
    reading = read_host(None)
    offers = None if reading.reported_bytes is None else 0
    assert between(reading, reading) == HostSample(reported_bytes=offers)


def test_the_file_system_of_a_path_has_a_name() -> None:
    assert file_system(Path("/proc/self")) == "proc"
    assert file_system(Path("/no/such/path")) == file_system(Path("/"))


def test_what_a_core_is_worth_is_measured_on_that_core() -> None:
    cores = os.sched_getaffinity(0)
    core = max(cores)
    reading = read_host(None, core)
    assert reading.core_loop_s is not None and 1e-6 < reading.core_loop_s < 0.05
    assert os.sched_getaffinity(0) == cores
    sample = between(reading, read_host(None, core))
    assert sample.core_loop_s is not None and between(reading, read_host(None)).core_loop_s is None
