"""An MLP of a column and a row linear: each rank has a part of both weights, and its own rows.

torchrun --nproc-per-node 2 examples/linears.py
"""

import torch

import pyruntime
from pyruntime.nn import ColumnParallelLinear, RowParallelLinear

torch.manual_seed(0)  # the same model on every rank; each keeps its part
with pyruntime.Runtime.start() as runtime:
    up = ColumnParallelLinear(64, 256, group=runtime.tp)
    down = RowParallelLinear(256, 64, group=runtime.tp)
    optimizer = torch.optim.AdamW([up.weight, down.weight], lr=1e-2)
    x = torch.randn(64, 64).tensor_split(runtime.tp_size)[runtime.rank]  # this rank's rows
    for step in range(3):
        loss = (down(up(x).relu()) - x).square().mean()
        loss.backward()
        optimizer.step(), optimizer.zero_grad()
        print(f"rank {runtime.rank}, step {step}: up {list(up.weight.shape)}, loss of own rows {loss:.4f}")
