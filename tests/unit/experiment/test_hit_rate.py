"""A hit rate names a whole number of chunks, to the digits that the error itself proposes."""

import re

import pytest

from harness.experiment.workloads import hit_tokens


@pytest.mark.parametrize(
    ("prompt_tokens", "hit_rate", "chunks"),
    [(2305, 1 / 3, 3), (2305, 0.333333, 3), (2305, 0.3333, 3), (2305, 0.6667, 6), (2305, 0.0, 0), (2305, 1.0, 9),
     (257, 1.0, 1), (255, 0.5, 0), (1_000_001, 0.5, 1953)],
)  # fmt: skip
def test_a_rate_is_a_share_of_the_whole_chunks_that_can_hit(prompt_tokens: int, hit_rate: float, chunks: int) -> None:
    assert hit_tokens(prompt_tokens, hit_rate, 256) == chunks * 256


@pytest.mark.parametrize(
    ("chunks", "hit_rate"), [(9, 0.33), (9, 0.334), (3, 0.5), (7, 0.9), (4000, 0.50001), (4000, 0.50015)]
)
def test_other_rates_are_refused_and_each_rate_that_the_error_proposes_is_taken(chunks: int, hit_rate: float) -> None:
    prompt_tokens = chunks * 256 + 1
    with pytest.raises(ValueError, match="is not a whole number of chunks") as error:
        hit_tokens(prompt_tokens, hit_rate, 256)
    below, above = map(float, re.findall(r"use ([\d.]+) or ([\d.]+)", str(error.value))[0])
    assert hit_tokens(prompt_tokens, above, 256) - hit_tokens(prompt_tokens, below, 256) == 256
    assert below < hit_rate < above
