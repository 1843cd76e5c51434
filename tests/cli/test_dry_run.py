"""`train --dry_run RANKS` says what would run, and presets for clusters fit the GPUs that they are for."""

import re

import pytest
import torch

from pyruntime.cli import main
from pyruntime.cli.dry_run import estimate
from pyruntime.llama import Llama
from pyruntime.plan.cluster import find_cluster
from pyruntime.plan.memory import SAFE
from pyruntime.train import config_file, dry_run
from pyruntime.train.config import tokens_per_step
from pyruntime.train.validate.gpus import check_between_hosts
from tests.train.jobs import changed
from tools import write_presets
from tools.write_presets import PRESETS

DIM1024 = ["train", "--config", "dim1024", "--train.steps", "100"]


def report(capsys, *argv):
    assert main([*map(str, argv)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_mesh_step_schedule_and_memory_are_said(capsys):
    axes = ["--parallel.tp", 2, "--parallel.dp", 4, "--parallel.zero", 3, "--optimizer.schedule", "wsd"]
    out = report(capsys, *DIM1024, *axes, "--dry_run", 8)
    assert "M parameters in bf16: 4 layers of 1024 features, 16 heads and 8 of keys and values" in out
    assert "mesh      tp=2, cp=1, pp=1, dp=4 at zero 3 on 8 rank(s), device auto" in out
    assert "steps of 2,048 tokens, 4 sequences of 512: on a rank 1 micro-batch(es) of 1" in out
    assert "100 steps by adamw; learning rate up to 0.0003 over 10 steps, then wsd to 3e-05" in out
    assert "GB for a rank on CPUs" in out and out.endswith("\nNothing was started.\n")
    parts = re.search(r"GB in a step: (.*)", out)[1]
    assert [part.split()[0] for part in parts.split(", ")] == [
        "weights", "gradients", "optimizer", "activations", "logits", "workspaces", "heap", "process",
    ]  # fmt: skip


def test_shapes_are_those_of_the_model_on_a_rank(capsys):
    out = report(capsys, *DIM1024, "--parallel.tp", 2, "--dry_run", 2)
    shown = dict(re.findall(r"^(\S.*?)  +\[(\d+, \d+)\]  ", out, re.MULTILINE))
    shape = dry_run.check(config_file.load(config_file.find("dim1024")), 1)
    model = Llama(shape, device="meta", dtype=torch.bfloat16)
    layer = model.layers[0]
    columns = {
        "queries, keys, values": layer.qkv,
        "gate and up": layer.gate_up,
        "embedding, head": model.head,
    }
    for name, linear in columns.items():
        n, k = linear.weight.shape
        assert shown[name] == f"{n // 2}, {k}"
    for name, linear in {"its output": layer.out, "down": layer.down}.items():
        n, k = linear.weight.shape
        assert shown[name] == f"{n}, {k // 2}"


def test_a_pipeline_s_stages_are_shown(capsys):
    axes = ["--parallel.pp", 2, "--pipeline.kind", "interleaved", "--pipeline.virtual", 2]
    out = report(capsys, *DIM1024, *axes, "--dry_run", 2)
    assert "pipeline  interleaved: 4 stages on 2 ranks, 4 micro-batches, 1 slice(s)" in out
    assert "layers of the ranks: 0: 0 and 2; 1: 1 and 3" in out
    assert re.search(r"\d+\.\d% of a step is bubble", out)


def test_fp32_takes_twice_the_memory_of_weights_and_activations():
    config = config_file.load(config_file.find("dim256"))
    shape = dry_run.check(config, 1)
    wide = estimate(config, shape, 1).memory
    narrow = estimate(changed(config, "train", dtype="bf16"), shape, 1).memory
    assert wide.weights == 2 * narrow.weights == 4 * shape.parameter_count()
    assert wide.activations == 2 * narrow.activations
    assert wide.optimizer == 8 * shape.parameter_count()  # two moments, and no masters


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.model)
def test_presets_run_on_gpus_of_several_hosts_and_fit_them(preset):
    path = config_file.find(preset.model)
    cluster = find_cluster(preset.cluster)
    numbers = config_file.ranks_of(path)
    assert numbers and numbers[-1] == 1024
    for gpus in numbers:
        config = config_file.load(path, gpus)
        shape = dry_run.check(config, gpus)
        assert config.train.device == "cuda" and tokens_per_step(config) in write_presets.TOKENS
        if gpus > cluster.gpus_per_node:
            check_between_hosts(config)
        assert estimate(config, shape, gpus).total <= SAFE * cluster.memory_bytes, gpus


def test_a_preset_is_the_planners():
    preset, gpus = PRESETS[0], 8
    job, candidate, _ = write_presets.fastest(preset.model, find_cluster(preset.cluster), gpus)
    planned = write_presets.config_of(job, candidate)
    found = config_file.load(config_file.find(preset.model), gpus)
    assert found.parallel == planned.parallel
    for name in ("batch_size", "micro_batch_size", "activation_checkpointing", "seq_len", "device"):
        assert getattr(found.train, name) == getattr(planned.train, name)


def test_a_number_of_ranks_without_a_mesh_is_refused_with_those_that_have_one(capsys):
    assert main(["train", "--config", "llama3-70b", "--dry_run", "48"]) == 2
    assert re.search(r"llama3-70b\.toml says how .*512, 1024 ranks share the work, and not how 48 would;",
                     capsys.readouterr().err)  # fmt: skip
