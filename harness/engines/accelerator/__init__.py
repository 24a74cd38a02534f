"""The reference accelerator: a real engine at the pace of a GPU that is not here.

    accelerator = Accelerator("rtx-a5000-nfs", "paced", load_model("llama-3.1-70b"))
    accelerator.environment(report)     # for the engine's process, which then finds the plugin
    read_report(report)                 # counters: what was paced, and how late it ended

The engine, its scheduler, its connector, the cache server and the storage are the real ones. A model without weights
stands for the GPU (`plugin/`, which runs in the engine's environment and which nothing here imports): a step takes the
time that a calibration of configs/hardware/ says, by the simulator's formula, and so does the link to CPU RAM.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import msgspec

from harness.errors import SettingsError
from harness.records import AcceleratorFacts
from simulator.calibration import STEP, TRANSFER, Calibration, load_calibration
from simulator.errors import ModelError
from simulator.models import ModelSpec, load_model

LinkMode = Literal["paced", "copied"]
PLUGIN = Path(__file__).parent / "plugin"
_VARIABLE = "KV_ACCELERATOR"
# Logits are as wide as the vocabulary, and nothing depends on what a token says.
_VOCABULARY = 4096
_MICRO = 1e6
_DEVICES = {"loads": "cpu.read", "stores": "cpu.write"}


class Accelerator:
    """name: of configs/hardware, or a file. link: how KV comes to CPU RAM and back; copied: the cache server's
    own way. where: the key that names it, for refusals.

    Raises SettingsError where there is no such calibration, where it lacks a constant, and where no layer has the
    model's shape.
    """

    def __init__(self, name: str, link: LinkMode, model: ModelSpec, where: str = "engines.vllm.accelerator") -> None:
        if not model.full_attention:
            raise SettingsError(
                f"{where}: {model.name} has layers of other kinds than full attention, and the accelerator has none;"
                " use a model with kv_heads alone"
            )
        try:
            known = load_calibration(name)
            self._constants = {"step": {of: known.constant(of) for of in STEP}}
            if link == "paced":
                for way, device in _DEVICES.items():
                    self._constants[way] = {of: known.constant(f"{device}.{of}") for of in TRANSFER}
        except ModelError as error:
            raise SettingsError(f"{where}: {error}") from None
        self.facts = AcceleratorFacts(
            name=known.name,
            machine=known.machine,
            date=known.date,
            standing=known.standing,
            link=link,
            fitted_on=known.fitted_on.model,
            other_model=None if _is_of(known, model) else model.name,
            assumed=tuple(of for of in self._paced_by() if _is_assumed(known, of)),
        )
        self.shape = msgspec.structs.replace(
            model,
            vocab_size=min(model.vocab_size, _VOCABULARY),
            hidden_size=model.attention_heads,
            intermediate_size=model.attention_heads,
        )

    def _paced_by(self) -> list[str]:
        """Names of the calibration's constants that the pace is made of."""
        return [
            of if kind == "step" else f"{_DEVICES[kind]}.{of}"
            for kind, names in self._constants.items()
            for of in names
        ]

    @property
    def constants(self) -> dict[str, float]:
        """What it keeps to, by the simulator's names: the steps' time, and the link's per byte.

        Without a transfer's latency_s and chunk_s: the engine's and the cache server's messages around each transfer
        add to those, and they are this host's.
        """
        link = {
            f"{device}.{of}": s
            for kind, device in _DEVICES.items()
            for of, s in self._constants.get(kind, {}).items()
            if of.endswith("bytes_per_s")
        }
        return self._constants["step"] | link

    def environment(self, report: Path, *, polls: bool = False) -> dict[str, str]:
        """report: the file, in memory, that the engine's process will keep its totals in. polls: its scheduler asks
        again and again for what its other threads do."""
        asked = json.dumps({"constants": self._constants, "report": str(report), "polls": polls})
        return {_VARIABLE: asked, "PYTHONPATH": str(PLUGIN)}


# What neither a step's time nor a token's bytes follow from.
_UNLIKE = ("name", "vocab_size", "max_position")


def _is_of(calibration: Calibration, model: ModelSpec) -> bool:
    """Whether the constants are of these layers. A model file that is gone is known by its name alone."""
    fitted_on = calibration.fitted_on.model
    try:
        known = load_model(fitted_on)
    except ModelError:
        return fitted_on == model.name
    return all(
        getattr(known, field) == getattr(model, field) for field in known.__struct_fields__ if field not in _UNLIKE
    )


def _is_assumed(calibration: Calibration, name: str) -> bool:
    """Whether a constant takes time that no published time shows. One that equals a fitted constant does not count."""
    found = calibration.assumed.get(name)
    return found is not None and bool(found.value)


def read_report(report: Path, origin_s: float = 0.0) -> dict[str, int | None]:
    """Totals since the engine started, by the names of Counters.named; empty before its first step. origin_s: the run's
    beginning, by time.perf_counter."""
    try:
        tallies: dict[str, dict[str, Any]] = json.loads(report.read_text())
    except (OSError, ValueError):
        return {}
    found: dict[str, int | None] = {}
    for name, (count, sum_s) in tallies.pop("moments").items():
        found[f"{name}_at_us"] = round((sum_s - count * origin_s) * _MICRO)
    for kind, tally in tallies.items():
        found |= {f"{kind}_paced": int(tally["count"]), f"{kind}_late": int(tally["late"])}
        found |= {f"{kind}_{name}_us": round(tally[f"{name}_s"] * _MICRO) for name in ("asked", "overrun")}
    return found
