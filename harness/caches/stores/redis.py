"""Redis or Valkey below LMCache's adapter resp: one key a chunk, looked for at each look-up (EXISTS).

Its account is its own INFO: bytes that left it, and GET commands. It has no pages to drop: its chunks are in RAM.
"""

from __future__ import annotations

import contextlib
import shutil
from typing import Any

import redis
import redis.asyncio
from redis.backoff import NoBackoff
from redis.retry import Retry

from harness.caches.stores.base import LOOPBACK, Forget, StoreAccount, StorePlan, address, gone, secret
from harness.caches.stores.link import NetworkLink
from harness.errors import EngineError, PreflightError
from harness.experiment.cache import Remote
from harness.processes.child import Child, child_environment, free_port

PROGRAMS = ("redis-server", "valkey-server")
_TIMEOUT_S = 10.0
# LMCache 0.5.6 names a chunk MODEL@RANK@GROUP@HASH.
_CHUNKS = "*@*@*@*"
_BATCH = 500


class RedisStore:
    """A RemoteStore. Of a store that runs already, database 0, the only one that LMCache reaches."""

    def __init__(self, plan: StorePlan) -> None:
        self._plan, self._remote = plan, plan.remote
        self._own = plan.remote.endpoint is None
        self._host, self._port = (LOOPBACK, 0) if self._own else address(plan.remote)
        self._child: Child | None = None
        self._link: NetworkLink | None = None
        self._client: redis.asyncio.Redis | None = None

    def start(self) -> None:
        if self._own:
            self._port = free_port()
            argv = [redis_program() or PROGRAMS[0], "--bind", LOOPBACK, "--port", str(self._port), "--daemonize", "no"]
            argv += ["--save", "", "--appendonly", "no", "--maxmemory", str(self._remote.capacity)]
            argv += ["--maxmemory-policy", "allkeys-lru"]
            log = self._plan.folder / "logs" / "redis.log"
            self._child = Child("Redis", argv, log=log, env=child_environment({}), cores=self._plan.cores)
            self._child.start()
        if self._remote.network is not None:
            self._link = NetworkLink(self._remote.network, (self._host, self._port), self._plan)
            self._link.start()
        self._client = redis.asyncio.Redis(
            host=self._host,
            port=self._port,
            username=secret(self._remote, "user") or None,
            password=secret(self._remote, "secret") or None,
            socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_TIMEOUT_S,
        )

    @property
    def children(self) -> tuple[Child, ...]:
        return tuple(filter(None, (self._child, self._link.child if self._link else None)))

    @property
    def names(self) -> dict[str, str]:
        return {}

    async def ready(self) -> str:
        if self._child is not None:
            await self._child.wait_until(self._answers, self._plan.start_timeout_s, "see `harness doctor`")
        if self._link is not None:
            await self._link.ready()
        info = await self._info()
        return (
            f"{'valkey' if 'valkey_version' in info else 'redis'} {info.get('valkey_version', info['redis_version'])}"
        )

    async def _answers(self) -> bool:
        assert self._client is not None
        with contextlib.suppress(redis.RedisError):
            return bool(await self._client.ping())
        return False

    def spec(self) -> dict[str, Any]:
        host, port = (LOOPBACK, self._link.port) if self._link else (self._host, self._port)
        threads = {} if self._remote.threads is None else {"num_workers": self._remote.threads}
        return {"type": "resp", "host": host, "port": port, **threads}

    def environment(self) -> dict[str, str]:
        found = {"USERNAME": secret(self._remote, "user"), "PASSWORD": secret(self._remote, "secret")}
        return {f"LMCACHE_RESP_{name}": value for name, value in found.items() if value}

    async def clear(self, _forget: Forget) -> None:
        """LMCache's adapter lists nothing, and looks at each key anew."""
        await self._remove()

    async def _remove(self) -> None:
        assert self._client is not None
        try:
            found = [key async for key in self._client.scan_iter(match=_CHUNKS, count=_BATCH)]
            for first in range(0, len(found), _BATCH):
                await self._client.unlink(*found[first : first + _BATCH])
        except redis.RedisError as error:
            raise gone(self._where, error) from None

    def make_cold(self) -> None:
        """Nothing: chunks are in RAM."""

    async def account(self, _reads: int) -> StoreAccount:
        info = await self._info()
        return StoreAccount(
            sent_bytes=int(info["total_net_output_bytes"]),
            reads=int(info.get("cmdstat_get", {}).get("calls", 0)),
            device_bytes=self._child.storage_read_bytes() if self._child else None,
        )

    async def _info(self) -> dict[str, Any]:
        assert self._client is not None
        try:
            found: dict[str, Any] = await self._client.info("everything")
        except redis.RedisError as error:
            raise gone(self._where, error) from None
        return found

    @property
    def _where(self) -> str:
        return f"redis at {self._host}:{self._port}"

    async def stop(self) -> None:
        if self._client is not None:
            if not self._own:
                with contextlib.suppress(EngineError):
                    await self._remove()
            await self._client.aclose()
            self._client = None
        for child in self.children:
            await child.stop()


def redis_program() -> str | None:
    """The server that would be started; None: there is none."""
    return next((path for name in PROGRAMS if (path := shutil.which(name))), None)


def check_redis(remote: Remote) -> None:
    """Raises PreflightError."""
    if remote.endpoint is None:
        if redis_program() is None:
            raise PreflightError(
                "cache.remote.adapter resp: no redis-server on the PATH; sudo apt-get install -y redis-server, or name"
                " cache.remote.endpoint"
            )
        return
    host, port = address(remote)
    user, password = secret(remote, "user"), secret(remote, "secret")
    where = f"cache.remote.endpoint {remote.endpoint}"
    try:
        with redis.Redis(
            host=host, port=port, username=user or None, password=password or None, socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_TIMEOUT_S, retry=Retry(NoBackoff(), 0),
        ) as client:  # fmt: skip
            keys = client.dbsize()
    except redis.AuthenticationError as error:
        cure = "correct what cache.remote.credentials name" if password else "name them in cache.remote.credentials"
        raise PreflightError(f"{where}: the server refuses the credentials ({error}); {cure}") from None
    except redis.RedisError as error:
        raise PreflightError(
            f"{where}: no Redis answers ({' '.join(str(error).split())}); start it, or correct it"
        ) from None
    if keys:
        raise PreflightError(
            f"{where}: it holds {keys} keys already, and a run empties its store; name an empty one, or empty it"
        )
