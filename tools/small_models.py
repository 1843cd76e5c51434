"""Builds small models of transformers for tools/check_architectures.py: their own configuration classes with
small sizes, random weights in every parameter, and a batch for a step. Nothing is downloaded."""

from __future__ import annotations

import copy
import importlib
import inspect
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

LARGEST = 130_000_000  # parameters; a larger model was not shrunk by the rules below

SIZES = {
    64: (
        *("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "word_embed_proj_dim"),
        *("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "sliding_window"),
        *("out_hidden_size", "projector_hidden_size", "moe_hidden_size", "cross_attention_hidden_size"),
    ),
    4: (
        "num_attention_heads",
        "n_head",
        "n_heads",
        "num_heads",
        "encoder_attention_heads",
        "decoder_attention_heads",
    ),
    0: ("num_kv_shared_layers",),
    24: ("qk_head_dim",),
    1: (
        "n_shared_experts",
        "n_group",
        "topk_group",
        "num_nextn_predict_layers",
        "attn_layer_offset",
    ),
    2: (
        *(
            "num_experts_per_tok",
            "num_experts_per_token",
            "moe_topk",
            "moe_k",
            "moe_num_experts_per_tok",
            "top_k_experts",
        ),
        *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"),
        *("depth", "zero_expert_num", "attn_layer_period"),
    ),
    96: (
        "intermediate_size",
        "d_ff",
        "ffn_dim",
        "n_inner",
        "hidden_dim",
        "encoder_ffn_dim",
        "decoder_ffn_dim",
        "ffn_hidden_size",
        "expert_ffn_hidden_size",
        "dense_intermediate_size",
        "shared_intermediate_size",
    ),
    101: ("vocab_size", "vocab_size_per_layer_input"),
    16: ("head_dim", "d_kv", "attention_head_size", "v_head_dim", "qk_nope_head_dim", "kv_lora_rank"),
    8: (
        "qk_rope_head_dim",
        "rotary_dim",
        "n_routed_experts",
        "num_experts",
        "num_local_experts",
        "moe_num_experts",
    ),
    32: ("q_lora_rank", "moe_intermediate_size", "shared_expert_intermediate_size", "index_head_dim"),
}
UNSET = ("expert", "moe", "head_dim", "sliding_window")
"""Settings with these parts in their names get a size even if the configuration has None."""
KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_AUDIO = {"num_filters": 2, "depths": [1] * 7}
PARTICULAR: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"n_group": 1, "topk_group": 1},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {**_ROPE, "mrope_section": [3, 3, 2]}}},
    "glm5_next_text": {
        **{"linear_num_heads": 4, "linear_head_dim": 16, "index_n_heads": 4, "index_topk": 4},
        **{
            "index_kpool": 2,
            "num_key_value_heads": 4,
            "qk_rope_head_dim": 0,
            "head_dim": 0,
            "qk_head_dim": 16,
        },
        **{"hc_sinkhorn_iters": 2, "mlp_layer_types": ["dense", "sparse"], "indexer_types": ["full", "full"]},
    },
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16},
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mistral4": {
        "rope_parameters": {
            **_ROPE,
            "partial_rotary_factor": 1.0,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 64,
        }
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "t5gemma2_text": {"dropout_rate": 0.0},
    "vibevoice_acoustic_tokenizer": _AUDIO,
    "vibevoice_acoustic_tokenizer_encoder": _AUDIO,
    "vibevoice_acoustic_tokenizer_decoder": _AUDIO,
}
"""{model type: settings that the general rules miss}, also for nested configurations."""


def build(class_name: str) -> nn.Module:
    """Returns the architecture, small, with random numbers in every parameter, the same on every rank."""
    cls = class_of(class_name)
    config = cls.config_class()
    shrink(config)
    if (
        getattr(config, "is_encoder_decoder", False)
        and getattr(config, "decoder_start_token_id", None) is None
    ):
        config.decoder_start_token_id = 0
    torch.manual_seed(0)
    with torch.device("meta"):
        size = sum(p.numel() for p in cls(copy.deepcopy(config)).parameters())
    if size > LARGEST:
        raise ValueError(f"{size:,} parameters after shrinking")
    model = cls(config)
    for p in model.parameters():  # new biases are zeros and new norms ones, which hides mistakes
        p.data.add_(torch.randn_like(p) * 0.1)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.float().train()


