"""What a rank holds for a sequence shrinks with the ranks that share it."""

from __future__ import annotations

import pytest
import torch

from pyruntime import comm
from pyruntime.context import Context, ring_attention
from pyruntime.llama import Llama
from pyruntime.llama.presets import preset
from tests.transports import take

SEQ, LAYERS = 1024, 2


def saved_bytes(group):
    """Bytes that one forward pass of a model keeps for its backward, beside the weights."""
    torch.manual_seed(0)
    config = preset("debug", vocab_size=64, max_position_embeddings=SEQ, num_hidden_layers=LAYERS)
    context = Context(group) if group.size() > 1 else None
    model = Llama(config, context=context, dtype=torch.bfloat16)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held = {}

    def keep(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            held[storage.data_ptr()] = storage.nbytes()
        return x

    ids = torch.randint(64, (1, SEQ // group.size()))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = model(ids, ids)
    total = sum(held.values())
    loss.backward()
    return total


def test_activations_shrink_with_the_ranks(ranks):
    """S / P of everything, by the formula of Fujii et al. (arXiv 2411.06465, section 4.3: A / (t c))."""
    alone = ranks.run(saved_bytes, 1)[0]
    for world in (2, 4):
        for held in ranks.run(saved_bytes, world):
            assert held == pytest.approx(alone / world, rel=0.1)


def ring_bytes(group, heads, dim):
    """Bytes that chunks travel through after a forward and a backward pass."""
    x = torch.randn(1, SEQ // group.size(), heads, dim, dtype=torch.bfloat16, requires_grad=True)
    take(group, "symmetric_memory")
    comm.close(group)  # what earlier rings have claimed
    for _ in range(3):
        ring_attention(x, x, x, group).sum().backward()
    rank, size = group.rank(), group.size()
    edges = [(rank, (rank + 1) % size), ((rank - 1) % size, rank)]
    return sum(comm.workspace_bytes(comm.companion(group, "cp", edge).name) for edge in edges)


@pytest.mark.parametrize("world", [2, 4])
def test_the_ring_holds_a_few_shards_of_keys(ranks, world):
    heads, dim = 4, 64
    share = 2 * SEQ // world * heads * dim  # elements of K and V
    for held in ranks.run(ring_bytes, world, heads, dim):
        # Four slots for what is sent and four for what comes, of at most fp32 (sizes are powers of two).
        assert held <= 8 * 4 * share * 1.1 + (1 << 18)
