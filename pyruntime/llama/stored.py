"""The tensors of a checkpoint folder of a family, and where they are in the tensors of the model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pyruntime.llama.config import LlamaConfig
from pyruntime.llama.families import family_of

_LAYER = re.compile(r"(model\.layers\.\d+\.)mlp\.(?:(gate)\.weight|experts\.(gate_up|down)_proj)")
_NORM = re.compile(r"(model\.layers\.\d+\.)(input|post_attention)_layernorm\.weight")
_MERGED = re.compile(r"(model\.layers\.\d+\.)(?:self_attn\.([qkv])|mlp\.(gate|up))_proj\.weight")


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint folder, or the rows of one that are a tensor of the model, and where these are
    in the model's: the expert's number, if that one has all experts, and the first row of its matrix."""

    name: str
    shape: tuple[int, ...]
    """Its shape, of these rows alone."""
    expert: int | None = None
    start: int = 0
    first: int = 0
    """The first of these rows in the folder's tensor."""
    rows_in_folder: int | None = None
    """Rows of the folder's tensor; None: these."""

    @property
    def shape_in_folder(self) -> tuple[int, ...]:
        rows = self.shape[0] if self.rows_in_folder is None else self.rows_in_folder
        return (rows, *self.shape[1:])

    @property
    def rows(self) -> slice:
        """The rows of an expert's matrix."""
        return slice(self.start, self.start + self.shape[0])


def stored(config: LlamaConfig, name: str, shape: Sequence[int]) -> list[Stored]:
    """Returns the tensors in a checkpoint folder that make up the model's tensor of that name and shape."""
    if config.merged_files and (merged := _MERGED.fullmatch(name)):
        layer, qkv, gate_up = merged.groups()
        return [_of_merged(config, layer, qkv, gate_up, tuple(shape))]
    if config.norms_after and (norm := _NORM.fullmatch(name)):
        layer, place = norm.groups()
        after = {"input": "post_attention", "post_attention": "post_feedforward"}[place]
        return [Stored(f"{layer}{after}_layernorm.weight", tuple(shape))]
    if config.mixture is not None and config.mixture.sigmoid:
        name = name.replace(".mlp.shared_expert.", ".mlp.shared_experts.")
    found = _LAYER.fullmatch(name)
    if config.mixture is None or found is None:
        return [Stored(name, tuple(shape))]
    layer, router, matrix = found.groups()
    mixtral = family_of(config) == "mixtral"
    room = "block_sparse_moe" if mixtral else "mlp"
    if router:
        return [Stored(f"{layer}{room}.gate.weight", tuple(shape))]
    experts, rows, columns = shape
    if matrix == "down":
        parts = ["w2" if mixtral else "down_proj"]
    else:
        parts = ["w1", "w3"] if mixtral else ["gate_proj", "up_proj"]
    size = rows // len(parts)
    return [
        Stored(f"{layer}{room}.experts.{i}.{part}.weight", (size, columns), i, size * place)
        for i in range(experts)
        for place, part in enumerate(parts)
    ]


def _of_merged(
    config: LlamaConfig, layer: str, qkv: str | None, gate_up: str | None, shape: tuple[int, ...]
) -> Stored:
    """Returns the rows of a folder's tensor of q, k and v, or of gate and up."""
    if qkv is None:
        rows = config.intermediate_size
        return Stored(
            f"{layer}mlp.gate_up_proj.weight", shape, first=rows * (gate_up == "up"), rows_in_folder=2 * rows
        )
    q, kv = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    first = {"q": 0, "k": q, "v": q + kv}[qkv]
    return Stored(f"{layer}self_attn.qkv_proj.weight", shape, first=first, rows_in_folder=q + 2 * kv)
