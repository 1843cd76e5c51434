"""Trains two stages of a model with a zero-bubble schedule.

torchrun --nproc-per-node 2 examples/pipeline.py
"""

import torch
from torch.nn import Linear, Sequential, Tanh

import pyruntime
from pyruntime.pipeline import make_schedule
from pyruntime.pipeline.executor import Pipeline

with pyruntime.Runtime.start(tp=1, pp=2) as runtime:
    schedule = make_schedule("zb-h1", ranks=2, micro_batches=4)
    stage = Sequential(Linear(64, 64), Tanh())  # this rank's part of the model
    pipeline = Pipeline(schedule, {runtime.rank: stage}, runtime.pp, shapes=[(8, 64)], dtype=torch.float32)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-2)
    batches = torch.randn(4, 1, 8, 64)  # read by the first stage
    for step in range(3):
        losses = pipeline.step(batches, lambda y, micro_batch, part: (y - 0.5).square().mean())
        optimizer.step(), optimizer.zero_grad()
        if losses:  # one for each micro-batch, on the rank of the last stage
            print(f"step {step}: losses {[round(loss.item(), 4) for (loss,) in losses]}")
    pipeline.close()
