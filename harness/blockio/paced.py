"""A file with the exact speed of a block device: its reads and writes take as long as on a device of given limits.

    python -I -S paced.py MOUNT_POINT BACKING SIZE READ_BYTES_PER_S WRITE_BYTES_PER_S READ_IOPS WRITE_IOPS LATENCY_S

MOUNT_POINT: a file, which becomes the device (FUSE; needs root). BACKING: a file that holds the bytes, or '-' for RAM.
A limit of 0 means no limit. SIGUSR1 starts the pacing, so that mkfs can work at full speed before it. The server ends
when the mount point is unmounted. It ignores signals milder than SIGKILL: the mount on top has to go first.

The server handles reads one after another, and writes in a queue of their own. A request starts when it has arrived and
its predecessor is done. It takes max(bytes / bandwidth, 1 / iops), and the server answers it `latency` later. An answer
carries its bytes, so that the server begins it before its time, by what the last ones of its size took (median). The
kernel's own throttle (blkio, io.max) hands out 100 ms of bandwidth at once. Of ten single reads of 1 MiB at 100 MiB/s,
nine take 0.2 ms and the tenth 100 ms. This file needs only the standard library and runs on one thread.
"""

import collections
import contextlib
import ctypes
import errno
import heapq
import mmap
import os
import select
import signal
import struct
import sys
import time

# The kernel's protocol, version 7.31 (linux/fuse.h): numbers of requests, flags of the handshake.
FORGET, GETATTR, OPEN, READ, WRITE, STATFS, RELEASE, FSYNC, FLUSH = 2, 3, 14, 15, 16, 17, 18, 20, 25
INIT, INTERRUPT, DESTROY, BATCH_FORGET = 26, 36, 38, 42
ASYNC_READ, BIG_WRITES, ASYNC_DIO, MAX_PAGES = 1 << 0, 1 << 5, 1 << 15, 1 << 22
FOPEN_DIRECT_IO = 1
MAX_REQUEST_BYTES = 2**20
MODE = 0o100600
REQUEST, REPLY, TRANSFER = struct.Struct("<IIQQIIIHH"), struct.Struct("<IiQ"), struct.Struct("<QQI")
DATA_AT = REQUEST.size + 40
# A request of 1 MiB spends this long in the loop driver and FUSE, copies included, outside this queue (0.15 to 0.4 ms
# on the machine of development). If a request arrives this soon after its predecessor, the device was not idle.
PATH_S = 0.0003
# How many answers of a size say how long the next one takes.
COPIES = 8
PR_SET_TIMERSLACK, PR_SET_IO_FLUSHER = 29, 57


class Pace:
    """The queue of one direction: computes the time at which each arriving request is done."""

    def __init__(self, bytes_per_s: float, iops: float) -> None:
        self._bytes_per_s, self._iops = bytes_per_s, iops
        self._busy_until_s = 0.0

    def done_s(self, arrived_s: float, size: int) -> float:
        takes_s = max(size / self._bytes_per_s if self._bytes_per_s else 0.0, 1 / self._iops if self._iops else 0.0)
        self._busy_until_s = max(self._busy_until_s, arrived_s - PATH_S) + takes_s
        return self._busy_until_s


