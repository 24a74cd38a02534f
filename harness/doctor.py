"""What this machine can measure: one check per line, each with the cure for a missing part.

The checks take less than two seconds, start nothing, change nothing and import nothing heavy. A check that fails to run
is itself a line of the output, so that `harness doctor` also helps on a broken machine.
"""

from __future__ import annotations

import errno
import hashlib
import importlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes.util import find_library
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from harness.caches import MOONCAKE_LISTENS
from harness.collectors.cores import MAX_SLOWER, cores_slower
from harness.collectors.memory import MAX_TAKEN_SHARE, RestedPages, reporting_order, taken_in_words
from harness.engines import ENGINES
from harness.engines.kind import Environment

GIB = 1 << 30
MIN_PYTHON = (3, 11)
MIN_CPUS = 2
MIN_MEMORY_BYTES = 8 * GIB
MIN_DISK_BYTES = 10 * GIB
# What vLLM and LMCache take beside KV, the models that users ask for, and a prompt worth measuring.
ENGINE_MEMORY_BYTES = 4 * GIB
ACCELERATOR_MODELS = ("llama-3.1-8b", "llama-3.1-70b")
ACCELERATOR_TOKENS = 4097
PORTS = (8000, 5555)
STEAL_WINDOW_S, REST_WINDOW_S = 0.5, 1.1
MAX_STEAL = 0.01
# Above the first, times spread; above the second, the machine has more work than cores.
QUIET_LOAD_PER_CPU, MAX_LOAD_PER_CPU = 0.25, 1.0
COMMAND_TIMEOUT_S = 1.5

# The kernel's interfaces; tests replace them with their own folders.
PROC, SYS, DEV = Path("/proc"), Path("/sys"), Path("/dev")


@dataclass(frozen=True, slots=True)
class Check:
    """One check. ok is None if only some measurements need a missing part, or if the check could not decide.

    cure: one line; None only if nothing needs a cure.
    """

    name: str
    ok: bool | None
    detail: str
    cure: str | None = None


@dataclass(frozen=True, slots=True)
class Ability:
    """What a user may want to do here, and the names of the checks that it needs."""

    name: str
    does: str
    needs: tuple[str, ...]


def abilities() -> list[Ability]:
    """In the order in which people need them."""
    engines = (
        Ability(name, f"measure {name} with --engine {name}", ("python", "cpus", "memory", "disk", f"engine {name}"))
        for name in _environments()
    )
    return [
        Ability("sim", "predict with --engine sim", ("python", "rust core", "disk")),
        *engines,
        Ability("accelerator", "run vllm at a GPU's pace without it", ("cpus", "memory", "disk", "engine vllm")),
        Ability("disk-cold", "drop the page cache for disk_cold", ("root",)),
        Ability("devices", "make reference devices", ("root", "loop devices", "io throttle", "file systems")),
        Ability("traces", "trace files and block I/O", ("root", "bpftrace")),
        Ability("fio", "compare a device with fio", ("fio",)),
        Ability("timing", "rely on times", ("cpus", "quiet machine", "steady cores", "memory kept")),
    ]


def obstacles(ability: Ability, found: Sequence[Check]) -> list[Check]:
    """The checks that keep a user from it; empty: it can be done here.

    An engine that is not installed is an obstacle, though no failure of the machine.
    """
    stops = [check for check in found if check.name in ability.needs and check.ok is not True]
    return [check for check in stops if check.ok is False or check.name.startswith("engine ")]


