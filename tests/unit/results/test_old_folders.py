"""Rows and samples that earlier versions wrote stay readable."""

import json
from pathlib import Path

import pyarrow.parquet as pq

from harness.records import Counters
from harness.results.folder import read_rows, read_samples, write_parquet

# One line each, as the version before counters by tier wrote them.
ROW = (
    '{"id":"cpu-00000-000","cell":"base","phase":"measure","sample":0,"attempt":0,"expected_tier":"cpu",'
    '"expected_hit_tokens":512,"verdict":"proven","verdict_reason":null,"scheduled_s":1.0,"sent_s":1.0,'
    '"first_chunk_s":1.5,"first_token_s":1.5,"last_token_s":1.5,"token_s":[],"prompt_tokens":1025,"output_tokens":1,'
    '"cached_tokens":512,"tokens_by_tier":{"computed":513,"gpu":0,"cpu":512,"disk":0,"shared":null},"session":null,'
    '"turn":0,"instance":null,"error":null}'
)
SAMPLE = (
    '{"cell":"base","tier":"cpu","index":0,"attempt":0,"started_s":1.0,"ended_s":1.5,"verdict":"proven","reason":null,'
    '"observed":{"computed_tokens":513,"gpu_hit_tokens":0,"external_tokens":512,"l1_hit_tokens":512,"l2_hit_tokens":0,'
    '"l2_loaded_chunks":3,"stores_begun":4,"stores_ended":5,"storage_read_bytes":6},'
    '"expected":{"computed_tokens":513,"gpu_hit_tokens":0,"external_tokens":512,"l1_hit_tokens":512,"l2_hit_tokens":0,'
    '"l2_loaded_chunks":null,"stores_begun":null,"stores_ended":null,"storage_read_bytes":null},"host":{}}'
)


def folder(path: Path) -> Path:
    (path / "rows.jsonl").write_text(ROW + "\n")
    (path / "samples.jsonl").write_text(SAMPLE + "\n")
    return path


def test_an_old_samples_counters_are_read_by_tier(tmp_path: Path) -> None:
    [sample] = read_samples(folder(tmp_path))
    assert sample.observed == Counters(
        computed_tokens=513,
        hit_tokens={"gpu": 0, "cpu": 512, "disk": 0},
        external_tokens=512,
        loaded_chunks={"disk": 3},
        device_read_bytes={"disk": 6},
        stores_begun=4,
        stores_ended=5,
    )
    assert sample.expected == Counters(
        computed_tokens=513, hit_tokens={"gpu": 0, "cpu": 512, "disk": 0}, external_tokens=512
    )


def test_an_old_rows_tokens_and_the_table_made_of_them(tmp_path: Path) -> None:
    [row] = read_rows(folder(tmp_path))
    assert {source: row.tokens_by_tier.get(source) for source in ("computed", "gpu", "cpu", "disk")} == {
        "computed": 513, "gpu": 0, "cpu": 512, "disk": 0,
    }  # fmt: skip
    write_parquet(tmp_path, [row])
    [flat] = pq.read_table(tmp_path / "requests.parquet").to_pylist()
    tokens = {name: flat[f"{name}_tokens"] for name in ("computed", "gpu", "cpu", "disk", "prompt", "output", "cached")}
    assert tokens == {
        "computed": 513, "gpu": 0, "cpu": 512, "disk": 0, "prompt": 1025, "output": 1, "cached": 512,
    }  # fmt: skip
    assert flat["expected_tier"] == "cpu" and json.loads(ROW)["id"] == flat["id"]


def test_counters_have_names_and_can_be_made_of_them() -> None:
    counters = Counters(computed_tokens=1, hit_tokens={"gpu": 2, "disk": 0}, device_read_bytes={"disk": 5})
    named = {"computed_tokens": 1, "gpu_hit_tokens": 2, "disk_hit_tokens": 0, "disk_device_read_bytes": 5}
    assert counters.named() == named and Counters.of({**named, "external_tokens": None}) == counters
    later = Counters(computed_tokens=4, hit_tokens={"gpu": 2, "cpu": 9}, external_tokens=3)
    assert later.since(counters) == Counters(computed_tokens=3, hit_tokens={"gpu": 0}), "what both report"
