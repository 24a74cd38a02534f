"""What lies below a cache server: it names itself, is emptied, is made cold, and leaves nothing that was not there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.caches.base import Backend
from harness.caches.files import ADAPTERS, FilesBackend

OWN: dict[str, Callable[[Path], Backend]] = {
    adapter: lambda folder, adapter=adapter: FilesBackend(folder / "own", adapter)  # type: ignore[misc]
    for adapter in ADAPTERS
}
ATTACHED: dict[str, Callable[[Path], Backend]] = {"attached folder": lambda folder: FilesBackend(folder)}
every_backend = pytest.mark.parametrize("make", [*OWN.values(), *ATTACHED.values()], ids=[*OWN, *ATTACHED])


def stored(backend: Backend) -> list[Path]:
    """Chunks as a server leaves them, and one file that holds no chunk."""
    assert isinstance(backend, FilesBackend)
    chunks = [backend.folder / f"ab/{number}.data" for number in range(3)]
    for path in [*chunks, backend.folder / "notes.txt"]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"k" * 4096)
    return chunks


@every_backend
def test_clear_removes_the_chunks_alone_and_may_be_asked_twice(make: Callable[[Path], Backend], tmp_path: Path) -> None:
    backend = make(tmp_path)
    backend.prepare()
    backend.prepare()
    chunks = stored(backend)
    backend.make_cold()
    assert all(path.read_bytes() == b"k" * 4096 for path in chunks)
    backend.clear()
    backend.clear()
    assert not any(path.exists() for path in chunks)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["notes.txt"]


@every_backend
def test_bytes_read_are_reported_or_none_and_never_made_up(make: Callable[[Path], Backend], tmp_path: Path) -> None:
    backend = make(tmp_path)
    assert backend.read_bytes(None) is None and backend.read_bytes(4096) == 4096


@pytest.mark.parametrize("make", OWN.values(), ids=OWN)
def test_a_backend_of_our_own_names_itself_and_goes_with_the_server(
    make: Callable[[Path], Backend], tmp_path: Path
) -> None:
    backend = make(tmp_path)
    backend.prepare()
    assert str(tmp_path) in json.dumps(backend.spec()) and backend.file_system
    assert all(folder.is_dir() and folder.is_relative_to(tmp_path) for folder in backend.scratch) and backend.scratch


def test_a_backend_of_a_running_server_stays(tmp_path: Path) -> None:
    assert ATTACHED["attached folder"](tmp_path).scratch == ()
