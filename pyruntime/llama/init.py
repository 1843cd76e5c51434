"""Draws initial weights that do not depend on the number of ranks: a shard is a slice of the tp=1 tensor."""

from __future__ import annotations

import hashlib
import math

import torch

from pyruntime.llama.config import LlamaConfig
from pyruntime.llama.tensor_shards import ROUTER_BIAS, TensorShard

_TILE = 256  # indices of the cut dimension that one generator draws; changing it changes every model


def init_shard(config: LlamaConfig, shard: TensorShard, seed: int) -> None:
    """Fills `shard.local` in place: norms with 1, biases with 0, matrices with normally distributed draws.

    The standard deviation is `initializer_range`. For the two projections that write into the residual
    stream it is divided by `sqrt(2 L)`, so that the stream's variance does not grow with the depth L (GPT-2,
    Radford et al. 2019, section 2.3).

    A matrix is drawn in tiles of 256 indices along the dimension that tensor parallelism cuts. Each tile has
    its own generator, seeded by (seed, tensor name, tile). So a rank draws only its own tiles, and needs
    memory for one fp32 tile beyond the parameter. A tile of experts is one expert's matrix.
    """
    with torch.no_grad():
        if shard.name.endswith("norm.weight"):
            shard.local.fill_(1.0)
        elif shard.name.endswith((".bias", ROUTER_BIAS)):
            shard.local.zero_()
        else:
            _fill_normal(shard, _std(config, shard.name), seed)


def init_adapter(shard: TensorShard, seed: int) -> None:
    """Fills a matrix of an adapter in place: A [r, K] with uniform draws in [-1/sqrt(K), 1/sqrt(K)), as peft
    does, B with 0, so that the adapter begins with no effect."""
    with torch.no_grad():
        if shard.name.endswith("lora_B.weight"):
            shard.local.zero_()
            return
        bound = 1 / math.sqrt(shard.shape[1])
        whole = torch.empty(shard.shape).uniform_(-bound, bound, generator=_generator(seed, shard.name, 0))
        dim = shard.dim or 0
        shard.local.copy_(whole.narrow(dim, shard.start, shard.local.shape[dim]))


def _std(config: LlamaConfig, name: str) -> float:
    if name.endswith(("self_attn.o_proj.weight", "down_proj.weight", "experts.down_proj")):
        return config.initializer_range / math.sqrt(2 * config.num_hidden_layers)
    return config.initializer_range


def _fill_normal(shard: TensorShard, std: float, seed: int) -> None:
    dim, local, start = shard.dim or 0, shard.local, shard.start  # a router's matrix is not cut
    end = start + local.shape[dim]
    size = 1 if len(shard.shape) == 3 else _TILE  # of experts' matrices one
    for tile in range(start // size, math.ceil(end / size)):
        first = tile * size
        last = min(first + size, shard.shape[dim])
        shape = list(shard.shape)
        shape[dim] = last - first
        # Always drawn on the CPU, so that a GPU run starts from the same weights.
        values = torch.empty(shape).normal_(0.0, std, generator=_generator(seed, shard.name, tile))
        low, high = max(first, start), min(last, end)
        values = values.narrow(dim, low - first, high - low)
        if shard.dim_y is not None:
            values = values.narrow(shard.dim_y, shard.start_y, local.shape[shard.dim_y])
        local.narrow(dim, low - start, high - low).copy_(values)


def _generator(seed: int, name: str, tile: int) -> torch.Generator:
    """Returns a generator whose draws depend only on the arguments."""
    digest = hashlib.sha256(f"{seed}/{name}/{tile}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
