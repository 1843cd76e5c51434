"""The low-rank adapters of a Llama: which linears have one, and how they become part of the weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from pyruntime.choices import LORA_TARGETS
from pyruntime.nn import MergedColumnParallelLinear, RowParallelLinear
from pyruntime.nn.cut import memory_of
from pyruntime.nn.low_rank import Adapter, ColumnAdapter, LoRA, RowAdapter

if TYPE_CHECKING:
    from pyruntime.llama.config import LlamaConfig
    from pyruntime.llama.model import Llama

_LINEARS = {
    "qkv": {"q_proj": "q", "k_proj": "k", "v_proj": "v"},
    "out": {"o_proj": ""},
    "gate_up": {"gate_proj": "gate", "up_proj": "up"},
    "down": {"down_proj": ""},
}
"""The linears of a layer, and the parts of each by their names in Hugging Face's models."""


def check(lora: LoRA, config: LlamaConfig, slices: int, has_second_axis: bool) -> None:
    """Raises ValueError for adapters that a model of this kind cannot have."""
    if unknown := [name for name in lora.targets if name not in LORA_TARGETS]:
        raise ValueError(f"No linear of a layer is called {unknown[0]!r}; use {', '.join(LORA_TARGETS)}.")
    if lora.rank < 1 or not lora.targets:
        raise ValueError(
            f"An adapter needs a rank of at least 1 and a linear, found rank={lora.rank} and "
            f"targets={list(lora.targets)}."
        )
    if slices > 1 or has_second_axis:
        raise ValueError(
            "Low-rank adapters do not fit causal slices or features cut over a second axis; leave these out."
        )
    if why := config.why_no_adapters(lora.targets):
        raise ValueError(f"{why[0].upper()}{why[1:]}.")


def adapters_of(layer: nn.Module, lora: LoRA | None) -> nn.ModuleDict:
    """Returns the adapters of a layer by the names of its linears; none without `lora`."""
    found = nn.ModuleDict()
    if lora is None:
        return found
    for name, parts in _LINEARS.items():
        wanted = [part for target, part in parts.items() if target in lora.targets]
        if not wanted:
            continue
        linear = getattr(layer, name)
        if isinstance(linear, MergedColumnParallelLinear):
            found[name] = ColumnAdapter(linear, wanted, lora.rank, lora.scale)
        else:
            assert isinstance(linear, RowParallelLinear)
            found[name] = RowAdapter(linear, lora.rank, lora.scale)
    return found


def train_only_adapters(model: nn.Module) -> None:
    """Freezes all parameters but those of adapters."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad_(isinstance(module, Adapter))


@contextlib.contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """The block computes as if the model had no adapters; no backward pass in it."""
    adapters = [each for each in model.modules() if isinstance(each, Adapter)]
    scales = [each.scale for each in adapters]
    try:
        for each in adapters:
            each.scale = 0.0
        yield
    finally:
        for each, scale in zip(adapters, scales, strict=True):
            each.scale = scale


@torch.no_grad()
def merge(model: Llama) -> None:
    """Adds the adapters, if there are any, to the weights of their linears, W + s B A rounded once, and
    removes them. No communication; weights stay frozen."""
    for number in model.part.layers:
        layer = model.layer(number)
        for name, adapter in layer.adapters.items():
            weight = memory_of(layer.get_submodule(name).weight)
            deltas = adapter.deltas()
            weight.copy_(weight.to(deltas.dtype) + deltas)
        layer.adapters = nn.ModuleDict()
    model.lora = None
