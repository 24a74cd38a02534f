"""A run's growing report on loopback, while it measures: one page that reloads itself, in a process of its own.

    with LivePage(folder, port=0) as page:
        print(page.url)
        ...

The process has the lowest priority and makes a page only when a browser asks, and at most every _EVERY_S: a page that
no browser shows costs the measurement nothing. Its input's end is the run's end, so that it never outlives the run.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

from aiohttp import web

from harness.errors import ConfigError, ResultsError
from harness.report.run.html import report_page

_HOST = "127.0.0.1"
_EVERY_S = 10.0
# After the run's end, a browser that was looking on gets the finished page for so long.
_LINGER_S = 1.5 * _EVERY_S
_WAITING = '<!doctype html><meta http-equiv="refresh" content="2"><title>kv-harness</title><p>The run has no rows yet.'


class LivePage:
    """Serves `folder`'s report until the block ends. port 0: any free one. Raises ConfigError where it is taken."""

    def __init__(self, folder: Path, port: int) -> None:
        self._folder = folder
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._listener.bind((_HOST, port))
            self._listener.listen()
        except (OSError, OverflowError) as error:
            self._listener.close()
            raise ConfigError(f"--live {port}: cannot be served ({error}); choose another port, or 0 for any") from None
        self.url = f"http://{_HOST}:{self._listener.getsockname()[1]}"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> LivePage:
        descriptor = self._listener.fileno()
        command = [sys.executable, "-m", "harness.report.live", str(self._folder), str(descriptor)]
        # A Ctrl-C is the run's to handle: the page ends with it.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, pass_fds=[descriptor], start_new_session=True, stdout=subprocess.DEVNULL
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=2 * _LINGER_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class _Server:
    """The page as it is now; kept for _EVERY_S while the run goes on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._page, self._made_s, self.asked_s = "", -_EVERY_S, -_LINGER_S
        self._lock = asyncio.Lock()
        self.ended, self.finished_page_sent = False, False

    async def answer(self, _: web.Request) -> web.Response:
        self.asked_s = time.monotonic()
        async with self._lock:
            if self.ended or time.monotonic() - self._made_s >= _EVERY_S:
                self._page = await asyncio.to_thread(self._made, self.ended)
                self._made_s = time.monotonic()
        self.finished_page_sent = self.ended
        return web.Response(text=self._page, content_type="text/html", headers={"Cache-Control": "no-store"})

    def _made(self, ended: bool) -> str:
        try:
            page = report_page(self._folder)
        except ResultsError:
            return _WAITING
        again = f'<meta http-equiv="refresh" content="{_EVERY_S:g}">'
        return page if ended else page.replace("<head>", f"<head>\n{again}", 1)


async def _serve(folder: Path, descriptor: int) -> None:
    server, app = _Server(folder), web.Application()
    app.router.add_get("/", server.answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.SockSite(runner, socket.socket(fileno=descriptor)).start()
    await asyncio.to_thread(sys.stdin.read)
    server.ended = True
    end_s = time.monotonic()
    watched = end_s - server.asked_s < _LINGER_S
    while watched and not server.finished_page_sent and time.monotonic() - end_s < _LINGER_S:
        await asyncio.sleep(0.1)
    await runner.cleanup()


if __name__ == "__main__":
    os.nice(19)
    asyncio.run(_serve(Path(sys.argv[1]), int(sys.argv[2])))
