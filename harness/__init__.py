"""The runner: experiments in, proven results out."""

__version__ = "0.1.0"
