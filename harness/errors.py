"""Every error that a command tells in one line, and its exit code. A bug is none of these and keeps its traceback.

UserError (ValueError)    exit code 2: the user's mistake; where, what, and the cure
├── TraceFileError, SpecError                     traces/errors.py
├── ModelError ── CalibrationError, StoreError    simulator/errors.py
├── ConfigError           the experiment file or the command line
├── SettingsError         the chosen engine's settings
├── PreflightError        this machine cannot give what the experiment asks for
├── ResultsError          a run folder cannot be used as asked
├── NotComparable         two runs, or a calibration, cannot be held against each other
├── TracingError          I/O cannot be traced here
├── DeviceError           a reference device cannot be made or destroyed
├── FioError              fio cannot measure here
├── ReplayError           a run's file calls cannot be replayed
└── ServeError            the server cannot be started as asked
RunError (Exception)      the run began and cannot go on
├── EngineError           exit code 1: an engine or a cache server died, or does not answer
└── Interrupted           exit code 128 + signal
"""

from __future__ import annotations

import signal

from traces.errors import UserError


class ConfigError(UserError):
    """The experiment file or the command line is wrong."""


class SettingsError(UserError):
    """The chosen engine's settings cannot work; nothing was started."""


class PreflightError(UserError):
    """This machine cannot give what the experiment asks for."""


class ResultsError(UserError):
    """A run folder cannot be used as asked."""


class NotComparable(UserError):
    """Two runs, or a calibration and a run, cannot be held against each other."""


class TracingError(UserError):
    """I/O cannot be traced here. The text also says what there is without root."""


class DeviceError(UserError):
    """A reference device cannot be made or destroyed as asked."""


class FioError(UserError):
    """fio cannot measure here."""


class ReplayError(UserError):
    """A run's file calls cannot be replayed."""


class ServeError(UserError):
    """The server cannot be started as asked."""


class RunError(Exception):
    """The run began and cannot go on. Its rows so far are kept."""


class EngineError(RunError):
    """An engine or cache server did not start, died, or does not answer. The text names the cure."""


class Interrupted(RunError):
    """Ctrl-C or SIGTERM ended the run; `signal` says which. The folder can be resumed."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.signal = number
