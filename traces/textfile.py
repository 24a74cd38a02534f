"""A trace file's bytes, and the one format of error messages about them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from traces.errors import TraceFileError


class TraceFile:
    """The bytes of a text file. Raises TraceFileError for any other file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.is_dir():
            raise self.error(None, "is a directory (not a file)", "name one trace file in it")
        if path.exists() and not path.is_file():
            raise self.error(None, "is a device, pipe or socket (not a file)", "save it as a file first")
        try:
            self.data = path.read_bytes()
        except (OSError, ValueError) as error:
            problem = f"cannot be read ({getattr(error, 'strerror', None) or error})"
            raise self.error(None, problem, "check the path and its permissions") from None
        if self.data.startswith(b"\x1f\x8b"):
            raise self.error(None, "is gzip-compressed (1f 8b)", "unpack it first: gunzip --keep FILE")
        if (at := self.data.find(b"\0")) >= 0:
            problem = "is a binary file (a NUL byte)"
            raise self.error(self.line_at(at), problem, "give JSON or JSONL text in UTF-8")
        try:
            self.data.decode()
        except UnicodeDecodeError as error:
            problem = f"is not UTF-8 (byte 0x{self.data[error.start]:02x})"
            raise self.error(self.line_at(error.start), problem, "convert it to UTF-8") from None
        self.text = self.data.removeprefix(b"\xef\xbb\xbf")
        if not self.text.strip():
            problem = f"is empty ({len(self.data)} bytes)"
            raise self.error(None, problem, "give a trace with at least one request")

    def line_at(self, offset: int) -> int:
        return self.data.count(b"\n", 0, offset) + 1

    def lines(self) -> Iterable[tuple[int, bytes]]:
        """(line number, content) of each line that is not blank."""
        return ((n, line) for n, line in enumerate(self.text.split(b"\n"), 1) if line and not line.isspace())

    def objects(self) -> Iterable[tuple[int, bytes]]:
        """(line number, content) of each line that is not blank; of the whole file where one object spans it."""
        number, first = next(iter(self.lines()))
        if first.lstrip().startswith(b"{") and not _is_json(first) and _is_json(self.text):
            return [(number, self.text)]
        return self.lines()

    def places(self, whole: bytes, line: int, entries: Iterable[msgspec.Raw]) -> Iterable[tuple[int, bytes]]:
        """(line number, content) of each part that msgspec left undecoded of `whole`, which begins on that line."""
        end = 0
        for entry in entries:
            raw = bytes(entry)
            begin = whole.index(raw, end)
            line += whole.count(b"\n", end, begin)
            yield line, raw
            line, end = line + raw.count(b"\n"), begin + len(raw)

    def error(self, line: int | None, problem: str, cure: str) -> TraceFileError:
        where = f"{self.path}" if line is None else f"{self.path}:{line}"
        return TraceFileError(re.sub(r"\s+", " ", f"{where}: {problem}; {cure}"))

    def once(self, lines: dict[Any, int], line: int, field: str, name: Any, cure: str) -> None:
        """Notes in `lines` which line has that name. Raises TraceFileError where an earlier one has it."""
        if name in lines:
            raise self.error(line, f"{field}: is that of line {lines[name]} too ({name!r})", cure)
        lines[name] = line

    def decode(
        self, decoder: msgspec.json.Decoder[Any], line: int, raw: bytes, cures: dict[str, str], within: str = ""
    ) -> Any:
        """Decodes raw to the decoder's type. cures maps a field to its cure; '' is the cure for all other errors.

        within: where raw stands in the line's object, such as `requests[3]`.
        """
        try:
            return decoder.decode(raw)
        except msgspec.ValidationError as error:
            problem, _, place = str(error).partition(" - at `$")
            place = place.removesuffix("`")
            field = re.match(r"\.(\w+)", place)
            name = field[1] if field else ""
            value = shorten(_value_at(raw, place)) if place else shorten(raw.decode())
            spot = f"{within}{place}".lstrip(".")
            spot = f"{spot}: " if spot else ""
            raise self.error(line, f"{spot}{problem} ({value})", cures.get(name, cures[""])) from None
        except (msgspec.DecodeError, RecursionError) as error:
            problem = f"is not JSON: {error} ({shorten(raw.decode())})"
            cure = "write valid JSON, one object a line, without NaN or Infinity"
            raise self.error(line, problem, cure) from None


def _is_json(text: bytes) -> bool:
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def _value_at(raw: bytes, place: str) -> Any:
    """The value at a path such as `.hash_ids[3]` of a JSON text; the whole text if the path cannot be followed."""
    try:
        value = msgspec.json.decode(raw)
        for key, index in re.findall(r"\.(\w+)|\[(\d+)\]", place):
            value = value[key] if key else value[int(index)]
    except (msgspec.DecodeError, RecursionError, LookupError, TypeError):
        return raw.decode()
    return value


def shorten(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text.strip() if len(text) <= 60 else f"{text[:57].strip()}..."
