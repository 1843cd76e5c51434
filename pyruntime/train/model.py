"""The model that a configuration asks for: its shape, and this rank's part of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from pyruntime.comm import Runtime
from pyruntime.comm.groups import crosses_hosts
from pyruntime.context import Context
from pyruntime.llama import Llama, load_weights
from pyruntime.llama.config import LlamaConfig
from pyruntime.llama.elementwise import NoCompiler
from pyruntime.llama.hf import check_shapes, read_config, saved_dtype
from pyruntime.llama.presets import preset
from pyruntime.nn.parameters import shard_bounds
from pyruntime.train.config import Model, RunConfig
from pyruntime.train.errors import ConfigError, refusing
from pyruntime.train.pipelined import part_of
from pyruntime.train.validate.sequences import why_no_slices

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
VOCABULARY_MULTIPLE = 128
DEFAULT_PRESET = "3m"


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


def slices_of(config: RunConfig, runtime: Runtime) -> int:
    """Causal slices inside a tensor-parallel group."""
    asked = config.parallel.slices
    if asked != "auto":
        return asked
    if config.parallel.cp > 1 or why_no_slices(config, runtime.tp_size):
        return 1
    return 2 if crosses_hosts(runtime.tp, runtime.device) else 1


def make_model(config: RunConfig, shape: LlamaConfig, runtime: Runtime) -> Llama:
    """This rank's part of a model of that shape, with the weights that a run starts from. Raises ConfigError
    where the mesh does not fit the model, or its first weights cannot be read."""
    cp, context = runtime.sizes.cp, None
    if runtime.cp.mesh is not None:
        context = Context(runtime.cp, config.context.layout, config.context.variant, config.context.wire)
        heads = shape.num_key_value_heads // runtime.tp_size
        if context.variant == "ulysses" and heads % cp:
            raise ConfigError(
                f"context.variant=ulysses deals out heads, and parallel.cp={cp} does not divide "
                f"the {heads} key/value heads of a tensor-parallel rank; use ring or all_gather_kv."
            )
    source = config.model.init_from
    if source:
        with refusing("model.init_from: ", (ValueError, OSError)):
            check_shapes(shape, source)
    with refusing("train.compile: ", (NoCompiler,)):
        model = llama(
            config,
            shape,
            runtime,
            seed=None if source else config.train.seed,
            context=context,
            recompute=config.train.activation_checkpointing,
            compile=config.train.compile,
            slices=slices_of(config, runtime),
            z_loss=config.train.z_loss,
            part=None if runtime.pp.mesh is None else part_of(config, shape, runtime.coordinate.pp),
        )
    if source:
        with refusing("model.init_from: ", (ValueError, OSError)):
            load_weights(model, source)
    return model


def llama(
    config: RunConfig, shape: LlamaConfig, runtime: Runtime, *, seed: int | None, **options: Any
) -> Llama:
    """A model of the run over its tensor-parallel ranks, whole unless `options`, which are Llama's, name a
    part."""
    return Llama(
        shape,
        runtime.tp_grid,
        device=runtime.device,
        dtype=DTYPES[config.train.dtype],
        tier=config.comm.tier,
        wire=config.parallel.tp_wire,
        seed=seed,
        **options,
    )


def words_of_dtype(config: RunConfig) -> str:
    """Where weights leave in another type than they came in; empty where they do not, or are new."""
    source = Path(config.model.init_from)
    if not config.model.init_from or not (source / "config.json").is_file():
        return ""
    try:
        came, leaves = saved_dtype(read_config(source)), DTYPES[config.train.dtype]
    except ValueError:  # a type that has no name here: loading says what it takes
        return ""
    if came == leaves:
        return ""
    return f"dtype  weights came as {came} and leave as {leaves}, which is train.dtype={config.train.dtype}"
