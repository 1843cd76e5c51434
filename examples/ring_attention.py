"""Compares attention over a sequence that is cut over ranks with attention over the whole sequence.

torchrun --nproc-per-node 2 examples/ring_attention.py
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

import pyruntime
from pyruntime.context import take_shard

torch.manual_seed(0)  # the same numbers on every rank
with pyruntime.Runtime.start(tp=1, cp=2) as runtime:
    q, k, v = (torch.randn(1, 256, heads, 64) for heads in (8, 4, 4))  # [B, S, heads, d]
    parts = [take_shard(x, "zigzag", 2, runtime.rank) for x in (q, k, v)]  # equal work for every rank
    out = pyruntime.ring_attention(*parts, runtime.cp)  # for this rank's tokens, over all tokens
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    whole = scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2)
    error = (out - take_shard(whole, "zigzag", 2, runtime.rank)).abs().max()
    print(f"rank {runtime.rank}: {out.shape[1]} of 256 tokens, off by {error:.1e}")
