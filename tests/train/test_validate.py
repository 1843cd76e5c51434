"""Every impossible value is refused in one sentence that names its key."""

import dataclasses
import math
import os
from pathlib import Path

import pytest

from pyruntime.train import validate
from pyruntime.train.config import (
    ContextParallel,
    Data,
    Optimizer,
    Parallel,
    PipelineParallel,
    RunConfig,
    Train,
)
from pyruntime.train.errors import ConfigError


def with_value(key, value):
    section, name = key.split(".")
    config = RunConfig()
    return dataclasses.replace(
        config, **{section: dataclasses.replace(getattr(config, section), **{name: value})}
    )


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        (
            "optimizer.lr",
            math.nan,
            "optimizer.lr must be between 1e-12 and 10, as a step moves each weight by about so much, found "
            "nan.",
        ),
        ("optimizer.lr", math.inf, "found inf."),
        ("optimizer.lr", -1e-3, "found -0.001."),
        (
            "optimizer.eps",
            0.0,
            "optimizer.eps must be between 1e-30, which fp32 still tells from 0, and 1, found 0.0.",
        ),
        ("optimizer.weight_decay", math.nan, "optimizer.weight_decay must be between 0 and 1000,"),
        ("optimizer.clip_grad_norm", -1.0, "optimizer.clip_grad_norm"),
        (
            "optimizer.beta1",
            1.0,
            "optimizer.beta1 must be at least 0 and at most 0.999999, which fp32 tells from 1, found 1.0.",
        ),
        ("optimizer.beta2", math.nan, "optimizer.beta2"),
        ("optimizer.min_lr_fraction", 1.5, "optimizer.min_lr_fraction must be between 0 and 1, found 1.5."),
        ("optimizer.warmup_steps", -1, "optimizer.warmup_steps must not be negative, found -1."),
        ("optimizer.warmup_fraction", 1.5, "optimizer.warmup_fraction must be between 0 and 1, found 1.5."),
        ("optimizer.decay_fraction", -0.5, "optimizer.decay_fraction must be between 0 and 1, found -0.5."),
        ("optimizer.schedule", "step", "optimizer.schedule must be one of cosine, linear, wsd, found step."),
        (
            "optimizer.spike_factor",
            0.5,
            "optimizer.spike_factor must be 0, or above 1 and at most 1e6, found 0.5.",
        ),
        ("optimizer.on_bad_step", "go on", "optimizer.on_bad_step must be one of stop, skip, found go on."),
        ("train.tokens", -1, "train.tokens must not be negative, found -1."),
        ("train.tokens", 2**62, f"train.tokens={2**62} needs more than 2**31 steps; use fewer."),
        ("train.tokens", 2**63, "train.tokens must be below 2**63, found 9223372036854775808."),
        (
            "train.z_loss",
            -1.0,
            "train.z_loss must be between 0 and 1, as a weight beside that of the loss, found -1.0.",
        ),
        ("train.steps", 0, "train.steps must be at least 1, found 0."),
        ("train.batch_size", -4, "train.batch_size must be at least 1, found -4."),
        (
            "train.micro_batch_size",
            3,
            "train.micro_batch_size=3 does not divide train.batch_size=8; use a train.batch_size of 9, or",
        ),
        ("train.seq_len", 0, "train.seq_len must be at least 1, found 0."),
        ("train.seed", -1, "train.seed must be at least 0 and below 2**63, found -1."),
        ("train.seed", 2**63, "train.seed must be at least 0 and below 2**63, found 9223372036854775808."),
        ("train.val_every", -1, "train.val_every must not be negative, found -1."),
        ("train.val_sequences", 0, "train.val_sequences must be at least 1, found 0."),
        ("data.val_fraction", 0.0, "data.val_fraction must be above 0 and at most 0.5, found 0.0."),
        ("data.val_fraction", math.nan, "data.val_fraction"),
        (
            "data.weights",
            (1.0,),
            "data.weights has 1 and data.paths 0 entries; give one weight for each path.",
        ),
        ("data.val_paths", ("/nowhere",), "data.val_paths: /nowhere does not exist;"),
        ("data.field", "", "data.field must be the name of a key or a column, found ''."),
        ("data.paths", ("/nowhere/at/all",), "data.paths: /nowhere/at/all does not exist;"),
        (
            "data.tokenizer",
            "/nowhere/tokenizer.json",
            "data.tokenizer: /nowhere/tokenizer.json is no file and no folder;",
        ),
        ("model.init_from", "/nowhere", "model.init_from: /nowhere: there is no such folder;"),
        ("checkpoint.resume", "/nowhere", "checkpoint.resume: the folder /nowhere does not exist;"),
        ("checkpoint.keep", 0, "checkpoint.keep must be at least 1, found 0."),
        ("checkpoint.every_steps", -1, "checkpoint.every_steps must not be negative, found -1."),
        (
            "comm.deadline_s",
            0.0,
            "comm.deadline_s must be at least 0.001 and at most 1000000 seconds, found 0.0.",
        ),
        ("comm.deadline_s", math.inf, "found inf."),
        ("comm.deadline_s", math.nan, "found nan."),
        ("comm.deadline_s", 1e7, "comm.deadline_s must be at least 0.001 and at most"),
        ("comm.tier", "fast", "comm.tier must be one of auto, unfused, chunked, fused, found fast."),
        (
            "comm.rings",
            ("0-1", "0-0"),
            "comm.rings holds '0-0', which does not name each of the 2 tensor-parallel ranks once; write it "
            "as '0-1', or leave out comm.rings.",
        ),
        ("comm.rings", ("0-x",), "comm.rings holds '0-x', which does not name each of the 2"),
        (
            "data.paths",
            ("/dev/null",),
            "data.paths: /dev/null is neither a file nor a folder; name files or folders",
        ),
        ("parallel.tp", 0, "parallel.tp must be at least 1, found 0."),
        ("parallel.tp", 3, "parallel.tp=3 but 2 rank(s) were started,"),
        ("parallel.dp", 0, "parallel.dp must be at least 1, found 0."),
        ("parallel.dp", 2, "micro_batch_size=8 times parallel.dp=2 does not divide train.batch_size=8; use"),
        ("parallel.zero", 4, "parallel.zero must be one of 0, 1, 2, 3, found 4."),
        ("parallel.dp_replicate", 2, "parallel.dp_replicate=2 does not divide parallel.dp=1; use 1,"),
        ("output.run_dir", __file__, f"output.run_dir: {__file__} exists and is not a folder; name another."),
        ("output.sample_tokens", -1, "output.sample_tokens must not be negative, found -1."),
        ("output.log_every", 0, "output.log_every must be at least 1, found 0."),
    ],
)
def test_an_impossible_value_is_refused_in_one_sentence(key, value, sentence):
    with pytest.raises(ConfigError) as refused:
        validate.check(with_value(key, value), world_size=2)
    message = str(refused.value)
    assert sentence in message
    assert "\n" not in message and message.endswith(".")


