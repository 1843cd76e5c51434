"""The scorecard's arithmetic and the plot."""

import dataclasses
import json

import pytest

from pyruntime.train.metrics import StepMetrics
from pyruntime.train.scorecard import format_scorecard, plot_loss, scorecard, tier_lines, write_scorecard


def history(steps=20, **more):
    """Lines of metrics.jsonl."""
    slow = [StepMetrics(n, 3.0, 1.0, 1e-3, 10.0, 9.0, 8.0, 10**8) for n in (1, 2)]
    warm = [StepMetrics(n, 2.0, 1.0, 1e-3, 1000.0, 0.5, 0.05, 2 * 10**8) for n in range(3, steps + 1)]
    warm[-1] = dataclasses.replace(warm[-1], val_loss=1.5, val_loss_per_byte=1.25)
    return [json.loads(dataclasses.replace(each, **more).to_json()) for each in slow + warm]


def use(layer, reason="measured"):
    product = {
        "when": "forward",
        "op": "all_gather_matmul",
        "rows": 64,
        "n": 32,
        "k": 16,
        "dtype": "bfloat16",
    }
    choice = {"group_size": 2, "asked": "auto", "tier": "chunked", "reason": reason, "strict": ""}
    return {"name": layer, **product, **choice}


def test_medians_leave_the_first_tenth_out():
    card = scorecard(history(), ranks=2, bytes_moved=20 * 10**6, flops_per_token=6e6, tiers=[])
    assert (card.step_time_s, card.exposed_comm_s, card.steps) == (0.5, 0.05, 18)
    assert card.exposed_share == pytest.approx(0.1)
    assert card.hidden_bound == pytest.approx(0.5 / 0.45)
    assert card.bytes_per_step == 10**6
    assert card.flops_per_second == 6e9
    assert card.memory_bytes == 2 * 10**8
    assert card.val_loss_per_byte == 1.25
    assert card.exposed_by_axis_s == {} and card.predicted_step_s is None


def test_parts_of_what_was_exposed_and_the_prediction_are_said():
    steps = history(exposed_by_axis_s={"tp": 0.04, "dp": 0.01}, predicted_step_s=0.45)
    card = scorecard(steps, ranks=4, bytes_moved=20 * 10**6, flops_per_token=6e6, tiers=[])
    assert card.exposed_by_axis_s == {"tp": 0.04, "dp": 0.01}
    text = format_scorecard(card)
    assert "500.0 ms (median of 18), 450.0 ms predicted" in text
    assert "50.0 ms a step, 10.0% of it (tp 40.0, dp 10.0)" in text


def test_layers_that_do_the_same_share_a_line():
    lines = tier_lines([use("a"), use("b"), use("c", reason="asked for")])
    assert len(lines) == 2
    assert lines[0].startswith("  2 x forward  all_gather_matmul")
    assert "[64, 16] @ [32, 16]^T bfloat16  chunked (measured)" in lines[0]
    assert tier_lines([]) == []


def test_a_reason_of_several_lines_is_said_once():
    reason = "asked for; a faster tier would want " + "much " * 30
    other = use("b", reason) | {"when": "backward"}
    lines = tier_lines([use("a", reason), other, use("c", "measured")])
    assert len(lines) == 4 and lines[3] == f"[1] {reason}"
    assert [line.rpartition("  ")[2] for line in lines[:3]] == [
        "chunked [1]",
        "chunked [1]",
        "chunked (measured)",
    ]


def test_the_scorecard_is_written_as_text_and_numbers(tmp_path):
    card = scorecard(history(), 2, 10**6, 6e6, [use("a")])
    write_scorecard(card, tmp_path)
    assert json.loads((tmp_path / "scorecard.json").read_text()) == dataclasses.asdict(card)
    text = (tmp_path / "scorecard.txt").read_text()
    assert text == format_scorecard(card) + "\n"
    assert "50.0 ms a step, 10.0% of it" in text and "1.2500 nats/byte" in text


def test_the_plot_is_a_png(tmp_path):
    lines = [{"step": n, "loss": 3.0 / n} | ({"val_loss": 2.0 / n} if n % 2 else {}) for n in range(1, 6)]
    plot_loss(lines, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
