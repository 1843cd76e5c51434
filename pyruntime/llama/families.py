"""The Hugging Face families that a model is written as and read from: names in config.json and of tensors.

| model_type | layers |
|---|---|
| llama | one feed-forward network |
| mixtral | experts, whose weights are divided by their sum |
| qwen2_moe | experts and a shared one; the first layers may have none |
| qwen3 | one feed-forward network; queries and keys are normalised |
| qwen3_moe | experts; queries and keys are normalised; the first layers may have none |
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyruntime.llama.mixture import Mixture
from pyruntime.text import short_repr

if TYPE_CHECKING:
    from pyruntime.llama.config import LlamaConfig

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
_LAYER = re.compile(r"(model\.layers\.\d+\.)mlp\.(?:(gate)\.weight|experts\.(gate_up|down)_proj)")


def family_of(config: LlamaConfig) -> str:
    """Returns the model_type of a config. Raises ValueError if no family has such layers."""
    mixture, normed = config.mixture, config.qk_norm
    if mixture is None:
        return "qwen3" if normed else "llama"
    shared = mixture.shared_width > 0
    found = "qwen3_moe" if normed else "qwen2_moe" if shared else "mixtral"
    why = ""
    if normed and shared:
        why = "both a shared expert and normalised queries and keys; leave out one of them"
    elif found == "mixtral" and (mixture.dense_layers or not mixture.renormalize):
        why = (
            "dense layers before those with experts, or weights that are not divided by their sum, without a "
            "shared expert or normalised queries and keys (qk_norm); add one of them"
        )
    elif config.mlp_bias or (config.attention_bias and found != "qwen3_moe"):
        why = "experts and biases; leave them out"
    if why:
        raise ValueError(f"No Hugging Face family of models has {why}.")
    return found


def mixture_to_hf(config: LlamaConfig) -> dict[str, Any]:
    """Returns the keys of config.json that describe the experts."""
    mixture, family = config.mixture, family_of(config)
    if mixture is None:
        return {}
    if family == "mixtral":
        return {
            "num_local_experts": mixture.experts,
            "num_experts_per_tok": mixture.per_token,
            "intermediate_size": mixture.width,
            "sliding_window": None,
        }
    keys = {
        "num_experts": mixture.experts,
        "num_experts_per_tok": mixture.per_token,
        "moe_intermediate_size": mixture.width,
        "norm_topk_prob": mixture.renormalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(mixture.dense_layers)),
        "use_sliding_window": False,
    }
    if family == "qwen2_moe":
        keys |= {"shared_expert_intermediate_size": mixture.shared_width, "qkv_bias": False}
    return keys


def mixture_from_hf(family: str, hf: dict[str, Any]) -> Mixture | None:
    """Returns the experts of a config.json. Raises ValueError for a feature that this model does not have."""
    refused = {"sliding_window": hf.get("sliding_window") if family == "mixtral" else None}
    refused |= {"use_sliding_window": hf.get("use_sliding_window") if family.startswith("qwen") else None}
    refused["router_jitter_noise"] = hf.get("router_jitter_noise")
    if family == "qwen2_moe":
        refused["qkv_bias"] = hf.get("qkv_bias", True)
    for name, value in refused.items():
        if value:
            raise ValueError(f"config.json has {name}={short_repr(value)}, which this model does not have.")
    if family in ("llama", "qwen3"):
        return None
    dense = _dense_layers(hf) if family != "mixtral" else 0
    named = {
        "experts": ("num_local_experts", "num_experts"),
        "per_token": ("num_experts_per_tok",),
        "width": ("intermediate_size",) if family == "mixtral" else ("moe_intermediate_size",),
    }
    if family == "qwen2_moe":
        named["shared_width"] = ("shared_expert_intermediate_size",)
    found = {}
    for field, names in named.items():
        values = [hf[name] for name in names if hf.get(name) is not None]
        if not values:
            raise ValueError(f"config.json lacks {names[-1]}, which a {family} model needs; add it.")
        found[field] = values[0]
    renormalize = True if family == "mixtral" else hf.get("norm_topk_prob", False)
    return Mixture(**found, renormalize=renormalize, dense_layers=dense)


def _dense_layers(hf: dict[str, Any]) -> int:
    """Returns the number of first layers without experts. Raises ValueError if others have none too."""
    step, without = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or []
    if step != 1 or without != list(range(len(without))):
        raise ValueError(
            f"config.json has decoder_sparse_step={short_repr(step)} and mlp_only_layers="
            f"{short_repr(without)}; only the first layers can be without experts."
        )
    return len(without)


@dataclass(frozen=True)
class Stored:
    """One tensor of a checkpoint folder, and where it is in the tensor of the model: the expert's number, if
    that one has all experts, and the first row of its matrix."""

    name: str
    shape: tuple[int, ...]
    expert: int | None = None
    start: int = 0

    @property
    def rows(self) -> slice:
        """The rows of an expert's matrix."""
        return slice(self.start, self.start + self.shape[0])


def stored(config: LlamaConfig, name: str, shape: Sequence[int]) -> list[Stored]:
    """Returns the tensors in a checkpoint folder that make up the model's tensor of that name and shape."""
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