class PacedFile:
    """The one file of the FUSE mount."""

    def __init__(self, data: mmap.mmap, paces: "dict[int, Pace]", latency_s: float) -> None:
        self._data, self._size = memoryview(data), len(data)
        self._paces, self._latency_s = paces, latency_s
        self._fuse = os.open("/dev/fuse", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._request = bytearray(MAX_REQUEST_BYTES + 65536)
        self._due: list[tuple[float, int, int, int, int]] = []
        self._copied_s: dict[int, collections.deque[float]] = {}
        self._paced = False

    def mount(self, target: str) -> None:
        """Mounts the file at the target. Raises OSError."""
        libc = ctypes.CDLL(None, use_errno=True)
        options = f"fd={self._fuse},rootmode={MODE:o},user_id=0,group_id=0"
        if libc.mount(b"kv-harness", target.encode(), b"fuse", 0, options.encode()):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), target)

    def start_pacing(self, *_: object) -> None:
        self._paced = True

    def serve(self) -> None:
        """Serves requests until the file is unmounted."""
        while True:
            self._answer_due()
            wait_s = max(0.0, self._begin_s() - time.monotonic()) if self._due else None
            if not select.select([self._fuse], [], [], wait_s)[0]:
                continue
            arrived_s = time.monotonic()
            try:
                os.readv(self._fuse, [self._request])
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return
                # The kernel withdrew the request (ENOENT), or none is waiting (EAGAIN, EINTR).
                if error.errno not in (errno.EAGAIN, errno.EINTR, errno.ENOENT):
                    raise
                continue
            self._take(arrived_s)

    def _take(self, arrived_s: float) -> None:
        _, kind, unique, *_ = REQUEST.unpack_from(self._request)
        if kind in (READ, WRITE):
            _, offset, size = TRANSFER.unpack_from(self._request, REQUEST.size)
            if kind == WRITE:
                self._data[offset : offset + size] = memoryview(self._request)[DATA_AT : DATA_AT + size]
            done_s = self._paces[kind].done_s(arrived_s, size) + self._latency_s if self._paced else arrived_s
            heapq.heappush(self._due, (done_s, unique, kind, offset, size))
        elif kind == INIT:
            self._shake_hands(unique)
        elif kind == GETATTR:
            self._reply(unique, self._attributes())
        elif kind == OPEN:
            self._reply(unique, struct.pack("<QII", 0, FOPEN_DIRECT_IO, 0))
        elif kind in (RELEASE, FSYNC, FLUSH, DESTROY):
            self._reply(unique)
        elif kind not in (FORGET, BATCH_FORGET, INTERRUPT):
            self._reply(unique, error=-errno.EOPNOTSUPP if kind == STATFS else -errno.ENOSYS)

    def _begin_s(self) -> float:
        """When to begin the next answer, so that it ends when it is due."""
        due_s, _, kind, _, size = self._due[0]
        if kind == WRITE or not (last_s := self._copied_s.get(size)):
            return due_s
        return due_s - sorted(last_s)[len(last_s) // 2]

    def _answer_due(self) -> None:
        while self._due and (begun_s := time.monotonic()) >= self._begin_s():
            _, unique, kind, offset, size = heapq.heappop(self._due)
            if kind == WRITE:
                self._reply(unique, struct.pack("<II", size, 0))
                continue
            self._reply(unique, self._data[offset : offset + size])
            last_s = self._copied_s.setdefault(size, collections.deque(maxlen=COPIES))
            last_s.append(time.monotonic() - begun_s)

    def _shake_hands(self, unique: int) -> None:
        offered = struct.unpack_from("<IIII", self._request, REQUEST.size)[3]
        flags = (ASYNC_READ | BIG_WRITES | ASYNC_DIO | MAX_PAGES) & offered
        in_flight, pages = 512, MAX_REQUEST_BYTES // mmap.PAGESIZE
        sizes = (in_flight, in_flight, MAX_REQUEST_BYTES, 1, pages, 0, 0)
        self._reply(unique, struct.pack("<IIIIHHIIHHI28x", 7, 31, 0, flags, *sizes))

    def _attributes(self) -> bytes:
        body = struct.pack("<6Q10I", 1, self._size, self._size // 512, 0, 0, 0, 0, 0, 0, MODE, 1, 0, 0, 0, 4096, 0)
        return struct.pack("<QII", 3600, 0, 0) + body

    def _reply(self, unique: int, payload: "bytes | memoryview" = b"", error: int = 0) -> None:
        header = REPLY.pack(REPLY.size + len(payload), error, unique)
        # ENOENT: the process that waited for the answer was killed.
        with contextlib.suppress(FileNotFoundError):
            os.writev(self._fuse, [header, payload] if payload else [header])


def main() -> None:
    target, backing, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
    read_bps, write_bps, read_iops, write_iops, latency_s = map(float, sys.argv[4:9])
    if sys.argv[9] != "-":
        os.sched_setaffinity(0, {int(core) for core in sys.argv[9].split(",")})
    for mild in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(mild, signal.SIG_IGN)
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
    # Allocating memory here must not wait for the kernel to write pages back to this very device.
    prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    paces = {READ: Pace(read_bps, read_iops), WRITE: Pace(write_bps, write_iops)}
    file = PacedFile(_memory(size) if backing == "-" else _file(backing, size), paces, latency_s)
    signal.signal(signal.SIGUSR1, file.start_pacing)
    file.mount(target)
    file.serve()


def _memory(size: int) -> mmap.mmap:
    """RAM in huge pages where the kernel has them: after a pause, 256 small ones make the copy of 1 MiB a slow one."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _file(backing: str, size: int) -> mmap.mmap:
    stored = os.open(backing, os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(stored, size)
    return mmap.mmap(stored, size)


if __name__ == "__main__":
    main()
