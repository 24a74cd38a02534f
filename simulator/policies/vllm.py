"""vLLM."""

from simulator.policies.engines import EnginePolicy

VLLM = EnginePolicy(name="vllm-0.32", null_blocks=1)
