"""Small training jobs that tests run on ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from pyruntime import comm
from pyruntime.context import Context
from pyruntime.llama import Llama
from pyruntime.train import corpus, shape
from pyruntime.train.config import (
    Checkpoint,
    Data,
    Model,
    Optimizer,
    Output,
    RunConfig,
    Train,
)
from pyruntime.train.loop import Trainer
from pyruntime.train.metrics import StepMetrics
from pyruntime.train.pipelined import part_of, resolved
from pyruntime.train.run import DTYPES
from pyruntime.train.signals import StopRequest
from pyruntime.train.tokenizer import ByteTokenizer


def job(folder: Path, **train) -> RunConfig:
    """A model of 64 features on fresh text: words drawn at random, so that there is something to learn."""
    generator = np.random.default_rng()
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
    corpus.build(config.data, ByteTokenizer())
    return folder


_runtimes: dict[tuple[int, ...], comm.Runtime] = {}


def runtime(config: RunConfig, world: int) -> comm.Runtime | None:
    """The mesh of a job over the pool's four ranks, or eight, made once; None where it has tensor-parallel
    ranks alone."""
    dp, replicate, cp = config.parallel.dp, config.parallel.dp_replicate, config.parallel.cp
    pp = config.parallel.pp
    if dp * cp * pp == 1:
        return None
    key = (pp, dp, replicate, cp, world)
    if key not in _runtimes:
        sizes = {"dp_replicate": replicate, "dp_shard": dp // replicate} if replicate > 1 else {"dp": dp}
        sizes = ({"pp": pp} if pp > 1 else {}) | (sizes if dp > 1 else {}) | ({"cp": cp} if cp > 1 else {})
        sizes |= {"tp": world // (pp * dp * cp)}
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        _runtimes[key] = comm.Runtime(mesh)
    return _runtimes[key]


def trainer(group, config: RunConfig, stop: StopRequest | None = None) -> Trainer:
    """This rank's trainer of a job that was prepared: tensor parallel over `group`, or, where the job has
    other ranks too, over what `runtime` makes of the group, which is all of them."""
    whole, replicas, world, context = runtime(config, comm.group_size(group)), None, None, None
    pp = None if whole is None else whole.pp
    if whole is not None:
        replicas, world, group = whole.replicas, group, whole.tp
        if whole.cp is not None:
            context = Context(whole.cp, config.context.layout, config.context.variant)
    size = comm.group_size(group)
    wanted = shape.llama_config(config.model, 256, config.train.seq_len, size)
    options = {"dtype": DTYPES[config.train.dtype], "seed": config.train.seed, "tier": config.comm.tier}
    config = resolved(config, wanted)
    part = None if pp is None else part_of(config, wanted, comm.group_rank(pp))
    options["recompute"] = config.train.activation_checkpointing
    model = Llama(wanted, group, context=context, part=part, **options)
    folder = Path(config.output.run_dir)
    tokens = corpus.build(config.data, ByteTokenizer())
    text = corpus.open_corpus(tokens, config.data.val_fraction, config.train.seq_len)
    stop = stop or StopRequest()
    return Trainer(config, model, wanted, text, group, folder, stop, replicas, world, context, pp)


def history(group, config: RunConfig, resume: Path | None = None) -> list[StepMetrics]:
    """What every step of the job measured."""
    made = trainer(group, config)
    if resume:
        made.resume(resume)
    return list(made.fit())


def full_state(group, config: RunConfig, resume: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole, after it was loaded over the ranks of `group`."""
    made = trainer(group, config)
    made.resume(resume)
    state = made._checkpointed().state()
    state = state["model"] | state["optimizer"]
    return {name: value.full_tensor() for name, value in state.items()}


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
