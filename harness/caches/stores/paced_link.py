"""A link between a cache server and its store: what passes takes as long as on a network of a given speed.

    python -I -S paced_link.py HOST PORT STORE_HOST STORE_PORT BYTES_PER_S LATENCY_S COUNTS CORES

Listens at HOST:PORT and forwards each connection to STORE_HOST:STORE_PORT. BYTES_PER_S: the link's rate in each
direction, for all connections together; 0 means no limit. LATENCY_S: what the link adds to a round trip, half of it
each way. COUNTS: a file for what has passed, as COUNTED has it. CORES: '0,1', or '-' for any. Prints READY once it
listens.

A byte leaves the link when all bytes before it have left, at the link's rate, and half a latency later. Bytes wait in
pipes, from socket to socket, and are never copied. While the sender had more bytes ready, the link was not idle: time
that this process was late by is made up for, so that a long transfer keeps the rate. This file needs only the standard
library and runs on one thread.
"""

import collections
import contextlib
import ctypes
import fcntl
import mmap
import os
import resource
import select
import signal
import socket
import struct
import sys
import termios
import time

READY = "the link listens"
# Bytes to the store, bytes from it, requests (the first bytes after an answer), connections.
COUNTED = struct.Struct("<QQQQ")
PIPE_BYTES = 2**20
# What is made up for at most: a machine that sleeps longer has no such link.
LATE_S = 0.01
# Sooner than this, waiting for a timer would take longer than looking again.
SPIN_S = 50e-6
PR_SET_TIMERSLACK = 29
CLOCK_MONOTONIC, TFD_NONBLOCK, TFD_TIMER_ABSTIME = 1, 0o4000, 1
TIMER = struct.Struct("<qqqq")
UP, DOWN = 0, 1


