"""All that a run would refuse before it trains, without ranks and without weights."""

from __future__ import annotations

from pyruntime.llama.config import LlamaConfig
from pyruntime.train import validate
from pyruntime.train.config import RunConfig, tp_axes, with_pieces
from pyruntime.train.data.tokenizer import open_tokenizer
from pyruntime.train.model import llama_config


def check(config: RunConfig, world_size: int) -> LlamaConfig:
    """The model that `config` would train on so many ranks. Raises ConfigError, as the run would."""
    validate.check(config, world_size)
    config = with_pieces(config)
    vocabulary = open_tokenizer(config.data.tokenizer, config.model.init_from, config.data.paths).vocab_size
    axes = tp_axes(config.parallel, world_size)
    shape = llama_config(config.model, vocabulary, config.train.seq_len, *axes)
    if config.parallel.pp > 1:
        from pyruntime.train.pipelined import layers_of_stages, resolved

        layers_of_stages(resolved(config, shape), shape)
    return shape
