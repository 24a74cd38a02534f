"""The section cache.remote: what is refused, and that a secret is in no part of a configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from harness.caches import CACHES
from harness.caches.stores import STORES, uncounted, unreachable
from harness.caches.stores.base import StorePlan
from harness.errors import PreflightError
from harness.experiment.cache import Cache, Remote
from harness.measure.run import RunRequest, run
from tests.unit.measure import test_run_sim
from tests.unit.measure.test_run_loop import Quiet, measured, request

THEIRS = {"endpoint": "10.0.0.7:9000", "credentials": {"user": "STORE_USER", "secret": "STORE_WORD"}}


def remote(**config: Any) -> Remote:
    return Remote.model_validate({"capacity": "1GiB", "adapter": "resp", **config})


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"credentials": {"secret": "WORD"}}, "credentials and tls are for a store that runs already"),
        ({"endpoint": "someone:hush@10.0.0.7:6379"}, "String should match pattern"),
        ({**THEIRS, "credentials": {"secret": "hush-hush!"}}, "String should match pattern"),
        ({"adapter": "s3", "endpoint": "10.0.0.7:9000"}, "s3 needs credentials"),
        ({"adapter": "s3", **THEIRS, "credentials": {"secret": "WORD"}}, "credentials.user is missing"),
        ({**THEIRS, "tls": True}, "tls is for s3 without a reference network"),
        ({"network": {"bandwidth": "0B/s"}}, "a bandwidth of 0 would never answer"),
        ({"adapter": "mooncake", **THEIRS}, "the harness starts the pool, .* remove endpoint"),
        ({"adapter": "mooncake", "network": {"bandwidth": "1GB/s"}}, "no reference network can stand; remove network"),
    ],
)
def test_what_cannot_be_is_refused(config: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        remote(**config)


def test_a_store_needs_cpu_ram_above_it_and_no_disk_beside_it() -> None:
    store = {"remote": {"capacity": "1GiB", "adapter": "resp"}}
    with pytest.raises(PreflightError, match=r"cache\.remote needs cache\.cpu"):
        CACHES["mp"].check(Cache.model_validate({"gpu": "64MiB", **store}))
    both = Cache.model_validate({"gpu": "64MiB", "cpu": "1GiB", "disk": {"capacity": "1GiB"}, **store})
    with pytest.raises(PreflightError, match="would prove neither; remove one"):
        CACHES["mp"].check(both)


@pytest.mark.parametrize("adapter", sorted(STORES.keys() - {"mooncake"}))
def test_secrets_are_in_the_servers_environment_alone(
    adapter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORE_USER", "someone")
    monkeypatch.setenv("STORE_WORD", "hush-hush")
    asked = remote(adapter=adapter, **THEIRS)
    store = STORES[adapter].make(StorePlan(remote=asked, folder=tmp_path))
    assert {"someone", "hush-hush"} <= set(store.environment().values())
    assert "hush-hush" not in json.dumps([store.spec(), asked.model_dump(mode="json")])
    monkeypatch.delenv("STORE_WORD")
    with pytest.raises(PreflightError, match="the environment variable STORE_WORD is not set; export it"):
        store.environment()


def test_what_is_proven_of_a_store_is_what_it_can_tell() -> None:
    def cache(**config: Any) -> Cache:
        return Cache.model_validate({"gpu": "64MiB", "cpu": "1GiB", "remote": remote(**config)})

    assert unreachable(cache(adapter="s3")) == frozenset() and uncounted(cache(adapter="s3")) == frozenset()
    assert unreachable(cache()) == {"remote_cold"} == unreachable(cache(adapter="s3", **THEIRS))
    assert uncounted(cache(**THEIRS)) == {"remote_device_read_bytes"}


def test_the_simulator_proves_what_its_store_sends_and_has_no_disk_behind_it(tmp_path: Path) -> None:
    network = {"bandwidth": "1.25GB/s", "latency": "200us"}
    cache = {"gpu": "64MiB", "cpu": "1GiB", "remote": {"capacity": "1GiB", "network": network}}
    config = {**test_run_sim.TIERS, "cache": cache}

    def asked(*states: str) -> RunRequest:
        config["measure"] = {**config["measure"], "tiers": states}
        return request(tmp_path, engine="sim", **config)

    rows = measured(run(asked("cpu", "remote"), Quiet()))
    assert {(row.expected_tier, row.verdict) for row in rows} == {("cpu", "proven"), ("remote", "proven")}
    with pytest.raises(PreflightError, match="cannot prove remote_cold"):
        run(asked("remote_cold"), Quiet())
