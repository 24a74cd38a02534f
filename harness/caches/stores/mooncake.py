"""A Mooncake pool below LMCache: a master and a client that lends RAM, on loopback, and one object a chunk.

LMCache's own adapter for it, `mooncake_store`, needs an extension that LMCache 0.5.6's wheel has not. So LMCache loads
`plugin/kv_mooncake.py`, by its adapter `native_plugin`; it looks for each chunk anew.

The account is the master's: each chunk that a client is sent to, and its bytes. The bytes themselves go from the pool's
memory to LMCache's, by TCP, past the master; LMCache counts a chunk as loaded when it has come whole.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from harness.caches.mooncake_pool import CLIENT_SIDE, MASTER_PROGRAM, MooncakePool, PoolPlan, install_cure
from harness.caches.stores.base import LOOPBACK, Forget, StoreAccount, StorePlan
from harness.errors import PreflightError
from harness.processes.child import Child

# The environment that cache.remote is for: SGLang has no LMCache.
_ENGINE = "vllm"
PLUGIN = Path(__file__).with_name("plugin")
# A client's own buffer, which put_from and get_into do not use.
_LOCAL_BUFFER_BYTES = 16 * 2**20


class MooncakeStore:
    """A RemoteStore."""

    def __init__(self, plan: StorePlan) -> None:
        self._remote = plan.remote
        self._pool = MooncakePool(
            PoolPlan(
                engine=_ENGINE,
                python=plan.python,
                log=lambda name: plan.folder / "logs" / f"{name}.log",
                segment_bytes=plan.remote.capacity,
                cores=plan.cores,
                master_args=plan.args,
                start_timeout_s=plan.start_timeout_s,
            )
        )

    def start(self) -> None:
        self._pool.start()

    @property
    def children(self) -> tuple[Child, ...]:
        return self._pool.children

    @property
    def names(self) -> dict[str, str]:
        return {}

    async def ready(self) -> str:
        await self._pool.ready()
        return f"mooncake {self._pool.version() or 'of no known version'}, by a plugin of LMCache's native_plugin"

    def spec(self) -> dict[str, Any]:
        setup = {
            "local_hostname": LOOPBACK,
            "metadata_server": "P2PHANDSHAKE",
            "global_segment_size": "0",
            "local_buffer_size": str(_LOCAL_BUFFER_BYTES),
            "protocol": "tcp",
            "master_server_addr": self._pool.master,
        }
        threads = {} if self._remote.threads is None else {"num_workers": self._remote.threads}
        return {
            "type": "native_plugin",
            "module_path": "kv_mooncake",
            "class_name": "MooncakeClient",
            "adapter_params": {"setup": setup, **threads},
        }

    def environment(self) -> dict[str, str]:
        return {**CLIENT_SIDE, "PYTHONPATH": str(PLUGIN)}

    async def clear(self, _forget: Forget) -> None:
        await self._pool.remove_all()

    def make_cold(self) -> None:
        """Nothing: chunks are in RAM."""

    async def account(self, _reads: int) -> StoreAccount:
        metrics, client = await self._pool.metrics(), self._pool.client
        return StoreAccount(
            sent_bytes=metrics.total("mem_cache_hit_bytes_total") or 0,
            reads=metrics.total("mem_cache_hit_nums_") or 0,
            device_bytes=client.storage_read_bytes() if client else None,
        )

    async def stop(self) -> None:
        await self._pool.stop()


def check_mooncake(python: Path) -> None:
    """Raises PreflightError."""
    where = "cache.remote.adapter mooncake"
    if not python.with_name(MASTER_PROGRAM).exists():
        raise PreflightError(f"{where}: no {MASTER_PROGRAM} beside {python}; {install_cure(_ENGINE)}")
    tried = subprocess.run([str(python), "-c", "import mooncake.store"], capture_output=True, text=True, check=False)
    if tried.returncode:
        told = (tried.stderr.strip().splitlines() or ["no reason given"])[-1]
        cure = "sudo apt-get install libibverbs1 libcurl4 libnuma1"
        raise PreflightError(f"{where}: {python} cannot load Mooncake ({told}); {cure}")
