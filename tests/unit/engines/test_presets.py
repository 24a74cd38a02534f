"""The pace of a preset, against steps that were timed and that it was not fitted on."""

from __future__ import annotations

import pytest

from harness.engines.accelerator import Accelerator
from harness.engines.accelerator.plugin.kv_accelerator.pace import StepCost
from simulator.calibration import STEP
from simulator.models import load_model

# New tokens, tokens before them, and the sum of the layers' times in ms: the tables that the preset names.
TIMED = [(512, 32, 48.501), (512, 256, 48.851), (512, 512, 49.345), (1024, 512, 97.573)]


@pytest.fixture
def cost() -> StepCost:
    accelerator = Accelerator("rtx-4090-llama-3.1-8b", "paced", load_model("llama-3.1-8b"))
    assert str(accelerator.facts) == "reference accelerator rtx-4090-llama-3.1-8b, no GPU"
    return StepCost(**{name: accelerator.constants[name] for name in STEP})


@pytest.mark.parametrize(("new", "context", "timed_ms"), TIMED)
def test_a_step_of_the_preset_takes_what_its_layers_took(
    cost: StepCost, new: int, context: int, timed_ms: float
) -> None:
    assert cost.of([(new, context)]) * 1e3 == pytest.approx(timed_ms, rel=0.003)


def test_a_step_of_one_token_takes_what_reading_the_weights_takes(cost: StepCost) -> None:
    assert cost.of([(1, 16)]) * 1e3 == pytest.approx(16.642, rel=0.022)
    # A long context is not in it.
    assert cost.of([(1, 16_384)]) * 1e3 == pytest.approx(18.156 * (1 - 0.064), rel=0.001)