def class_of(class_name: str) -> type:
    """Returns a class of transformers; some are exported only by their own module."""
    if hasattr(transformers, class_name):
        return getattr(transformers, class_name)
    names = transformers.models.auto.modeling_auto.MODEL_MAPPING_NAMES
    for model_type, name in names.items():
        if name == class_name:
            folder = transformers.models.auto.configuration_auto.model_type_to_module_name(model_type)
            module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
            return getattr(module, class_name)
    raise AttributeError(f"transformers has no {class_name}")


def shrink(config: Any) -> None:
    values = config.to_dict()
    for size, names in SIZES.items():
        for name in names:
            unset = values.get(name, 0) is None and any(part in name for part in UNSET)
            if unset or (isinstance(values.get(name), int) and not isinstance(values[name], bool)):
                assign(config, name, int(size))
    if (
        isinstance(values.get("head_dim"), int) and "qk_rope_head_dim" in values
    ):  # deepseek: only the rotated part
        assign(config, "head_dim", 8)
    for name in KEY_VALUE_HEADS:
        if name in values:
            fewer = values[name] is None or values[name] < values.get("num_attention_heads", 10**9)
            assign(config, name, 2 if fewer else 4)
    shrink_rope(config, values)
    for name, value in values.items():
        if isinstance(value, list) and name.endswith(("layer_types", "layers_block_type", "attention_types")):
            assign(config, name, two_kinds(value))
        elif "jitter" in name and isinstance(value, float):  # of a router: random in every call
            assign(config, name, 0.0)
        elif "dropout" in name or name.endswith(("_pdrop", "layerdrop")):
            if isinstance(value, float):
                assign(config, name, 0.0)
        elif name.endswith("_token_id") and isinstance(value, int):
            assign(config, name, 1)
    for name, value in PARTICULAR.get(config.model_type, {}).items():
        setattr(config, name, copy.deepcopy(value))
    for child in list(vars(config).values()):
        if isinstance(child, transformers.PretrainedConfig):
            shrink(child)


def two_kinds(layers: list[str]) -> list[str]:
    """Returns the kinds of two layers, different if possible, one of them with attention."""
    attention = [kind for kind in layers if "attention" in kind and "linear" not in kind]
    if attention and layers[0] not in attention:
        return [layers[0], attention[0]]
    if not attention and layers[0] == "linear_attention":
        return [layers[0], "full_attention"]
    return [layers[0], layers[-1]]


def shrink_rope(config: Any, values: dict[str, Any]) -> None:
    """Makes the sections of a rotation over several axes, if the model has them, fill half of a head."""
    rope = values.get("rope_parameters")
    source = Path(inspect.getfile(type(config)))
    modeling = source.with_name(source.name.replace("configuration", "modeling"))
    sections = modeling.is_file() and "mrope_section" in modeling.read_text()
    if sections and isinstance(rope, dict) and "rope_type" in rope:
        half = int(8 * rope.get("partial_rotary_factor", 1.0))
        third = 3 * half // 8
        assign(config, "rope_parameters", rope | {"mrope_section": [third, third, half - 2 * third]})


def assign(config: Any, name: str, value: Any) -> None:
    try:
        setattr(config, name, value)
    except Exception:  # some names are properties of others
        return


def batch_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns a batch of text, with labels if the model takes them; pictures if it takes no text."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 101, (2, 12), generator=draw)
    given = inspect.signature(model.forward).parameters
    batch = {"input_ids": ids}
    if {"pixel_values", "pixel_position_ids"} <= set(given) and "input_ids" not in given:
        side = 2 * model.config.pooling_kernel_size
        places = torch.cartesian_prod(torch.arange(side), torch.arange(side)).expand(2, -1, -1)
        pixels = torch.rand(2, side * side, 3 * model.config.patch_size**2, generator=draw)
        return {"pixel_values": pixels, "pixel_position_ids": places}
    if "labels" in given:
        batch["labels"] = ids.clone()
    elif "decoder_input_ids" in given:
        batch["decoder_input_ids"] = ids.flip(1)
    return batch
