"""What plan "auto" computes in its own way: the loss of a causal model, and RMS norms."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaRMSNorm

from pyruntime import explain, parallelize, verify
from pyruntime.any_model.activations.causal_loss import CausalLoss
from pyruntime.any_model.activations.fused_norms import FusedNorm, fuse_norms, fused_norms
from tests.any_model.test_auto import BATCH, IDS, MODELS, build
from tests.nn.cases import assert_near

NORMS = (
    "model.layers.*.input_layernorm",
    "model.layers.*.post_attention_layernorm",
    "model.norm",
)


def of_own_logits(group) -> None:
    """Each way to name labels gives transformers' loss and gradients, and its own loss is not called."""
    whole = build("Llama").train()
    model = parallelize(copy.deepcopy(whole), group, "auto")
    assert "loss: " not in str(explain(model))  # it has not been taken
    model(**BATCH)  # the first call compares, with transformers' loss
    some = torch.where(IDS % 3 == 0, -100, IDS)
    for batch in (
        BATCH,
        {"input_ids": IDS, "labels": some},
        {"input_ids": IDS, "labels": some, "num_items_in_batch": 7},
        {"input_ids": IDS, "labels": some, "num_items_in_batch": torch.tensor(9)},
        {"input_ids": IDS, "labels": some, "shift_labels": IDS.flip(1)},
    ):
        assert isinstance(model.loss_function, CausalLoss)
        with mock.patch.object(model.loss_function, "loss", side_effect=AssertionError("of whole logits")):
            verify(model, whole, batch, tolerance=1e-5)
    assert "\nloss: of each rank's own logits of lm_head" in str(explain(model))
    assert f"\nnorm by one kernel: {', '.join(NORMS)}" in str(explain(model))
    with pytest.raises(IndexError):
        model(input_ids=IDS, labels=IDS + 101)
    none = {"input_ids": IDS, "labels": torch.full_like(IDS, -100)}
    assert model(**none).loss.isnan() and whole(**none).loss.isnan()


def test_the_loss_is_taken_of_a_ranks_own_logits(ranks):
    ranks.run(of_own_logits, 2)
    ranks.run(of_own_logits, 3)


def of_other_logits(group) -> tuple[int, str]:
    """How often the loss of whole logits is called where the model makes others of the head's, and what
    explain() says."""
    whole = build("Gemma3Text", {"Gemma3Text": MODELS["Gemma3Text"] | {"tie_word_embeddings": False}})
    whole.config.final_logit_softcapping = 5.0
    model = parallelize(copy.deepcopy(whole), group, "auto")
    model(**BATCH)
    loss = model.loss_function.loss
    with mock.patch.object(model.loss_function, "loss", side_effect=loss) as called:
        verify(model, whole, BATCH, tolerance=1e-5)
    return called.call_count, str(explain(model))


def test_the_loss_of_logits_that_the_model_has_changed_is_its_own(ranks):
    for calls, said in ranks.run(of_other_logits, 2):
        assert calls == 1
        assert "\nloss: of whole logits: the model computes others from its head's" in said
        assert "norm by" not in said  # Gemma's adds one to its weight


class Masked(LlamaForCausalLM):
    """Writes to its head's logits, as Chameleon does."""

    def forward(self, input_ids, labels):
        logits = self.lm_head(self.model(input_ids=input_ids)[0])
        logits[..., :40] = -9.0
        return CausalLMOutput(self.loss_function(logits, labels, self.config.vocab_size), logits)


def of_written_logits(group) -> None:
    whole = build("Llama")
    whole.__class__ = Masked
    model = parallelize(copy.deepcopy(whole), group, "auto")
    model(**BATCH)  # the first call compares
    verify(model, whole, BATCH, tolerance=1e-5)
    model.eval()
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            for _ in range(2):
                found, wanted = model(**BATCH), whole(**BATCH)
                assert_near(found.loss, wanted.loss, f"loss in {without.__name__}")
                assert_near(found.logits, wanted.logits, "logits")
    assert "inference mode" in explain(model).loss


def test_the_loss_of_logits_that_were_written_to_in_place(ranks):
    ranks.run(of_written_logits, 2)
    ranks.run(of_written_logits, 3)  # of 101 words


class Scaled(LlamaRMSNorm):
    def forward(self, x):
        return 2 * super().forward(x)


class Sometimes(LlamaRMSNorm):
    """A norm, or not, by an attribute."""

    def __init__(self, size, doubles):
        super().__init__(size)
        self.doubles = doubles

    def forward(self, x):
        return 2 * super().forward(x) if self.doubles else super().forward(x)


class Biased(LlamaRMSNorm):
    def __init__(self, size):
        super().__init__(size)
        self.bias = nn.Parameter(torch.zeros(size))


def test_which_modules_are_rms_norms_is_told_by_their_numbers():
    model = nn.ModuleList(
        [
            *(LlamaRMSNorm(24, 1e-6), LlamaRMSNorm(8, 1e-2), nn.RMSNorm(24, 1e-5), Scaled(24), Biased(24)),
            *(Gemma3RMSNorm(24), nn.Linear(24, 24), nn.LayerNorm(24, bias=False)),
            *(Sometimes(24, False), Sometimes(24, True)),
        ]
    )
    before = copy.deepcopy(model)
    fuse_norms(model)
    assert [isinstance(vars(m).get("forward"), FusedNorm) for m in model] == (
        [True, True, True] + [False] * 5 + [True, False]
    )
    for mine, its in zip(model, before, strict=True):
        x = torch.randn(2, 3, 8 if mine is model[1] else 24)
        assert_near(mine(x), its(x), type(mine).__name__)
    again = copy.deepcopy(model[0])
    again.weight.data.fill_(3.0)
    x = torch.randn(2, 24)
    assert_near(again(x), 3 * before[0](x), "a copy reads its own weight")
    assert fused_norms(model) == {"0": "", "1": "", "2": "", "8": ""}
    assert_near(model[0](x.double()), before[0](x.double()), "another dtype than the weight's")
    with torch.autocast("cpu", torch.bfloat16):
        model[2](x)
    assert fused_norms(model) == {
        **{"0": "it reads torch.float64, and its weight is torch.float32", "1": ""},
        **{"2": "autocast chooses the dtypes", "8": ""},
    }
    model[2](x)
    assert fused_norms(model)["2"] == ""
