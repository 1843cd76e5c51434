"""This rank's part of the model of a run, and at the end all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pyruntime import comm
from pyruntime.choices import VARIANTS_OF_WHOLE_HEADS
from pyruntime.comm import Runtime
from pyruntime.comm.groups import crosses_hosts
from pyruntime.context import Context
from pyruntime.llama import Llama, load_weights
from pyruntime.llama.elementwise import NoCompiler
from pyruntime.llama.hf import check_shapes, read_config, saved_dtype
from pyruntime.train import checkpoint
from pyruntime.train.config import RunConfig
from pyruntime.train.errors import ConfigError, refusing
from pyruntime.train.resolved import ResolvedRun
from pyruntime.train.validate.sequences import why_no_slices

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def slices_of(run: ResolvedRun, runtime: Runtime) -> int:
    """Causal slices inside a tensor-parallel group."""
    config = run.config
    asked = config.parallel.tp_slices
    if asked != "auto":
        return asked
    if config.parallel.cp > 1 or why_no_slices(config, run.mesh.tp):
        return 1
    return 2 if crosses_hosts(runtime.tp, runtime.device) else 1


def make_model(run: ResolvedRun, runtime: Runtime) -> Llama:
    """This rank's part of the model, with the weights that a run starts from. Raises ConfigError where the
    mesh does not fit the model, or its first weights cannot be read."""
    config, source = run.config, run.config.model.init_from
    context = _context(run, runtime)
    if source:
        with refusing("model.init_from: ", (ValueError, OSError)):
            check_shapes(run.shape, source)
    with refusing("train.compile: ", (NoCompiler,)):
        model = _llama(
            run,
            runtime,
            seed=None if source else config.train.seed,
            context=context,
            recompute=config.train.activation_checkpointing,
            compile=config.train.compile,
            slices=slices_of(run, runtime),
            z_loss=config.train.z_loss,
            part=run.part_of(runtime.coordinate.pp),
        )
    if source:
        with refusing("model.init_from: ", (ValueError, OSError)):
            load_weights(model, source)
    return model


def whole_model(run: ResolvedRun, runtime: Runtime, folder: Path) -> Llama:
    """The layers of all stages over this rank's tensor-parallel group, from the checkpoint in `folder`."""
    model = _llama(run, runtime, seed=None)
    checkpoint.load_weights(folder, model, comm.process_group(runtime.tp))
    return model


def _llama(run: ResolvedRun, runtime: Runtime, *, seed: int | None, **options: Any) -> Llama:
    """`options` are Llama's."""
    return Llama(
        run.shape,
        runtime.tp_grid,
        device=runtime.device,
        dtype=DTYPES[run.config.train.dtype],
        tier=run.config.comm.tier,
        wire=run.config.parallel.tp_wire,
        seed=seed,
        **options,
    )


def _context(run: ResolvedRun, runtime: Runtime) -> Context | None:
    """How attention sees the tokens of other ranks; None where sequences are not cut over ranks."""
    asked, cp = run.config.context, run.mesh.cp
    if cp == 1:
        return None
    heads = run.shape.num_key_value_heads // run.mesh.tp
    if asked.variant == "ulysses" and heads % cp:
        raise ConfigError(
            f"context.variant=ulysses deals out heads, and parallel.cp={cp} does not divide "
            f"the {heads} key/value heads of a tensor-parallel rank; use "
            f"{' or '.join(VARIANTS_OF_WHOLE_HEADS)}."
        )
    return Context(runtime.cp, asked.layout, asked.variant, asked.wire)


def words_of_dtype(config: RunConfig) -> str:
    """Where weights leave in another type than they came in; empty where they do not, or are new."""
    source = Path(config.model.init_from)
    if not config.model.init_from or not (source / "config.json").is_file():
        return ""
    try:
        came, leaves = saved_dtype(read_config(source)), DTYPES[config.train.dtype]
    except ValueError:  # a type that has no name here: loading says what it takes
        return ""
    if came == leaves:
        return ""
    return f"dtype  weights came as {came} and leave as {leaves}, which is train.dtype={config.train.dtype}"
