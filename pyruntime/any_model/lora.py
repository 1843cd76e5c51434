"""Linears that peft has given low-rank adapters: y = x W^T + s (x A^T) B^T, A [r, K], B [N, r].

    column   W and B are cut along N; A is whole, and what it gives, [.., r], is whole on every rank
    row      W and A are cut along K; A's output is the sum over ranks, and B is whole

so an adapter costs a row linear one more sum, of r features, and a column linear nothing in the forward pass.
"""

from __future__ import annotations

from torch import nn


def linears_of(name: str, module: nn.Module, style: str) -> list[tuple[str, str]]:
    """[(qualified name, style)]: what `style` on a module means. The module itself, unless it is a linear
    with adapters.

    Raises ValueError for adapters that are not plain LoRA."""
    if not is_wrapper(module):
        return [(name, style)]
    if (
        style == "embedding"
        or getattr(module, "lora_variant", None)
        or getattr(module, "lora_bias", None) is True
    ):
        raise ValueError(
            f"{name} has adapters of peft that cannot be cut as {style!r}: linears with plain LoRA can (no "
            "DoRA or another variant, no embeddings); leave it out of the plan, or make plain adapters."
        )
    cut = "lora_A" if style.startswith("row") else "lora_B"
    adapters = [f"{name}.{cut}.{adapter}" for adapter in getattr(module, cut)]
    return [(f"{name}.base_layer", style), *((adapter, style) for adapter in adapters)]


def is_wrapper(module: nn.Module) -> bool:
    """Whether it is a linear with adapters."""
    return all(hasattr(module, part) for part in ("base_layer", "lora_A", "lora_B"))


def wrapper_of(name: str) -> str:
    """The linear with adapters that the module of this qualified name is a part of; else the name itself."""
    parts = name.split(".")
    cuts = [i for i, part in enumerate(parts) if part in ("base_layer", "lora_A", "lora_B")]
    return ".".join(parts[: cuts[0]]) if cuts else name
