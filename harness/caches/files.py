"""A folder of chunk files below a cache server: of LMCache 0.5.6's adapters fs and fs_native, of HiCache's pages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from harness.collectors.host import device_name, file_system
from harness.errors import EngineError
from harness.processes.keeper import drop_from_page_cache


class Adapter(NamedTuple):
    """depth: workers that read for all requests in their order; 1: each request reads by itself. serial_chunks: each
    chunk takes an interpreter's time, one at a time."""

    depth: int
    serial_chunks: bool


ADAPTERS = {
    "fs": Adapter(depth=1, serial_chunks=True),
    "fs_native": Adapter(depth=4, serial_chunks=False),
}


@contextlib.contextmanager
def _told(folder: Path) -> Iterator[None]:
    """What a file system refuses in the block becomes an EngineError: a read-only one, or a device that fails."""
    try:
        yield
    except OSError as error:
        raise EngineError(
            f"the disk tier at {folder} fails ({error.strerror}); is it read-only, full, or its device broken?"
            " Mend it, or name another cache.disk.path"
        ) from None


class _Folder:
    """What all backends of a folder have in common: where it lies, and that its server reads it by itself."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def file_system(self) -> str | None:
        return file_system(self.folder)

    @property
    def device(self) -> str | None:
        return device_name(self.folder)

    def read_bytes(self, server_bytes: int | None) -> int | None:
        return server_bytes


class FilesBackend(_Folder):
    """A Backend (caches/base.py) of one file a chunk. adapter None: a running server's folder, which stays. files: the
    pattern of the chunk files' names."""

    def __init__(
        self, folder: Path, adapter: str | None = None, *, odirect: bool = False, files: str = "*.data"
    ) -> None:
        super().__init__(folder)
        self._adapter, self._odirect, self._pattern = adapter, odirect, files

    @property
    def scratch(self) -> tuple[Path, ...]:
        return (self.folder,) if self._adapter else ()

    def prepare(self) -> None:
        if self._adapter:
            with _told(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)

    def spec(self) -> dict[str, Any]:
        assert self._adapter is not None, "a server that runs has its adapter"
        adapter = {"type": self._adapter, "base_path": str(self.folder.absolute())}
        return adapter | ({"use_odirect": True} if self._odirect else {})

    def clear(self) -> None:
        with _told(self.folder):
            for file in self._files():
                file.unlink(missing_ok=True)

    def make_cold(self) -> None:
        """Writes the chunk files back and drops them from the page cache, so that a read reaches the device."""
        with _told(self.folder):
            drop_from_page_cache(self._files())

    def _files(self) -> Iterator[Path]:
        return self.folder.glob(f"**/{self._pattern}")


class BucketFiles(_Folder):
    """A Backend of Mooncake's own files, in a folder that only its client knows how to read. direct: past the page
    cache."""

    def __init__(self, folder: Path, *, direct: bool) -> None:
        super().__init__(folder)
        self._direct = direct

    @property
    def scratch(self) -> tuple[Path, ...]:
        return (self.folder,)

    def prepare(self) -> None:
        with _told(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)

    def spec(self) -> dict[str, Any]:
        return {"path": str(self.folder.absolute()), "io_uring": self._direct}

    def clear(self) -> None:
        """The server removes objects; without it, its files would lack what names them."""

    @property
    def holds_any(self) -> bool:
        """Whether an object is in it."""
        return any(self.folder.rglob("*.bucket"))

    def make_cold(self) -> None:
        with _told(self.folder):
            drop_from_page_cache(self.folder.rglob("*.bucket"))
