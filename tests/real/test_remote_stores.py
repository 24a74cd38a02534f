"""Redis and an S3 store alone, each behind a reference network, and a Mooncake pool: life, account, refusals; what
remains when one dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis

from harness.caches.stores import STORES
from harness.caches.stores.base import RemoteStore, StorePlan
from harness.caches.stores.mooncake import MooncakeStore
from harness.caches.stores.redis import RedisStore, redis_program
from harness.caches.stores.s3 import s3_program
from harness.errors import PreflightError
from harness.experiment.cache import Remote
from harness.processes.child import child_environment, free_port
from tests.contract.cases import PYTHON
from tests.support.paths import ROOT
from tests.support.real_runs import Served

boto3 = pytest.importorskip("boto3", reason="boto3 is not installed: nothing puts objects into the S3 store")
pytestmark = pytest.mark.real
NEEDS = {
    "resp": pytest.mark.skipif(redis_program() is None, reason="no redis-server; sudo apt-get install redis-server"),
    "s3": pytest.mark.skipif(s3_program() is None, reason="no versitygw; `scripts/store_env` makes it"),
    "mooncake": pytest.mark.skipif(
        not PYTHON.with_name("mooncake_master").exists(), reason="no Mooncake; `scripts/engine_env vllm` makes it"
    ),
}
# Nothing stands before a Mooncake pool, and test_mooncake.py kills its processes.
BEHIND_A_NETWORK = [name for name in STORES if name != "mooncake"]


def for_stores(adapters: Iterable[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("adapter", [pytest.param(name, marks=NEEDS[name]) for name in adapters])


MIB = 2**20
CHUNKS, CHUNK_BYTES = 8, 2 * MIB
NETWORK = {"bandwidth": "200MB/s", "latency": "200us"}
NAMES = [f"model@00000000@0@{number:064x}" for number in range(CHUNKS)]


def plan(folder: Path, adapter: str, **more: Any) -> StorePlan:
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    remote = Remote.model_validate({"capacity": "256MiB", "adapter": adapter, **more})
    return StorePlan(remote=remote, folder=folder, python=PYTHON if adapter == "mooncake" else Path(sys.executable))


@contextlib.asynccontextmanager
async def started(asked: StorePlan) -> AsyncIterator[RemoteStore]:
    store = STORES[asked.remote.adapter].make(asked)
    store.start()
    try:
        await store.ready()
        yield store
    finally:
        await store.stop()
        await store.stop()


class Client:
    """What LMCache does to the store, by the store's own spec and environment."""

    def __init__(self, store: RemoteStore) -> None:
        spec, env = store.spec(), store.environment()
        self._redis: Any = None
        self._s3: Any = None
        self._plugin = (spec["adapter_params"], env) if isinstance(store, MooncakeStore) else None
        if self._plugin is not None:
            return
        if isinstance(store, RedisStore):
            self._redis = redis.Redis(host=spec["host"], port=spec["port"], password=env.get("LMCACHE_RESP_PASSWORD"))
            return
        self._bucket, _, place = spec["s3_endpoint"].partition(".")
        host = store.names.get(f"{self._bucket}.{place.partition(':')[0]}", "127.0.0.1")
        self._s3 = boto3.client(
            "s3", endpoint_url=f"http://{host}:{place.partition(':')[2]}", region_name=spec["s3_region"],
            aws_access_key_id=env["AWS_ACCESS_KEY_ID"], aws_secret_access_key=env["AWS_SECRET_ACCESS_KEY"],
        )  # fmt: skip

    def _of_plugin(self, what: str) -> Any:
        """The answer of LMCache's plugin, in LMCache's environment."""
        assert self._plugin is not None
        params, env = self._plugin
        argv = [str(PYTHON), str(ROOT / "tests/oracle/mooncake_chunks.py"), json.dumps(params), what, str(CHUNK_BYTES)]
        asked = subprocess.run(
            [*argv, *NAMES], env=child_environment(env), capture_output=True, text=True, timeout=120, check=False
        )
        told = [line for line in asked.stdout.splitlines() if line.startswith("RESULT ")]
        assert told, asked.stderr
        return json.loads(told[0].removeprefix("RESULT "))

    def put(self) -> None:
        if self._plugin is not None:
            assert self._of_plugin("put") == {"stored": CHUNKS}
            return
        for name in NAMES:
            body = os.urandom(CHUNK_BYTES)
            if self._redis is not None:
                self._redis.set(name, body)
            else:
                self._s3.put_object(Bucket=self._bucket, Key=name, Body=body)

    def get(self) -> int:
        """Bytes that came, unharmed."""
        if self._plugin is not None:
            return CHUNK_BYTES * int(self._of_plugin("get")["right"])
        if self._redis is not None:
            return sum(len(self._redis.get(name) or b"") for name in NAMES)
        return sum(len(self._s3.get_object(Bucket=self._bucket, Key=name)["Body"].read()) for name in NAMES)

    def names(self) -> list[str]:
        if self._plugin is not None:
            return [str(name) for name in self._of_plugin("get")["found"]]
        if self._redis is not None:
            return [key.decode() for key in self._redis.scan_iter()]
        return [each["Key"] for each in self._s3.list_objects_v2(Bucket=self._bucket).get("Contents", ())]

    async def forget(self) -> None:
        for name in self.names():
            self._s3.delete_object(Bucket=self._bucket, Key=name)


