"""Finds the linears inside peft's low-rank adapters: y = x W^T + s (x A^T) B^T, A [r, K], B [N, r].

    column   W and B are cut along N; A is whole, and its output [.., r] is whole on every rank
    row      W and A are cut along K; A's output is the sum over ranks, and B is whole

So in the forward pass an adapter costs a row linear one more sum, of r features, and a column linear nothing.
"""

from __future__ import annotations

from torch import nn


def linears_of(name: str, module: nn.Module, style: str) -> list[tuple[str, str]]:
    """Returns [(qualified name, style)] of the linears that `style` on a module cuts: the module itself, or
    the linears inside it where it has adapters. Raises ValueError for adapters that are not plain LoRA."""
    if not is_wrapper(module):
        return [(name, style)]
    if (
        style == "embedding"
        or getattr(module, "lora_variant", None)
        or getattr(module, "lora_bias", None) is True
    ):
        raise ValueError(
            f"{name} has adapters of peft that cannot be cut as {style!r}. Only linears with plain LoRA can "
            "(no DoRA or other variant, no embeddings); leave it out of the plan, or use plain adapters."
        )
    cut = "lora_A" if style.startswith("row") else "lora_B"
    adapters = [f"{name}.{cut}.{adapter}" for adapter in getattr(module, cut)]
    return [(f"{name}.base_layer", style), *((adapter, style) for adapter in adapters)]


def is_wrapper(module: nn.Module) -> bool:
    """Whether the module is a linear with adapters."""
    return all(hasattr(module, part) for part in ("base_layer", "lora_A", "lora_B"))


def wrapper_of(name: str) -> str:
    """Returns the name of the linear with adapters that contains the module of this name; else the name."""
    parts = name.split(".")
    cuts = [i for i, part in enumerate(parts) if part in ("base_layer", "lora_A", "lora_B")]
    return ".".join(parts[: cuts[0]]) if cuts else name
