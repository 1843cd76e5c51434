"""Which slice of which checkpoint tensor a local parameter is: the map behind init, load and save."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from torch import Tensor, nn

from pyruntime.nn.cut import memory_of
from pyruntime.nn.gather import gather_whole
from pyruntime.nn.parameters import TensorGroup

_MODEL = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_LAYER = {
    "attention_norm": {"": "input_layernorm"},
    "qkv": {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj"},
    "out": {"": "self_attn.o_proj"},
    "mlp_norm": {"": "post_attention_layernorm"},
    "gate_up": {"gate": "mlp.gate_proj", "up": "mlp.up_proj"},
    "down": {"": "mlp.down_proj"},
}


@dataclasses.dataclass(frozen=True)
class TensorShard:
    """This rank's part of one tensor of a Hugging Face Llama checkpoint.

    `name` and full `shape` are the checkpoint's; `local` is a view of the parameter that holds indices
    `[start, start + local.shape[dim])` of dimension `dim`, or the whole tensor where `dim` is None. `dim_y`
    and `start_y` are the same of another dimension, where the group has two axes.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None
    start: int
    local: Tensor
    dim_y: int | None = None
    start_y: int = 0


def shards_of_model(name: str, module: nn.Module) -> Iterator[TensorShard]:
    """Tensors of "embed", "norm" or "head"."""
    return _shards_of(module, {"": _MODEL[name]})


def shards_of_layer(number: int, layer: nn.Module) -> Iterator[TensorShard]:
    """Tensors of a decoder layer, in the order in which it uses them."""
    for module, names in _LAYER.items():
        yield from _shards_of(getattr(layer, module), names, f"model.layers.{number}.")


def gather_full(shard: TensorShard, group: TensorGroup) -> Tensor:
    """The full tensor that `shard` is a part of, on every rank. All ranks of the group must call this."""
    cuts = zip(group.axes, (shard.dim, shard.dim_y), strict=False)
    return gather_whole(shard.local, cuts, shard.shape)


def _shards_of(module: nn.Module, names: dict[str, str], prefix: str = "") -> Iterator[TensorShard]:
    for parameter in module.parameters(recurse=False):
        layout = parameter.tp_layout
        for part, local in zip(layout.parts, layout.split(memory_of(parameter)), strict=True):
            # "q.weight" of a merged linear, "weight" of a plain one
            which, _, kind = part.key.rpartition(".")
            starts = {dim: start for dim, start, _ in layout.places(part)}
            dims = [(dim, starts.get(dim, 0)) for dim in (layout.dim, layout.dim_y)]
            yield TensorShard(f"{prefix}{names[which]}.{kind}", tuple(part.shape), *dims[0], local, *dims[1])
