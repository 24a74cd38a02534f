"""The commands of `harness` for an experiment of the toys."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.support.paths import ROOT


def told(folder: Path, verb: str, *words: str, **config: Any) -> subprocess.CompletedProcess[str]:
    """`harness VERB FOLDER/toy.yaml WORDS`, where the file has that configuration and the toys are in their tables."""
    (folder / "toy.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "tests.support.toy", verb, str(folder / "toy.yaml"), *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
