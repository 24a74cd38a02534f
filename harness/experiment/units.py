"""Sizes and times as people write them: `8GiB`, `400MiB/s`, `30s`. A bare number has no unit and is refused."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator

_SIZES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40} | {
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_NUMBER = re.compile(r"\s*(-?[0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+(?:/s)?)\s*")


def _parse(text: Any, units: dict[str, float], what: str, example: str) -> float:
    match = _NUMBER.fullmatch(text) if isinstance(text, str) else None
    if match is not None and match[1].startswith("-"):
        raise ValueError(f"{text!r} is negative; write a {what} above zero, like {example}")
    if match is not None and match[2] not in units:
        folded = {unit.casefold(): unit for unit in units}
        meant = folded.get(match[2].casefold()) or folded.get(f"{match[2]}/s".casefold())
        if meant:
            raise ValueError(f"{text!r} has no unit of a {what}; did you mean '{match[1]}{meant}'?")
    if match is None or match[2] not in units:
        raise ValueError(f"{text!r} is not a {what}; write it like {example} (units: {', '.join(units)})")
    return float(match[1]) * units[match[2]]


def parse_bytes(text: Any) -> int:
    """`8GiB` → bytes. Raises ValueError with the cure."""
    return round(_parse(text, dict(_SIZES), "size", "8GiB"))


def parse_rate(text: Any) -> float:
    """`400MiB/s` → bytes per second. Raises ValueError with the cure."""
    return _parse(text, {f"{unit}/s": size for unit, size in _SIZES.items()}, "bandwidth", "400MiB/s")


def parse_seconds(text: Any) -> float:
    """`30s` → seconds. Raises ValueError with the cure."""
    return _parse(text, _TIMES, "time", "30s")


def format_bytes(value: float, digits: int = 4) -> str:
    """Binary units with at most `digits` digits, for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.{digits}g}{unit}"
        value /= 1024
    return f"{value:.{digits}g}TiB"


def format_compared(*values: float) -> list[str]:
    """Sizes that a message compares: with so many digits that unequal sizes read as unequal."""
    texts: list[str] = []
    for digits in range(4, 17):
        texts = [format_bytes(value, digits) for value in values]
        if len(set(texts)) == len(set(values)):
            break
    return texts


# A resolved configuration is read back from a manifest, where sizes are plain bytes: numbers written by us pass
# only with the context flag below.
def _bytes_field(value: Any, info: Any) -> int:
    if info.context and info.context.get("resolved") and isinstance(value, int):
        return value
    return parse_bytes(value)


def _seconds_field(value: Any, info: Any) -> float:
    if info.context and info.context.get("resolved") and isinstance(value, int | float):
        return float(value)
    return parse_seconds(value)


def _rate_field(value: Any, info: Any) -> float:
    if info.context and info.context.get("resolved") and isinstance(value, int | float):
        return float(value)
    return parse_rate(value)


Bytes = Annotated[int, BeforeValidator(_bytes_field)]
Seconds = Annotated[float, BeforeValidator(_seconds_field)]
BytesPerS = Annotated[float, BeforeValidator(_rate_field)]
