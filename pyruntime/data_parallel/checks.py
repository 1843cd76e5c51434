"""Refuses models and options that shard() cannot take, before anything changes, and torch.compile always."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.compiler import is_compiling
from torch.distributed.device_mesh import DeviceMesh

from pyruntime.choices import WireFormat
from pyruntime.data_parallel.axes import Axes, AxesOf


def check_weight_wire(wire: WireFormat, stage: int, axes: Axes) -> None:
    if stage != 3:
        raise ValueError(
            f'weight_wire="{wire}" needs stage=3: at stage={stage} the gathered weights are the stored ones; '
            "use stage 3, or leave weight_wire out."
        )
    if axes.shard.size == 1:
        raise ValueError(
            f'weight_wire="{wire}" was asked for, and one rank alone gathers nothing; leave it out.'
        )


def check_compression(stage: int, axes_of: AxesOf) -> None:
    axes = axes_of.main
    if len(axes_of.every) > 1:
        raise ValueError(
            "compression was asked for, and the model's experts lie over a group of their own, whose "
            "gradients travel uncompressed; leave it out, or spread them over the tensor-parallel ranks."
        )
    if axes.size == 1:
        raise ValueError("compression was asked for, and one rank alone sends nothing; leave it out.")
    if stage == 3:
        raise ValueError(
            "compression was asked for at stage=3, where weights travel uncompressed, twice as often as "
            "gradients; use stage 0, 1 or 2."
        )


def check_kinds(model: nn.Module, named: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Raises ValueError for parameters whose gradients cannot travel as rows."""
    sparse = {
        id(module.weight): name
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    }
    for name, parameter in named:
        if id(parameter) in sparse:
            raise ValueError(
                f"{sparse[id(parameter)]} has sparse gradients, but shard() reduces dense rows (of a "
                "table, those that a step has touched); make it with sparse=False."
            )
        if parameter.is_complex():
            raise ValueError(
                f"{name} is {parameter.dtype}, but shard() reduces only real numbers; keep the real and the "
                "imaginary part as two parameters (torch.view_as_real)."
            )
        if not parameter.is_contiguous():
            raise ValueError(
                f"{name} {list(parameter.shape)} has strides {list(parameter.stride())} (such as "
                "channels_last), but shard() takes rows that lie one after the other; call "
                "model.to(memory_format=torch.contiguous_format) first."
            )


def check_uncompiled(model: nn.Module) -> None:
    """Raises ValueError if torch.compile is to trace a part of the model."""
    for name, module in model.named_modules():
        compiled = isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None
        if compiled and next(module.parameters(), None) is not None:
            raise ValueError(f"{name or 'The model'} is under torch.compile, and {_NOT_COMPILED}")


def refuse_compiled(module: nn.Module, _args: tuple) -> None:
    """A forward pre-hook of sharded modules that raises RuntimeError if torch.compile traces one."""
    if is_compiling():
        _raise_compiled(module)


refuse_compiled.brings_no_weight = True  # type: ignore[attr-defined]
"""Says that linears with this hook that read one input may be multiplied together."""


_NOT_COMPILED = (
    "the weights and gradients of a sharded model travel by hooks that it cannot trace; compile functions "
    "that hold no weights (an activation, a loss), or do without it."
)


@torch.compiler.disable(reason=f"shard() has sharded this module, and {_NOT_COMPILED}")
def _raise_compiled(module: nn.Module) -> None:
    if any(hasattr(parameter, "sharded_as") for parameter in module.parameters()):  # not so in a copy
        raise RuntimeError(f"torch.compile was asked to trace a sharded module, and {_NOT_COMPILED}")


def check_ranks(model: nn.Module, named: Sequence[tuple[str, nn.Parameter]], mesh: DeviceMesh) -> None:
    """Raises ValueError if ranks with different shards of a parameter would be given the same values, or if
    each rank would write into a weight in its forward pass."""
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.Embedding | nn.EmbeddingBag)
            and module.max_norm is not None
            and mesh.size() > 1
        ):
            raise ValueError(
                f"{name} has max_norm={module.max_norm}, so its forward pass writes into its weight, on each "
                "rank the rows of its own data; clip the rows yourself, within handle.writes()."
            )
    ours = set(mesh.mesh.flatten().tolist())
    for name, parameter in named:
        layout = getattr(parameter, "tp_layout", None)
        for group in () if layout is None else layout.group.axes:
            if group.size == 1 or group.copies is not None:
                continue
            shared = ours.intersection(dist.get_process_group_ranks(group.process_group))
            if len(shared) > 1:
                raise ValueError(
                    f"shard() was asked to make ranks {sorted(shared)} train one model on different data, "
                    f"but {name} is cut over them (tensor-parallel group {group}), so that they hold "
                    "different shards. Pass the mesh of ranks that hold the same shards: runtime.dp of "
                    "Runtime.start(dp=2), say."
                )


def check_experts(model: nn.Module, axes_of: AxesOf) -> None:
    """Raises ValueError if experts that lie over a group of their own do not belong to the ranks over which
    gradients are averaged: their sum would be divided by another number than that of its terms."""
    groups = [
        layout.group for p in model.parameters() if (layout := getattr(p, "tp_layout", None)) is not None
    ]
    tp = max((group.ranks for group in groups if group.copies is None), default=1)
    for group in groups:
        if group.copies is None:
            continue
        if (held := group.size * group.copies.size()) != (given := tp * axes_of.main.size):
            raise ValueError(
                f"shard() was asked to average over {axes_of.main.size} rank(s) of tp={tp}, {given} ranks in "
                f"all, but the model's experts lie over {group.size} ranks in {group.copies.size()} copies, "
                f"{held} in all; pass runtime.replicas, the ranks of dp and cp, and runtime.ep of the same "
                "Runtime to the experts."
            )