def checks(root: Path) -> list[Check]:
    """Runs all checks of the machine and of the checkout at root, in a fixed order. Never raises."""
    table: list[tuple[str, Callable[[], Check]]] = [
        ("python", _python),
        ("rust core", _core),
        ("cpus", _cpus),
        ("quiet machine", _quiet),
        ("steady cores", _steady),
        ("memory", _memory),
        ("memory kept", _memory_kept),
        ("accelerator", _accelerator),
        ("disk", lambda: _disk(root)),
        ("traces", lambda: _traces(root)),
        ("ports", _ports),
        ("gpu", _gpu),
        *((f"engine {name}", partial(_engine, root, name, needs)) for name, needs in _environments().items()),
        *((f"{name} traps", partial(_traps, f"{name} traps", traps)) for name, traps in _installed_traps(root).items()),
        ("root", _root_user),
        ("fio", lambda: _program("fio", "needed by storage measurements")),
        ("bpftrace", _bpftrace),
        ("loop devices", _loop),
        ("io throttle", _throttle),
        ("file systems", _file_systems),
        ("mooncake", _mooncake),
        ("redis", lambda: _store("redis", _found("redis-server", "valkey-server"), "resp")),
        ("s3 server", lambda: _store("s3 server", _found("versitygw", home=root / ".engines/stores"), "s3")),
    ]
    # Threads, because some checks wait for a sample of CPU time or for a driver's tool.
    with ThreadPoolExecutor(len(table)) as pool:
        return list(pool.map(lambda row: _guarded(*row), table))


def render(found: Sequence[Check]) -> list[tuple[str, bool | None]]:
    """Lines, each with its check's result: the checks, one or two lines each; what a user can do here and what not."""
    marks = {True: "ok", False: "FAIL", None: "-"}
    width = max((len(check.name) for check in found), default=0)
    lines: list[tuple[str, bool | None]] = []
    for check in found:
        lines.append((f"{marks[check.ok]:>4}  {check.name:<{width}}  {check.detail}", check.ok))
        if check.ok is not True and check.cure:
            lines.append((f"{'':>4}  {'':<{width}}  -> {check.cure}", check.ok))
    failed = sum(check.ok is False for check in found)
    lines.append((f"{failed} of {len(found)} checks failed" if failed else "nothing failed", not failed))
    for ability in abilities():
        stops = obstacles(ability, found)
        why = f" ({', '.join(check.name for check in stops)})" if stops else ""
        lines.append((f"you {'cannot' if stops else 'can'}: {ability.does}{why}  [{ability.name}]", not stops))
    return lines


