"""Compares an MLP made of the two primitives with the unsplit MLP.

torchrun --nproc-per-node 2 examples/primitives.py
"""

import torch

import pyruntime

torch.manual_seed(0)  # the same numbers on every rank
with pyruntime.Runtime.start() as runtime:
    rank, size = runtime.rank, runtime.tp_size
    x, up, down = torch.randn(10, 64), torch.randn(96, 64), torch.randn(64, 96)
    own = x.chunk(size)[rank]  # this rank's rows; below, its features of both weights
    hidden = pyruntime.all_gather_matmul(own, up.chunk(size)[rank], runtime.tp)  # all rows
    out = pyruntime.matmul_reduce_scatter(hidden.relu(), down.chunk(size, 1)[rank], runtime.tp)  # own rows
    whole = ((x @ up.T).relu() @ down.T).chunk(size)[rank]
    off = (out - whole).abs().max() / whole.abs().max()
    print(f"rank {rank}: {list(own.shape)} -> {list(hidden.shape)} -> {list(out.shape)}, off by {off:.1e}")
