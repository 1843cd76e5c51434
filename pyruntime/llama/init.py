"""Initial weights that do not depend on the number of ranks: a shard is the slice of the tp=1 tensor."""

from __future__ import annotations

import hashlib
import math

import torch

from pyruntime.llama.config import LlamaConfig
from pyruntime.llama.tensor_shards import TensorShard

_TILE = 256  # indices of the cut dimension that one generator draws; changing it changes every model


def init_shard(config: LlamaConfig, shard: TensorShard, seed: int) -> None:
    """Fill `shard.local` in place: norms with 1, biases with 0, matrices with draws of a normal distribution.

    The standard deviation is `initializer_range`, divided by `sqrt(2 L)` for the two projections that write
    into the residual stream (GPT-2, Radford et al. 2019, section 2.3: its variance then does not grow with
    the depth L).

    A matrix is drawn in tiles of 256 indices along the dimension that tensor parallelism cuts, each by a
    generator of its own seeded by (seed, tensor name, tile). A rank thus draws its own tiles and no others,
    whatever the number of ranks, and the memory beyond the parameter is one fp32 tile.
    """
    with torch.no_grad():
        if shard.name.endswith("norm.weight"):
            shard.local.fill_(1.0)
        elif shard.name.endswith(".bias"):
            shard.local.zero_()
        else:
            _fill_normal(shard, _std(config, shard.name), seed)


def _std(config: LlamaConfig, name: str) -> float:
    if name.endswith(("self_attn.o_proj.weight", "mlp.down_proj.weight")):
        return config.initializer_range / math.sqrt(2 * config.num_hidden_layers)
    return config.initializer_range


def _fill_normal(shard: TensorShard, std: float, seed: int) -> None:
    assert shard.dim is not None  # every matrix is cut
    dim, local, start = shard.dim, shard.local, shard.start
    end = start + local.shape[dim]
    for tile in range(start // _TILE, math.ceil(end / _TILE)):
        first = tile * _TILE
        last = min(first + _TILE, shard.shape[dim])
        shape = list(shard.shape)
        shape[dim] = last - first
        # Drawn on the CPU for every device, so that a GPU run starts from the same weights.
        values = torch.empty(shape).normal_(0.0, std, generator=_generator(seed, shard.name, tile))
        low, high = max(first, start), min(last, end)
        values = values.narrow(dim, low - first, high - low)
        if shard.dim_y is not None:
            values = values.narrow(shard.dim_y, shard.start_y, local.shape[shard.dim_y])
        local.narrow(dim, low - start, high - low).copy_(values)


def _generator(seed: int, name: str, tile: int) -> torch.Generator:
    """A generator whose stream depends on nothing but its arguments."""
    digest = hashlib.sha256(f"{seed}/{name}/{tile}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