@for_stores(STORES)
def test_a_store_counts_what_it_sends_and_is_emptied(adapter: str, tmp_path: Path) -> None:
    network = {"network": NETWORK} if adapter in BEHIND_A_NETWORK else {}

    async def live() -> None:
        async with started(plan(tmp_path, adapter, **network)) as store:
            client = Client(store)
            await asyncio.to_thread(client.put)
            before = await store.account(0)
            began_s = time.perf_counter()
            got = await asyncio.to_thread(client.get)
            took_s = time.perf_counter() - began_s
            after = await store.account(CHUNKS)
            assert got == CHUNKS * CHUNK_BYTES and after.reads - before.reads == CHUNKS
            assert got <= after.sent_bytes - before.sent_bytes < 1.01 * got + 65536
            assert not network or took_s >= got / 200e6  # the network lets no byte through earlier
            assert (after.device_bytes or 0) - (before.device_bytes or 0) < 0.01 * got
            await store.clear(client.forget)
            assert client.names() == []

    asyncio.run(live())
    assert {path.name for path in tmp_path.iterdir()} == {"logs"}


@pytest.mark.skipif(s3_program() is None, reason="no versitygw; `scripts/store_env` makes it")
def test_an_object_store_made_cold_reads_its_device(tmp_path: Path) -> None:
    async def live() -> None:
        async with started(plan(tmp_path, "s3")) as store:
            client = Client(store)
            await asyncio.to_thread(client.put)
            store.make_cold()
            before = await store.account(0)
            got = await asyncio.to_thread(client.get)
            after = await store.account(CHUNKS)
            assert before.device_bytes is not None and after.device_bytes is not None
            assert after.device_bytes - before.device_bytes > 0.99 * got

    asyncio.run(live())


@pytest.fixture
def guarded_redis() -> Iterator[int]:
    """A Redis of the user's own, with a password."""
    port = free_port()
    argv = [
        redis_program() or "",
        "--bind",
        "127.0.0.1",
        "--port",
        str(port),
        "--save",
        "",
        "--requirepass",
        "hush-hush",
    ]
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    listens(port)
    yield port
    process.terminate()
    process.wait(10)


def listens(port: int) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise AssertionError(f"nothing listens at {port}")


@NEEDS["resp"]
def test_what_a_users_redis_lacks_is_told_in_one_line(guarded_redis: int, monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"capacity": "1GiB", "adapter": "resp", "endpoint": f"127.0.0.1:{guarded_redis}"}
    named = {"credentials": {"secret": "A_STORES_WORD"}}
    monkeypatch.delenv("A_STORES_WORD", raising=False)

    def told(config: dict[str, Any]) -> str:
        with pytest.raises(PreflightError) as refused:
            STORES["resp"].check(Remote.model_validate(config), PYTHON)
        assert "\n" not in str(refused.value) and "hush-hush" not in str(refused.value)
        return str(refused.value)

    assert "refuses the credentials" in told(here) and "name them in cache.remote.credentials" in told(here)
    assert "the environment variable A_STORES_WORD is not set; export it" in told(here | named)
    monkeypatch.setenv("A_STORES_WORD", "wrong")
    assert "refuses the credentials" in told(here | named)
    monkeypatch.setenv("A_STORES_WORD", "hush-hush")
    STORES["resp"].check(Remote.model_validate(here | named), PYTHON)
    assert "no Redis answers" in told(here | named | {"endpoint": f"127.0.0.1:{free_port()}"})
    with redis.Redis(port=guarded_redis, password="hush-hush") as client:
        client.set("theirs", "kept")
        assert "it holds 1 keys already" in told(here | named)
        assert client.get("theirs") == b"kept"


