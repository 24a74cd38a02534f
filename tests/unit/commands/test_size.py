"""`harness size`."""

import json

import pytest

from harness.commands.size import size


def test_a_user_of_70b_keeps_two_and_a_half_gib(capsys: pytest.CaptureFixture[str]) -> None:
    assert size("llama-3.1-70b", tokens=8192, users=40) == 0
    assert "2.5GiB a sequence of 8,192 tokens; 40 at once: 100GiB" in capsys.readouterr().out


def test_each_kind_of_layer_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    size("gpt-oss-120b", tokens=1000)
    shown = capsys.readouterr().out
    assert "the last 128 tokens" in shown and "keys and values of each token" in shown
    size("qwen3-next-80b-a3b", tokens=1000, users=3, as_json=True)
    answer = json.loads(capsys.readouterr().out)
    linear, full = answer["groups"]
    assert (linear["kind"], linear["bytes_per_token"], linear["value_heads"]) == ("linear", 0, 32)
    assert full["bytes"] == 1000 * 24 * 1024
    assert answer["bytes"] == 3 * answer["bytes_per_sequence"] == 3 * (linear["bytes"] + full["bytes"])


@pytest.mark.parametrize("option", ["tokens", "users"])
def test_a_number_below_one_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (size("tiny-llama", tokens=0) if option == "tokens" else size("tiny-llama", users=0)) == 2
    assert f"--{option} 0: must be at least 1" in capsys.readouterr().err