class LinkRate:
    """One direction of the link: computes when the bytes that arrive have left it."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._busy_until_s = 0.0

    def left_s(self, now_s: float, size: int, waited: bool) -> float:
        """waited: the bytes were there before the link looked for them."""
        begun_s = max(self._busy_until_s, now_s - LATE_S if waited else now_s)
        self._busy_until_s = begun_s + (size / self._bytes_per_s if self._bytes_per_s else 0.0)
        return self._busy_until_s


class Flow:
    """One direction of one connection. held: bytes in the pipe; ready: those of them that may leave."""

    def __init__(self, source: socket.socket, target: socket.socket, direction: int, pipe_bytes: int) -> None:
        self.source, self.target, self.direction = source, target, direction
        self.read_end, self.write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.write_end, fcntl.F_SETPIPE_SZ, pipe_bytes)
        self.room = fcntl.fcntl(self.write_end, fcntl.F_GETPIPE_SZ)
        self.held = self.ready = 0
        self.more = self.full = self.blocked = self.ended = self.ending = False

    def close(self) -> None:
        os.close(self.read_end)
        os.close(self.write_end)


class Proxy:
    def __init__(self, listener: socket.socket, store: "tuple[str, int]", bytes_per_s: float, latency_s: float) -> None:
        self._listener, self._store, self._half_s = listener, store, latency_s / 2
        self._rates = (LinkRate(bytes_per_s), LinkRate(bytes_per_s))
        self._pipe_bytes = max(PIPE_BYTES, int(2 * bytes_per_s * latency_s))
        self._due = (collections.deque[tuple[float, Flow, int]](), collections.deque[tuple[float, Flow, int]]())
        self._flows: dict[int, tuple[Flow, Flow]] = {}  # by socket: as its source, as its target
        self._masks: dict[int, int] = {}
        self._poll = select.epoll()
        self._timer = Timer()
        self.passed = [0, 0]
        self.requests = self.connections = 0
        self._last = DOWN
        for waking in (listener.fileno(), self._timer.fd):
            self._poll.register(waking, select.EPOLLIN)

    def serve(self, counts: mmap.mmap) -> None:
        while True:
            self._deliver()
            COUNTED.pack_into(counts, 0, *self.passed, self.requests, self.connections)
            for fd, what in self._poll.poll(self._wait()):
                if fd == self._listener.fileno():
                    self._accept()
                elif fd == self._timer.fd:
                    self._timer.clear()
                elif (flows := self._flows.get(fd)) is not None:
                    self._move(flows, what)

    def _wait(self) -> "float | None":
        """0 while bytes leave soon; None: until something comes, or the timer ends."""
        due_s = min((queue[0][0] for queue in self._due if queue), default=None)
        if due_s is None:
            return None
        if due_s - time.monotonic() < SPIN_S:
            return 0
        self._timer.at(due_s - SPIN_S)
        return None

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            client, _ = self._listener.accept()
            store = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            for each in (client, store):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                store.connect(self._store)
            except OSError as error:
                print(f"no connection to the store at {self._store[0]}:{self._store[1]}: {error}", flush=True)
                client.close()
                store.close()
                return
            client.setblocking(False)
            store.setblocking(False)
            up, down = (
                Flow(*ends, direction, self._pipe_bytes)
                for direction, ends in ((UP, (client, store)), (DOWN, (store, client)))
            )
            self._flows[client.fileno()], self._flows[store.fileno()] = (up, down), (down, up)
            self.connections += 1
            for each in (client, store):
                self._masks[each.fileno()] = select.EPOLLIN
                self._poll.register(each.fileno(), select.EPOLLIN)

    def _move(self, flows: "tuple[Flow, Flow]", what: int) -> None:
        taking, giving = flows
        try:
            if what & select.EPOLLOUT:
                self._give(giving)
            if what & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
                self._take(taking)
            for end in (taking.source, giving.source):
                self._ask(end)
        except OSError:
            self._drop(flows)

    def _take(self, flow: Flow) -> None:
        """Takes what has arrived into the pipe, and computes when it leaves the link."""
        if flow.ended:
            return
        waited = flow.more or flow.full
        try:
            size = os.splice(flow.source.fileno(), flow.write_end, max(1, flow.room - flow.held), flags=2)
        except BlockingIOError:
            # Either nothing is there, or the pipe has no slot left for what is.
            flow.full = flow.more = waiting_bytes(flow.source) > 0
            return
        now_s = time.monotonic()
        if not size:
            flow.ended = True
            self._due[flow.direction].append((now_s + self._half_s, flow, 0))
            return
        if flow.direction == UP and self._last == DOWN:
            self.requests += 1
        self._last = flow.direction
        flow.held += size
        flow.more, flow.full = waiting_bytes(flow.source) > 0, flow.held >= flow.room
        left_s = self._rates[flow.direction].left_s(now_s, size, waited)
        self._due[flow.direction].append((left_s + self._half_s, flow, size))

    def _deliver(self) -> None:
        for queue in self._due:
            while queue and queue[0][0] <= time.monotonic():
                _, flow, size = queue.popleft()
                flow.ready += size
                flow.ending = flow.ended and not size
                if flow.source.fileno() < 0:
                    continue  # the connection was dropped meanwhile
                try:
                    self._give(flow)
                    for end in (flow.source, flow.target):
                        self._ask(end)
                except OSError:
                    self._drop(self._flows[flow.source.fileno()])

    def _give(self, flow: Flow) -> None:
        flow.blocked = False
        while flow.ready:
            try:
                size = os.splice(flow.read_end, flow.target.fileno(), flow.ready, flags=2)
            except BlockingIOError:
                flow.blocked = True
                break
            flow.ready -= size
            flow.held -= size
            flow.full = False
            self.passed[flow.direction] += size
        if flow.ending and not flow.held:
            with contextlib.suppress(OSError):
                flow.target.shutdown(socket.SHUT_WR)
            other = self._flows[flow.source.fileno()][1]
            if other.ending and not other.held:
                self._drop((flow, other))

    def _ask(self, end: socket.socket) -> None:
        """Waits for what this socket can do for us now."""
        flows = self._flows.get(end.fileno())
        if flows is None:
            return
        taking, giving = flows
        mask = 0 if taking.full or taking.ended else select.EPOLLIN
        mask |= select.EPOLLOUT if giving.blocked else 0
        if mask != self._masks[end.fileno()]:
            self._masks[end.fileno()] = mask
            self._poll.modify(end.fileno(), mask)

    def _drop(self, flows: "tuple[Flow, Flow]") -> None:
        for flow in flows:
            fd = flow.source.fileno()
            if self._flows.pop(fd, None) is not None:
                del self._masks[fd]
                with contextlib.suppress(OSError):
                    self._poll.unregister(fd)
                flow.close()
        for flow in flows:
            flow.source.close()


def waiting_bytes(source: socket.socket) -> int:
    """What has arrived at the socket and was not taken yet."""
    found = fcntl.ioctl(source.fileno(), termios.FIONREAD, bytes(4))
    return int.from_bytes(found, sys.byteorder)


class Timer:
    """A descriptor that becomes readable at a moment: epoll alone counts in milliseconds."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd: int = self._libc.timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK)

    def at(self, moment_s: float) -> None:
        seconds, rest = divmod(max(1, int(moment_s * 1e9)), 10**9)
        self._libc.timerfd_settime(self.fd, TFD_TIMER_ABSTIME, TIMER.pack(0, 0, seconds, rest), None)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 8)


def main() -> None:
    host, port, store_host, store_port = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    bytes_per_s, latency_s = float(sys.argv[5]), float(sys.argv[6])
    if sys.argv[8] != "-":
        os.sched_setaffinity(0, {int(core) for core in sys.argv[8].split(",")})
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    counted = os.open(sys.argv[7], os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(counted, mmap.PAGESIZE)
    counts = mmap.mmap(counted, mmap.PAGESIZE)
    listener = socket.create_server((host, port), backlog=1024)
    listener.setblocking(False)
    print(READY, flush=True)
    Proxy(listener, (socket.gethostbyname(store_host), store_port), bytes_per_s, latency_s).serve(counts)


if __name__ == "__main__":
    main()
