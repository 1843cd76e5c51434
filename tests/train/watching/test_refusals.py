"""What cannot be watched is refused in one sentence, before anything starts."""

import dataclasses
import re

import pytest

from pyruntime.cli.train import read
from pyruntime.train import validate
from pyruntime.train.config import (
    Comm,
    ContextParallel,
    DataParallel,
    Output,
    Parallel,
    PipelineParallel,
    RunConfig,
    Train,
    steps_of,
)
from pyruntime.train.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "steps"), [("7", range(7, 8)), ("10-12", range(10, 13)), ("3-3", range(3, 4))]
)
def test_steps_are_written_as_one_or_from_to(text, steps):
    assert steps_of(text) == steps


@pytest.mark.parametrize("text", ["0", "12-10", "1-", "-3", "x", "1-2-3", "1.5", "0-4", "9" * 5000])
def test_what_names_no_steps_is_refused(text):
    with pytest.raises(
        ConfigError, match=r"^train.profile: .* names no steps; write them as 10, or 10-12\.$"
    ):
        validate.check(RunConfig(train=Train(profile=text)), 1)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (RunConfig(train=Train(steps=9, profile="9-10")), "train.profile=9-10 goes beyond the last step, 9;"),
        (RunConfig(train=Train(profile="1", ledger=True)), "leave one of them out."),
        (
            RunConfig(train=Train(peak_flops=0.0)),
            "train.peak_flops must be between 1e6 and 1e20 FLOP/s, found",
        ),
        (RunConfig(output=Output(cluster="no-such")), "output.cluster: There is no cluster 'no-such'"),
    ],
)
def test_what_cannot_be_is_refused(config, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        validate.check(config, 1)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"train": Train(dtype="fp32")}, "train.dtype=fp32"),
        ({"comm": Comm(tier="unfused")}, "comm.tier=unfused"),
        ({"parallel": Parallel(tp_wire="fp8")}, "parallel.tp_wire=fp8"),
        ({"data_parallel": DataParallel(method="diloco", tau=4)}, "data_parallel.method=diloco"),
        ({"data_parallel": DataParallel(compression="top_k")}, "data_parallel.compression=top_k"),
        ({"data_parallel": DataParallel(weight_wire="fp8")}, "data_parallel.weight_wire=fp8"),
        ({"parallel": Parallel(pp=2, rebalance="on")}, "parallel.rebalance=on"),
        ({"pipeline": PipelineParallel(slice_tokens=(96, 32))}, "pipeline.slice_tokens=(96, 32)"),
        ({"pipeline": PipelineParallel(costs="costs.json")}, "pipeline.costs=costs.json"),
        ({"pipeline": PipelineParallel(wire="bf16")}, "pipeline.wire=bf16"),
        ({"context": ContextParallel(wire="bf16")}, "context.wire=bf16"),
    ],
)
def test_what_the_planner_does_not_know_is_not_predicted(change, named):
    config = dataclasses.replace(
        RunConfig(parallel=Parallel(tp=2, dp=2), output=Output(cluster="dgx-h100")), **change
    )
    with pytest.raises(ConfigError, match=re.escape(f"the planner does not know {named}, and would predict")):
        validate.watching.check_watching(config)
    validate.watching.check_watching(dataclasses.replace(config, output=Output()))


@pytest.mark.parametrize("flags", [["--profile", "3-4"], ["--profile=3-4"], ["--train.profile", "3-4"]])
def test_profile_is_short_for_its_key(flags):
    config, _ = read(["--config", "tiny", *flags])
    assert config.train.profile == "3-4"
