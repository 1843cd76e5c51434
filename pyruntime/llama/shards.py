"""Which slice of which checkpoint tensor a local parameter is: the map behind init, load and save."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pyruntime.nn.gather import gather_shard
from pyruntime.nn.parameters import TensorGroup

if TYPE_CHECKING:
    from pyruntime.llama.model import Llama

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
class Shard:
    """This rank's part of one tensor of a Hugging Face Llama checkpoint.

    `name` and full `shape` are the checkpoint's; `local` is a view of the parameter that holds indices
    `[start, start + local.shape[dim])` of dimension `dim`, or the whole tensor where `dim` is None.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None
    start: int
    local: Tensor

    def take(self, full: Tensor) -> Tensor:
        """The part of a full tensor that this shard holds, as a view."""
        return full if self.dim is None else full.narrow(self.dim, self.start, self.local.shape[self.dim])


def shards(model: Llama) -> Iterator[Shard]:
    """Every tensor of the checkpoint that the model's part has, in the order in which the model uses them;
    the same on every rank of its group.

    A tied head has no tensor of its own.
    """
    if model.has_embedding:
        yield from _shards_of(model.embed, {"": _MODEL["embed"]})
    for number in model.part.layers:
        for module, names in _LAYER.items():
            yield from _shards_of(getattr(model.layers.of(number), module), names, f"model.layers.{number}.")
    if model.part.head:
        yield from _shards_of(model.norm, {"": _MODEL["norm"]})
    if model.part.head and not model.config.tie_word_embeddings:
        yield from _shards_of(model.head, {"": _MODEL["head"]})


@torch.no_grad()
def gather_full(shard: Shard, group: TensorGroup) -> Tensor:
    """The full tensor that `shard` is a part of, on every rank. All ranks of the group must call this."""
    if shard.dim is None or group.size == 1:
        return shard.local
    return gather_shard(shard.local, group, shard.dim, shard.shape[shard.dim])


def _shards_of(module: nn.Module, names: dict[str, str], prefix: str = "") -> Iterator[Shard]:
    for parameter in module.parameters(recurse=False):
        layout = parameter.tp_layout
        for part, local in zip(layout.parts, layout.split(parameter.detach()), strict=True):
            # "q.weight" of a merged linear, "weight" of a plain one
            which, _, kind = part.key.rpartition(".")
            start = 0 if layout.dim is None else layout.bounds(part)[0]
            yield Shard(f"{prefix}{names[which]}.{kind}", tuple(part.shape), layout.dim, start, local)
