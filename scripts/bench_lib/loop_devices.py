"""Loop devices that `scripts/bench storage` measures on: ext4 on memory, one as fast as it goes, one throttled.

All is mounted in a mount namespace of our own and every loop device is told to go when it is not used any more: when
this process ends, even by SIGKILL, the kernel takes everything apart. Needs root.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

BLKIO = Path("/sys/fs/cgroup/blkio")
MIB = 1 << 20
CLONE_NEWNS = 0x00020000


class Device:
    """A mounted device. name: as in /sys/block. group: throttles the processes that join it; None: no throttle."""

    def __init__(self, folder: Path, name: str, group: Path | None) -> None:
        self.folder, self.name, self.group = folder, name, group

    def moved_bytes(self) -> tuple[int, int]:
        """Bytes read and written since the device's creation, counted by the block layer."""
        fields = Path(f"/sys/block/{self.name}/stat").read_text().split()
        return 512 * int(fields[2]), 512 * int(fields[6])

    def join(self) -> None:
        """Moves this process into the throttled group."""
        if self.group is not None:
            (self.group / "cgroup.procs").write_text(str(os.getpid()))


class LoopDevices:
    """Makes the devices; a context manager that removes whatever the kernel does not remove by itself."""

    def __init__(self, size_mib: int, limit_mib_per_s: int) -> None:
        self._size_mib, self._limit = size_mib, limit_mib_per_s * MIB
        self._group = BLKIO / f"kv-harness-{os.getpid()}"
        self._root = Path()

    def __enter__(self) -> LoopDevices:
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS):
            raise OSError(ctypes.get_errno(), "no mount namespace: run this as root")
        command("mount", "--make-rprivate", "/")
        self._root = Path(tempfile.mkdtemp(prefix="kv-bench-"))
        command("mount", "-t", "tmpfs", "-o", f"size={4 * self._size_mib + 384}M", "tmpfs", str(self._root))
        return self

    def __exit__(self, *_: object) -> None:
        for place in sorted((path for path in self._root.glob("*/") if path.is_mount()), reverse=True):
            command("umount", str(place))
        command("umount", str(self._root))
        self._root.rmdir()
        if self._group.is_dir():
            self._group.rmdir()

    @property
    def folder(self) -> Path:
        """On memory (tmpfs), beside the devices' images."""
        return self._root

    def fast(self) -> Device:
        """A device without limit: memory and the loop driver set its speed."""
        folder, name = self._mounted("fast", self._root / "fast.img", self._size_mib, [])
        return Device(folder, name, None)

    def throttled(self) -> Device:
        """A device at the limit, nested in another one, so that the outer device's statistics include the waiting."""
        if not BLKIO.is_dir():
            raise OSError("no blkio control group at /sys/fs/cgroup/blkio: the throttled device needs cgroup v1")
        inner, name = self._mounted("inner", self._root / "inner.img", self._size_mib + 128, [])
        folder, outer = self._mounted("throttled", inner / "outer.img", self._size_mib, ["--direct-io=on"])
        self._group.mkdir(exist_ok=True)
        number = Path(f"/sys/block/{name}/dev").read_text().strip()
        for way in ("read", "write"):
            (self._group / f"blkio.throttle.{way}_bps_device").write_text(f"{number} {self._limit}")
        return Device(folder, outer, self._group)

    def _mounted(self, name: str, image: Path, size_mib: int, flags: Sequence[str]) -> tuple[Path, str]:
        command("fallocate", "-l", f"{size_mib}M", str(image))
        device = command("losetup", "--find", "--show", *flags, str(image))
        folder = self._root / name
        folder.mkdir()
        try:
            command("mkfs.ext4", "-q", "-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard", device)
            command("mount", device, str(folder))
        finally:
            command("losetup", "--detach", device)  # the kernel detaches it after its last user
        return folder, device.removeprefix("/dev/")


def command(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout.strip()