def _guarded(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Exception as error:
        # A machine can fail in unforeseen ways; the other checks still answer.
        return Check(name, None, f"could not be checked: {type(error).__name__}: {error}")


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    cure = f"make the environment anew with Python {MIN_PYTHON[0]}.{MIN_PYTHON[1]} or later: scripts/demo does"
    return Check("python", tuple(sys.version_info[:2]) >= MIN_PYTHON, version, cure)


def _core() -> Check:
    try:
        importlib.import_module("simulator._core")
    except ImportError as error:
        return Check("rust core", False, str(error), "build it: uv sync --frozen (needs Rust 1.85 or later)")
    return Check("rust core", True, "simulator._core loads")


def _cpus() -> Check:
    usable, total = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    detail = f"{usable} of {total} CPUs usable"
    cure = f"give it {MIN_CPUS} CPUs (taskset, cgroup, VM size): an engine and its load generator need one each"
    return Check("cpus", usable >= MIN_CPUS, detail, cure)


def _quiet() -> Check:
    before = _cpu_ticks()
    time.sleep(STEAL_WINDOW_S)
    spent = [later - earlier for earlier, later in zip(before, _cpu_ticks(), strict=True)]
    steal = spent[7] / max(sum(spent[:8]), 1)  # user nice system idle iowait irq softirq steal (guest is in user)
    load = float((PROC / "loadavg").read_text().split()[0]) / (os.cpu_count() or 1)
    detail = f"{steal:.1%} of CPU time stolen by the host, load {load:.2f} per CPU over the last minute"
    cure = "end other work and wait a minute; where a host steals time, measure on a dedicated machine"
    if steal > MAX_STEAL or load > MAX_LOAD_PER_CPU:
        return Check("quiet machine", False, detail, cure)
    return Check("quiet machine", True if load <= QUIET_LOAD_PER_CPU else None, detail, cure)


def _steady() -> Check:
    slower = cores_slower(sorted(os.sched_getaffinity(0))[:MIN_CPUS])
    cure = "wait until the host's other guests need less, or measure on a machine whose cores are its own"
    return Check("steady cores", slower.quarter <= MAX_SLOWER, slower.in_words(), cure)


def _cpu_ticks() -> list[int]:
    return [int(field) for field in (PROC / "stat").read_text().splitlines()[0].split()[1:]]


def _free_bytes() -> int:
    fields = dict(line.split(":", 1) for line in (PROC / "meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def _memory() -> Check:
    free = _free_bytes()
    detail = f"{free / GIB:.1f} GiB available"
    cure = f"free some: vLLM and LMCache need {MIN_MEMORY_BYTES / GIB:.0f} GiB (the simulator far less)"
    return Check("memory", free >= MIN_MEMORY_BYTES, detail, cure)


def _memory_kept() -> Check:
    rested = RestedPages()
    time.sleep(REST_WINDOW_S)
    if (taken := rested.taken_share()) > MAX_TAKEN_SHARE:
        cure = "wait until the host's other guests need less, or measure on a machine whose memory is its own"
        return Check("memory kept", False, taken_in_words(taken), cure)
    if reporting_order(SYS) is None:
        return Check("memory kept", True, "no host takes free memory back")
    detail = "this machine's host takes free memory back: cold reads and first writes can take several times longer"
    cure = "measure loads of a cold disk on a machine that keeps its memory; samples of warm states touch theirs first"
    return Check("memory kept", None, detail, cure)


def _accelerator() -> Check:
    """What a reference accelerator can stand in for: with it, the GPU's KV lies in RAM as well as the CPU tier's."""
    from simulator.models import CONFIGS, load_model

    each = max(0, _free_bytes() - ENGINE_MEMORY_BYTES) // 2
    room = {name: each // load_model(name).kv_bytes_per_token for name in ACCELERATOR_MODELS}
    gpus = ", ".join(sorted(path.stem for path in (CONFIGS / "hardware").glob("*.yaml")))
    held = ", ".join(f"{tokens:,} of {name}" for name, tokens in room.items())
    detail = f"{gpus}; RAM for tokens of KV, on GPU and in CPU RAM each: {held}"
    cure = f"free some: a prompt of {ACCELERATOR_TOKENS:,} tokens has to fit twice, beside vLLM and LMCache"
    return Check("accelerator", True if room[ACCELERATOR_MODELS[0]] >= ACCELERATOR_TOKENS else None, detail, cure)


def _disk(root: Path) -> Check:
    folder = root / os.environ.get("HARNESS_RESULTS", "results")
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(there).free
    free_for = f"{free / GIB:.1f} GiB free for {folder}"
    elsewhere = f"point HARNESS_RESULTS to a folder with {MIN_DISK_BYTES / GIB:.0f} GiB"
    if not os.access(there, os.W_OK):
        return Check("disk", False, f"{there} can't be written to", f"chown it, or {elsewhere}")
    return Check("disk", free >= MIN_DISK_BYTES, free_for, f"free some, or {elsewhere}")


def _traces(root: Path) -> Check:
    packaged = _trace_names(root / "traces" / "data")
    named = os.environ.get("HARNESS_TRACES")
    if not named:
        cure = "set HARNESS_TRACES to a folder of traces to use more than those"
        return Check("traces", None, f"{packaged} in the package; HARNESS_TRACES is not set", cure)
    folder = Path(named)
    if not folder.is_dir():
        return Check("traces", False, f"HARNESS_TRACES={named} is no folder", "make it, or name another one")
    own = _trace_names(folder)
    cure = "put .jsonl or .json traces there, or name another folder"
    return Check("traces", own != "none", f"{packaged} in the package; {own} in {named}", cure)


def _trace_names(folder: Path) -> str:
    names = sorted(path.name for path in folder.glob("*") if path.suffix in (".jsonl", ".json"))
    return ", ".join(names[:4] + ([f"{len(names) - 4} more"] if len(names) > 4 else [])) or "none"


def _ports() -> Check:
    taken = [str(port) for port in PORTS if _in_use(port)]
    if not taken:
        return Check("ports", True, " and ".join(map(str, PORTS)) + " are free")
    cure = f"end what listens there (ss -ltnp 'sport = :{taken[0]}'), or give the experiment other ports"
    return Check("ports", False, f"in use: {', '.join(taken)}", cure)


def _in_use(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a closing connection is no obstacle
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return True
            raise
    return False


def _gpu() -> Check:
    if not shutil.which("nvidia-smi"):
        return Check("gpu", None, "none: vLLM runs its CPU build, or use --engine sim")
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    cure = "run nvidia-smi and mend the driver; until then measurements run on the CPU"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return Check("gpu", False, f"nvidia-smi did not answer in {COMMAND_TIMEOUT_S} s", cure)
    names = "; ".join(done.stdout.split("\n")).strip("; ")
    if done.returncode or not names:
        return Check("gpu", False, f"nvidia-smi failed: {(done.stderr or done.stdout).strip()[:120]}", cure)
    return Check("gpu", True, names)


def _environments() -> dict[str, Environment]:
    return {name: kind.environment for name, kind in ENGINES.items() if kind.environment is not None}


def _engine(root: Path, name: str, needs: Environment) -> Check:
    """Versions are read from the folder names of installed distributions: importing vLLM takes seconds."""
    label, config, cure = f"engine {name}", root / "configs/engines" / name, f"scripts/engine_env {name}"
    home = root / ".engines" / name
    if not home.is_dir():
        cures = cure if config.with_suffix(".txt").is_file() else None
        return Check(label, None, f"not installed (.engines/{name})", cures)
    versions = _versions(home)
    wanted = [next((d for d in needs.distributions if d in versions), needs.distributions[0]), *needs.also]
    missing = [distribution for distribution in wanted if distribution not in versions]
    if missing:
        return Check(label, False, f".engines/{name} lacks {', '.join(missing)}", f"complete it: {cure}")
    detail = ", ".join(f"{distribution} {versions[distribution]}" for distribution in wanted)
    if not config.with_suffix(".txt").is_file():
        return Check(label, True, detail)
    if _stamp(home) != _fingerprint(config):
        return Check(label, False, f"{detail}, not checked against {config.name}.txt", f"check it: {cure}")
    return Check(label, True, detail)


def _installed_traps(root: Path) -> dict[str, str]:
    return {name: kind.traps for name, kind in ENGINES.items() if kind.traps and (root / ".engines" / name).is_dir()}


def _traps(label: str, told: str) -> Check:
    """No fault of this machine's: what its users run into."""
    return Check(label, True, f"{told} (docs/engines.md)")


def _versions(home: Path) -> dict[str, str]:
    """Distribution name, with dashes, to version, of everything installed in an environment."""
    names = (path.name.removesuffix(".dist-info") for path in home.glob("lib/python3*/site-packages/*.dist-info"))
    parted = (name.partition("-") for name in names)
    return {name.lower().replace("_", "-"): version for name, _, version in parted}


def _stamp(home: Path) -> str | None:
    path = home / ".requirements.sha256"
    return path.read_text().strip() if path.is_file() else None


def _fingerprint(config: Path) -> str:
    """The hash that scripts/engine_env writes into a finished environment."""
    digest = hashlib.sha256(config.with_suffix(".txt").read_bytes())
    overrides = config.with_suffix(".overrides.txt")
    if overrides.is_file():
        digest.update(overrides.read_bytes())
    return digest.hexdigest()


def _root_user() -> Check:
    if os.geteuid() == 0:
        return Check("root", True, "yes")
    cure = "run those with sudo; everything else works without"
    return Check("root", False, "no: page cache drops, block traces and loop devices need it", cure)


def _program(name: str, purpose: str) -> Check:
    path = shutil.which(name)
    if path:
        return Check(name, True, path)
    return Check(name, False, f"not installed; {purpose}", f"sudo apt-get install -y {name}")


def _found(*names: str, home: Path | None = None) -> str | None:
    """The first of these programs on the PATH, or in the folder home."""
    folders = (None, home) if home else (None,)
    return next((path for name in names for folder in folders if (path := shutil.which(name, path=folder))), None)


def _store(label: str, program: str | None, adapter: str) -> Check:
    """A store that a run can start by itself: where it is, and what it says of its version."""
    if program is None:
        needed = f"not installed; only for cache.remote with adapter {adapter}, where it names no endpoint"
        return Check(label, None, needed, "scripts/store_env")
    command, cure = [program, "--version"], f"replace {program}: remove it, then scripts/store_env"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return Check(label, False, f"does not run: {' '.join(str(error).split())}", cure)
    version = re.search(r"\bv?=?(\d+\.\d+(?:\.\d+)*)", done.stdout)
    return Check(label, True, f"{program}, {version[1] if version else 'which tells no version'}")


def _mooncake() -> Check:
    """The libraries that Mooncake's programs are linked with; its wheel brings the rest."""
    packages = {"ibverbs": "libibverbs1", "curl": "libcurl4", "numa": "libnuma1"}
    missing = [package for library, package in packages.items() if find_library(library) is None]
    if not missing:
        return Check("mooncake", True, f"its libraries are there; {MOONCAKE_LISTENS}")
    cure = f"sudo apt-get install -y {' '.join(missing)}"
    return Check("mooncake", None, f"no {', '.join(missing)}; only for cache.pool and cache.remote's mooncake", cure)


def _bpftrace() -> Check:
    found = _program("bpftrace", "needed by block I/O traces (harness io)")
    if not found.ok:
        return found
    if not (SYS / "kernel/btf/vmlinux").exists():
        cure = "use a kernel with CONFIG_DEBUG_INFO_BTF, as distributions' are"
        return Check("bpftrace", False, "the kernel has no BTF, by which descendants of a process are found", cure)
    places = (SYS / "kernel/tracing/events", SYS / "kernel/debug/tracing/events")
    if any(place.is_dir() for place in places):
        return Check("bpftrace", True, f"{found.detail}, tracefs is mounted")
    cure = "sudo mount -t tracefs tracefs /sys/kernel/tracing"
    return Check("bpftrace", False, "tracefs is not mounted, or only root may see it", cure)


def _loop() -> Check:
    if not shutil.which("losetup"):
        return Check("loop devices", False, "losetup is not installed", "sudo apt-get install -y mount")
    if not (DEV / "loop-control").exists():
        cure = "sudo modprobe loop; in a container, give it /dev/loop-control (--privileged)"
        return Check("loop devices", False, "the kernel offers none", cure)
    return Check("loop devices", True, "losetup and loop-control are there")


def _throttle() -> Check:
    """Repeatable storage needs a block throttle: cgroup v1 blkio, or io.max of v2."""
    groups = SYS / "fs/cgroup"
    if (groups / "blkio").is_dir():
        return Check("io throttle", True, "cgroup v1 blkio")
    for home in (groups, groups / "unified"):
        controllers = home / "cgroup.controllers"
        if controllers.is_file() and "io" in controllers.read_text().split():
            return Check("io throttle", True, "cgroup v2 io.max")
    cure = "mount it: mkdir /sys/fs/cgroup/blkio && mount -t cgroup -o blkio none /sys/fs/cgroup/blkio"
    return Check("io throttle", False, "neither cgroup v1 blkio nor v2 io: reference devices can't be paced", cure)


def _file_systems() -> Check:
    packages = {"mkfs.ext4": "e2fsprogs", "mkfs.xfs": "xfsprogs", "mkfs.btrfs": "btrfs-progs"}
    missing = [tool for tool in packages if not shutil.which(tool)]
    if not missing:
        known = {line.split()[-1] for line in (PROC / "filesystems").read_text().splitlines()}
        absent = [name for name in ("f2fs", "nfs") if name not in known]
        told = f"; {' and '.join(absent)} not in this kernel: no disk tier there" if absent else ""
        return Check("file systems", True, f"ext4, xfs and btrfs can be made{told}")
    cure = "sudo apt-get install -y " + " ".join(packages[tool] for tool in missing)
    # Experiments use ext4 by default.
    return Check("file systems", False if "mkfs.ext4" in missing else None, f"no {', '.join(missing)}", cure)
