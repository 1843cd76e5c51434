"""The trainer's rules say what fresh processes of it really hold."""

from __future__ import annotations

import pytest
import torch

import pyruntime
from pyruntime.choices import LORA_ATTENTION, LORA_TARGETS
from pyruntime.llama import Llama, LlamaConfig
from pyruntime.nn.low_rank import LoRA
from pyruntime.plan.memory import memory_of_rank
from pyruntime.plan.mesh import Job, Mesh
from pyruntime.train.metrics import peak_memory_bytes
from pyruntime.train.planned import TRAINER, adapters_of, of_llama
from tests.plan.jobs import job

SEQ, STEPS, RANK = 1024, 1, 16


def shape(hidden: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=2048,
        hidden_size=hidden,
        intermediate_size=11 * hidden // 4,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
    )


def train(config: LlamaConfig, group, seq: int, targets: tuple[str, ...]) -> None:
    lora = LoRA(RANK, 32.0, targets) if targets else None
    model = Llama(config, group, dtype=torch.bfloat16, tier="chunked", lora=lora)
    optimizer = pyruntime.shard(model, None, stage=0).adamw(lr=1e-4)
    ids = torch.randint(config.vocab_size, (2, seq))
    for _ in range(STEPS):
        for micro in ids.split(1):
            model(micro, micro).backward()
        optimizer.step(1.0)


def held(group, targets: tuple[str, ...]) -> int:
    """Bytes that a model needs beyond what the process had after it trained a small one."""
    torch.set_num_threads(1)
    pyruntime.keep_freed_memory()
    train(shape(64), group, 64, targets)
    before = peak_memory_bytes()
    train(shape(512), group, SEQ, targets)
    return peak_memory_bytes() - before


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="this processor multiplies bf16 in fp32, through copies that the rules do not count",
)
@pytest.mark.parametrize(
    "tp, targets",
    [(1, ()), (2, ()), (1, LORA_ATTENTION), (1, LORA_TARGETS), (2, LORA_TARGETS)],
    ids=["1", "2", "1 adapters of attention", "1 adapters", "2 adapters"],
)
@pytest.mark.second_tier(but=["1"])
def test_resident_memory_is_predicted_within_10_percent(ranks, tp, targets):
    """Where all weights train, and where adapters of these linears do."""
    adapters = adapters_of(shape(512), RANK if targets else 0, targets)
    cluster = job("debug", "dgx-h100", 1, 1).cluster
    wanted = Job(of_llama("test", shape(512)), cluster, tp, 2, SEQ, adapters=adapters)
    predicted = memory_of_rank(wanted, Mesh(tp=tp, zero=0), 0, TRAINER, process=0.0).total
    for rank in ranks.launch(held, tp, targets):
        assert rank.exit_code == 0, rank.output
        assert rank.value == pytest.approx(predicted, rel=0.1)
