"""Makes this rank's part of a run's model, and at the end the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pyruntime import comm
from pyruntime.choices import VARIANTS_OF_WHOLE_HEADS
from pyruntime.comm import Runtime
from pyruntime.comm.core import _C
from pyruntime.comm.groups import crosses_hosts
from pyruntime.context import Context
from pyruntime.llama import Llama, load_weights
from pyruntime.llama.adapter_files import load_adapters
from pyruntime.llama.config import LlamaConfig
from pyruntime.llama.elementwise import NoCompiler
from pyruntime.llama.hf import check_shapes, read_config, saved_dtype
from pyruntime.nn import RouterLosses
from pyruntime.nn.low_rank import LoRA
from pyruntime.nn.parameters import Group
from pyruntime.train import checkpoint
from pyruntime.train.assembly import data_axes
from pyruntime.train.config import RunConfig
from pyruntime.train.errors import ConfigError, refusing
from pyruntime.train.resolved import ResolvedRun
from pyruntime.train.validate.sequences import why_no_slices

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SLICED_FROM = 8
"""Tensor-parallel ranks of one host from which on slices pay on devices (bench/results/clock.md)."""
SLICED_FROM_ROWS, SLICED_FROM_ROWS_TOGETHER = 4096, 1024
"""Rows of a micro-batch that an expert gets on average from which on slices pay there: with fewer, GEMMs of
half of them lose as much as is hidden. The second where one launch multiplies for all experts."""


def slices_of(run: ResolvedRun, runtime: Runtime) -> int:
    """Returns the number of causal slices inside a tensor-parallel group."""
    config = run.config
    asked = config.parallel.tp_slices
    if asked != "auto":
        return asked
    of_shape = run.shape.why_no_slices(2, run.mesh.tp, over_tp=run.mesh.experts_over == run.mesh.tp)
    forbidden = config.lora.rank > 0 or of_shape or why_no_slices(config, run.mesh)
    if forbidden or config.parallel.cp > 1:
        return 1
    # Only with selective recomputation do slices keep no gathered rows, which nobody may have room for.
    keeps_none = run.mesh.tp == 1 or config.train.activation_checkpointing == "selective"
    together = config.train.dtype == "bf16" and _C.has_grouped_gemm(runtime.device.type)
    least = SLICED_FROM_ROWS_TOGETHER if together else SLICED_FROM_ROWS
    is_long = run.mesh.tp >= SLICED_FROM or _rows_of_expert(run) >= least
    gains = runtime.device.type != "cpu" and keeps_none and is_long
    return 2 if gains or crosses_hosts(runtime.tp, runtime.device) else 1


def _rows_of_expert(run: ResolvedRun) -> float:
    """The mean number of rows that an expert gets of a micro-batch; 0 without experts over several ranks."""
    mixture, mesh, train = run.shape.mixture, run.mesh, run.config.train
    if mixture is None or mesh.experts_over == 1:
        return 0.0
    tokens = train.micro_batch_size * train.seq_len * mesh.experts_over / (mesh.tp * mesh.cp)
    return tokens * mixture.per_token / mixture.experts


def make_model(run: ResolvedRun, runtime: Runtime) -> Llama:
    """Makes this rank's part of the model, with the weights that the run starts from. Raises ConfigError if
    the mesh does not fit the model, or the weights cannot be read."""
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
            router_losses=_router_losses(run, runtime),
        )
    if source:
        with refusing("model.init_from: ", (ValueError, OSError)):
            load_weights(model, source)
    if config.lora.init_from:
        with refusing("lora.init_from: ", (ValueError, OSError)):
            load_adapters(model, config.lora.init_from)
    return model


def lora_of(config: RunConfig) -> LoRA | None:
    """Returns the adapters that a run trains; None if all weights train."""
    asked = config.lora
    if asked.rank == 0:
        return None
    return LoRA(asked.rank, asked.alpha, asked.targets, asked.rslora, config.train.seed)


def _router_losses(run: ResolvedRun, runtime: Runtime) -> RouterLosses:
    """The losses of experts' routers, over the tokens of all ranks that sum their gradients in every step."""
    within, _ = data_axes(run, runtime)
    groups: list[Group] = [runtime.tp] if runtime.sizes.tp > 1 else []
    groups += [] if within is None else [within.get_group(dim) for dim in range(within.ndim)]
    train, shares = run.config.train, 1 if within is None else within.size()
    return RouterLosses(train.balance_loss, train.router_z_loss, groups, shares, 1.0 / run.micro_batches)


def whole_model(run: ResolvedRun, runtime: Runtime, folder: Path) -> Llama:
    """The layers of all stages over this rank's tensor-parallel group, from the checkpoint in `folder`, and
    those that it does not have, because they did not train, from where the run began."""
    source, is_frozen = run.config.model.init_from, run.config.lora.rank > 0
    model = _llama(run, runtime, seed=run.config.train.seed if is_frozen and not source else None)
    if is_frozen and source:
        with refusing("model.init_from: ", (ValueError, OSError)):
            load_weights(model, source)
    checkpoint.load_weights(folder, model, comm.process_group(runtime.tp))
    return model


def _llama(run: ResolvedRun, runtime: Runtime, *, seed: int | None, **options: Any) -> Llama:
    return Llama(
        run.shape,
        runtime.tp_grid,
        device=runtime.device,
        dtype=DTYPES[run.config.train.dtype],
        tier=run.config.comm.tier,
        wire=run.config.parallel.tp_wire,
        seed=seed,
        lora=lora_of(run.config),
        experts=None if run.shape.mixture is None else runtime.ep,
        tp_speeds=run.config.parallel.tp_speeds,
        **options,
    )


def _context(run: ResolvedRun, runtime: Runtime) -> Context | None:
    """Returns how attention reaches other ranks' tokens; None if sequences are not cut over ranks."""
    asked, cp = run.config.context, run.mesh.cp
    if cp == 1:
        return None
    heads = run.cuts.groups_of(run.shape, run.mesh.tp)
    if asked.variant == "ulysses" and (others := [each for each in heads if each % cp]):
        raise ConfigError(
            f"context.variant=ulysses deals out heads, but parallel.cp={cp} does not divide "
            f"the {others[0]} key/value heads of a tensor-parallel rank; use "
            f"{' or '.join(VARIANTS_OF_WHOLE_HEADS)}."
        )
    return Context(runtime.cp, asked.layout, asked.variant, asked.wire)


def words_of_dtype(config: RunConfig) -> str:
    """A line for the log if weights leave in another type than they came in; else empty."""
    source = Path(config.model.init_from)
    if not config.model.init_from or not (source / "config.json").is_file():
        return ""
    try:
        came, leaves = saved_dtype(read_config(source)), DTYPES[config.train.dtype]
    except ValueError:  # an unknown type: loading raises the error that names it
        return ""
    if came == leaves:
        return ""
    return f"dtype  weights came as {came} and leave as {leaves}, which is train.dtype={config.train.dtype}"


def words_of_positions(config: RunConfig) -> str:
    """A line for the log if sequences are longer than those that model.init_from was made for; else empty."""
    source, seq_len = Path(config.model.init_from), config.train.seq_len
    if not config.model.init_from or not (source / "config.json").is_file():
        return ""
    most = LlamaConfig.from_hf(read_config(source)).max_position_embeddings
    if seq_len <= most:
        return ""
    return (
        f"length train.seq_len={seq_len} is above max_position_embeddings={most} of {source}, which may not "
        "know later positions; the model that leaves says the longer one"
    )
