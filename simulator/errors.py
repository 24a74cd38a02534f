"""Users' mistakes that concern the simulator.

UserError                 traces/errors.py
├── ModelError            a model, calibration or policy cannot be used as named
│   └── CalibrationError  a calibration lacks a constant, or is not whole
└── StoreError            a store for real bytes cannot be made as asked
"""

from __future__ import annotations

from traces.errors import UserError


class ModelError(UserError):
    """A model, calibration or policy cannot be used as named."""


class CalibrationError(ModelError):
    """A calibration lacks a constant that is needed, or is not whole."""


class StoreError(UserError):
    """A store for real bytes cannot be made as asked."""
