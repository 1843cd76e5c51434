"""LoRA: adapters of peft are cut together with their linears; after merging, the weights are complete.

torchrun --nproc-per-node 2 examples/lora.py
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import pyruntime

torch.manual_seed(0)  # the same weights on every rank
with pyruntime.Runtime.start() as runtime:
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=1000, hidden_size=128, num_hidden_layers=2))
    model = get_peft_model(llama, LoraConfig(target_modules=["q_proj", "down_proj"]))
    pyruntime.parallelize(model, runtime.tp, "auto")
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    ids = torch.randint(1000, (2, 32))  # the same batch on every rank
    for _ in range(3):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step(), optimizer.zero_grad()
    merged = model.merge_and_unload()(input_ids=ids, labels=ids).loss
    print(f"rank {runtime.rank}: loss {merged:.4f} with adapters merged after three steps")
