"""The shape of the model that a configuration asks for, and the tokenizer that it is for."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from pyruntime.llama.config import LlamaConfig
from pyruntime.llama.hf import read_config
from pyruntime.llama.presets import preset
from pyruntime.nn.parameters import shard_bounds
from pyruntime.train.config import Model, RunConfig, mesh_of
from pyruntime.train.data.tokenizer import Tokenizer, open_tokenizer
from pyruntime.train.errors import ConfigError, refusing

VOCABULARY_MULTIPLE = 128
DEFAULT_PRESET = "3m"


def open_model(config: RunConfig, world_size: int) -> tuple[Tokenizer, LlamaConfig]:
    """The tokenizer of a run, and the model that so many ranks train. Raises ConfigError."""
    data, model, mesh = config.data, config.model, mesh_of(config, world_size)
    tokenizer = open_tokenizer(data.tokenizer, model.init_from, data.paths)
    return tokenizer, llama_config(model, tokenizer.vocab_size, config.train.seq_len, mesh.tp, mesh.tp_y)


def llama_config(model: Model, vocab_needed: int, seq_len: int, tp: int, tp_y: int = 1) -> LlamaConfig:
    """The model of the [model] section, with room for `vocab_needed` tokens and sequences of `seq_len`, on
    `tp` ranks, or on `tp` times `tp_y` of two axes.

    Raises ConfigError, one sentence, where the sizes do not fit together, the tokenizer or the number of
    ranks.
    """
    with refusing("[model]: ", (ValueError, OSError)):
        shape = _from_checkpoint(model) if model.init_from else _from_preset(model, vocab_needed)
        shape = dataclasses.replace(
            shape, max_position_embeddings=max(shape.max_position_embeddings, seq_len)
        )
        shape.check_tp(tp)
        shard_bounds(shape.hidden_size, tp_y, 0, "hidden_size over y")
    if shape.vocab_size < vocab_needed:
        raise ConfigError(
            f"model.vocab_size={shape.vocab_size} is smaller than the tokenizer's {vocab_needed} tokens; use "
            "at least that many."
        )
    return shape


def padded_vocabulary(vocab_needed: int) -> int:
    """Of a model whose configuration names none, where the tokenizer has so many tokens."""
    return -(-vocab_needed // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def _from_preset(model: Model, vocab_needed: int) -> LlamaConfig:
    changes = _sizes(model)
    changes.setdefault("vocab_size", padded_vocabulary(vocab_needed))
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
    return {
        name: value
        for name, value in vars(model).items()
        if name not in ("preset", "init_from") and value is not None
    }
