"""Adapters of peft, and save_pretrained, on parallel models of transformers."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import LlamaForCausalLM

from pyruntime import parallelize, verify
from tests.any_model.test_hf_llama import batch, llama
from tests.nn.cases import assert_near

LORA = LoraConfig(r=4, target_modules=["q_proj", "o_proj", "gate_proj", "down_proj"], task_type="CAUSAL_LM")


def adapted(**options) -> PeftModel:
    """Adapters that do something: B is zeros as peft makes it."""
    model = get_peft_model(
        llama(), copy.deepcopy(LORA) if not options else LoraConfig(**LORA.to_dict() | options)
    )
    torch.manual_seed(1)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1)
    return model


def adapters_first(group, folder: str) -> None:
    whole = adapted()
    model = parallelize(copy.deepcopy(whole), group, "llama")
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {name for name, p in whole.named_parameters() if p.requires_grad}
    verify(model, whole, batch())
    model.save_pretrained(folder)
    again = PeftModel.from_pretrained(llama(), folder)
    assert_near(again(**batch()).logits, whole(**batch()).logits, "logits of the adapters saved")
    merged = model.merge_and_unload()
    assert_near(merged(**batch()).logits, whole(**batch()).logits, "logits of the adapters merged")
    merged.save_pretrained(f"{folder}/merged")
    again = LlamaForCausalLM.from_pretrained(f"{folder}/merged")
    assert_near(again(**batch()).logits, whole(**batch()).logits, "logits of the adapters merged and saved")


def adapters_refused(group) -> list[str]:
    messages = []
    for change in (
        lambda: parallelize(adapted(use_dora=True), group, "llama"),
        lambda: get_peft_model(parallelize(llama(), group, "llama"), LORA),
    ):
        with pytest.raises(ValueError) as caught:
            change()
        messages.append(str(caught.value))
    return messages


def saves_whole(group, folder: str, tied: bool) -> None:
    whole = llama(tie_word_embeddings=tied)
    model = parallelize(copy.deepcopy(whole), group, "llama")
    model.save_pretrained(folder)
    assert {path.suffix for path in Path(folder).iterdir()} == {".json", ".safetensors"}
    again = LlamaForCausalLM.from_pretrained(folder)
    for name, value in whole.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def cannot_save(group, folder: str) -> str:
    model = parallelize(llama(), group, "llama")
    with pytest.raises((RuntimeError, ValueError)) as caught:
        model.save_pretrained(folder, max_shard_size="no size")
    return str(caught.value)


def test_adapters_made_before_are_cut_with_their_linears(ranks, tmp_path):
    ranks.run(adapters_first, 2, str(tmp_path))


def test_adapters_that_cannot_be_cut_are_refused(ranks):
    for dora, afterwards in ranks.run(adapters_refused, 2):
        assert "q_proj has adapters of peft that cannot be cut as 'column'" in dora
        assert "ColumnParallelLinear" in afterwards and "is not supported" in afterwards


@pytest.mark.parametrize("tied", [False, True])
def test_save_pretrained_writes_whole_tensors(ranks, tmp_path, tied):
    ranks.run(saves_whole, 2, str(tmp_path), tied)


def test_all_ranks_hear_that_rank_0_cannot_save(ranks, tmp_path: Path):
    first, second = ranks.run(cannot_save, 2, str(tmp_path))
    assert "no size" in first and second == "Rank 0 could not save the model; its own error says why."
