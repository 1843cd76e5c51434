"""What the trainer rounds on its way: off by default, said in the log, fewer bytes, and it learns."""

from __future__ import annotations

import dataclasses
import importlib
from unittest.mock import patch

import pytest

from pyruntime.train import validate
from pyruntime.train.config import ContextParallel, DataParallel, Parallel, PipelineParallel, RunConfig, Train
from pyruntime.train.errors import ConfigError
from pyruntime.train.watching.heading import first_lines
from tests.train import jobs

WIRES = {
    "data_parallel": ({"dp": 2, "zero": 3}, {"weight_wire": "fp8"}, "weights gathered as fp8"),
    "pipeline": ({"pp": 2}, {"wire": "fp8"}, "activations and their gradients sent as fp8"),
    "context": ({"cp": 2}, {"wire": "fp8"}, "keys and values as fp8"),
    "parallel": ({"dp": 2}, {"tp_wire": "fp8"}, "rows gathered as fp8"),
}

BYTES = {
    "data_parallel": ("dp_bytes", 0.8),
    "pipeline": ("pp_bytes", 0.27),
    "context": ("cp_bytes", 0.8),
    "parallel": ("tp_bytes", 0.75),
}
"""Of fp32: what each section's figure falls to; gradients, and sums over ranks, travel as they are."""


def said(group, config):
    """Metrics of every step, and what the log begins with. The matrices are small, and cut all the same."""
    with patch.dict(importlib.import_module("pyruntime.data_parallel.shard").BUCKET_BYTES, {3: 1024}):
        made = jobs.trainer(group, config)
    first = first_lines(made._run, made._corpus, made._run_dir, made._runtime)
    curves = list(made.fit())
    made.close()
    return curves, first


@pytest.mark.parametrize("section", WIRES)
@pytest.mark.second_tier(but=["pipeline"])
def test_it_learns_as_without_and_the_log_says_so(ranks, tmp_path, section):
    parallel, values, words = WIRES[section]
    config = jobs.job(tmp_path, steps=12, val_every=0, batch_size=4, micro_batch_size=2, seq_len=32)
    config = jobs.changed(jobs.changed(config, "model", num_hidden_layers=2), "parallel", **parallel)
    jobs.prepare(config)
    (plain, before), (found, after) = (
        ranks.run(said, 4, each)[0] for each in (config, jobs.changed(config, section, **values))
    )
    assert words in after and "fp8" not in before
    assert found[-1].val_loss == pytest.approx(plain[-1].val_loss, abs=0.1)
    assert jobs.curve(found, "loss") != jobs.curve(plain, "loss")
    counted, most = BYTES[section]
    assert 0 < sum(jobs.curve(found, counted)) < most * sum(jobs.curve(plain, counted))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"data_parallel": DataParallel(weight_wire="fp8"), "parallel": Parallel(dp=2, zero=2)},
            "data_parallel.weight_wire=fp8 with parallel.zero=2",
        ),
        (
            {"data_parallel": DataParallel(weight_wire="fp8"), "parallel": Parallel(zero=3)},
            "data_parallel.weight_wire=fp8 needs several ranks that gather weights",
        ),
        (
            {"pipeline": PipelineParallel(wire="bf16")},
            "pipeline.wire=bf16 without a pipeline; set parallel.pp.",
        ),
        ({"context": ContextParallel(wire="fp8")}, "context.wire=fp8 without context-parallel ranks"),
        (
            {"context": ContextParallel(wire="fp8", variant="all_gather_kv"), "parallel": Parallel(cp=2)},
            "context.wire=fp8 applies to the ring, and context.variant=all_gather_kv",
        ),
        (
            {"parallel": Parallel(dp=2, tp_wire="fp8")},
            "parallel.tp_wire=fp8 needs several tensor-parallel ranks, and there is one",
        ),
        ({"context": ContextParallel(wire="fp4")}, "context.wire must be one of same, bf16, fp8, found fp4."),
    ],
)
@pytest.mark.second_tier("changes6-context.wire must be one of same, bf16, fp8, found fp4.")
def test_what_does_not_go_together_is_refused_in_one_sentence(changes, sentence):
    with pytest.raises(ConfigError, match=sentence) as refusal:
        validate.check(
            dataclasses.replace(RunConfig(train=Train(micro_batch_size=4)), **changes), world_size=2
        )
    assert "\n" not in str(refusal.value)
