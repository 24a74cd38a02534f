"""An engine that copies what it has read: its reads in the simulator, and what a fit takes for linear."""

from __future__ import annotations

import msgspec
import pytest

from simulator.calibration import Calibration, CalibrationPoint, FittedOn, load_calibration
from simulator.levels import DiskWays, core_levels, standard_levels
from simulator.point_costs import is_linear
from simulator.policies import tier_policy

MIB = 1 << 20
COPY_BYTES_PER_S, LEFT_BYTES_PER_S = 4000 * MIB, 5000 * MIB
LIMIT_BYTES_PER_S = 1000 * MIB


def known(**traits: bool) -> Calibration:
    calibration = load_calibration("cpu-2core")
    reads = {"latency_s": 1e-3, "chunk_s": 2e-4, "shared_bytes_per_s": 1e12}
    disk = {f"disk.read.{of}": value for of, value in (reads | {"bytes_per_s": LEFT_BYTES_PER_S}).items()}
    cached = {f"page_cache.read.{of}": value for of, value in (reads | {"bytes_per_s": COPY_BYTES_PER_S}).items()}
    return msgspec.structs.replace(calibration, constants=calibration.constants | disk | cached, **traits)


@pytest.mark.parametrize("chunk_bytes", [8 * MIB, 16 * MIB])
def test_each_byte_is_copied_after_the_device_s_time(chunk_bytes: int) -> None:
    """A page-cache read takes as long as before; one from a known device takes what is left of the copy longer."""
    pack = tier_policy("sglang-0.5.23-hicache-wait")
    levels = standard_levels(pack, pack, {"cpu": 64 * chunk_bytes, "disk": 64 * chunk_bytes})
    ways = DiskWays(bytes_per_s=LIMIT_BYTES_PER_S)
    copy_s, left_s = chunk_bytes / COPY_BYTES_PER_S, chunk_bytes / LEFT_BYTES_PER_S
    for copied in (False, True):
        disk = core_levels(levels, known(copied_reads=copied, serial_chunks=True), chunk_bytes, ways)[1]
        cached, cold = (read.chunk_s + read.byte_s * chunk_bytes for read in (disk.page_cache_read, disk.read))
        assert cached == pytest.approx(2e-4 + copy_s)
        assert cold == pytest.approx(2e-4 + chunk_bytes / LIMIT_BYTES_PER_S + copied * left_s)
        assert disk.read.shared_chunk_s == pytest.approx(2e-4 + copied * left_s)
        assert disk.write.chunk_s == known().constant("disk.write.chunk_s")


def test_of_an_unknown_device_the_copy_is_that_of_the_page_cache() -> None:
    pack, chunk_bytes = tier_policy("sglang-0.5.23-hicache-wait"), 8 * MIB
    levels = standard_levels(pack, pack, {"cpu": 64 * chunk_bytes, "disk": 64 * chunk_bytes})
    disk = core_levels(levels, known(copied_reads=True), chunk_bytes, DiskWays())[1]
    assert disk.read.chunk_s == pytest.approx(2e-4 + chunk_bytes / COPY_BYTES_PER_S)
    assert disk.read.byte_s == pytest.approx(1 / LEFT_BYTES_PER_S)


@pytest.mark.parametrize(
    ("policy", "tier", "linear"),
    [("vllm-0.32", "cpu", True), ("sglang-0.5.23", "gpu", True), ("sglang-0.5.23", "cpu", False)],
)
def test_a_load_beside_the_step_is_not_added_to_it(policy: str, tier: str, linear: bool) -> None:
    point = CalibrationPoint(tier=tier, prompt_tokens=513, hit_tokens=512, chunk_tokens=64, measured_s=1.0)
    fitted_on = FittedOn(model="tiny-llama", max_num_batched_tokens=2048, engine_policy=policy, points=(point,))
    assert is_linear(point, fitted_on) is linear
    assert not is_linear(msgspec.structs.replace(point, concurrency=2), fitted_on)
