"""The live page: it grows with the rows, reloads itself, and never outlives the run."""

import contextlib
import socket
import time
from pathlib import Path

import httpx
import psutil
import pytest

from harness.errors import ConfigError
from harness.measure.run import run
from harness.report.live import LivePage
from harness.report.refresh import seal
from tests.unit.commands.test_commands import command
from tests.unit.measure.test_run_loop import Quiet, request

REFRESH = 'http-equiv="refresh"'


def served(url: str) -> str:
    """The page, once the server has come up."""
    answer = httpx.get(url, timeout=60)
    assert answer.status_code == 200 and answer.headers["cache-control"] == "no-store"
    return answer.text


def test_it_grows_reloads_itself_and_ends_with_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    pages = []

    class Looks(Quiet):
        def advance(self, n: int = 1) -> None:
            super().advance(n)
            if self.done == 5:
                pages.append(served(page.url))

    with LivePage(folder, 0) as page:
        waiting = served(page.url)
        children = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
        [process] = [child for child in children if "harness.report.live" in child.cmdline()]
        assert process.nice() == 19
        time.sleep(10.5)  # a page is kept for ten seconds
        run(request(tmp_path), Looks())
    assert "no rows yet" in waiting and REFRESH in waiting
    [early] = pages
    assert REFRESH in early and "has not finished" in early
    assert not process.is_running()
    with pytest.raises(httpx.ConnectError):
        httpx.get(page.url)
    assert not (folder / "report.html").exists(), "it writes nothing into the folder"
    seal(folder)
    assert REFRESH not in (folder / "report.html").read_text()


def test_a_port_in_use_is_told_before_anything_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with contextlib.closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--live {port}: cannot be served"):
            LivePage(tmp_path, port)
        out = tmp_path / "out"
        assert command("run", "quickstart", "--engine", "sim", "--live", str(port), "--out", str(out)) == 2
    assert "choose another port, or 0 for any" in capsys.readouterr().err and not out.exists()


def test_a_run_says_where_its_page_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    few = ("--set", "measure.tiers=[gpu]", "--set", "measure.samples=3", "--out", str(tmp_path / "out"))
    assert command("run", "quickstart", "--engine", "sim", "--live", "0", *few) == 0
    assert "live: http://127.0.0.1:" in capsys.readouterr().err
