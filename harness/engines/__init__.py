"""Engines by name. A new engine is a folder with `settings.py`, `kind.py` and its engine, and one line here."""

from __future__ import annotations

from harness.engines.fake.kind import KIND as FAKE
from harness.engines.kind import EngineKind
from harness.engines.openai.kind import KIND as OPENAI
from harness.engines.sglang.kind import KIND as SGLANG
from harness.engines.sim.kind import KIND as SIM
from harness.engines.vllm.kind import KIND as VLLM

ENGINES: dict[str, EngineKind] = {"sim": SIM, "vllm": VLLM, "sglang": SGLANG, "openai": OPENAI, "fake": FAKE}
