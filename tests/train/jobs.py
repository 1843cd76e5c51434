"""Small training jobs that tests run on ranks."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pyruntime import comm
from pyruntime.train import checkpoint
from pyruntime.train.config import (
    Checkpoint,
    Data,
    Model,
    Optimizer,
    Output,
    RunConfig,
    Train,
    mesh_of,
)
from pyruntime.train.data import corpus
from pyruntime.train.data.tokenizer import open_tokenizer
from pyruntime.train.loop import Trainer
from pyruntime.train.metrics import StepMetrics
from pyruntime.train.model_of_run import make_model
from pyruntime.train.resolved import ResolvedRun, resolve, settled
from pyruntime.train.shape import llama_config
from pyruntime.train.signals import StopRequest
from tests.transports import take


def job(folder: Path, **train) -> RunConfig:
    """A model of 64 features on fresh text: words drawn at random, so that there is something to learn."""
    generator = np.random.default_rng(random.getrandbits(64))
    words = [
        "".join(map(chr, generator.integers(97, 123, size=int(n)))) for n in generator.integers(2, 8, 50)
    ]
    text = folder / "text.txt"
    text.write_text(" ".join(generator.choice(words, 6000)))
    return RunConfig(
        model=Model(preset="debug", hidden_size=64, intermediate_size=128),
        data=Data(paths=(str(text),), cache=str(folder / "tokens")),
        optimizer=Optimizer(lr=3e-3, warmup_steps=3),
        train=Train(
            **{
                "steps": 20, "batch_size": 6, "micro_batch_size": 2, "seq_len": 33, "dtype": "fp32",
                "val_every": 10, "val_sequences": 5, "threads": 1,
            } | train
        ),
        checkpoint=Checkpoint(keep=10),
        output=Output(run_dir=str(folder / "run"), progress="off", sample_tokens=8),
    )  # fmt: skip


def changed(config: RunConfig, section: str, **values) -> RunConfig:
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **values)})


def prepare(config: RunConfig) -> Path:
    """Writes the tokens of the job where `trainer` finds them."""
    folder = Path(config.output.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    opened(config)
    return folder


def opened(config: RunConfig) -> corpus.Corpus:
    """The text of the job as a run sees it."""
    tokenizer = open_tokenizer(config.data.tokenizer, "", config.data.paths)
    return corpus.open_corpus(
        config.data, corpus.build(config.data, tokenizer), tokenizer, config.train.seq_len
    )


def resolved(config: RunConfig, world_size: int = 1) -> ResolvedRun:
    """The job on so many ranks, of a model for bytes."""
    mesh = mesh_of(config, world_size)
    shape = llama_config(config.model, 256, config.train.seq_len, mesh.tp, mesh.tp_y, mesh.ep)
    return resolve(settled(config, shape), shape, world_size)


_runtimes: dict[tuple, comm.Runtime] = {}


def runtime(group, config: RunConfig) -> comm.Runtime:
    """The mesh of a job over the ranks of `group`, made once: with other axes than tp these are the pool's
    four ranks, or eight."""
    mesh = mesh_of(config, comm.group_size(group))
    dp, replicate, ep = mesh.dp, mesh.dp_replicate, mesh.ep
    sizes = {"dp_replicate": replicate, "dp_shard": dp // replicate} if replicate > 1 else {"dp": dp}
    sizes = {"pp": mesh.pp, **sizes, "cp": mesh.cp, "tp": mesh.tp, "tp_y": mesh.tp_y}
    sizes = {name: size for name, size in sizes.items() if size > 1 or name in ("dp_shard", "tp")}
    key = (comm.group_name(group), ep, *sizes.items())
    if key not in _runtimes:
        if len(sizes) == 1:
            mesh = DeviceMesh.from_group(comm.process_group(group), "cpu", mesh_dim_names=("tp",))
        else:
            mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        _runtimes[key] = comm.Runtime(mesh, ep=ep)
    return _runtimes[key]


def on_mesh(
    config: RunConfig, micro_batches: int, schedule="1f1b", recompute="none", slices=1, **sizes
) -> RunConfig:
    """The job on a mesh of these sizes, in steps of so many micro-batches a data-parallel rank."""
    size = config.train.batch_size // (sizes.get("dp", 1) * micro_batches)
    config = changed(config, "train", micro_batch_size=size, activation_checkpointing=recompute)
    config = changed(config, "parallel", **{"tp": 1} | sizes)
    return changed(config, "pipeline", kind=schedule, slices=slices)


def between_hosts(group, config: RunConfig, case):
    """Returns case(group, config) on a mesh whose chunks of tp, dp, cp and ep travel as between hosts."""
    made = runtime(group, config)
    every = (made.tp, made.dp, made.cp, *((made.ep, made.edp) if made.ep.copies else ()))
    axes = [axis.group for axis in every if axis.size > 1]
    for axis in axes:
        take(axis, "process_group")
    try:
        return case(group, config)
    finally:
        for axis in axes:
            take(axis, "symmetric_memory")


def trainer(group, config: RunConfig, stop: StopRequest | None = None) -> Trainer:
    """This rank's trainer of a job that was prepared, over what `runtime` makes of the group."""
    return trainer_over(runtime(group, config), config, stop)


def trainer_over(ranks: comm.Runtime, config: RunConfig, stop: StopRequest | None = None) -> Trainer:
    """This rank's trainer of a job that was prepared."""
    run = resolved(config, ranks.world.size())
    made = make_model(run, ranks)
    return Trainer(run, made, opened(run.config), ranks, Path(config.output.run_dir), stop or StopRequest())


def history(group, config: RunConfig, resume: Path | None = None) -> list[StepMetrics]:
    """What every step of the job measured."""
    made = trainer(group, config)
    made.refer()
    if resume:
        made.resume(resume)
    return list(made.fit())


def full_state(group, config: RunConfig, resume: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole, after it was loaded over the ranks of `group`."""
    made = trainer(group, config)
    made.resume(resume)
    state = checkpoint.state_of(made.sharded)
    state = state["model"] | state["optimizer"]
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()
    }


def curve(steps: list[StepMetrics], name: str) -> list:
    return [getattr(step, name) for step in steps]


def check_curves(found: list[list[StepMetrics]], expected: list[StepMetrics]) -> None:
    """What every rank found is what was expected, losses to 1e-4, and bitwise the same on first and last."""
    for name in ("loss", "grad_norm", "val_loss"):
        assert curve(found[0], name) == curve(found[-1], name)
        for one, other in zip(curve(found[0], name), curve(expected, name), strict=True):
            assert (one is None) == (other is None)
            # A norm far above 1 has more digits that rounding reaches.
            assert one is None or one == pytest.approx(other, abs=1e-4, rel=1e-3 * (name == "grad_norm"))