@NEEDS["s3"]
def test_what_a_users_s3_lacks_is_told_and_a_run_empties_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port, word = free_port(), "hush-hush-hush"
    (tmp_path / "data" / "there").mkdir(parents=True)
    argv = [str(s3_program()), "--port", f"127.0.0.1:{port}", "--quiet", "posix", "--nometa", str(tmp_path / "data")]
    env = child_environment({"ROOT_ACCESS_KEY_ID": "someone", "ROOT_SECRET_ACCESS_KEY": word})
    process = subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL)
    try:
        listens(port)
        here: dict[str, Any] = {
            "capacity": "1GiB", "adapter": "s3", "endpoint": f"127.0.0.1:{port}", "bucket": "there",
            "credentials": {"user": "A_STORES_USER", "secret": "A_STORES_WORD"},
        }  # fmt: skip
        python = Path(sys.executable)

        def told(config: dict[str, Any]) -> str:
            with pytest.raises(PreflightError) as refused:
                STORES["s3"].check(Remote.model_validate(config), python)
            assert "\n" not in str(refused.value) and word not in str(refused.value)
            return str(refused.value)

        monkeypatch.setenv("A_STORES_USER", "someone")
        monkeypatch.setenv("A_STORES_WORD", "wrong")
        assert "refuses the credentials (SignatureDoesNotMatch)" in told(here)
        monkeypatch.setenv("A_STORES_WORD", word)
        STORES["s3"].check(Remote.model_validate(here), python)
        assert "it has no bucket missing; make it" in told(here | {"bucket": "missing"})
        assert "no S3 store answers" in told(here | {"endpoint": f"127.0.0.1:{free_port()}"})

        async def live() -> None:
            (tmp_path / "logs").mkdir()
            asked = StorePlan(remote=Remote.model_validate(here), folder=tmp_path)
            async with started(asked):
                (tmp_path / "data/there/ours").write_text("a chunk")

        asyncio.run(live())
        assert list((tmp_path / "data/there").iterdir()) == []
        (tmp_path / "data/there/theirs").write_text("kept")
        assert "bucket there holds objects already" in told(here)
    finally:
        process.terminate()
        process.wait(10)


SERVES = """
import asyncio, sys
from pathlib import Path
from harness.errors import EngineError
from harness.processes.child import outlive
from tests.real.test_remote_stores import NETWORK, Client, plan, started

async def live():
    async with started(plan(Path(sys.argv[1]), sys.argv[2], network=NETWORK)) as store:
        await asyncio.to_thread(Client(store).put)
        print(*(child.pid for child in store.children), flush=True)
        await outlive(store.children, asyncio.sleep(600))

try:
    asyncio.run(live())
except EngineError as error:
    sys.exit(f"harness: {error}")
"""


def listening(connection: Any) -> int | None:
    """The port that a socket listens at."""
    return connection.laddr.port if connection.status == psutil.CONN_LISTEN else None


@for_stores(BEHIND_A_NETWORK)
@pytest.mark.parametrize("victim", ["store", "network", "harness"])
def test_whoever_is_killed_nothing_stays_running_listening_or_on_disk(
    adapter: str, victim: str, tmp_path: Path
) -> None:
    with Served(SERVES, str(tmp_path), adapter) as served:
        ports = {listening(each) for server in served.servers for each in server.net_connections()} - {None}
        assert ports
        errors = served.kill({"store": 0, "network": 1, "harness": None}[victim], tmp_path)
    assert not any(listening(each) in ports for each in psutil.net_connections())
    if victim != "harness":
        name = "reference network" if victim == "network" else {"resp": "Redis", "s3": "S3 server"}[adapter]
        assert errors.splitlines()[-1].startswith(f"harness: {name} ended during the run (killed by SIGKILL)")
