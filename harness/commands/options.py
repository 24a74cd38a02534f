"""Options that several commands have: each one's type and help text, once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from harness.engines import ENGINES
from harness.engines.kind import EngineName

ExperimentFile = Annotated[Path, Parameter(help="The experiment: a file, or a name of `harness list experiments`.")]
Overrides = Annotated[
    list[str] | None, Parameter(name="--set", help="KEY=VALUE overrides any key of the file, e.g. seed=2. Repeatable.")
]
Size = Annotated[str | None, Parameter(help="One of the file's sizes, e.g. paper.")]
Out = Annotated[Path | None, Parameter(help="The run's folder; it must not exist. Default: results/<run id>.")]
Resume = Annotated[Path | None, Parameter(help="An unfinished run's folder: goes on where it stopped.")]
Goals = Annotated[
    list[str] | None,
    Parameter(
        name="--goal",
        negative="",
        help="What has to be kept, e.g. 'ttft_p90<500ms' or 'disk_cold:ttft_mean<0.3s'; else exit code 3. Repeatable.",
    ),
]
On = Annotated[
    str | None,
    Parameter(help="Spreads the cells of a simulation: local:N (processes), ray (here), or ray:ADDRESS (a cluster)."),
]
LivePort = Annotated[
    int | None, Parameter(name="--live", help="Serves the growing report on this port of 127.0.0.1; 0: any free one.")
]
Tolerance = Annotated[float, Parameter(help="The largest relative error that passes.")]
Rate = Annotated[str | None, Parameter(help="e.g. 400MiB/s")]

# A type checker sees a string: the choices are known when the program runs.
if TYPE_CHECKING:
    _EngineName = EngineName
else:
    _EngineName = Literal[tuple(ENGINES)]
EngineChoice = Annotated[_EngineName, Parameter(help="What serves the load.")]
