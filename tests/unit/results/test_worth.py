"""Off against on: which lengths pay, where break-even lies, and what too few samples may not say."""

import math
from typing import Any

import msgspec
import pytest

from harness.records import Counters, Resolved, Sample
from harness.report.words import TIMES
from harness.report.worth import answer, headings, table
from harness.results.manifest import Attempt, CellEntry, Manifest
from harness.results.provenance import git, host
from harness.results.worth import Worth, break_even_share, judge
from traces.request import RequestRecord

CHUNK, PER_TOKEN = 256, 32768
Side = dict[int, dict[str, list[float]]]


def cell(tokens: int, cpu: int | None) -> CellEntry:
    tiers = ["recompute"] if cpu is None else ["recompute", "cpu", "disk_cold"]
    disk = {"capacity": 2**32} if cpu else None
    config = {
        "name": "worth-x",
        "workload": {"kind": "prefix", "prompt_tokens": tokens + 1},
        "measure": {"tiers": tiers, "samples": 5},
        "cache": {"gpu": 2**30, "cpu": cpu, "disk": disk, "chunk_tokens": CHUNK},
        "engines": {"sim": {"hardware": "cpu-2core"}},
    }
    resolved = Resolved(kv_bytes_per_token=PER_TOKEN, chunk_tokens=CHUNK)
    return CellEntry(key=f"{cpu}/{tokens}", status="complete", config=config, resolved=resolved)


def rows_of(cells: dict[tuple[int | None, int], dict[str, list[float]]]) -> list[RequestRecord]:
    return [
        RequestRecord(
            id=f"{tier}-{index}", cell=f"{cpu}/{tokens}", sample=index, expected_tier=tier, verdict="proven",
            scheduled_s=0.0, sent_s=0.0, first_token_s=ttft_s, last_token_s=ttft_s, prompt_tokens=tokens + 1,
        )
        for (cpu, tokens), tiers in cells.items()
        for tier, times in tiers.items()
        for index, ttft_s in enumerate(times)
    ]  # fmt: skip


def around(middle_s: float, n: int = 5) -> list[float]:
    """n times of which the typical one is the middle, 2 % around it."""
    return [middle_s * math.exp(0.02 * (i - (n - 1) / 2)) for i in range(n)]


def found(off: dict[int, list[float]], on: Side, *, engine: str = "vllm", samples: tuple[Sample, ...] = ()) -> Worth:
    cells: dict[tuple[int | None, int], dict[str, list[float]]]
    cells = {(None, tokens): {"recompute": times} for tokens, times in off.items()}
    cells |= {(2**30, tokens): tiers for tokens, tiers in on.items()}
    manifest = Manifest(
        run_id="worth-x", name="worth-x", status="complete", engine=engine, created_at="2026-01-01T00:00:00Z",
        git=git(), host=host(), versions={}, seed=1, attempts=[Attempt(started_at="2026-01-01T00:00:00Z", pid=1)],
        cells=[cell(tokens, cpu) for cpu, tokens in cells],
    )  # fmt: skip
    return judge(manifest, rows_of(cells), samples)


def on_at(hit_s: float, miss_s: float, n: int = 5) -> dict[str, list[float]]:
    return {"recompute": around(miss_s, n), "cpu": around(hit_s / 2, n), "disk_cold": around(hit_s, n)}


def test_break_even_lies_between_a_slower_and_a_faster_neighbour() -> None:
    """Ratios 0.5 and 4 at 256 and 2,048 tokens: on log axes they cross 1 a third of the way, at 512."""
    one = found({256: around(0.1), 2048: around(0.8)}, {256: on_at(0.2, 0.1), 2048: on_at(0.2, 0.8)})
    [_, disk] = one.onsets
    assert (disk.state, disk.from_tokens, disk.above_tokens, disk.estimate_tokens) == ("disk_cold", 2048, 256, 512)
    assert [p.outcome for p in one.points if p.state == "disk_cold"] == ["slower", "faster"]
    text = answer(one)[0]
    assert text.startswith("disk, page cache cold: worth it from about 512 tokens on")
    assert "between 256 and 2,048 tokens" in text and f"At 2,048 tokens 4.0{TIMES}" in text
    assert "200 ms against 800 ms" in text


def test_an_unclear_length_between_them_gives_a_bracket_and_no_estimate() -> None:
    off = {256: around(0.1), 512: around(0.2), 1024: around(0.8)}
    on = {256: on_at(0.2, 0.1), 512: on_at(0.2, 0.2), 1024: on_at(0.2, 0.8)}
    disk = found(off, on).onsets[-1]
    assert (disk.from_tokens, disk.above_tokens, disk.estimate_tokens) == (1024, 256, None)
    assert disk.unclear_tokens == (512,)


def test_the_shortest_length_may_pay_already_and_the_longest_may_not() -> None:
    all_pay = found({256: around(0.8)}, {256: on_at(0.2, 0.8)})
    assert "from 256 tokens on, the shortest length measured" in answer(all_pay)[0]
    none_pays = found({256: around(0.1)}, {256: on_at(0.3, 0.1)})
    assert none_pays.onsets[-1].from_tokens is None and none_pays.points[-1].hit_rate is None
    assert "not worth it up to 256 tokens" in answer(none_pays)[0] and f"3.0{TIMES}" in answer(none_pays)[0]


