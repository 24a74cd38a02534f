"""Workers that are processes of this machine. A worker never outlives the run: the kernel ends it with its parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe

from harness.errors import EngineError
from harness.measure.task import work
from harness.measure.workers import Loadable, WorkerDiedError
from harness.processes.warden import die_with_parent


class _Worker:
    """One process, which answers batches one after another."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        descriptor = theirs.fileno()
        argv = [sys.executable, "-m", "harness.measure.local_workers", str(os.getpid()), str(descriptor)]
        try:
            # A Ctrl-C is the run's to handle: the workers end with it.
            self._process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, pass_fds=[descriptor], start_new_session=True
            )
        except OSError as error:
            raise EngineError(f"a worker cannot be started ({error}); take fewer workers") from None
        finally:
            theirs.close()

    def work(self, batch: bytes) -> bytes:
        """Blocks until the batch is answered. Raises WorkerDiedError."""
        try:
            self._connection.send_bytes(batch)
            return self._connection.recv_bytes()
        except (EOFError, OSError):
            self.end()
            code = self._process.returncode
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise WorkerDiedError(how) from None

    def end(self) -> None:
        """A thread that waits in `work` gets WorkerDiedError."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """After `end`, when no thread waits any more."""
        self._connection.close()


class LocalWorkers:
    """So many processes."""

    def __init__(self, name: str, number: int) -> None:
        self.name, self._number = name, number
        self._workers: list[_Worker] = []
        self._threads = ThreadPoolExecutor(number)

    async def start(self) -> int:
        # From the loop's own thread: a worker ends with the thread that has started it.
        for _ in range(self._number):
            self._workers.append(_Worker())
        return self._number

    async def work(self, worker: int, batch: bytes, _loads: Loadable, /) -> bytes:
        """A process of this machine makes its loads from the same files."""
        loop, one = asyncio.get_running_loop(), self._workers[worker]
        try:
            return await loop.run_in_executor(self._threads, one.work, batch)
        except WorkerDiedError:
            one.close()
            self._workers[worker] = _Worker()
            raise

    async def stop(self) -> None:
        for worker in self._workers:
            worker.end()
        self._threads.shutdown()
        for worker in self._workers:
            worker.close()


def _serve(connection: Connection) -> None:
    while True:
        try:
            batch = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(work(batch))


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]), signal.SIGKILL)
    _serve(Connection(int(sys.argv[2])))
