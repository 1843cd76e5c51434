"""All that a run would refuse before it trains, without ranks and without weights."""

from __future__ import annotations

from pyruntime.llama.config import LlamaConfig
from pyruntime.train import validate
from pyruntime.train.config import RunConfig, micro_batches, tokens_per_step, tp_axes, with_pieces
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


def report(config: RunConfig, world_size: int) -> str:
    """One line for people about what would run. Raises ConfigError, as the run would."""
    shape = check(config, world_size)
    config = with_pieces(config)
    parallel = config.parallel
    tp, tp_y = tp_axes(parallel, world_size)
    axes = {"tp": tp, **({"tp_y": tp_y} if tp_y > 1 else {})}
    axes |= {"cp": parallel.cp, "pp": parallel.pp, "dp": parallel.dp}
    sizes = ", ".join(f"{name}={size}" for name, size in axes.items())
    return (
        f"{shape.parameter_count() / 1e6:,.1f} M parameters on {world_size} rank(s): {sizes}; steps of "
        f"{tokens_per_step(config):,} tokens in {micro_batches(config)} micro-batch(es) a rank. Nothing was "
        "started."
    )
