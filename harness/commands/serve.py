"""`harness serve`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from harness.commands.errors import told
from harness.commands.options import ExperimentFile, Overrides, Size


@told
def serve(
    experiment: ExperimentFile,
    /,
    *,
    port: Annotated[int, Parameter(help="0: any free one.")],
    host: Annotated[str, Parameter(help="The address to listen on; 0.0.0.0 for all of the machine's.")] = "127.0.0.1",
    overrides: Overrides = None,
    size: Size = None,
    api_key_env: Annotated[
        str | None, Parameter(help="The environment variable that holds the key to ask for.")
    ] = None,
) -> int:
    """Answers OpenAI requests over HTTP with the simulator's timing.

    Of the experiment, its model, cache sizes and engines.sim count.

    Example: harness serve quickstart --port 8000
    """
    from harness.experiment.read import load_experiment
    from harness.serving.server import serve

    return serve(load_experiment(experiment, overrides or [], size).experiment, host, port, api_key_env)
