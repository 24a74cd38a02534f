"""An object store below LMCache's adapter s3: one object a chunk.

LMCache 0.5.6 asks for BUCKET.HOST:PORT, takes keys from boto3, and remembers which objects there are: they are removed
through its own interface. The store that we start is versitygw, a gateway to a folder; its access log counts reads and,
of what it streams, no bytes. So a relay of ours stands before every object store, and counts what the store sends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Literal

import httpx

from harness.caches.stores import s3_bucket
from harness.caches.stores.base import LOOPBACK, Forget, StoreAccount, StorePlan, address, secret
from harness.caches.stores.link import NetworkLink
from harness.errors import EngineError, PreflightError
from harness.experiment.cache import Remote
from harness.processes.child import Child, child_environment, free_port
from harness.processes.keeper import drop_from_page_cache
from harness.processes.names import can_name

PROGRAM = "versitygw"
_OURS = Path(".engines/stores") / PROGRAM
_DOMAIN = "localhost"
# Its own words for a read that it answered.
_READ = re.compile(r" s3_GetObject .* (?:200|206) \S+ \d+ \d+ \d+ \d+ - ")
# How long the log's line may come after the answer that it tells of.
_LOG_LAG_S = 2.0


class S3Store:
    """A RemoteStore."""

    def __init__(self, plan: StorePlan) -> None:
        self._plan, self._remote = plan, plan.remote
        self._own = plan.remote.endpoint is None
        self._host, self._port = (_DOMAIN, 0) if self._own else address(plan.remote)
        self._child: Child | None = None
        self._link: NetworkLink | None = None
        self._log = plan.folder / "logs" / "s3-access.log"
        self._read_to = self._reads = 0
        self._fills = False  # a bucket that is not ours
        self._keys = {"user": "kvharness", "secret": secrets.token_hex(16)} if self._own else {}

    def _key(self, what: str) -> str:
        return self._keys[what] if self._own else secret(self._remote, what)

    def start(self) -> None:
        target = (self._host, self._port)
        if self._own:
            self._port = free_port()
            target = (LOOPBACK, self._port)
            self._start_gateway()
        self._link = NetworkLink(self._remote.network, target, self._plan, self._port)
        self._link.start()
        self._fills = not self._own

    def _start_gateway(self) -> None:
        # A folder below the gateway's is a bucket.
        (self._plan.scratch / self._remote.bucket).mkdir(parents=True, exist_ok=True)
        argv = [str(s3_program() or PROGRAM), "--port", f"{LOOPBACK}:{self._port}", "--virtual-domain", _DOMAIN]
        argv += ["--region", self._remote.region, "--access-log", str(self._log), "--quiet", "--keep-alive"]
        argv += ["posix", str(self._plan.scratch)]
        env = child_environment(
            {"ROOT_ACCESS_KEY_ID": self._key("user"), "ROOT_SECRET_ACCESS_KEY": self._key("secret")}
        )
        log = self._plan.folder / "logs" / "s3.log"
        self._child = Child("S3 server", argv, log=log, env=env, cores=self._plan.cores, scratch=[self._plan.scratch])
        self._child.start()

    @property
    def children(self) -> tuple[Child, ...]:
        return tuple(filter(None, (self._child, self._link.child if self._link else None)))

    @property
    def names(self) -> dict[str, str]:
        """LMCache's name for the bucket leads to the relay."""
        return {f"{self._remote.bucket}.{self._host}": self._link.host} if self._link else {}

    async def ready(self) -> str:
        if self._child is not None:
            await self._child.wait_until(self._answers, self._plan.start_timeout_s, "see `harness doctor`")
        if self._link is not None:
            await self._link.ready()
        return f"{PROGRAM if self._own else f's3 at {self._remote.endpoint}'}, its bytes counted by a relay"

    async def _answers(self) -> bool:
        async with httpx.AsyncClient(timeout=5) as client:
            with contextlib.suppress(httpx.HTTPError):
                return (await client.get(f"http://{LOOPBACK}:{self._port}/")).status_code < 500
        return False

    def spec(self) -> dict[str, Any]:
        threads = {} if self._remote.threads is None else {"s3_num_io_threads": self._remote.threads}
        return {
            "type": "s3",
            "s3_endpoint": f"{self._remote.bucket}.{self._host}:{self._port}",
            "s3_region": self._remote.region,
            "disable_tls": not self._remote.tls,
            "s3_prefer_http2": False,
            **threads,
        }

    def environment(self) -> dict[str, str]:
        return _environment(self._key("user"), self._key("secret"))

    async def clear(self, forget: Forget) -> None:
        await forget()

    def make_cold(self) -> None:
        drop_from_page_cache(path for path in self._plan.scratch.rglob("*") if path.is_file())

    async def account(self, reads: int) -> StoreAccount:
        assert self._link is not None, "account before start"
        if self._child is None:
            passed = self._link.passed()
            return StoreAccount(sent_bytes=passed.down_bytes, reads=passed.requests, device_bytes=None)
        deadline_s = time.monotonic() + _LOG_LAG_S
        while True:
            self._read_log()
            if self._reads >= reads or time.monotonic() > deadline_s:
                break
            await asyncio.sleep(0.02)
        sent_bytes = self._link.passed().down_bytes
        return StoreAccount(sent_bytes=sent_bytes, reads=self._reads, device_bytes=self._child.storage_read_bytes())

    def _read_log(self) -> None:
        """Adds what the log has told since it was read last, by whole lines."""
        try:
            with self._log.open("rb") as log:
                log.seek(self._read_to)
                told = log.read()
        except OSError as error:
            raise EngineError(f"the store's access log cannot be read ({error})") from None
        whole = told[: told.rfind(b"\n") + 1]
        self._read_to += len(whole)
        self._reads += sum(_READ.search(line) is not None for line in whole.decode(errors="replace").splitlines())

    async def stop(self) -> None:
        if self._fills:
            self._fills = False
            await asyncio.to_thread(_asked_of_bucket, self._remote, self._plan.python, "empty")
        for child in self.children:
            await child.stop()


