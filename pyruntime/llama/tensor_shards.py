"""The parts of a Llama's tensors that a rank holds: how much (`TensorCuts`), and where they lie in those of a
checkpoint (`TensorShard`), for initialisation, loading and saving.

Tensor-parallel ranks of unequal speed hold MLP features in units of 16, whole groups of heads (a key/value
head and its queries), and rows of the vocabulary in units of 64. Each unit goes to the rank that would finish
it first (`least_largest`), but every rank has a group of heads and some vocabulary, which are coarse. Rows of
activations stay equal, so that the ranks exchange as much as with equal cuts; only GEMMs and attention
differ. (Derived. ZeRO-resizing and migration of columns, arXiv 2401.11469, have the same aim, but change the
result, or move weights in every call.)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from pyruntime.llama.config import LlamaConfig
from pyruntime.nn.cut import memory_of
from pyruntime.nn.gather import gather_whole
from pyruntime.nn.parameters import TensorGroup
from pyruntime.nn.router import SigmoidRouter
from pyruntime.pipeline.split import least_largest

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
FEATURES = 16
"""MLP features of a unit."""
VOCABULARY = 64
"""Rows of the vocabulary of a unit."""


@dataclasses.dataclass(frozen=True)
class TensorCuts:
    """The sizes that each tensor-parallel rank holds of the dimensions that are cut. (): equal parts, as
    DTensor's `Shard` cuts them."""

    features: tuple[int, ...] = ()
    """MLP features."""
    groups: tuple[int, ...] = ()
    """Key/value heads, each with its query heads."""
    vocabulary: tuple[int, ...] = ()
    """Rows of embedding and head."""

    def groups_of(self, config: LlamaConfig, tp: int) -> tuple[int, ...]:
        """Returns the key/value heads of each of `tp` ranks."""
        return self.groups or (config.num_key_value_heads // tp,) * tp

    def heads(self, features: int) -> tuple[int, ...]:
        """Returns the features of each rank where a group of heads has so many."""
        return tuple(features * groups for groups in self.groups)

    def largest_share(self, config: LlamaConfig, tp: int) -> float:
        """Returns the largest share that one of `tp` ranks holds of a dimension."""
        sizes = config.intermediate_size, config.num_key_value_heads, config.vocab_size
        cuts = self.features, self.groups, self.vocabulary
        shares = [max(cut) / size for cut, size in zip(cuts, sizes, strict=True) if cut]
        return max([1 / tp, *shares])

    def __str__(self) -> str:
        return ", ".join(
            f"{'+'.join(map(str, cut))} {what}"
            for cut, what in (
                (self.features, "MLP features"),
                (self.groups, "groups of heads"),
                (self.vocabulary, "rows of the vocabulary"),
            )
            if cut
        )


def tensor_cuts(
    config: LlamaConfig, tp: int, speeds: Sequence[float] = (), ep: int | None = None
) -> TensorCuts:
    """Returns how a model of that shape is cut over `tp` ranks of these relative speeds. Empty or equal
    speeds give equal parts, which `config.check_tp` checks; ep: as there.

    Raises ValueError for speeds that are not `tp` positive numbers, for a model with experts or latent
    attention, and where a rank would hold nothing of a dimension.
    """
    asked = f"tp_speeds={list(speeds)}"
    if speeds and len(speeds) != tp:
        raise ValueError(
            f"{asked} are {len(speeds)} numbers for {tp} tensor-parallel ranks; give one for each."
        )
    if not all(math.isfinite(speed) and speed > 0 for speed in speeds):
        raise ValueError(f"{asked} must be positive numbers; a rank of half the others' speed has 0.5.")
    if len(set(speeds)) <= 1:
        config.check_tp(tp, ep)
        return TensorCuts()
    for what, is_there in (("experts", config.mixture), ("latent attention", config.latent)):
        if is_there is not None:
            raise ValueError(
                f"{asked} do not support a model with {what}, which is cut equally; leave them out."
            )

    def cut(size: int, unit: int, fewest: int, what: str) -> tuple[int, ...]:
        units = -(-size // unit)
        if units < tp:
            raise ValueError(
                f"The {size} {what} are {units} units of {unit}, fewer than the {tp} tensor-parallel ranks; "
                "use fewer ranks."
            )
        counts = least_largest([1 / speed for speed in speeds], [0.0] * tp, fewest, units)
        if min(counts) < 1:
            raise ValueError(
                f"{asked} leave rank {counts.index(0)} without any of the {size} {what}, which are dealt in "
                f"units of {unit}; use speeds that differ less, or fewer tensor-parallel ranks."
            )
        ends = [min(size, unit * sum(counts[: rank + 1])) for rank in range(tp)]
        shares = tuple(end - begin for begin, end in zip([0, *ends], ends, strict=False))
        return () if shares == _equal(size, tp) else shares

    return TensorCuts(
        cut(config.intermediate_size, FEATURES, 0, "MLP features"),
        cut(config.num_key_value_heads, 1, 1, "key/value heads"),
        cut(config.vocab_size, VOCABULARY, 1, "rows of the vocabulary"),
    )


def _equal(size: int, tp: int) -> tuple[int, ...]:
    """Returns what `Shard` gives each rank."""
    chunk = -(-size // tp)
    return tuple(max(0, min(chunk, size - rank * chunk)) for rank in range(tp))


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
