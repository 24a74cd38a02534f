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
from typing import Literal

import msgspec

from harness.errors import SettingsError
from harness.records import AcceleratorFacts
from simulator.calibration import STEP, TRANSFER, load_calibration
from simulator.errors import ModelError
from simulator.models import ModelSpec

LinkMode = Literal["paced", "copied"]
ARCHITECTURE = "PacedForCausalLM"
_PLUGIN = Path(__file__).parent / "plugin"
_VARIABLE = "KV_ACCELERATOR"
# What moves KV each way, by the simulator's name of the device.
_LINK = {"loads": "cpu.read", "stores": "cpu.write"}
# Logits are as wide as the vocabulary, and nothing depends on what a token says.
_VOCABULARY = 4096
_MICRO = 1e6


class Accelerator:
    """name: of configs/hardware, or a file. link: how KV comes to CPU RAM and back; copied: the cache server's
    own way.

    Raises SettingsError where there is no such calibration, where it lacks a constant, and where no layer has the
    model's shape.
    """

    def __init__(self, name: str, link: LinkMode, model: ModelSpec) -> None:
        if model.mla_latent_dim is not None:
            raise SettingsError(
                f"engines.vllm.accelerator: {model.name} has latent attention, which it has no layers for; use a model"
                " with kv_heads alone"
            )
        try:
            known = load_calibration(name)
            self._paces = {"step": {of: known.constant(of) for of in STEP}}
            for way, device in _LINK.items() if link == "paced" else ():
                self._paces[way] = {of: known.constant(f"{device}.{of}") for of in TRANSFER}
        except ModelError as error:
            raise SettingsError(f"engines.vllm.accelerator: {error}") from None
        self.facts = AcceleratorFacts(
            name=known.name,
            machine=known.machine,
            date=known.date,
            standing=known.standing,
            link=link,
            fitted_on=known.fitted_on.model,
        )
        self.shape = msgspec.structs.replace(
            model,
            vocab_size=min(model.vocab_size, _VOCABULARY),
            hidden_size=model.attention_heads,
            intermediate_size=model.attention_heads,
        )

    @property
    def constants(self) -> dict[str, float]:
        """What it keeps to, by the simulator's names: the steps' time, and the link's per byte.

        Without a transfer's latency_s and chunk_s: the engine's and the cache server's messages around each transfer
        add to those, and they are this host's.
        """
        link = {
            f"{device}.{of}": s
            for kind, device in _LINK.items()
            for of, s in self._paces.get(kind, {}).items()
            if of.endswith("bytes_per_s")
        }
        return self._paces["step"] | link

    def environment(self, report: Path) -> dict[str, str]:
        """report: the file, in memory, that the engine's process will keep its totals in."""
        asked = json.dumps({"constants": self._paces, "report": str(report)})
        return {_VARIABLE: asked, "PYTHONPATH": str(_PLUGIN), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

    @property
    def vllm_arguments(self) -> list[str]:
        """One process for scheduler and model, as vLLM has it on one GPU."""
        return ["--scheduler-cls", "kv_accelerator.scheduler.PacedScheduler", "--distributed-executor-backend", "uni"]


def read_report(report: Path) -> dict[str, int | None]:
    """Totals since the engine started, by the names of Counters.named; empty before its first step."""
    try:
        tallies: dict[str, dict[str, float]] = json.loads(report.read_text())
    except (OSError, ValueError):
        return {}
    found: dict[str, int | None] = {}
    for kind, tally in tallies.items():
        found |= {f"{kind}_paced": int(tally["count"]), f"{kind}_late": int(tally["late"])}
        found |= {f"{kind}_{name}_us": round(tally[f"{name}_s"] * _MICRO) for name in ("asked", "overrun")}
    return found
