"""Whether two run folders hold the same run: every file byte for byte, but for what names its time and its folder."""

from pathlib import Path
from typing import Any

import msgspec

# Of manifest.json: when and by which process, by which command, into which folder.
OF_THE_MOMENT = ("run_id", "command", "created_at", "finished_at", "attempts")
ROWS = ("rows.jsonl", "samples.jsonl")


def manifest(folder: Path) -> dict[str, Any]:
    """Without what names its moment."""
    content = msgspec.json.decode((folder / "manifest.json").read_bytes(), type=dict[str, Any])
    return {key: value for key, value in content.items() if key not in OF_THE_MOMENT}


def without_id(folder: Path, name: str) -> dict[str, Any]:
    content = msgspec.json.decode((folder / name).read_bytes(), type=dict[str, Any])
    return {key: value for key, value in content.items() if key not in ("run_id", "run")}


def assert_same_rows(one: Path, other: Path) -> None:
    for name in ROWS:
        assert (one / name).read_bytes() == (other / name).read_bytes() != b"", name


def assert_same_run(one: Path, other: Path) -> None:
    """Both are sealed."""
    assert_same_rows(one, other)
    assert manifest(one) == manifest(other)
    assert {path.name for path in one.iterdir()} == {path.name for path in other.iterdir()}
    assert (one / "requests.parquet").read_bytes() == (other / "requests.parquet").read_bytes()
    for name in ("summary.json", "ceiling.json"):
        if (one / name).exists():
            assert without_id(one, name) == without_id(other, name), name