@pytest.mark.parametrize(
    ("parallel", "pipeline", "world", "named"),
    [
        ({"tp_slices": 2}, {}, 1, "parallel.tp=1, where no rows are sent but"),
        ({"tp_slices": 3, "cp": 2}, {}, 4, "context.layout=zigzag cuts sequences into at most 2; use"),
        ({"tp_slices": 2, "cp": 2, "zero": 3}, {}, 4, "parallel.zero=3, which gathers weights for one layer"),
        ({"tp_slices": 4, "dp": 2, "zero": 3}, {}, 4, "parallel.zero=3, which gathers weights for one layer"),
        (
            {"tp_slices": 2, "pp": 2},
            {"kind": "seq1f1b", "slices": 2},
            4,
            "pipeline.slices=2, which also cuts",
        ),
        ({"tp_slices": 5}, {}, 2, "parallel.tp_slices must be one of auto, 1, 2, 3, 4, found 5."),
    ],
)
def test_slices_are_refused_beside_what_they_do_not_go_with(parallel, pipeline, world, named):
    config = RunConfig(train=Train(micro_batch_size=2), pipeline=PipelineParallel(**pipeline))
    with pytest.raises(ConfigError) as refused:
        validate.check(dataclasses.replace(config, parallel=Parallel(**parallel)), world)
    assert named in str(refused.value)
    if parallel["tp_slices"] != 5:
        whole = {**parallel, "tp_slices": "auto"}
        validate.check(dataclasses.replace(config, parallel=Parallel(**whole)), world)


