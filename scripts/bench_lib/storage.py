"""`scripts/bench storage`: our real devices against fio's, interleaved. Usage and sample output: scripts/bench."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from loop_devices import MIB, Device, LoopDevices
from storage_pairs import paired
from storage_tiers import CHUNK_MIB, tiers_lines

from simulator.storage import CoreStore, Operation, StoreSettings

ROOT = Path(__file__).resolve().parents[2]
KIB = 1 << 10
SIZES = (128 * KIB, MIB, 8 * MIB)
DEPTHS = (1, 4, 16)
FILE_MIB = 256
DEVICE_MIB = 768
LIMIT_MIB_PER_S = 400
# So much a run: half a second and more of each device's time.
RUN_MIB = {"throttled": 256, "fast": 4096}
# What fio moves each way for the CPU of all tiers: about what the device does in a run, so that its start counts as
# little as ours.
TIERS_MIB = 2048
# Both sides run here: where a process happens to stand beside the loop driver's own threads is worth 20 us a transfer.
CORE = max(os.sched_getaffinity(0))
TARGETS = {"bandwidth": 0.95, "cpu": 2.0, "bytes": 0.01}


class Run(NamedTuple):
    bytes_per_s: float
    cpu_s_per_gib: float
    # What the block layer counted for each byte that was reported.
    counted: float


class Worker:
    """Our side in a process of its own: opens a store, fills it, joins the throttled, and runs what it is told.

    path: the store's file, which fio reads and writes too. Where on a device a file lies, and in which memory that is,
    is worth up to a third of its bandwidth: two files would be held against each other, not two programs.
    """

    def __init__(self, device: Device, size: int, depth: int, tree: Path = ROOT) -> None:
        """tree: whose storage it is, a checkout with its .venv."""
        words = [str(device.folder), device.name, str(device.group or ""), str(size), str(depth)]
        self._process = subprocess.Popen(
            [tree / ".venv/bin/python", tree / "scripts/bench_lib/storage.py", "worker", *words],
            cwd=tree, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.path = Path(self._read())

    def run(self, write: bool, total: int) -> Run:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([write, total]) + "\n")
        self._process.stdin.flush()
        return Run(*self._read())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self.path.unlink()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"our worker ended early (exit code {self._process.wait()}); what it said is above")
        return json.loads(line)


def work(folder: str, name: str, group: str, size: int, depth: int) -> None:
    """The worker's side: one line in, one line out."""
    device = Device(Path(folder), name, Path(group) if group else None)
    slots = FILE_MIB * MIB // size
    settings = StoreSettings(
        folder=device.folder, chunk_bytes=size, slots=slots, depth=depth, reserve_bytes=0, keep_files=True
    )
    with CoreStore(settings) as store:
        if store.io != "io_uring" or store.buffered_because:
            sys.exit(f"{folder}: {store.io}, {store.buffered_because}: not comparable with fio")
        for write in (True, False):  # also makes the memory to write from and to read into, as fio does beforehand
            store.run([Operation(slot, write, slot, slot) for slot in range(slots)])
        os.sync()
        take_place(device)
        print(json.dumps(str(store.path)), flush=True)
        for line in sys.stdin:
            write, total = json.loads(line)
            operations = [Operation(i, write, i % slots, i % slots) for i in range(total // size)]
            before, cpu_s = device.moved_bytes()[write], time.process_time()
            ended = store.run(operations)
            cpu_s = time.process_time() - cpu_s
            counted = device.moved_bytes()[write] - before
            if failed := [one.error for one in ended if one.error]:
                sys.exit(f"{len(failed)} operations failed, e.g. {failed[0]}")
            moved = sum(one.bytes for one in ended)
            wall_s = max(one.ended_s for one in ended) - min(one.queued_s for one in ended)
            print(json.dumps([moved / wall_s, cpu_s / moved * 2**30, counted / moved]), flush=True)


def take_place(device: Device) -> None:
    """Moves this process into the throttled group and onto its core."""
    device.join()
    os.sched_setaffinity(0, {CORE})


def fio(device: Device, path: Path, size: int, depth: int, write: bool, total: int, *, memory: bool = False) -> Run:
    """fio's io_uring engine on the whole file of that path, which has all of its blocks. memory: the file is on tmpfs;
    fio's own thread copies then, as all of its CPU is to be counted."""
    words = ["fio", "--name=run", f"--filename={path}"]
    words += ["--ioengine=psync"] if memory else ["--ioengine=io_uring", "--direct=1"]
    words += [f"--bs={size}", f"--iodepth={depth}", f"--size={FILE_MIB}M", f"--io_size={total}", "--overwrite=1"]
    words += [f"--rw={'write' if write else 'read'}", "--allow_file_create=0", "--output-format=json"]
    before = device.moved_bytes()[write]
    done = subprocess.run(words, capture_output=True, text=True, preexec_fn=partial(take_place, device))
    if done.returncode:
        sys.exit(f"fio failed: {(done.stderr or done.stdout).strip().splitlines()[-1]}")
    counted = device.moved_bytes()[write] - before
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    side = job["write" if write else "read"]
    cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    return Run(
        side["io_bytes"] / (side["runtime"] / 1000), cpu_s / side["io_bytes"] * 2**30, counted / side["io_bytes"]
    )


def pairs(device: Device, worker: Worker, case: tuple[int, int, bool, int], rounds: int) -> Iterator[tuple[Run, Run]]:
    size, depth, write, total = case
    for number in range(rounds):
        if number % 2:
            theirs = fio(device, worker.path, size, depth, write, total)
            yield worker.run(write, total), theirs
        else:
            ours = worker.run(write, total)
            yield ours, fio(device, worker.path, size, depth, write, total)


def line(label: str, runs: list[tuple[Run, Run]]) -> tuple[str, bool]:
    """A line of the table, and whether the cell misses a target."""
    bandwidth = statistics.median(ours.bytes_per_s / theirs.bytes_per_s for ours, theirs in runs)
    cpu = statistics.median(ours.cpu_s_per_gib / max(theirs.cpu_s_per_gib, 1e-9) for ours, theirs in runs)
    counted = statistics.median(ours.counted for ours, _ in runs)
    ours_mib, fio_mib = (statistics.median(pair[side].bytes_per_s for pair in runs) / MIB for side in (0, 1))
    ours_cpu, fio_cpu = (statistics.median(pair[side].cpu_s_per_gib for pair in runs) for side in (0, 1))
    missed = [
        name
        for name, miss in (
            ("bandwidth", bandwidth < TARGETS["bandwidth"]),
            ("cpu", cpu > TARGETS["cpu"]),
            ("bytes", abs(counted - 1) > TARGETS["bytes"]),
        )
        if miss
    ]
    verdict = f"MISS: {', '.join(missed)}" if missed else "ok"
    text = (
        f"  {label}  {ours_mib:7,.0f} {fio_mib:7,.0f}   {bandwidth:5.3f}   {ours_cpu:6.3f} {fio_cpu:6.3f}"
        f"   {cpu:5.2f}   {counted:6.4f}   {verdict}"
    )
    return text, bool(missed)


def measured(kind: str, device: Device, sizes: tuple[int, ...], depths: tuple[int, ...], rounds: int) -> list[bool]:
    print(f"{kind}: ext4 on {device.name}, io_uring, O_DIRECT, one file of {FILE_MIB} MiB, {rounds} pairs a cell")
    print("                     MiB/s   fio's   ratio  CPU-s/GiB  fio's  ratio  counted/reported")
    missed = []
    for size in sizes:
        for depth in depths:
            worker = Worker(device, size, depth)
            for write in (False, True):
                runs = list(pairs(device, worker, (size, depth, write, RUN_MIB[kind] * MIB), rounds))
                label = f"{'write' if write else 'read':5} {size // KIB:>5} KiB x{depth:<2}"
                text, miss = line(label, runs)
                print(text, flush=True)
                missed.append(miss)
            worker.close()
    return missed


@contextlib.contextmanager
def in_memory(devices: LoopDevices) -> Iterator[Path]:
    """A file on tmpfs that has all of its pages."""
    path = devices.folder / "memory"
    path.write_bytes(os.urandom(MIB) * FILE_MIB)
    try:
        yield path
    finally:
        path.unlink()


def measured_tiers(kind: str, device: Device, devices: LoopDevices, rounds: int) -> list[bool]:
    """All three tiers, whose last one is on the device, against fio on a file of the same chunks there."""
    print(f"{kind}: GPU memory and CPU RAM (both RAM) over {device.name}, chunks of {CHUNK_MIB} MiB, {rounds} runs")

    def bare(memory: bool, write: bool) -> tuple[float, float]:
        size, total = CHUNK_MIB * MIB, TIERS_MIB * MIB
        if memory:
            with in_memory(devices) as path:
                found = fio(device, path, size, 1, write, total, memory=True)
        else:
            worker = Worker(device, size, DEPTHS[-1])
            found = fio(device, worker.path, size, DEPTHS[-1], write, total)
            worker.close()
        return found.bytes_per_s, found.cpu_s_per_gib / 2**30

    missed = []
    for text, miss in tiers_lines(device, rounds, bare, TARGETS["cpu"]):
        print(text, flush=True)
        if miss is not None:
            missed.append(miss)
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench storage", description="Are our real devices as fast as fio's?")
    parser.add_argument("--quick", action="store_true", help="two sizes, two depths, three pairs: a minute")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of runs a cell")
    parser.add_argument("--device", choices=("throttled", "fast"), help="one of the two devices only")
    parser.add_argument("--tiers", action="store_true", help="all three tiers by client cores, and nothing else")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another commit's tree, in place of fio")
    options = parser.parse_args()
    if shutil.which("fio") is None:
        sys.exit("fio is missing; run: sudo apt-get install -y fio")
    if os.geteuid():
        sys.exit("loop devices and mounts need root; run: sudo scripts/bench storage")
    sizes, depths = ((SIZES[0], SIZES[2]), (1, 16)) if options.quick else (SIZES, DEPTHS)
    rounds = 3 if options.quick else options.rounds
    missed: list[bool] = []
    print(f"load before the start (1 min): {os.getloadavg()[0]:.2f}")
    try:
        with LoopDevices(DEVICE_MIB, LIMIT_MIB_PER_S) as devices:
            for kind, make in (("throttled", devices.throttled), ("fast", devices.fast)):
                if options.device in (None, kind) and options.tiers:
                    missed += measured_tiers(kind, make(), devices, rounds)
                elif options.device in (None, kind) and options.against is not None:
                    device, trees = make(), (ROOT, options.against.resolve())
                    print(f"{kind}: against {trees[1]}, {rounds} pairs a cell on {device.name}")
                    for text in paired(partial(Worker, device), trees, sizes, depths, rounds):
                        print(text, flush=True)
                elif options.device in (None, kind):
                    missed += measured(kind, make(), sizes, depths, rounds)
    except OSError as error:
        sys.exit(str(error))
    if options.against is not None:
        return
    print(
        f"{sum(missed)} of {len(missed)} cells miss a target: bandwidth at least {TARGETS['bandwidth']} of fio's, CPU a"
        f" GiB at most {TARGETS['cpu']:g} times fio's, bytes as the block layer counted them ±{TARGETS['bytes']:.0%}"
    )
    print(f"load after the end (1 min): {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        work(sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]), int(sys.argv[6]))
    else:
        main()
