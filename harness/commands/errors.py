"""Where errors end: one line on stderr and an exit code. A bug keeps its traceback."""

from __future__ import annotations

import functools
import shlex
import signal
import sys
from collections.abc import Callable
from typing import ParamSpec

from harness.errors import ConfigError, EngineError, Interrupted
from traces.errors import UserError

DONE, RUN_FAILED, USER_ERROR, GOAL_MISSED = 0, 1, 2, 3
P = ParamSpec("P")


def told(work: Callable[P, int]) -> Callable[P, int]:
    """A command whose known errors become one line on stderr and an exit code."""

    @functools.wraps(work)
    def command(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return work(*args, **kwargs)
        except EngineError as error:
            print(f"harness: {error}", file=sys.stderr)
            return RUN_FAILED
        except UserError as error:
            print(f"harness: {error}", file=sys.stderr)
            return USER_ERROR
        except Interrupted as error:
            print(f"harness: {error}", file=sys.stderr)
            return 128 + error.signal
        except KeyboardInterrupt:
            print("harness: interrupted", file=sys.stderr)
            return 128 + signal.SIGINT

    return command


def command_line() -> str:
    """This process's command line, for the report. Keys are in the environment, never here."""
    return shlex.join(["harness", *sys.argv[1:]])


def seconds(option: str, text: str) -> float:
    """An option's time in seconds. Raises ConfigError, which names the option."""
    from harness.experiment.units import parse_seconds

    try:
        return parse_seconds(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None
