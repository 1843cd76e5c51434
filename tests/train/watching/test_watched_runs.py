"""Whole runs: every axis is in the record of a step, and layers and axes in its trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pyruntime.plan.cluster import find_cluster
from pyruntime.train.metrics import read
from pyruntime.train.planned import planned, predicted
from pyruntime.train.run import run
from pyruntime.train.signals import StopRequest
from pyruntime.train.watching.step_profile import StepProfile
from tests.train import jobs

STEPS = 3


def whole_run(group, config):
    ranks = jobs.runtime(group, config)
    return run(config, "job", ranks, StopRequest())


def watched(ranks, folder, axes, **train):
    """The folder of a run of 4 ranks, whose steps 2 and 3 were recorded."""
    config = jobs.job(
        folder, steps=STEPS, batch_size=4, micro_batch_size=1, seq_len=32, val_every=0, profile="2-3", **train
    )
    config = jobs.changed(config, "output", cluster="dgx-h100" if train else "", sample_tokens=0)
    jobs.prepare(config)
    (found, *_) = ranks.run(whole_run, 4, jobs.changed(config, "parallel", **axes, tp=None))
    return found, config


def ended_early(group, config):
    made = jobs.trainer(group, config)
    profile = StepProfile(jobs.runtime(group, config), Path(config.output.run_dir), range(1, 9))
    steps = made.fit(profile=profile)
    next(steps)
    profile.write()
    steps.close()


def trace_of(run_dir: Path, rank: int) -> list[dict]:
    return json.loads((run_dir / "profile" / f"rank-{rank}.json").read_text())["traceEvents"]


def ranges_of(events: list[dict], name: str) -> list[tuple[float, float]]:
    return [
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event["ph"] == "X" and event["name"] == name
    ]


@pytest.fixture(scope="module")
def tp_dp(request, tmp_path_factory):
    ranks = request.getfixturevalue("ranks")
    return watched(ranks, tmp_path_factory.mktemp("tp-dp"), {"dp": 2, "zero": 1}, dtype="bf16")


@pytest.fixture(scope="module")
def cp_pp(request, tmp_path_factory):
    ranks = request.getfixturevalue("ranks")
    return watched(ranks, tmp_path_factory.mktemp("cp-pp"), {"cp": 2, "pp": 2})


@pytest.mark.parametrize(("name", "axes"), [("tp_dp", {"tp", "dp", "all"}), ("cp_pp", {"cp", "pp", "all"})])
@pytest.mark.second_tier("tp_dp-axes0")
def test_what_was_exposed_is_there_by_axis_and_adds_up(request, name, axes):
    lines = read(request.getfixturevalue(name)[0] / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert axes <= line["exposed_by_axis_s"].keys()
        assert all(seconds >= 0 for seconds in line["exposed_by_axis_s"].values())
        assert sum(line["exposed_by_axis_s"].values()) == pytest.approx(line["exposed_comm_s"])
    for axis in axes:
        assert any(line["exposed_by_axis_s"][axis] > 0 for line in lines[1:]), axis


def test_every_step_has_what_it_is_compared_with(tp_dp):
    run_dir, config = tp_dp
    lines = read(run_dir / "metrics.jsonl")
    for line in lines:
        assert line["tokens_per_second_per_device"] == pytest.approx(line["tokens_per_second"] / 4)
        assert 0 < line["mfu"] < 1
        assert line["eta_s"] >= 0
    assert lines[-1]["eta_s"] == 0
    asked = jobs.changed(config, "parallel", dp=2, zero=1)
    expected = predicted(*planned(jobs.resolved(asked, 4), find_cluster("dgx-h100"))).total
    assert {line["predicted_step_s"] for line in lines} == {expected}
    card = json.loads((run_dir / "scorecard.json").read_text())
    assert card["predicted_step_s"] == expected and card["mfu"] > 0
    assert set(card["exposed_by_axis_s"]) >= {"tp", "dp"}


def test_nothing_is_predicted_without_a_cluster(cp_pp):
    assert all("predicted_step_s" not in line for line in read(cp_pp[0] / "metrics.jsonl"))


@pytest.mark.parametrize("rank", range(4))
def test_layers_and_axes_are_in_the_trace_of_every_rank(tp_dp, rank):
    events = trace_of(tp_dp[0], rank)
    names = {event["name"] for event in events}
    assert {"step 2", "step 3", "forward", "backward", "update"} <= names and "step 1" not in names
    assert {"tp layers.0.qkv", "tp layers.1.down"} <= names
    assert any(name.startswith("dp sum ") for name in names)
    assert any(
        event["name"] == "process_name" and event["args"]["name"] == f"rank {rank}" for event in events
    )


def test_layers_lie_in_the_passes_in_their_order(tp_dp):
    events = trace_of(tp_dp[0], 0)
    forward, backward = (ranges_of(events, name) for name in ("forward", "backward"))
    layers = [ranges_of(events, f"layers.{number}") for number in (0, 1)]
    back = [ranges_of(events, f"layers.{number} backward") for number in (0, 1)]
    embed = ranges_of(events, "embed backward")
    passes = 2 * 2  # steps, micro-batches of a rank
    assert [len(each) for each in (forward, backward, *layers, *back, embed)] == [passes] * 7
    for one in range(passes):
        begin, end = forward[one]
        assert begin <= layers[0][one][0] < layers[0][one][1] <= layers[1][one][0] < layers[1][one][1] <= end
        begin, end = backward[one]
        assert begin <= back[1][one][0] < back[1][one][1] <= back[0][one][0] < back[0][one][1]
        assert back[0][one][1] <= embed[one][0] < embed[one][1] <= end


def test_chunks_and_waits_lie_under_the_layers_by_axis(tp_dp):
    events = trace_of(tp_dp[0], 0)
    chunks = [event for event in events if event["pid"] == "rank 0: communication" and event["ph"] == "b"]
    assert {"tp", "dp"} <= {event["cat"] for event in chunks}
    of_layer = [event for event in chunks if event["name"].startswith("layers.1.qkv: all_gather_matmul")]
    (first, end), *_ = ranges_of(events, "step 2")
    assert all(first - 1e3 < event["ts"] for event in of_layer)
    layers = ranges_of(events, "layers.1")
    slack = 500.0  # microseconds between two clocks
    assert any(
        begin - slack < event["ts"] < end + slack and event["ts"] < until
        for begin, until in layers
        for event in of_layer
    )


def test_a_pipeline_s_and_context_s_ranges_are_there(cp_pp):
    names = {event["name"] for event in trace_of(cp_pp[0], 0)}
    assert any(name.startswith("pp F of stage 0") for name in names)
    assert any(name.startswith("cp forward block of rank") for name in names)
    assert "layers.0" in names and "layers.0 backward" in names
    last = {event["name"] for event in trace_of(cp_pp[0], 3)}
    assert "layers.1" in last and "layers.1 backward" in last and "layers.0" not in last


def test_a_run_that_ends_among_the_steps_leaves_what_it_has(ranks, tmp_path):
    config = jobs.job(tmp_path, steps=9, val_every=0)
    jobs.prepare(config)
    ranks.run(ended_early, 2, config)
    names = {event["name"] for event in trace_of(Path(config.output.run_dir), 1)}
    assert "step 1" in names and "step 2" not in names and "tp layers.1.qkv" in names
