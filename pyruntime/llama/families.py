"""The Hugging Face families that a model is written as and read from: their names and keys in config.json.

| model_type | layers |
|---|---|
| deepseek_v3 | latent attention; experts by sigmoid, a shared one; the first layers may have none |
| dots1 | experts by sigmoid, a shared one; queries and keys are normalised; perhaps a window, as in qwen3 |
| llama | one feed-forward network; perhaps biases |
| mistral | perhaps a window of attention |
| mixtral | experts, whose weights are divided by their sum; perhaps a window of attention |
| olmo2 | results of attention and network are normalised, not inputs; queries and keys over all heads |
| phi3 | perhaps a window of attention; one tensor of q, k and v, and one of gate and up |
| qwen2 | biases of q, k and v; perhaps a window of attention in the later layers |
| qwen2_moe | experts and a shared one; the first layers may have none; perhaps biases of q, k and v |
| qwen3 | queries and keys are normalised; perhaps a window of attention in the later layers |
| qwen3_moe | experts; queries and keys are normalised; the first layers may have none |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyruntime.llama.mixture import Mixture
from pyruntime.llama.sizes import check_size
from pyruntime.plan.models import LatentAttention
from pyruntime.text import short_repr

if TYPE_CHECKING:
    from pyruntime.llama.config import LlamaConfig

ARCHITECTURES = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "dots1": "Dots1ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
DIFFERENCES = (
    "latent",
    "mixture",
    "norms_after",
    "qk_norm_of_all",
    "qk_norm",
    "qkv_bias",
    "merged_files",
    "sliding_window",
    "first_window_layer",
)
"""Fields of LlamaConfig that config.json of a family says in keys of its own, or by its model_type."""
_WORDS = {
    "latent": "latent attention",
    "mixture": "experts",
    "norms_after": "normalised results of attention and network (norms_after)",
    "qk_norm_of_all": "queries and keys normalised over all heads (qk_norm_of_all)",
    "qk_norm": "normalised queries and keys (qk_norm)",
    "qkv_bias": "biases of q, k and v",
    "merged_files": "files with one tensor of q, k and v",
    "sliding_window": "a window of attention",
    "first_window_layer": "a window in the later layers alone",
    "attention_bias": "biases of q, k, v and o",
    "mlp_bias": "biases of the feed-forward network",
}
_FIELDS = {
    "deepseek_v3": ("latent", "mixture", "attention_bias"),
    "dots1": ("mixture", "qk_norm", "attention_bias", "sliding_window", "first_window_layer"),
    "llama": ("attention_bias", "mlp_bias"),
    "mistral": ("sliding_window",),
    "mixtral": ("mixture", "sliding_window"),
    "olmo2": ("norms_after", "qk_norm_of_all", "qk_norm", "attention_bias"),
    "phi3": ("merged_files", "sliding_window"),
    "qwen2": ("qkv_bias", "sliding_window", "first_window_layer"),
    "qwen2_moe": ("mixture", "qkv_bias"),
    "qwen3": ("qk_norm", "attention_bias", "sliding_window", "first_window_layer"),
    "qwen3_moe": ("mixture", "qk_norm", "attention_bias"),
}
"""The fields of LlamaConfig, of those in _WORDS, that a family has."""
_ALWAYS = ("norms_after", "qk_norm_of_all", "qk_norm", "merged_files")
"""Fields that are true in all models of the families that have them."""
_BY_SIGMOID = ("deepseek_v3", "dots1")
"""Families whose routers choose by sigmoid."""
_DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"max_position_embeddings": 4096, "n_group": 8, "topk_group": 4, "norm_topk_prob": True}
    | {"routed_scaling_factor": 2.5, "first_k_dense_replace": 3},
    "dots1": {"sliding_window": 4096, "max_window_layers": 62},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    "mixtral": {"rms_norm_eps": 1e-5},
    "olmo2": {"rms_norm_eps": 1e-5},
    "phi3": {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    "qwen2": {"max_position_embeddings": 32768},
}
"""transformers' values for keys that a config.json lacks, where they are not LlamaConfig's defaults."""


def family_of(config: LlamaConfig) -> str:
    """Returns the model_type of a config. Raises ValueError if no family has such layers."""
    mixture, normed = config.mixture, config.qk_norm
    if mixture is not None:
        found = "qwen3_moe" if normed else "qwen2_moe" if mixture.shared_width else "mixtral"
        found = "dots1" if mixture.sigmoid else found
        found = found if config.latent is None else "deepseek_v3"
    elif config.latent is not None:
        found = "deepseek_v3"
    elif config.norms_after or config.qk_norm_of_all:
        found = "olmo2"
    elif normed:
        found = "qwen3"
    elif config.qkv_bias:
        found = "qwen2"
    elif config.merged_files:
        found = "phi3"
    else:
        found = "llama" if config.sliding_window is None else "mistral"
    why = ""
    if found == "deepseek_v3":
        if mixture is None or not mixture.sigmoid or not _has_whole_shared(mixture):
            why = (
                "latent attention without experts by sigmoid, or without a shared expert as wide as some of "
                "the others; add them"
            )
    elif mixture is not None and mixture.sigmoid:
        if not normed or not _has_whole_shared(mixture):
            why = (
                "routers by sigmoid without normalised queries and keys (qk_norm), or without a shared "
                "expert as wide as some of the others; add them"
            )
    elif mixture is not None and normed and mixture.shared_width:
        why = "both a shared expert and normalised queries and keys; leave out one of them"
    elif found == "mixtral" and mixture is not None and (mixture.dense_layers or not mixture.renormalize):
        why = (
            "dense layers before those with experts, or weights that are not divided by their sum, without a "
            "shared expert or normalised queries and keys (qk_norm); add one of them"
        )
    lacking = [name for name in _ALWAYS if name in _FIELDS[found] and not getattr(config, name)]
    used = [name for name in _WORDS if getattr(config, name)]
    others = [name for name in used if name not in _FIELDS[found]]
    if others and not why:
        why = f"{_WORDS[used[0]]} and {_WORDS[others[0]]}; leave out one of them"
    elif lacking and not why:
        why = f"{_WORDS[used[0]]} without {_WORDS[lacking[0]]}; have both or neither"
    if why:
        raise ValueError(f"No Hugging Face family of models has {why}.")
    return found


def _has_whole_shared(mixture: Mixture) -> bool:
    """Whether a shared expert has the width of one or more of the others."""
    return mixture.shared_width > 0 and mixture.shared_width % mixture.width == 0


def _with(field: str) -> list[str]:
    """Returns the families that have the field."""
    return [family for family, fields in _FIELDS.items() if field in fields]


def with_defaults(family: str, hf: dict[str, Any]) -> dict[str, Any]:
    """Returns a config.json with the family's own defaults for keys that it lacks."""
    return {"rms_norm_eps": 1e-6} | _DEFAULTS.get(family, {}) | hf


