"""The command line: every verb's name, where its function is, and what `harness --help` says of it.

A verb's module is imported when the verb runs, so that `harness --help` answers at once. The text here is the first
line of the function's docstring; a test holds the two together.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError, Group

from harness import __version__

_HELP = "Measures what a prefix served from GPU, CPU RAM or disk does to LLM serving, and proves it."
_EXAMPLES = """Examples:

    harness list experiments

    harness init mine.yaml --engine sim

    harness run quickstart --engine sim

    harness run quickstart --engine vllm --set workload.prompt_tokens=8193

    harness sweep thesis_exp2_hit_rate --engine sim --size paper

    harness worth quickstart --engine vllm --set cache.disk.path=/mnt/nvme

    harness serve quickstart --port 8000

    harness calibrate quickstart --engine vllm -o mine.yaml

    harness validate thesis_exp2_hit_rate --calibration mine.yaml

    harness report results/*

    harness doctor
"""


# Verb: module in harness/commands, function, first line of its docstring.
VERBS = {
    "init": ("init", "init", "Writes an experiment file for your model, engine and disk, each key explained."),
    "run": ("run", "run", "Measures an experiment's base point."),
    "sweep": ("run", "sweep", "Measures every point of the file's `sweep` axes, into one folder."),
    "suite": ("suite", "suite", "Runs the tests of a suite that this machine can run, and compares them."),
    "worth": (
        "worth",
        "worth",
        "Answers whether the cache behind the engine is worth it: from which length on, and at what cost.",
    ),
    "calibrate": (
        "calibrate",
        "calibrate",
        "Measures an engine's costs; fits the simulator's constants to them.",
    ),
    "validate": ("validate", "validate", "Holds the calibrated simulator against a real engine: pass, fail, and why."),
    "compare": (
        "validate",
        "compare",
        "Holds two runs against each other: equal before and after, or by how much two set-ups differ.",
    ),
    "serve": ("serve", "serve", "Answers OpenAI requests over HTTP with the simulator's timing."),
    "report": ("report", "report", "Makes summary, table and report.html again, from the rows alone."),
    "capacity": (
        "capacity",
        "capacity",
        "Finds the most users that keep the targets, or those with the highest throughput.",
    ),
    "export": ("export", "export", "Writes runs as one table: CSV, a spreadsheet, or Parquet."),
    "list": ("list", "list_all", "Lists experiments, models, presets, and the runs in ./results."),
    "size": ("size", "size", "Says how many bytes of KV cache a model keeps, by kind of layer."),
    "keys": ("keys", "keys", "Prints every key of an experiment file: unit or choices, default, meaning."),
    "doctor": ("doctor", "doctor", "Says what this machine can and cannot do, each with the cure."),
    "traces list": ("traces", "list_traces", "Lists the catalogue."),
    "traces fetch": ("traces", "fetch", "Downloads a trace and checks its sha256."),
    "device create": ("device", "create_device", "Makes a device with the limits given, and a file system on it."),
    "device list": ("device", "list_devices", "Lists the devices that are there, runs' included."),
    "device destroy": ("device", "destroy_devices", "Unmounts and removes a device."),
    "io characterize": ("io", "characterize", "Compares what runs did to their block devices and files."),
    "io baseline": ("io", "baseline", "Measures what fio reaches in a folder."),
    "io replay": ("io", "replay", "Does a run's file calls again, in order, on another device."),
}
_GROUPS = {
    "traces": "Public traces: what there is, and fetching it.",
    "device": "Reference devices: storage that repeats to a percent. Root.",
    "io": "What the cache does to the disk.",
}


def make_app(tokens: Sequence[str]) -> App:
    """The commands. The verb that the tokens name has all of its docstring for help, the others one line."""
    named = next((verb for verb in (" ".join(tokens[:2]), *tokens[:1]) if verb in VERBS), None)
    made = App(name="harness", help=_HELP, help_epilogue=_EXAMPLES, help_format="plaintext", version=__version__)
    groups = {name: App(name=name, help=text, help_format="plaintext") for name, text in _GROUPS.items()}
    for group in groups.values():
        made.command(group)
    for verb, (module, function, text) in VERBS.items():
        *group_name, name = verb.split()
        parent = groups[group_name[0]] if group_name else made
        parent.command(
            f"harness.commands.{module}:{function}", name=name, help=None if verb == named else text, help_epilogue=""
        )
    return made


def main() -> None:
    """Runs a command.

    Exit codes: 0 done; 1 the run failed or a tier has no row that counts; 2 the user's mistake; 3 a goal is not met;
    130, 143 interrupted; 141 the reader of the output has gone.
    validate and compare: 0 pass; 1 fail; 3 nothing fails and not everything could be resolved.
    compare of unlike set-ups: 0 answered; 3 too few samples for any answer.
    """
    app = make_app(sys.argv[1:])
    app["--help"].group = app["--version"].group = Group("Help")
    try:
        code = app(exit_on_error=False, print_error=False)
        sys.stdout.flush()
    except BrokenPipeError:
        # `harness … | head`: the reader has what it wanted. Python must find nothing to flush at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + signal.SIGPIPE
    except CycloptsError as error:
        print(f"harness: {' '.join(str(error).split())} See harness --help.", file=sys.stderr)
        code = 2
    sys.exit(code)


if __name__ == "__main__":
    main()
