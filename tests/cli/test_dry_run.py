"""`train --dry_run RANKS` says what would run, and presets for clusters fit the GPUs that they are for."""

import dataclasses
import json
import random
import re
import time

import pytest
import torch

from pyruntime.cli import main
from pyruntime.cli.dry_run import held
from pyruntime.cli.plan_facts import Asked, checked, find_model
from pyruntime.llama import Llama
from pyruntime.plan.cluster import find_cluster
from pyruntime.plan.memory import SAFE, worst_memory
from pyruntime.plan.mesh import Job
from pyruntime.plan.search import SearchSpace, meshes
from pyruntime.train import config_file
from pyruntime.train.config import Model, Parallel, RunConfig, Train, tokens_per_step
from pyruntime.train.planned import estimate, rules_of
from pyruntime.train.resolved import check
from tests.train.jobs import changed, resolved
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
    shape = check(config_file.load(config_file.find("dim1024")), 1).shape
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


def test_a_run_that_skips_stages_says_so(capsys):
    axes = ["--parallel.pp", 4, "--pipeline.skip", 1, "--train.micro_batch_size", 1]
    out = report(capsys, *DIM1024, *axes, "--model.num_hidden_layers", 8, "--dry_run", 4)
    assert "1 slice(s), each micro-batch skips 1 of 4 stages: on average 5 of 8 layers train\n" in out


def test_a_run_that_routes_micro_batches_by_speed_says_so(capsys):
    axes = ["--parallel.pp", 2, "--parallel.dp", 2, "--pipeline.speeds", 1, 0.5, 1, 1]
    sizes = ["--train.batch_size", 12, "--train.micro_batch_size", 1]
    out = report(capsys, *DIM1024, *axes, *sizes, "--dry_run", 4)
    words = "1 slice(s), 8 4; 6 6 micro-batches on the data-parallel ranks of the stages\n"
    assert words in out and "micro-batches that pipeline.speeds stores beyond those of 1f1b" in out
    assert re.search(r"\d+\.\d% of a step is bubble if GEMMs", out)


def test_a_pipeline_s_stages_are_shown(capsys):
    axes = ["--parallel.pp", 2, "--pipeline.kind", "interleaved", "--pipeline.virtual", 2]
    out = report(capsys, *DIM1024, *axes, "--dry_run", 2)
    assert "pipeline  interleaved: 4 stages on 2 ranks, 4 micro-batches, 1 slice(s)" in out
    assert "layers of the ranks: 0: 0 and 2; 1: 1 and 3" in out
    assert re.search(r"\d+\.\d% of a step is bubble", out)


def test_fp32_takes_twice_the_memory_of_weights_and_activations():
    config = config_file.load(config_file.find("dim256"))
    run = check(config, 1)
    shape, wide = run.shape, held(run)
    narrow = held(check(changed(config, "train", dtype="bf16"), 1))
    assert wide.weights == 2 * narrow.weights == 4 * shape.parameter_count()
    assert wide.activations == 2 * narrow.activations
    assert wide.optimizer == 8 * shape.parameter_count()  # two moments, and no masters


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.model)
def test_presets_have_tensor_and_data_parallel_ranks_and_fit_their_gpus(preset):
    path = config_file.find(preset.model)
    cluster = find_cluster(preset.cluster)
    numbers = config_file.ranks_of(path)
    assert numbers and numbers[-1] == 1024
    for gpus in numbers:
        config = config_file.load(path, gpus)
        run = check(config, gpus)
        assert config.train.device == "cuda" and tokens_per_step(config) in write_presets.TOKENS
        assert config.parallel.cp == config.parallel.pp == 1
        memory = held(run).total
        assert memory <= SAFE * cluster.memory_bytes, gpus
        said = re.search(rf"\d+ GB a GPU\n\[ranks.{gpus}\]", path.read_text())[0]
        assert said.startswith(f"{memory / 1e9:.0f} GB"), gpus


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.model)
@pytest.mark.second_tier(but=["llama3-70b"])
def test_a_preset_planned_anew_and_written_is_dry_run_to_the_same_bytes_and_verdict(preset, capsys, tmp_path):
    for gpus in config_file.ranks_of(config_file.find(preset.model))[::3]:
        files = {"config": tmp_path / f"{gpus}.toml", "json": tmp_path / f"{gpus}.json"}
        flags = [part for name, path in files.items() for part in (f"--{name}", str(path))]
        of_preset = config_file.load(config_file.find(preset.model), gpus)
        asked = ["--gpus", gpus, "--cluster", preset.cluster, "--tokens_per_step", tokens_per_step(of_preset)]
        told = report(capsys, "plan", "--model", preset.model, *asked, "--top", 3, *flags)
        planned = json.loads(files["json"].read_text())["candidates"][0]
        assert planned["trainer"] == "runs" and planned["verdict"] == "fits"
        gb = planned["memory_bytes"] / 1e9
        assert f"The trainer runs line 1, {planned['name']}, which fits: {gb:.1f} of " in told
        config = config_file.load(files["config"], gpus)
        assert held(check(config, gpus)).total == planned["memory_bytes"]
        out = report(capsys, "train", "--config", files["config"], "--dry-run", gpus)
        assert re.search(rf"memory +{gb:.3g} GB.* fits, as that is \d+% of \d+ GB \({preset.cluster}\)", out)
        out = report(capsys, "train", "--config", preset.model, "--dry-run", gpus)
        assert ": fits, as that is" in out


