"""The root of every mistake that a user can make, and those that concern load.

    UserError                 one line: where, what, and the cure; exit code 2
    ├── TraceFileError        a trace cannot be read, found or fetched
    └── SpecError             no load can meet a spec

The simulator's are in simulator/errors.py, the harness's and the whole tree in harness/errors.py.
"""

from __future__ import annotations


class UserError(ValueError):
    """The user's mistake, not a bug. Its text is one line: where, what, and the cure."""


class TraceFileError(UserError):
    """A trace cannot be read, found or fetched."""


class SpecError(UserError):
    """No load can meet this spec. The text names the field, its value, and the cure."""
