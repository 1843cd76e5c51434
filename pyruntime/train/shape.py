"""The shape of the model that a configuration asks for, and its tokenizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyruntime.llama.config import LlamaConfig
from pyruntime.llama.hf import read_config
from pyruntime.llama.mixture import Mixture
from pyruntime.llama.presets import preset
from pyruntime.llama.tensor_shards import tensor_cuts
from pyruntime.nn.parameters import shard_bounds
from pyruntime.train.config import Model, RunConfig, mesh_of
from pyruntime.train.data.tokenizer import Tokenizer, open_tokenizer
from pyruntime.train.errors import ConfigError, refusing
from pyruntime.train.validate.adapter_options import check_lora_of
from pyruntime.train.validate.preference_options import check_dpo_of
from pyruntime.train.validate.shapes import check_experts_over, check_shape, check_slices_of

VOCABULARY_MULTIPLE = 128
DEFAULT_PRESET = "3m"
_OF_MIXTURE = {
    "experts": "experts",
    "experts_per_token": "per_token",
    "expert_size": "width",
    "shared_expert_size": "shared_width",
    "dense_layers": "dense_layers",
    "norm_topk_prob": "renormalize",
    "sigmoid_router": "sigmoid",
    "expert_groups": "groups",
    "expert_groups_per_token": "best_groups",
    "routed_scaling_factor": "factor",
}
"""Options of [model] about experts, and their fields of Mixture."""


def open_model(config: RunConfig, world_size: int) -> tuple[Tokenizer, LlamaConfig]:
    """Returns a run's tokenizer, and the shape of its model on `world_size` ranks. Raises ConfigError."""
    data, model, mesh = config.data, config.model, mesh_of(config, world_size)
    tokenizer = open_tokenizer(data.tokenizer, model.init_from, data.paths)
    speeds = config.parallel.tp_speeds
    shape = llama_config(
        model, tokenizer.vocab_size, config.train.seq_len, mesh.tp, mesh.tp_y, mesh.ep, speeds
    )
    check_shape(config, shape)
    check_experts_over(config, shape, mesh)
    check_slices_of(config, shape, mesh)
    check_lora_of(config, shape)
    check_dpo_of(config, shape)
    return tokenizer, shape


def llama_config(
    model: Model,
    vocab_needed: int,
    seq_len: int,
    tp: int,
    tp_y: int = 1,
    ep: int | None = None,
    tp_speeds: Sequence[float] = (),
) -> LlamaConfig:
    """Returns the shape that [model] asks for, with room for `vocab_needed` tokens and sequences of `seq_len`
    tokens, on `tp * tp_y` tensor-parallel ranks of `tp_speeds`, with experts over `ep` (None: tp) ranks.

    Raises ConfigError if the sizes do not fit each other, the tokenizer or the number of ranks.
    """
    asked = f"model.init_from {model.init_from}" if model.init_from else "[model]"
    with refusing(f"{asked}: ", (ValueError, OSError)):
        shape = _from_checkpoint(model) if model.init_from else _from_preset(model, vocab_needed)
        shape = _with_positions(shape, seq_len)
        if not tp_speeds:
            shape.check_tp(tp, ep)
        shard_bounds(shape.hidden_size, tp_y, 0, "hidden_size over y")
    with refusing("parallel."):
        tensor_cuts(shape, tp, tp_speeds, ep)
    if shape.vocab_size < vocab_needed:
        raise ConfigError(
            f"model.vocab_size={shape.vocab_size} is smaller than the tokenizer's {vocab_needed} tokens; use "
            "at least that many."
        )
    return shape


def _with_positions(shape: LlamaConfig, seq_len: int) -> LlamaConfig:
    """Returns the shape for sequences of at least `seq_len` tokens."""
    most, scaling = shape.max_position_embeddings, shape.rope_scaling
    if seq_len <= most:
        return shape
    if scaling is not None and scaling.rope_type == "dynamic":
        raise ValueError(
            "rope_type='dynamic' of the checkpoint turns all tokens of a sequence by its length if that is "
            f"above max_position_embeddings={most}, which is not supported; set train.seq_len={seq_len} to "
            "at most that."
        )
    return dataclasses.replace(shape, max_position_embeddings=seq_len)


def padded_vocabulary(vocab_needed: int) -> int:
    """Returns the vocabulary of a model that names none, for a tokenizer of `vocab_needed` tokens."""
    return -(-vocab_needed // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def _from_preset(model: Model, vocab_needed: int) -> LlamaConfig:
    changes = _sizes(model)
    changes.setdefault("vocab_size", padded_vocabulary(vocab_needed))
    if {"hidden_size", "num_attention_heads"} & set(changes):
        changes["head_dim"] = None  # the quotient of the new sizes instead of the preset's
    shape = preset(model.preset or DEFAULT_PRESET, **changes)
    return dataclasses.replace(shape, mixture=_mixture(model, shape))


def _mixture(model: Model, shape: LlamaConfig) -> Mixture | None:
    """Returns the experts that [model] asks for in a preset of that shape."""
    asked = {field: getattr(model, name) for name, field in _OF_MIXTURE.items()}
    asked = {field: value for field, value in asked.items() if value is not None}
    held = shape.mixture
    if asked.get("experts") == 0 or (held is None and "experts" not in asked):
        if others := [name for name, field in _OF_MIXTURE.items() if field in asked and name != "experts"]:
            raise ValueError(f"model.{others[0]} applies to experts, and there are none; set model.experts.")
        return None
    if held is not None:
        return dataclasses.replace(held, **asked)
    return Mixture(**{"per_token": 2, "width": shape.intermediate_size} | asked)


def _from_checkpoint(model: Model) -> LlamaConfig:
    shape = LlamaConfig.from_hf(read_config(Path(model.init_from)))
    held = {name: getattr(shape.mixture, field, 0) for name, field in _OF_MIXTURE.items()}
    held |= {name: getattr(shape, name) for name in _sizes(model)}
    others = {
        name: v for name, v in vars(model).items() if name in held and v is not None and v != held[name]
    }
    if model.preset:
        others = {"preset": model.preset, **others}
    for name, value in others.items():
        raise ValueError(
            f"model.{name}={value} conflicts with model.init_from={model.init_from}, whose checkpoint sets "
            f"the shape; leave out model.{name} or model.init_from."
        )
    return shape


def _sizes(model: Model) -> dict[str, Any]:
    """The sizes given by name."""
    return {
        name: value
        for name, value in vars(model).items()
        if name not in ("preset", "init_from", *_OF_MIXTURE) and value is not None
    }
