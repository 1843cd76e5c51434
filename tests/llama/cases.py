"""Small Llamas that between them use every feature, and what ranks do with them.

Nothing here imports transformers, which would make every rank wait for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyruntime.llama import Llama, LlamaConfig, RopeScaling, generate, load_hf, save_hf
from pyruntime.llama.tensor_shards import gather_full

# Sizes that differ from each other, and a vocabulary that neither 2 nor 4 divides.
_SMALL = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 256,
}

CASES = {
    "plain": LlamaConfig(**_SMALL, num_key_value_heads=8),
    "gqa-llama3-tied": LlamaConfig(
        **_SMALL,
        num_key_value_heads=4,
        rope_theta=500.0,
        rope_scaling=RopeScaling(factor=4.0, original_max_position_embeddings=64),
        tie_word_embeddings=True,
    ),
    "gqa-linear-bias-wide": LlamaConfig(
        **_SMALL,
        num_key_value_heads=4,
        head_dim=12,
        rope_scaling=RopeScaling("linear", factor=2.0),
        attention_bias=True,
        mlp_bias=True,
    ),
}


def full_tensors(model: Llama) -> dict[str, Tensor]:
    """Every tensor of the checkpoint, gathered from all ranks."""
    return {shard.name: gather_full(shard).clone() for shard in model.shards()}


def full_gradients(model: Llama) -> dict[str, Tensor]:
    """Every gradient, gathered: they take the parameters' places, so that they come under the same names."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    return full_tensors(model)


def logits_loss_gradients(group, directory, ids, labels, options=None):
    """What the checkpoint in `directory` makes of a batch; gradients of rank 0 only, to spare the pipe."""
    model = load_hf(directory, group, **(options or {}))
    with torch.no_grad():
        logits = model(ids)
    loss = model(ids, labels)
    loss.backward()
    gradients = full_gradients(model)
    return logits, loss.detach(), gradients if model.group.rank == 0 else None


def gradients_through_logits(group, directory, ids, weights):
    """Gradients of a caller's own loss on gathered logits, which every rank computes alike."""
    model = load_hf(directory, group)
    (model(ids) * weights).sum().backward()
    return full_gradients(model)


def eager_and_compiled(group, config, ids, labels):
    """Loss and gradients without and with torch.compile of the whole model, no graph break allowed."""
    results = []
    for wrap in (
        lambda model: model,
        lambda model: torch.compile(model, fullgraph=True, backend="aot_eager"),
    ):
        model = Llama(config, group)
        loss = wrap(model)(ids, labels)
        loss.backward()
        results.append((loss.detach(), full_gradients(model)))
    return results


def initial_tensors(group, config, seed):
    return full_tensors(Llama(config, group, seed=seed))


def load_and_save(group, source, target, options):
    save_hf(load_hf(source, group), target, **options)


def init_and_save(group, config, target):
    save_hf(Llama(config, group, seed=3), target)


def only_loads(group, source):
    load_hf(source, group)


def continue_text(group, config, ids, new_tokens, options):
    return generate(Llama(config, group, seed=5), ids, new_tokens, **options)


def build_error(group, config):
    try:
        Llama(config, group)
    except ValueError as error:
        return str(error)
    return None
