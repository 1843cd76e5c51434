"""Trains a model of transformers with tensor parallelism, without a change of its code.

torchrun --nproc-per-node 2 examples/parallelize.py
"""

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import pyruntime

torch.manual_seed(0)  # the same weights on every rank, as from_pretrained() gives them
with pyruntime.Runtime.start() as runtime:  # reads torchrun's environment
    config = Qwen3Config(vocab_size=1000, hidden_size=128, intermediate_size=352, num_hidden_layers=2)
    model = pyruntime.parallelize(Qwen3ForCausalLM(config), runtime.tp, "auto")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(1000, (2, 64))  # the same batch on every rank
    for step in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of the whole model
        optimizer.step(), optimizer.zero_grad()
        print(f"rank {runtime.rank}, step {step}: loss {loss:.4f}, gradient norm {norm:.4f}")
