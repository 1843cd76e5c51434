"""Data parallelism of any module: gradients are sent as they are written, optimizer states are cut (ZeRO).

torchrun --nproc-per-node 2 examples/data_parallel.py
"""

import torch

import pyruntime

torch.manual_seed(0)  # the same model on every rank
with pyruntime.Runtime.start(tp=1, dp=2) as runtime:
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    handle = pyruntime.shard(model, runtime.dp, stage=2)  # 0 to 3
    optimizer = handle.adamw(lr=1e-2, max_norm=1.0)
    x = torch.randn(2, 32, 64)[runtime.rank]  # every rank's own data
    for step in range(3):
        loss = (model(x) - x).square().mean()
        loss.backward()
        norm = optimizer.step().grad_norm  # of the mean over all ranks
        print(f"rank {runtime.rank}, step {step}: loss of own data {loss:.4f}, gradient norm {norm:.4f}")
