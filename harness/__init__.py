"""The runner: experiments in, proven results out."""

from importlib.metadata import version

__version__ = version("kv-harness")
