"""A Llama whose loss is computed by chunks of rows has the loss and the gradients of whole logits."""

from __future__ import annotations

from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch

from pyruntime.llama import Llama
from pyruntime.nn import chunked_head
from pyruntime.nn.low_rank import LoRA
from tests.llama.cases import CASES, full_tensors
from tests.llama.test_adapters import full, with_effect
from tests.train import jobs

SOME_ROWS = {"LEAST_LOGITS": 0, "CHUNK_ROWS": 6, "CHUNKS": 100}
Q = LoRA(5, 12.0, ("q_proj",))


def test_large_logits_are_computed_by_chunks():
    assert chunked_head.chunk_rows(4096, 2 * 32_000, "cpu") == 0
    assert chunked_head.chunk_rows(4096, 2 * 128_256, "cpu") == 512
    assert chunked_head.chunk_rows(4096, 2 * 128_256, "cuda") == 1024
    assert chunked_head.chunk_rows(32_768, 2 * 64_128, "cpu") == 2048
    assert chunked_head.chunk_rows(512, 1 << 30, "cpu") == 0  # one chunk would be all


def losses_and_gradients(group, case: str, chunked: bool, lora: LoRA | None, options: dict):
    """Losses without gradients and with them, and the gradients of 3 times the loss."""
    config = CASES[case]
    generator = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(config.vocab_size, (2, 2, 19), generator=generator)
    labels[0, 3:7] = -100
    model = Llama(config, group, seed=3, lora=lora, **options)
    if lora is not None:
        with_effect(model)
    with patch.multiple(chunked_head, **SOME_ROWS) if chunked else nullcontext():
        with torch.no_grad():
            without = model(ids, labels)
        with patch.object(model.head, "compute", side_effect=model.head.compute) as whole:
            loss = model(ids, labels)
        assert whole.called is not chunked
    (3 * loss).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(parameter.grad)
    return without, loss.detach(), full_tensors(model) if lora is None else full(model)


@pytest.mark.parametrize(
    ("world", "case", "lora", "options"),
    [
        (1, "plain", None, {"z_loss": 0.1}),
        (2, "gqa-llama3-tied", None, {"z_loss": 0.1}),
        (4, "plain", Q, {}),
        (2, "plain", None, {"slices": 2}),
        (2, "plain", None, {"keep_gathered": True, "recompute": "full"}),
        (2, "plain", None, {"z_loss": 0.1, "tp_speeds": (1.0, 0.7)}),
    ],
)
def test_loss_and_gradients(ranks, world, case, lora, options):
    expected = losses_and_gradients(None, case, False, lora, {"z_loss": options.get("z_loss", 0.0)})
    for found in ranks.run(losses_and_gradients, world, case, True, lora, options):
        for given, wanted in zip(found[:2], expected[:2], strict=True):
            torch.testing.assert_close(given, wanted, rtol=1e-5, atol=0)
        assert found[2].keys() == expected[2].keys()
        for name, gradient in expected[2].items():
            torch.testing.assert_close(found[2][name], gradient, rtol=1e-4, atol=2e-6)


def trained(group, config, chunked: bool):
    with patch.multiple(chunked_head, **SOME_ROWS) if chunked else nullcontext():
        return jobs.history(group, config)


@pytest.mark.parametrize(
    "options",
    [
        {"dp": 2, "tp": 2, "zero": 3},
        {"tp": 2, "pp": 2},
        {"tp": 2, "cp": 2},
        {"dp": 2, "pp": 2, "schedule": "zb-h1", "zero": 2},
    ],
    ids=["zero3", "pp", "cp", "zero-bubble"],
)
@pytest.mark.second_tier(but=["pp"])
def test_the_trainer_takes_the_steps_of_one_rank(ranks, tmp_path, options):
    """With types checked, which follow the loss over the axes."""
    config = jobs.job(tmp_path, steps=3, val_every=3, seq_len=32, batch_size=4, micro_batch_size=1)
    jobs.prepare(config)
    expected = ranks.run(trained, 1, config, False)[0]
    micro_batches = 4 // (2 * options.get("dp", 1))
    config = jobs.on_mesh(config, micro_batches, **options)
    config = jobs.changed(config, "train", check_types=options.get("schedule") is None)
    jobs.check_curves(ranks.run(trained, 4, config, True), expected)
