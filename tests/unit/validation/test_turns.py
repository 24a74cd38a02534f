"""Conversations on two sides by turn: sums, requests that are equal, and what is said of them."""

import json
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from harness.report.validation.html import comparison_findings, markdown, terminal_tables, write_comparison
from harness.results.summary import FREE_LOAD
from harness.validation.document import SideFacts, document_of, write_document
from harness.validation.equivalence import PointResult
from harness.validation.points import Repeat, Side
from tests.unit.validation.test_figures import judged, row, side
from traces.request import RequestRecord

SIDE = SideFacts(
    engine="sim", runs=("a",), created_at=None, host={}, git=None, versions={}, gpu_blocks=None, block_tokens=None
)
Hits = Mapping[str, tuple[int | None, int | None]]


def asked(hits: Hits) -> Repeat:
    """A pass: by id, which ends with the turn's number, the tokens hit on the GPU and in CPU RAM of 100."""
    rows: list[RequestRecord] = []
    for name, (gpu, cpu) in hits.items():
        known = None if gpu is None or cpu is None else gpu + cpu
        plain = row(name, 1.0, sent_s=10.0 + len(rows))
        tiers = {"gpu": gpu, "cpu": cpu}
        rows.append(
            msgspec.structs.replace(plain, turn=int(name[-1]), cached_tokens=known, tokens_by_tier=tiers, session=name)
        )
    return Repeat(rows=rows)


def free(*passes: Hits) -> Side:
    return side([asked(one) for one in passes], FREE_LOAD)


FIRST: Hits = {"a0": (0, 0), "b0": (0, 0), "a1": (40, 10), "b1": (20, 30)}


def test_each_turn_has_its_sums_and_the_requests_that_are_equal_in_every_tier() -> None:
    elsewhere = {**FIRST, "a1": (50, 0), "b1": (20, 32)}
    first, second = judged(free(FIRST), free(elsewhere)).turns
    assert (first.turn, first.requests, first.equal, first.prompt_tokens) == (0, 2, 2, 200)
    assert first.hits is not None and first.hits.error == 0.0
    assert (second.turn, second.requests, second.equal) == (1, 2, 0)
    assert second.hits is not None and (second.hits.reference, second.hits.candidate) == (100, 102)
    assert second.hits.error == pytest.approx(0.02)
    assert {tier: (t.reference, t.candidate) for tier, t in second.by_tier.items()} == {
        "gpu": (60, 70),
        "cpu": (40, 32),
    }


def test_passes_are_averaged_the_reference_s_own_range_is_told_and_a_request_has_to_be_equal_in_all() -> None:
    other = {**FIRST, "b1": (20, 10)}
    turns = judged(free(FIRST, other), free(FIRST)).turns
    assert turns[1].equal == 1 and turns[1].hits is not None
    assert (turns[1].hits.reference, turns[1].hits.least, turns[1].hits.most) == (90, 80, 100)


def test_what_one_side_does_not_tell_is_compared_in_nothing() -> None:
    silent: Hits = {name: (None, 0) for name in FIRST}
    turns = judged(free(FIRST), free(silent)).turns
    assert turns[1].hits is None and list(turns[1].by_tier) == ["cpu"] and turns[1].equal == 0


def test_only_what_both_answered_counts_and_loads_without_a_second_turn_have_no_turns() -> None:
    shorter = {name: hits for name, hits in FIRST.items() if name != "b1"}
    assert [turn.requests for turn in judged(free(FIRST), free(shorter)).turns] == [2, 1]
    assert judged(free({"a0": (0, 0)}), free({"a0": (0, 0)})).turns == ()


def cells(*points: PointResult) -> list[PointResult]:
    return [msgspec.structs.replace(point, cell=f"caches={number}") for number, point in enumerate(points)]


def test_terminal_text_page_and_file_say_the_hits_by_turn(tmp_path: Path) -> None:
    same, other = judged(free(FIRST), free(FIRST)), judged(free(FIRST), free({**FIRST, "a1": (40, 8)}))
    document = document_of(cells(same, other), 0.05, name="n", command="", reference=SIDE, candidate=SIDE)
    said = comparison_findings(document)
    assert "load caches=0: all 4 requests hit the same tokens in every tier." in said
    assert (
        "load caches=1: 3 of 4 requests hit the same tokens in every tier; by turn, hits differ at most by -2.0 %"
        " (turn 1)." in said
    )
    _, table = terminal_tables(document)
    assert table.row_count == 4 and "| load caches=1 | 1 | 50.0 % | 49.0 % | -2.0 % | 1 of 2 |" in markdown(document)
    write_document(tmp_path, document)
    write_comparison(tmp_path, document)
    assert "Hits by turn" in (tmp_path / "report.html").read_text()
    [_, kept] = json.loads((tmp_path / "validation.json").read_text())["points"]
    assert [turn["equal"] for turn in kept["turns"]] == [2, 1]
