"""The model of an engine and its cache tiers. Knows no HTTP, no asyncio, no result files, no wall clock."""


class SettingError(ValueError):
    """A model, calibration or policy that cannot be used as named. One line, with the cure."""
