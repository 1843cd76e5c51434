"""Hugging Face's Trainer and accelerate wrap models in DistributedDataParallel: a parallel one refuses."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import pyruntime


def trains(_group, folder: str) -> list[str]:
    from accelerate import Accelerator
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    with pyruntime.Runtime.start() as runtime:
        shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
        model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2, num_key_value_heads=2))
        pyruntime.parallelize(model, runtime.tp, "llama", tier="chunked")
        before = [p.detach().clone() for p in model.parameters()]
        ids = torch.arange(8)
        options = {
            "max_steps": 1,
            "report_to": [],
            "use_cpu": True,
            "save_strategy": "no",
            "disable_tqdm": True,
        }
        arguments = TrainingArguments(folder, per_device_train_batch_size=1, **options)
        data = [{"input_ids": ids, "labels": ids}] * 4
        said = []
        for attempt in (
            lambda: Trainer(model, arguments, train_dataset=data).train(),
            lambda: Accelerator().prepare(model, torch.optim.AdamW(model.parameters())),
        ):
            with pytest.raises(ValueError) as caught:
                attempt()
            said.append(str(caught.value))
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        return said


def test_the_trainer_and_accelerate_are_refused_before_they_change_a_weight(ranks, tmp_path):
    pytest.importorskip("accelerate")
    for outcome in ranks.launch(trains, 2, str(tmp_path), init=False):
        assert outcome.error is None and outcome.exit_code == 0, outcome.output
        assert len(outcome.value) == 2
        for said in outcome.value:
            assert "DistributedDataParallel was asked to wrap a tensor-parallel model" in said
            assert "pyruntime.shard(model, runtime.dp)" in said
