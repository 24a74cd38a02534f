"""The shell functions that the scripts share."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.paths import ROOT

# In the place of uv: it lists the Pythons of the folder, in the order of their names.
UV = """
. scripts/lib.sh
uv() { for each in "$PYTHONS"/?; do echo "cpython-3.11 $each"; done; }
fast_python
"""


# A stand-in for a Python that takes these seconds, one after the other each time that it is asked.
PYTHON = """#!/bin/sh
echo >> "$0.asked"
set -- {took}
shift $(( ($(wc -l < "$0.asked") - 1) % $# ))
echo "$1 $0"
"""


@pytest.mark.parametrize(
    ("took", "chosen"),
    [
        ({"a": "0.0040", "b": "0.0025", "c": "0.0024"}, "b"),
        ({"a": "0.0028", "b": "0.0025"}, "a"),
        ({"a": None, "b": "0.0025"}, "b"),
        ({"a": "0.0020 0.0040 0.0040", "b": "0.0041 0.0025 0.0025"}, "b"),
        ({"a": "0.0040 0.0040 0.0120", "b": "0.0100"}, "a"),
    ],
    ids=[
        "a sixth slower is not taken",
        "the first of those alike",
        "one that fails is left out",
        "one that met a quiet second gains nothing",
        "one that was interrupted loses nothing",
    ],
)
def test_an_environment_gets_the_first_python_that_is_as_fast_as_any(
    tmp_path: Path, took: dict[str, str | None], chosen: str
) -> None:
    pythons = tmp_path / "pythons"
    pythons.mkdir()
    for name, seconds in took.items():
        path = pythons / name
        path.write_text(PYTHON.format(took=seconds) if seconds else "#!/bin/sh\nexit 1\n")
        path.chmod(0o755)
    env = {name: value for name, value in os.environ.items() if name != "UV_PYTHON"} | {"PYTHONS": str(pythons)}

    def asked(**more: str) -> str:
        command = ["bash", "-c", UV]
        return subprocess.run(command, cwd=ROOT, env=env | more, capture_output=True, text=True, check=True).stdout

    assert asked().strip() == str(pythons / chosen)
    assert asked(UV_PYTHON="3.13").strip() == "3.13"