def _environment(user: str, key: str) -> dict[str, str]:
    return {"AWS_ACCESS_KEY_ID": user, "AWS_SECRET_ACCESS_KEY": key}


def s3_program() -> Path | None:
    """The gateway that would be started; None: there is none."""
    found = shutil.which(PROGRAM)
    return Path(found) if found else _OURS.absolute() if os.access(_OURS, os.X_OK) else None


def check_s3(remote: Remote, python: Path) -> None:
    """Raises PreflightError."""
    where = "cache.remote.adapter s3"
    if subprocess.run([str(python), "-c", "import boto3"], capture_output=True, check=False).returncode:
        raise PreflightError(
            f"{where}: {python} has no boto3, by which LMCache finds keys; run scripts/engine_env vllm"
        )
    if remote.endpoint is None and s3_program() is None:
        raise PreflightError(f"{where}: no {PROGRAM} here; run scripts/store_env, or name cache.remote.endpoint")
    if not can_name():
        raise PreflightError(
            f"{where}: the bucket's host name has to lead to a relay of ours, and this machine lets us make no mount"
            " namespace; run as root"
        )
    if remote.endpoint is not None:
        _check_bucket(remote, python)


def _check_bucket(remote: Remote, python: Path) -> None:
    if complaint := _asked_of_bucket(remote, python, "check"):
        raise PreflightError(f"cache.remote.endpoint {remote.endpoint}: {complaint}")


def _asked_of_bucket(remote: Remote, python: Path, what: Literal["check", "empty"]) -> str:
    """Asks the store in the cache server's environment, which has boto3. Returns the complaint, or ""."""
    env = child_environment(_environment(secret(remote, "user"), secret(remote, "secret")))
    url = f"http{'s' if remote.tls else ''}://{remote.endpoint}"
    argv = [str(python), str(Path(s3_bucket.__file__)), url, remote.region, remote.bucket, what]
    asked = subprocess.run(argv, capture_output=True, text=True, env=env, check=False)
    told = (asked.stdout or asked.stderr).strip().splitlines()
    return (told[-1] if told else "its check failed") if asked.returncode else ""
