"""The shape of the model that a configuration asks for."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from pyruntime.llama.config import LlamaConfig
from pyruntime.llama.hf import read_config
from pyruntime.llama.presets import preset
from pyruntime.train.config import Model
from pyruntime.train.errors import ConfigError

VOCABULARY_MULTIPLE = 128


def llama_config(model: Model, vocab_needed: int, seq_len: int, tp: int) -> LlamaConfig:
    """The model of the [model] section, with room for `vocab_needed` tokens and sequences of `seq_len`, on
    `tp` ranks.

    Raises ConfigError, one sentence, where the sizes do not fit together, the tokenizer or the number of
    ranks.
    """
    try:
        shape = (
            _from_checkpoint(Path(model.init_from)) if model.init_from else _from_preset(model, vocab_needed)
        )
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
    changes = {
        field.name: getattr(model, field.name)
        for field in dataclasses.fields(model)
        if field.name not in ("preset", "init_from") and getattr(model, field.name) is not None
    }
    changes.setdefault("vocab_size", -(-vocab_needed // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE)
    if {"hidden_size", "num_attention_heads"} & set(changes):
        changes["head_dim"] = None  # the quotient of the new sizes instead of the preset's
    return preset(model.preset, **changes)


def _from_checkpoint(folder: Path) -> LlamaConfig:
    return LlamaConfig.from_hf(read_config(folder))
