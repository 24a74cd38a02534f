"""What is not SGLang's own where an accelerator stands for the GPU: each function, what it stands for, and why.

Nothing else differs from the installed SGLang 0.5.23, no file of which is changed. The list goes into the manifest and
the report of every such run, with the line at which our function begins. On a GPU nothing is replaced.
"""

from __future__ import annotations

import ast
from pathlib import Path

from harness.engines.accelerator import PLUGIN
from harness.errors import EngineError
from harness.records import Replacement

_OURS = Path("kv_accelerator/sglang")
# (ours, what it stands for below sglang/srt, why). Ours: FILE:NAME; a constant, a function or a class.
TABLE = (
    ("models/paced.py:SglangPacedForCausalLM", "models/: the model", "takes a GPU's time in place of its arithmetic"),
    (
        "steps.py:request_arrives",
        "managers/scheduler.py: Scheduler.handle_generate_request",
        "runs before it: notes when a request has arrived",
    ),
    ("steps.py:step_begins", "managers/scheduler.py: Scheduler.get_next_batch_to_run", "runs before it: begins a step"),
    ("steps.py:no_step", "managers/scheduler.py: Scheduler.on_idle", "runs before it: no step follows the last one"),
    (
        "hicache.py:without_page_lock",
        "mem_cache/pool_host/mha.py: MHATokenToKVPoolHost.__init__(pin_memory)",
        "page-locking needs CUDA",
    ),
    (
        "hicache.py:with_noise",
        "mem_cache/pool_host/mha.py: MHATokenToKVPoolHost.__init__",
        "runs after it: random bytes in the host pool, where the link is paced",
    ),
    (
        "hicache.py:kept_page",
        "mem_cache/pool_host/mha.py: MHATokenToKVPoolHost.get_dummy_flat_data_page",
        "memory that storage is read into is kept, as torch keeps what CUDA has page-locked",
    ),
    (
        "hicache.py:load_layer",
        "mem_cache/pool_host/mha.py: transfer_kv_per_layer_direct_pf_lf",
        "a CUDA kernel of sgl_kernel: host to device",
    ),
    (
        "hicache.py:store_pages",
        "mem_cache/pool_host/mha.py: transfer_kv_all_layer_direct_lf_pf",
        "a CUDA kernel of sgl_kernel: device to host",
    ),
    (
        "streams.py:Streams",
        "mem_cache/l2_transfer.py and managers/cache_controller.py: device_module",
        "CUDA's streams and events, which let copies run beside the scheduler",
    ),
    (
        "hicache.py:_RESERVE_BYTES",
        "mem_cache/pool_host/base.py: HICACHE_HOST_MEMORY_RESERVE_BYTES",
        "1 GiB of RAM is left to others in place of 10 GiB",
    ),
)


def replaced() -> tuple[Replacement, ...]:
    """The table, with the line of each of ours. Raises EngineError where one is gone."""
    return tuple(Replacement(ours=_line(ours), theirs=theirs, why=why) for ours, theirs, why in TABLE)


def _line(ours: str) -> str:
    file, _, name = ours.partition(":")
    path = PLUGIN / _OURS / file
    for node in ast.parse(path.read_text()).body:
        names = [getattr(node, "name", None)]
        if isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        if name in names:
            return f"{_OURS / file}:{node.lineno} {name}"
    raise EngineError(f"{path} has no {name}; harness/engines/sglang/replaced.py and the plugin are of two versions")