@pytest.mark.parametrize(("cpus", "optimizer"), [(False, "adamw"), (True, "adamw"), (True, "muon")])
@pytest.mark.second_tier(but=["True-adamw"])
def test_planner_and_trainer_count_the_same_bytes_of_every_mesh_that_runs(cpus, optimizer):
    cluster = find_cluster("dgx-h100")
    if cpus:
        cluster = dataclasses.replace(cluster, core_bandwidth=1e11)
    job = Job(find_model("llama3-1b"), cluster, 8, 64, 4096, optimizer=optimizer)
    rules, asked, compared = rules_of(cluster), Asked(job), 0
    every = list(meshes(job, SearchSpace()))
    for mesh in random.Random(33).sample(every, 400):
        if asked.refusal(mesh) is None:
            of_trainer = estimate(checked(job, mesh), cluster)
            assert of_trainer == worst_memory(job, mesh, rules), mesh
            compared += 1
    assert compared > 100


def test_what_does_not_fit_ends_with_2_and_says_what_would(capsys):
    wide = ["train", "--config", "llama3-70b", "--train.activation_checkpointing", "none", "--dry-run", "32"]
    assert main(wide) == 2
    out, err = capsys.readouterr()
    assert "does not fit, as that is" in out and out.endswith("Nothing was started.\n")
    said = re.search(r"dgx-h100 has 80 GB a rank, and this run needs ([\d.]+) GB on 32 ranks: it does not "
                     r"fit\. With (.*) it takes ([\d.]+) GB and fits\.\n$", err)  # fmt: skip
    assert said and float(said[1]) > 80 and float(said[3]) <= 64
    flags = [part for change in said[2].split(" and ") for part in f"--{change}".split("=")]
    again = report(capsys, *wide, *flags)
    assert f"memory    {said[3]} GB" in again and ": fits, as" in again


def test_what_nothing_makes_fit_is_sent_to_the_planner(capsys, tmp_path):
    path = tmp_path / "405b.toml"
    path.write_text(
        '[model]\npreset = "llama3-405b"\nvocab_size = 128256\n[parallel]\ntp = 8\n'
        '[train]\ndevice = "cuda"\nbatch_size = 1\nmicro_batch_size = 1\n[output]\ncluster = "dgx-h100"\n'
    )
    assert main(["train", "--config", str(path), "--dry-run", "8"]) == 2
    said = capsys.readouterr().err
    assert "it does not fit. Take more ranks, or let `python -m pyruntime plan` look for a mesh" in said


def test_millions_of_micro_batches_are_dry_run_in_seconds(capsys):
    """Without making the actions of their schedule."""
    axes = ["--parallel.pp", 2, "--train.batch_size", 2**18, "--train.micro_batch_size", 1]
    started = time.perf_counter()
    out = report(capsys, *DIM1024, *axes, "--dry_run", 2)
    assert time.perf_counter() - started < 10
    assert "1f1b: 2 stages on 2 ranks, 262144 micro-batches" in out and "bubble" not in out


def test_a_preset_is_the_planners():
    preset, gpus = PRESETS[0], 8
    job, candidate = write_presets.fastest(preset.model, find_cluster(preset.cluster), gpus)
    planned = write_presets.config_of(job, candidate)
    found = config_file.load(config_file.find(preset.model), gpus)
    assert found.parallel == planned.parallel
    for name in ("batch_size", "micro_batch_size", "activation_checkpointing", "seq_len", "device"):
        assert getattr(found.train, name) == getattr(planned.train, name)


def test_a_number_of_ranks_without_a_mesh_is_refused_with_those_that_have_one(capsys):
    assert main(["train", "--config", "llama3-70b", "--dry_run", "48"]) == 2
    assert re.search(r"llama3-70b\.toml has tables for .*512, 1024 ranks, and none for 48;",
                     capsys.readouterr().err)  # fmt: skip


@pytest.mark.parametrize(
    ("slices", "recompute", "whole"), [(2, "none", 7), (2, "selective", 0), (3, "selective", 8)]
)
def test_rows_that_causal_slices_keep_are_counted(slices, recompute, whole):
    """Two linears a layer keep the rows of 8 ranks, in place of this rank's or where none were kept."""
    config = RunConfig(
        model=Model(preset="llama3-8b", vocab_size=128256),
        train=Train(
            dtype="bf16", seq_len=2048, batch_size=1, micro_batch_size=1, activation_checkpointing=recompute
        ),
        parallel=Parallel(tp=8),
    )
    plain, sliced = (
        estimate(resolved(changed(config, "parallel", tp_slices=each), 8)) for each in (1, slices)
    )
    assert sliced.activations - plain.activations == pytest.approx(32 * 2 * 2 * 2048 * 4096 * whole / 8)