@pytest.mark.parametrize(
    ("pipeline", "layout", "named"),
    [
        ({"slices": 3}, "zigzag", "context.layout=zigzag cuts sequences into 2 equal slices that follow"),
        ({"slices": 2, "slice_tokens": (192, 64)}, "zigzag", "cuts sequences into 2 equal slices"),
        ({"slices": 2}, "contiguous", "context.layout=contiguous cuts sequences into no slices that follow"),
        (
            {"slices": 2, "slice_tokens": (255, 1)},
            "striped",
            "are shared by parallel.cp=2 ranks; use multiples of",
        ),
        (
            {"slices": 0, "costs": __file__},
            "striped",
            "which cut whole sequences, but parallel.cp=2; set",
        ),
        ({"slices": 129}, "striped", "pipeline.slices=129 is more than a rank's 128 tokens of a sequence;"),
    ],
)
def test_slices_of_a_pipeline_are_refused_where_context_ranks_cannot_share_them(pipeline, layout, named):
    config = RunConfig(
        pipeline=PipelineParallel(kind="seq1f1b", **pipeline),
        context=ContextParallel(layout=layout),
        parallel=Parallel(cp=2, pp=2),
    )
    with pytest.raises(ConfigError) as refused:
        validate.check(config, 4)
    assert named in str(refused.value)


FOLDERS = {
    "nowhere": ((), "there is no such folder; download or save the model"),
    "empty": (("note",), "it holds no config.json; give a Hugging Face folder"),
    "run": (("model/config.json",), "it is the folder of a run; give FOLDER/model."),
    "lora": (("adapter/adapter_config.json",), "convert --source FOLDER --target merged --merge true"),
    "adapter": (("adapter_config.json",), "it holds adapters and no model; merge them"),
    "model": (("config.json", "adapter_config.json"), ""),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_another_folder_than_a_model_s_is_refused_with_what_to_give(tmp_path, name):
    files, words = FOLDERS[name]
    folder = tmp_path / name
    for each in files:
        (folder / each).parent.mkdir(parents=True, exist_ok=True)
        (folder / each).touch()
    config = with_value("model.init_from", str(folder))
    if not words:
        validate.check(config, 1)
        return
    with pytest.raises(ConfigError) as refused:
        validate.check(config, 1)
    assert str(refused.value).startswith(f"model.init_from: {folder}: ")
    assert words.replace("FOLDER", str(folder)) in str(refused.value)


@pytest.mark.parametrize("key, value", [("train.patience", 2), ("checkpoint.keep_best", True)])
def test_what_needs_validations_is_refused_without_them(key, value):
    config = with_value(key, value)
    validate.check(config, 1)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, val_every=0))
    with pytest.raises(ConfigError, match=r"needs validations during the run, and train\.val_every=0"):
        validate.check(config, 1)


def test_two_warm_ups_are_refused():
    config = dataclasses.replace(RunConfig(), optimizer=Optimizer(warmup_steps=3, warmup_fraction=0.1))
    with pytest.raises(ConfigError, match=r"warmup_steps=3 and optimizer\.warmup_fraction=0\.1 both set"):
        validate.check(config, 1)


def test_a_pipe_is_no_text(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"data\.paths: .*pipe is neither a file nor a folder;"):
        validate.check(with_value("data.paths", (str(tmp_path / "pipe"),)), world_size=1)


def test_the_largest_seed_and_deadline_are_accepted():
    validate.check(with_value("train.seed", 2**63 - 1), world_size=1)
    validate.check(with_value("comm.deadline_s", 1e6), world_size=1)


def test_the_defaults_are_accepted_on_any_number_of_ranks():
    for world_size in (1, 2, 8):
        validate.check(RunConfig(), world_size)


@pytest.mark.parametrize(
    ("weights", "sentence"),
    [
        ((1.0, 0.0), "data.weights must be positive finite numbers, found [1.0, 0.0]."),
        ((1.0, math.inf), "data.weights must be positive finite numbers, found [1.0, inf]."),
        (
            (1.0, 1e-4),
            "data.weights has 0.0001 of 1.0001, less than one sample in 2048; use a larger weight",
        ),
    ],
)
def test_weights_that_share_out_nothing_are_refused(tmp_path, weights, sentence):
    paths = (str(tmp_path), str(Path(__file__)))
    validate.check(RunConfig(data=Data(paths=paths, weights=(1.0, 3.0))), world_size=1)
    with pytest.raises(ConfigError) as refused:
        validate.check(RunConfig(data=Data(paths=paths, weights=weights)), world_size=1)
    assert str(refused.value).startswith(sentence)
