"""The shape of the model that a configuration asks for."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from pyruntime.llama.config import LlamaConfig
from pyruntime.llama.hf import read_config
from pyruntime.llama.presets import preset
from pyruntime.train.config import Model
from pyruntime.train.errors import ConfigError

VOCABULARY_MULTIPLE = 128
DEFAULT_PRESET = "3m"


def llama_config(model: Model, vocab_needed: int, seq_len: int, tp: int) -> LlamaConfig:
    """The model of the [model] section, with room for `vocab_needed` tokens and sequences of `seq_len`, on
    `tp` ranks.

    Raises ConfigError, one sentence, where the sizes do not fit together, the tokenizer or the number of
    ranks.
    """
    try:
        shape = _from_checkpoint(model) if model.init_from else _from_preset(model, vocab_needed)
        shape = dataclasses.replace(
            shape, max_position_embeddings=max(shape.max_position_embeddings, seq_len)
        )
        shape.check_tp(tp)
    except (ValueError, OSError) as error:
        raise ConfigError(f"[model]: {error}") from error
    if shape.vocab_size < vocab_needed:
        raise ConfigError(
            f"model.vocab_size={shape.vocab_size} is smaller than the tokenizer's {vocab_needed} tokens; use "
            "at least that many."
        )
    return shape


def _from_preset(model: Model, vocab_needed: int) -> LlamaConfig:
    changes = _sizes(model)
    changes.setdefault("vocab_size", -(-vocab_needed // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE)
    if {"hidden_size", "num_attention_heads"} & set(changes):
        changes["head_dim"] = None  # the quotient of the new sizes instead of the preset's
    return preset(model.preset or DEFAULT_PRESET, **changes)


def _from_checkpoint(model: Model) -> LlamaConfig:
    shape = LlamaConfig.from_hf(read_config(Path(model.init_from)))
    others = {name: value for name, value in _sizes(model).items() if value != getattr(shape, name)}
    if model.preset:
        others = {"preset": model.preset, **others}
    for name, value in others.items():
        raise ValueError(
            f"model.{name}={value} and model.init_from={model.init_from} were asked for, and the checkpoint "
            "says what shape its weights have; leave one of the two out."
        )
    return shape


def _sizes(model: Model) -> dict[str, Any]:
    """The sizes that are asked for by name."""
    values = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
    return {
        name: value
        for name, value in values.items()
        if name not in ("preset", "init_from") and value is not None
    }
