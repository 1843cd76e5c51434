"""bench/linear/timeline.py: what it draws is what was read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench.linear.problem import Case
from bench.linear.timeline import Trace, plot, share_of_link

RECORDED = Path(__file__).resolve().parents[2] / "bench" / "results" / "linear" / "timeline.json"


def test_the_link_s_row_holds_every_byte_that_came():
    trace = Trace("a", 1.0, [(0.1, 0.2)], [(0.0, 0), (0.24, 500), (0.26, 1000), (0.9, 3000)])
    shares = share_of_link(trace, width=0.25, bytes_per_s=10_000)
    assert shares[:4] == pytest.approx([500 / 2500, 500 / 2500, 0, 2000 / 2500])
    assert sum(shares) * 0.25 * 10_000 == pytest.approx(3000)


def test_gemms_of_the_recorded_traces_follow_one_another():
    document = json.loads(RECORDED.read_text())
    for trace in (Trace(**each) for each in document["traces"]):
        moments = [moment for gemm in trace.gemms for moment in gemm]
        assert moments == sorted(moments) and moments[0] >= 0 and moments[-1] <= trace.seconds
        counts = [count for _, count in trace.received]
        assert counts == sorted(counts) and counts[-1] > 0


def test_the_same_traces_give_the_same_picture(tmp_path):
    document = json.loads(RECORDED.read_text())
    case = Case.parse("mlp:2048x2048x5632", torch.bfloat16)
    traces = [Trace(**each) for each in document["traces"]]
    pictures = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for picture in pictures:
        plot(str(picture), traces, document["rate_mbit"], case)
    assert pictures[0].read_text() == pictures[1].read_text()