@pytest.mark.parametrize("n", [0, 1, 2])
def test_below_three_samples_nothing_is_compared(n: int) -> None:
    one = found({256: around(3.0, 5)}, {256: on_at(0.05, 3.0, n)})
    assert {point.outcome for point in one.points} == {"too few to compare"}
    said = " ".join(answer(one))
    assert "too few to compare (fewer than 3 samples a side)" in said and "no clear difference" not in said
    assert all(row[4] == "too few to compare" and len(row) == len(headings(one)) for row in table(one))


def test_a_dearer_miss_needs_hits_to_pay_for_it() -> None:
    """A miss costs 1.2 s in place of 1.0 s, a hit 0.2 s: (1.2 - 1.0) / (1.2 - 0.2) = 20 % of requests have to hit."""
    point = found({1024: around(1.0)}, {1024: on_at(0.2, 1.2)}).points[-1]
    assert point.hit_rate is not None and point.hit_rate.share == pytest.approx(0.2)
    assert 0.1 < point.hit_rate.low < 0.2 < point.hit_rate.high < 0.3
    said = answer(found({1024: around(1.0)}, {1024: on_at(0.2, 1.2)}))
    assert "breaks even once 20.0 % (" in said[0] and any(
        "slows misses" in line and f"1.2{TIMES}" in line for line in said
    )


def test_the_interval_of_the_share_holds_the_truth_as_often_as_it_says() -> None:
    """200 draws of three sides with a known share: 95 % of the intervals should hold it; 90 % is three sigma below."""
    import numpy as np

    rng = np.random.default_rng(3)
    held = 0
    for _ in range(200):
        sides = [dict(enumerate([s * math.exp(0.05 * rng.standard_normal())] for _ in range(5))) for s in (1, 1.2, 0.2)]
        share = break_even_share(*sides)
        assert share is not None
        held += share.low <= 0.2 <= share.high
    assert held >= 0.9 * 200


def test_a_free_miss_breaks_even_at_once_and_a_slow_hit_never() -> None:
    quick = found({1024: around(1.0)}, {1024: on_at(0.2, 0.9)}).points[-1].hit_rate
    assert quick is not None and quick.share == quick.low == 0.0
    base, miss, hit = ({i: [t] for i, t in enumerate(around(s))} for s in (1.0, 1.1, 1.5))
    never = break_even_share(base, miss, hit)
    assert never is not None and never.share == math.inf


def test_a_server_that_runs_already_is_compared_with_its_own_misses() -> None:
    one = found({}, {1024: on_at(0.2, 1.0)})
    assert one.against == "a miss with the cache server" and one.points[-1].hit_rate is None and not one.misses
    assert one.points[-1].outcome == "faster" and any("cannot be left out" in line for line in answer(one))


def test_a_simulation_says_so_and_claims_no_cost_of_stores() -> None:
    one = found({1024: around(1.0)}, {1024: on_at(0.2, 1.0)}, engine="sim")
    said = answer(one)
    assert said[0].startswith("Simulated with cpu-2core") and one.points[-1].hit_rate is None
    assert any("not modelled" in line for line in said) and not any("breaks even once" in line for line in said)


def test_a_preset_whose_steps_take_time_to_store_has_a_break_even_hit_rate() -> None:
    one = found(
        {1024: [1.0] * 3}, {1024: {"recompute": [1.1] * 3, "cpu": [0.2] * 3, "disk_cold": [0.6] * 3}}, engine="sim"
    )
    shares = {point.state: point.hit_rate for point in one.points}
    assert shares["cpu"] is not None and shares["cpu"].share == pytest.approx(0.1 / 0.9)
    assert shares["disk_cold"] is not None and shares["disk_cold"].share == pytest.approx(0.1 / 0.5)
    assert any("slows misses: at 1,024 tokens" in line for line in answer(one))


def test_an_engine_at_a_gpu_s_pace_says_so_first() -> None:
    one = found({1024: around(1.0)}, {1024: on_at(0.2, 1.0)})
    assert one.accelerator is None and "Paced" not in " ".join(answer(one))
    paced = msgspec.structs.replace(one, accelerator="reference accelerator h9, no GPU")
    assert answer(paced)[0].startswith("Paced by reference accelerator h9, no GPU: real cache server and storage")


def test_writes_are_counted_by_the_cache_server() -> None:
    def sample(index: int, chunks: int | None) -> Sample:
        moved = Counters(computed_tokens=1025, stores_ended=chunks)
        return Sample(cell=f"{2**30}/1024", tier="recompute", index=index, started_s=0.0, ended_s=1.0,
                      verdict="proven", observed=moved, expected=Counters())  # fmt: skip

    arguments: Any = ({1024: around(1.0)}, {1024: on_at(0.2, 1.0)})
    one = found(*arguments, samples=(sample(0, 4), sample(1, 4)))
    assert one.writes is not None and one.writes.bytes_per_token == PER_TOKEN
    assert one.writes.stored_share == pytest.approx(1024 / 1025)
    assert "32KiB for each token stored, 32MiB for a new prompt of 1,024 tokens" in answer(one)[-1]
    silent = found(*arguments, samples=(sample(0, 4), sample(1, None))).writes
    assert silent is not None and silent.stored_share is None
