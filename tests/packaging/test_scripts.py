"""The shell functions that the scripts share."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.paths import ROOT

# In the place of uv: it lists the Pythons of the folder, in the order of their names.
UV = """
. scripts/lib.sh
uv() { for each in "$PYTHONS"/*; do echo "cpython-3.11 $each"; done; }
fast_python
"""


@pytest.mark.parametrize(
    ("took", "chosen"),
    [
        ({"a": "0.0040", "b": "0.0025", "c": "0.0024"}, "b"),
        ({"a": "0.0028", "b": "0.0025"}, "a"),
        ({"a": "no time: it does not start", "b": "0.0025"}, "b"),
    ],
    ids=["a sixth slower is not taken", "the first of those alike", "one that fails is left out"],
)
def test_an_environment_gets_the_first_python_that_is_as_fast_as_any(
    tmp_path: Path, took: dict[str, str], chosen: str
) -> None:
    for name, said in took.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{'exit 1' if 'no' in said else f'echo {said} $0'}\n")
        path.chmod(0o755)
    env = {name: value for name, value in os.environ.items() if name != "UV_PYTHON"} | {"PYTHONS": str(tmp_path)}

    def asked(**more: str) -> str:
        command = ["bash", "-c", UV]
        return subprocess.run(command, cwd=ROOT, env=env | more, capture_output=True, text=True, check=True).stdout

    assert asked().strip() == str(tmp_path / chosen)
    assert asked(UV_PYTHON="3.13").strip() == "3.13"