def differences_to_hf(config: LlamaConfig) -> dict[str, Any]:
    """Returns the keys of config.json for the fields in DIFFERENCES."""
    family, window = family_of(config), config.sliding_window
    keys = _mixture_to_hf(config, family) | _latent_to_hf(config.latent)
    if family == "qwen2_moe":
        return keys | {"qkv_bias": config.qkv_bias}
    if family in ("mistral", "mixtral", "phi3"):
        return keys | {"sliding_window": window}
    if "sliding_window" not in _FIELDS[family]:
        return keys
    if family != "dots1":
        keys["use_sliding_window"] = window is not None
    elif window is None:
        keys["sliding_window"] = None
    if window is not None:
        keys |= {"sliding_window": window, "max_window_layers": config.first_window_layer}
    return keys


def differences_from_hf(family: str, hf: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields in DIFFERENCES of a config.json. Raises ValueError for a feature that this model
    does not have."""
    for name in ("attention_bias", "mlp_bias"):
        if hf.get(name) and name not in _FIELDS[family]:
            raise ValueError(f"config.json has {name}={short_repr(hf[name])}, which no {family} model has.")
    window, first = _window_from_hf(family, hf)
    latent = _latent_from_hf(hf) if "latent" in _FIELDS[family] else {"latent": None}
    return {
        **latent,
        "mixture": _mixture_from_hf(family, hf),
        "qkv_bias": hf.get("qkv_bias", True) if family == "qwen2_moe" else family == "qwen2",
        "sliding_window": window,
        "first_window_layer": first,
        **{name: name in _FIELDS[family] for name in _ALWAYS},
    }


def _window_from_hf(family: str, hf: dict[str, Any]) -> tuple[int | None, int]:
    """Returns the window of attention, None if there is none, and the first layer that has it."""
    window, first = hf.get("sliding_window"), 0
    if family == "dots1":
        first = _first_window_layer(hf)
    elif family.startswith("qwen"):
        is_used = hf.get("use_sliding_window")
        if is_used is not None and type(is_used) is not bool:
            raise ValueError(
                f"use_sliding_window={short_repr(is_used)} of config.json must be true or false."
            )
        if not is_used:
            return None, 0
        if "sliding_window" not in _FIELDS[family]:
            raise ValueError(
                f"config.json has use_sliding_window=true, which is not supported for {family}; it is for "
                f"{' and '.join(name for name in _with('first_window_layer') if name.startswith('qwen'))}."
            )
        window, first = hf.get("sliding_window", 4096), _first_window_layer(hf)
    elif "sliding_window" not in _FIELDS[family]:  # transformers does not read it
        return None, 0
    if window is None:
        return None, 0
    check_size("sliding_window", window)
    layers = hf.get("num_hidden_layers")
    return (None, 0) if type(layers) is int and first >= layers else (window, first)


def _first_window_layer(hf: dict[str, Any]) -> int:
    """Returns the first layer with a window. Raises ValueError if a later one has none."""
    kinds = hf.get("layer_types")
    if kinds is None:
        first = hf.get("max_window_layers", 28)
        if type(first) is not int or first < 0:
            raise ValueError(
                f"max_window_layers={short_repr(first)} of config.json must be a number of layers."
            )
        return first
    names = ("full_attention", "sliding_attention")
    found = [names.index(kind) for kind in kinds if kind in names] if isinstance(kinds, list) else []
    if not found or len(found) != len(kinds) or found != sorted(found):
        raise ValueError(
            f"config.json has layer_types={short_repr(kinds)}; only layers with full_attention, and after "
            "them layers with sliding_attention, can be loaded."
        )
    return found.count(0)


def _latent_to_hf(latent: LatentAttention | None) -> dict[str, Any]:
    """Returns the keys of config.json that describe latent attention."""
    if latent is None:
        return {}
    return {
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_rope_head_dim": latent.rope_dim,
        "qk_nope_head_dim": latent.nope_dim,
        "v_head_dim": latent.value_dim,
        "head_dim": latent.rope_dim,  # as transformers calls it
        "rope_interleave": latent.interleaved,
        "num_nextn_predict_layers": 0,
    }


def _latent_from_hf(hf: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of latent attention."""
    defaults = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    kv_rank, rope_dim, nope_dim, value_dim = ((defaults | hf)[name] for name in defaults)
    return {
        "latent": LatentAttention(
            kv_rank,
            rope_dim,
            nope_dim,
            value_dim,
            q_rank=hf.get("q_lora_rank", 1536),
            interleaved=hf.get("rope_interleave", True),
        ),
        "head_dim": None,
    }


def _mixture_to_hf(config: LlamaConfig, family: str) -> dict[str, Any]:
    """Returns the keys of config.json that describe the experts."""
    mixture = config.mixture
    if mixture is None:
        return {}
    if family == "mixtral":
        return {
            "num_local_experts": mixture.experts,
            "num_experts_per_tok": mixture.per_token,
            "intermediate_size": mixture.width,
        }
    if family in _BY_SIGMOID:
        return {
            "n_routed_experts": mixture.experts,
            "num_experts_per_tok": mixture.per_token,
            "moe_intermediate_size": mixture.width,
            "n_shared_experts": mixture.shared_width // mixture.width,
            "first_k_dense_replace": mixture.dense_layers,
            "norm_topk_prob": mixture.renormalize,
            "n_group": mixture.groups,
            "topk_group": mixture.best_groups,
            "routed_scaling_factor": mixture.factor,
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
        keys["shared_expert_intermediate_size"] = mixture.shared_width
    return keys


def _mixture_from_hf(family: str, hf: dict[str, Any]) -> Mixture | None:
    """Returns the experts of a config.json. Raises ValueError for a feature that this model does not have."""
    if hf.get("router_jitter_noise"):
        raise ValueError(
            f"config.json has router_jitter_noise={short_repr(hf['router_jitter_noise'])}, which this model "
            "does not have."
        )
    if "mixture" not in _FIELDS[family]:
        return None
    if family in _BY_SIGMOID:
        return _by_sigmoid_from_hf(hf)
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


def _by_sigmoid_from_hf(hf: dict[str, Any]) -> Mixture:
    needed = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts")
    for name in needed:
        check_size(name, hf.get(name))
    experts, per_token, width, shared = (hf[name] for name in needed)
    return Mixture(
        experts,
        per_token,
        width,
        renormalize=hf.get("norm_topk_prob", False),
        shared_width=shared * width,
        dense_layers=hf.get("first_k_dense_replace", 0),
        sigmoid=True,
        groups=hf.get("n_group", 1),
        best_groups=hf.get("topk_group", 1),
        factor=hf.get("routed_scaling_factor", 1.0),
    )


def _dense_layers(hf: dict[str, Any]) -> int:
    """Returns the number of first layers without experts. Raises ValueError if others have none too."""
    step, without = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or []
    if step != 1 or without != list(range(len(without))):
        raise ValueError(
            f"config.json has decoder_sparse_step={short_repr(step)} and mlp_only_layers="
            f"{short_repr(without)}; only the first layers can be without experts."
        )
    return len(without)
