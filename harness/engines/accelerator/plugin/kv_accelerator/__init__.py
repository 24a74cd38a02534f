"""The reference accelerator inside an engine: its model takes the time that a GPU would, and computes nothing.

The harness puts the folder above on the PYTHONPATH of an engine's process, and of the LMCache server behind it. vLLM
finds `register`, and SGLang its own, by the entry points of the .dist-info beside this package. Nothing is installed,
and an engine that the harness does not start never sees it.

    pace.py         when a step has to end, when a transfer has to end, and how late they were; knows no engine
    settings.py     what the harness asks for, from the environment
    noise.py        memory that neither compresses nor deduplicates; knows no engine
    model.py        vLLM: attention layers of the real shape, no weights, no arithmetic
    scheduler.py    vLLM: the stock scheduler; a step's output is given back when the step's time is over
    link.py         LMCache: its engine-driven transfers, on threads, with nothing copied
    page_locked.py  LMCache's server, run with its RAM mapped whole
    sglang/         SGLang: its model, its steps, and HiCache's copies
"""


def register() -> None:
    """Called by vLLM in each of its processes. Imports of LMCache wait for the model: here they break vLLM's start."""
    from vllm import ModelRegistry

    ModelRegistry.register_model("PacedForCausalLM", "kv_accelerator.model:PacedForCausalLM")
