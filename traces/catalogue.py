"""Finds traces in the package and in $HARNESS_TRACES, and downloads public ones."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import BinaryIO

import httpx
import msgspec
import yaml

from traces.errors import TraceFileError

DATA = Path(__file__).parent / "data"
ENVIRONMENT = "HARNESS_TRACES"
SUFFIXES = ("", ".jsonl", ".json")
MAX_BYTES = 1 << 30

BytesSoFar = Callable[[int, int | None], None]


class CatalogueEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A trace with a known name. url is None for a trace in the package; sha256 and bytes are None if unverified."""

    format: str
    description: str
    licence: str
    url: str | None
    sha256: str | None
    bytes: int | None


@cache
def _catalogue() -> dict[str, CatalogueEntry]:
    rows = yaml.safe_load((DATA / "catalogue.yaml").read_text(encoding="utf-8"))
    return msgspec.convert(rows, dict[str, CatalogueEntry])


def catalogue() -> dict[str, CatalogueEntry]:
    """The known traces by name, in the order of traces/data/catalogue.yaml."""
    return dict(_catalogue())


def find_trace(name_or_path: str | Path, *, base: Path | None = None) -> Path:
    """The file of a trace. Raises TraceFileError.

    An argument with a '/' is a path relative to `base` (default: the working directory). Any other argument is a name.
    The function looks for NAME, NAME.jsonl and NAME.json in the package, then in the folder of fetched traces.
    """
    given = str(name_or_path)
    if "/" in given or os.sep in given:
        path = (base or Path()) / Path(given).expanduser()
        if not path.exists():
            raise TraceFileError(f"{path}: there is no such trace file ({given}); check the path")
        return path
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*", given):
        raise TraceFileError(f"{given!r}: is not a trace's name ({given!r}); give a plain name, or a path with a '/'")
    for folder in _folders():
        for suffix in SUFFIXES:
            candidate = folder / f"{given}{suffix}"
            if candidate.is_file():
                return _inside(folder, candidate)
    raise TraceFileError(f"{given}: there is no trace of that name ({_looked_in()}); {_cure(given)}")


def fetched() -> Path:
    """Where fetched traces are: $HARNESS_TRACES, else traces/data of the working directory."""
    named = os.environ.get(ENVIRONMENT)
    return Path(named).expanduser() if named else Path("traces/data")


def _folders() -> list[Path]:
    return [DATA, fetched()]


def _looked_in() -> str:
    named = os.environ.get(ENVIRONMENT)
    where = f"looked in the package and in {fetched()}"
    return where if named else f"{where}; ${ENVIRONMENT} is not set"


def _inside(folder: Path, candidate: Path) -> Path:
    target = candidate.resolve()
    if not target.is_relative_to(folder.resolve()):
        raise TraceFileError(f"{candidate}: leads out of its folder ({target}); give the file's path, not a name")
    return candidate


def _cure(name: str) -> str:
    entry = _catalogue().get(name)
    if entry is not None and entry.url is not None:
        return f"run: harness traces fetch {name}"
    if Path(name).is_file():
        return f"for the file here, write ./{name}"
    known = ", ".join(_catalogue())
    return f"give a path with a '/', put it into ${ENVIRONMENT}, or choose one of {known}"


def fetch(name: str, into: Path, *, accept_digest: str | None = None, progress: BytesSoFar | None = None) -> Path:
    """Downloads a trace of the catalogue to into/NAME.jsonl, once. Raises TraceFileError."""
    entry = _catalogue().get(name)
    if entry is None:
        raise TraceFileError(f"{name}: is not in the catalogue ({name}); choose one of {', '.join(_catalogue())}")
    if entry.url is None:
        return find_trace(name)
    return download(entry, into / f"{name}.jsonl", accept_digest=accept_digest, progress=progress)


def download(
    entry: CatalogueEntry,
    target: Path,
    *,
    accept_digest: str | None = None,
    progress: BytesSoFar | None = None,
    max_bytes: int = MAX_BYTES,
) -> Path:
    """Streams an entry's url to target, and creates target only if it is complete and its sha256 is right.

    progress gets (bytes so far, total bytes or None). If the entry has no sha256, accept_digest must equal the
    download's. Raises TraceFileError.
    """
    wanted = entry.sha256 or accept_digest
    if wanted is not None and target.is_file() and _sha256(target) == wanted:
        return target
    if entry.url is None:
        raise TraceFileError(f"{target}: has no url to download from (null); find it by its name")
    part = target.with_name(f"{target.name}.part")
    with _explained(entry.url, target):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with part.open("wb") as sink:
                digest = _stream(entry.url, sink, entry.bytes or max_bytes, progress)
            _check_digest(entry, target, digest, wanted)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
    return target


def _stream(url: str, sink: BinaryIO, max_bytes: int, progress: BytesSoFar | None) -> str:
    """Writes the body and returns its sha256."""
    digest = hashlib.sha256()
    with httpx.stream("GET", url, follow_redirects=True, timeout=30.0) as response:
        response.raise_for_status()
        length = response.headers.get("content-length", "")
        total = int(length) if length.isdigit() and "content-encoding" not in response.headers else None
        done = 0
        for chunk in response.iter_bytes(1 << 16):
            done += len(chunk)
            if done > max_bytes:
                raise TraceFileError(f"{url}: is larger than it may be ({max_bytes} bytes); check the url")
            digest.update(chunk)
            sink.write(chunk)
            if progress is not None:
                progress(done, total)
    return digest.hexdigest()


@contextmanager
def _explained(url: str, target: Path) -> Iterator[None]:
    try:
        yield
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = f"HTTP {error.response.status_code}" if isinstance(error, httpx.HTTPStatusError) else str(error)
        reason = " ".join(reason.split()) or type(error).__name__
        raise TraceFileError(f"{url}: cannot be downloaded ({reason}); download it by hand to {target}") from None
    except OSError as error:
        raise TraceFileError(f"{target}: cannot be written ({error.strerror}); choose another folder") from None


def _check_digest(entry: CatalogueEntry, target: Path, digest: str, wanted: str | None) -> None:
    if wanted is None:
        raise TraceFileError(
            f"{target}: was not kept, for the catalogue has no sha256 to check it by ({digest}); if you trust "
            f"{entry.url}, fetch again with --accept-digest {digest}"
        )
    if digest != wanted:
        raise TraceFileError(
            f"{target}: was not kept, its sha256 is not {wanted} ({digest}); fetch again, or ask the publisher of "
            f"{entry.url} what changed"
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
