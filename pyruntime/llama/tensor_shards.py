"""Maps local parameters to slices of checkpoint tensors, for initialisation, loading and saving."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from torch import Tensor, nn

from pyruntime.nn.cut import memory_of
from pyruntime.nn.gather import gather_whole
from pyruntime.nn.parameters import TensorGroup
from pyruntime.nn.router import SigmoidRouter

ROUTER_BIAS = "e_score_correction_bias"
"""The bias of a router, always fp32."""
_MODEL = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_LAYER = {
    "attention_norm": {"": "input_layernorm"},
    "qkv": {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj"},
    "latent.q": {"": "self_attn.q_proj"},
    "latent.q_norm": {"": "self_attn.q_a_layernorm"},
    "latent.q_up": {"": "self_attn.q_b_proj"},
    "latent.down": {"q": "self_attn.q_a_proj", "kv": "self_attn.kv_a_proj_with_mqa"},
    "latent.kv_norm": {"": "self_attn.kv_a_layernorm"},
    "latent.kv_up": {"": "self_attn.kv_b_proj"},
    "q_norm": {"": "self_attn.q_norm"},
    "k_norm": {"": "self_attn.k_norm"},
    "out": {"": "self_attn.o_proj"},
    "mlp_norm": {"": "post_attention_layernorm"},
    "gate_up": {"gate": "mlp.gate_proj", "up": "mlp.up_proj"},
    "down": {"": "mlp.down_proj"},
    "mixture.router": {"": "mlp.gate"},
    "mixture.experts": {"": "mlp.experts"},
    "mixture.shared_gate_up": {"gate": "mlp.shared_expert.gate_proj", "up": "mlp.shared_expert.up_proj"},
    "mixture.shared_down": {"": "mlp.shared_expert.down_proj"},
    "mixture.shared_gate": {"": "mlp.shared_expert_gate"},
}


@dataclasses.dataclass(frozen=True)
class TensorShard:
    """This rank's part of one tensor of a Hugging Face Llama checkpoint.

    `name` and `shape` are those of the whole tensor. `local` is a view of the parameter with the indices
    `[start, start + local.shape[dim])` of dimension `dim`, or with the whole tensor if `dim` is None. `group`
    has the ranks that share it. `dim_y` and `start_y` are the same for the dimension cut over y, if the group
    has two axes.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None
    start: int
    local: Tensor
    group: TensorGroup
    dim_y: int | None = None
    start_y: int = 0
    shares: tuple[int, ...] = ()
    """Indices of `dim` that each rank holds; () as `Shard` cuts."""


def shards_of_model(name: str, module: nn.Module) -> Iterator[TensorShard]:
    """Yields the tensors of "embed", "norm" or "head"."""
    return _shards_of(module, {"": _MODEL[name]})


def shards_of_layer(number: int, layer: nn.Module) -> Iterator[TensorShard]:
    """Yields the tensors of a decoder layer, in the order of use."""
    held = dict(layer.named_modules())
    for module, names in _LAYER.items():
        if module in held:
            yield from _shards_of(held[module], names, f"model.layers.{number}.")


def shards_of_adapters(number: int, layer: nn.Module) -> Iterator[TensorShard]:
    """Yields the tensors of a layer's adapters, in the order of use."""
    for module, adapter in layer.adapters.items():
        names = {
            f"{which}.{matrix}".lstrip("."): f"{name}.{matrix}"
            for which, name in _LAYER[module].items()
            for matrix in ("lora_A", "lora_B")
        }
        yield from _shards_of(adapter, names, f"model.layers.{number}.")


def gather_full(shard: TensorShard) -> Tensor:
    """Returns the full tensor of `shard` on every rank. All ranks of its group must call this."""
    cuts = zip(shard.group.axes, (shard.dim, shard.dim_y), (shard.shares, ()), strict=False)
    return gather_whole(
        shard.local, [(axis, d, (shard.shape[d],), shares) for axis, d, shares in cuts if d is not None]
    )


def _shards_of(module: nn.Module, names: dict[str, str], prefix: str = "") -> Iterator[TensorShard]:
    for parameter in module.parameters(recurse=False):
        layout = parameter.tp_layout
        for part, local in zip(layout.parts, layout.split(memory_of(parameter)), strict=True):
            # "q.weight" of a merged linear, "weight" of a plain one
            which, _, kind = part.key.rpartition(".")
            starts = {dim: ranges[0][0] for dim, ranges in layout.ranges(part).items()}
            dims = [(dim, starts.get(dim, 0)) for dim in (layout.dim, layout.dim_y)]
            name, shape = f"{prefix}{names[which]}.{kind}", tuple(part.shape)
            yield TensorShard(name, shape, *dims[0], local, layout.group, *dims[1], part.shares)
    if isinstance(module, SigmoidRouter):
        name = f"{prefix}{names['']}.{ROUTER_BIAS}"
        yield TensorShard(name, tuple(module.bias.shape), None, 0, module.bias, module.group)
