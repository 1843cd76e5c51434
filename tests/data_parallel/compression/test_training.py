"""Training with compressed gradients: it learns as without, in fewer bytes; checkpoints hold what is lost."""

from __future__ import annotations

import re

import pytest
import torch

from pyruntime.train import checkpoint, checkpoint_folder, validate
from pyruntime.train.config import DataParallel, Parallel, RunConfig, Train
from pyruntime.train.errors import ConfigError
from tests.train import jobs

SEQUENCES = {"batch_size": 8, "micro_batch_size": 1}
METHODS = [
    {"compression": "quantize"},
    {"compression": "quantize", "compression_bits": 6, "error_feedback": False},
    {"compression": "quantize", "compression_plan_every": 5},
    {"compression": "top_k", "compression_density": 0.05},
    {"compression": "power_sgd"},
]


def named(value: object) -> str:
    return "-".join(map(str, value.values())) if isinstance(value, dict) else str(value)


def compressed(config: RunConfig, dp: int, zero: int, method: dict) -> RunConfig:
    return jobs.changed(jobs.changed(config, "parallel", dp=dp, zero=zero), "data_parallel", **method)


@pytest.fixture(scope="module")
def plain(ranks, tmp_path_factory):
    """A job, and its curve at stages 0 and 1 without compression."""
    config = jobs.job(tmp_path_factory.mktemp("plain"), steps=30, val_every=0, **SEQUENCES)
    jobs.prepare(config)
    return config, [ranks.run(jobs.history, 4, compressed(config, 4, zero, {}))[0] for zero in (0, 1)]


@pytest.mark.parametrize(
    ("zero", "method"), [(0, METHODS[0]), *((1, method) for method in METHODS[1:])], ids=named
)
@pytest.mark.second_tier(but=["1-quantize-5"])
def test_it_learns_as_without_compression_in_fewer_bytes(ranks, plain, zero, method):
    config, curves = plain
    expected = curves[zero]
    found = ranks.run(jobs.history, 4, compressed(config, 4, zero, method))
    for name in ("loss", "grad_norm", "dp_bytes"):
        assert jobs.curve(found[0], name) == jobs.curve(found[-1], name)
    learnt = expected[0].loss - expected[-1].val_loss
    assert learnt > 0.5
    assert found[0][-1].val_loss < expected[-1].val_loss + 0.1 * learnt
    # At stage 1 the weights travel as they are, as many bytes as the gradients would.
    most = 0.35 if zero == 0 else 0.7
    taken, plainly = (sum(jobs.curve(each, "dp_bytes")) for each in (found[0], expected))
    assert 0 < taken < most * plainly  # a step's last bytes may be counted in the next


def curves_and_weights(group, config, resume=None):
    """What every step measured, the whole weights at the end, and the plan."""
    made = jobs.trainer(group, config)
    left = ""
    if resume:
        left = made.what_is_not_resumed(resume)
        made.resume(resume)
    curves = [(metrics.step, metrics.loss, metrics.grad_norm) for metrics in made.fit()]
    weights = {
        name: value.full_tensor() for name, value in checkpoint.state_of(made.sharded)["model"].items()
    }
    return curves, weights, made.sharded.compressor.plan, left


@pytest.mark.parametrize(
    ("dp", "zero", "method"),
    [
        (4, 0, METHODS[0] | {"compression_plan_every": 2}),
        (4, 1, METHODS[1]),
        (2, 1, METHODS[4]),  # beside tensor parallelism
    ],
    ids=named,
)
@pytest.mark.second_tier(but=["4-0-quantize-2"])
def test_a_resumed_run_is_bitwise_the_same(ranks, tmp_path, method, dp, zero):
    config = jobs.job(tmp_path, steps=6, dtype="bf16", val_every=0, **SEQUENCES)
    config = jobs.changed(compressed(config, dp, zero, method), "checkpoint", every_steps=3)
    folder = jobs.prepare(config)
    whole = ranks.run(curves_and_weights, 4, config)
    saved = checkpoint_folder.complete(folder / checkpoint_folder.FOLDER)[0]
    assert checkpoint_folder.step_of(saved) == 3
    resumed = ranks.run(curves_and_weights, 4, config, saved)
    for one, again in zip(whole, resumed, strict=True):
        assert again[0] == one[0][3:] and again[2:] == (one[2], "")
        assert all(torch.equal(again[1][name], weight) for name, weight in one[1].items())


def test_over_other_ranks_a_run_goes_on_without_what_was_lost_and_says_so(ranks, tmp_path):
    config = jobs.job(tmp_path, steps=3, val_every=0, **SEQUENCES)
    folder = jobs.prepare(config)
    ranks.run(jobs.history, 4, compressed(config, 4, 1, METHODS[0]))
    saved = checkpoint_folder.find(folder)
    config = jobs.changed(config, "train", steps=5)
    for changed in (compressed(config, 2, 1, METHODS[0]), compressed(config, 4, 1, METHODS[4])):
        for curves, _, _, left in ranks.run(curves_and_weights, 4, changed, saved):
            assert [step for step, _, _ in curves] == [4, 5]
            assert "was saved with compression by" in left and "are not loaded" in left


def test_a_pipeline_s_gradients_are_compressed_too(ranks, tmp_path):
    config = jobs.job(tmp_path, steps=3, val_every=0, **SEQUENCES)
    config = jobs.changed(compressed(config, 2, 1, METHODS[0]), "model", num_hidden_layers=4)
    config = jobs.changed(config, "parallel", pp=2)
    jobs.prepare(config)
    found = ranks.run(jobs.history, 4, config)
    assert jobs.curve(found[0], "loss") == jobs.curve(found[-1], "loss")
    plain = ranks.run(jobs.history, 4, jobs.changed(config, "data_parallel", compression="none"))
    assert found[0][-1].loss == pytest.approx(plain[0][-1].loss, abs=0.05)
    assert found[0][-1].loss != plain[0][-1].loss


@pytest.mark.parametrize(
    ("section", "values", "sentence"),
    [
        (
            "parallel",
            {"dp": 1},
            "compression=quantize needs several data-parallel ranks, and there is one;",
        ),
        (
            "parallel",
            {"zero": 3},
            "data_parallel.compression=quantize with parallel.zero=3, which sends weights",
        ),
        (
            "parallel",
            {"dp": 4, "dp_replicate": 2},
            "works over one axis, and parallel.dp_replicate=2 makes two;",
        ),
        ("optimizer", {"on_bad_step": "skip"}, "its gradient is already in the compression residuals;"),
        ("data_parallel", {"compression_bits": 9}, "compression_bits must be between 1 and 8, found 9."),
        (
            "data_parallel",
            {"compression_density": 0.0},
            "compression_density must be between 1e-6 and 1, found 0.0.",
        ),
        ("data_parallel", {"compression_rank": 0}, "compression_rank must be at least 1, found 0."),
        (
            "data_parallel",
            {"compression_plan_every": -1},
            "compression_plan_every must not be negative, found",
        ),
        (
            "data_parallel",
            {"compression": "top_k", "error_feedback": False},
            "=top_k with data_parallel.error_",
        ),
        (
            "data_parallel",
            {"compression": "none", "error_feedback": False},
            "without data_parallel.compression",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(section, values, sentence):
    config = RunConfig(
        train=Train(micro_batch_size=1),
        parallel=Parallel(dp=2),
        data_parallel=DataParallel(compression="quantize"),
    )
    config = jobs.changed(config, section, **values)
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        validate.check(config, config.parallel.dp)
