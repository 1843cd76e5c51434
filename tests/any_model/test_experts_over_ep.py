"""Experts of transformers' mixtures over `runtime.ep`, a group of their own, by parallelize()."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from transformers import AutoModelForCausalLM

from pyruntime import explain, parallelize, verify
from pyruntime.nn import ParallelExperts
from tests.any_model.test_auto import BATCH, COMMON, IDS, build
from tests.any_model.test_experts import MIXTRAL, steps_are_those_of_one_rank
from tests.any_model.test_experts import SHAPES as OF_FAMILIES
from tests.nn.cases import assert_near
from tests.nn.test_expert_groups import runtime_of
from tests.ranks import RankError

SEVEN = {"num_local_experts": 7}
SHAPES = {
    "Mixtral": MIXTRAL | SEVEN,
    "GptOss": OF_FAMILIES["GptOss"] | SEVEN,
    "Llama4Text": OF_FAMILIES["Llama4Text"] | SEVEN,
    "Llama": COMMON,
}


def model_on(name: str, ep: int, plan: str | dict[str, str] = "auto", family: str = "Mixtral"):
    """A model with experts on a folding of the ranks, the whole one, and the Runtime."""
    runtime = runtime_of(name, ep)
    whole = build(family, SHAPES)
    return parallelize(copy.deepcopy(whole), runtime.tp, plan, experts=runtime.ep), whole, runtime


def is_the_whole_model(
    _group, name: str, ep: int, plan: str | dict[str, str] = "auto", family: str = "Mixtral"
) -> None:
    """Output, loss and gradients, in training and in evaluation; a call without gradients; text."""
    model, whole, runtime = model_on(name, ep, plan, family)
    layers = [module for module in model.modules() if isinstance(module, ParallelExperts)]
    assert [layer.group.size for layer in layers] == [ep, ep]
    held = [len(part) for part in torch.arange(7).chunk(ep)][runtime.ep.rank]
    assert [len(layer.down_proj) for layer in layers] == [held, held]
    verify(model, whole, BATCH, tolerance=1e-5)
    verify(model.eval(), whole.eval(), BATCH, tolerance=1e-5)
    assert "experts_backward" in str(explain(model))
    with torch.no_grad():
        assert_near(model(input_ids=IDS).logits, whole(input_ids=IDS).logits, "logits", 1e-4)
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(IDS[:1], **options), whole.generate(IDS[:1], **options))


CASES = [("dp4", 2), ("dp4", 4), ("tp4", 2), ("dp2 tp2", 4), ("dp2 tp2", 1), ("tp4", 1)]


@pytest.mark.parametrize(("name", "ep"), CASES)
@pytest.mark.second_tier(but=["dp2 tp2-4"])
def test_loss_logits_and_every_gradient_are_those_of_the_whole(ranks, name, ep):
    ranks.run(is_the_whole_model, 4, name, ep)


@pytest.mark.parametrize("family", ["GptOss", "Llama4Text"])
@pytest.mark.parametrize(("name", "ep"), [("dp4", 2), ("dp2 tp2", 4)])
@pytest.mark.second_tier(but=["dp2 tp2-4-GptOss", "dp2 tp2-4-Llama4Text"])
def test_experts_of_other_forms_are_those_of_the_whole(ranks, family, name, ep):
    ranks.run(is_the_whole_model, 4, name, ep, "auto", family)


def test_a_plan_of_the_caller_keeps_activations_whole(ranks):
    ranks.run(is_the_whole_model, 4, "dp2 tp2", 4, {"*.experts": "experts"})


def sharded(_group, name: str, ep: int, stage: int, family: str) -> None:
    """Steps in which data-parallel ranks have batches of other lengths."""
    logging.disable(logging.WARNING)
    model, whole, runtime = model_on(name, ep, family=family)
    data = runtime.replicas
    lengths = tuple(5 + 3 * rank for rank in range(data.size))
    steps_are_those_of_one_rank(model, whole, data, data.rank, stage, lengths)


@pytest.mark.parametrize(
    ("name", "ep", "stage", "family"),
    [
        ("dp2 tp2", 4, 1, "Mixtral"),
        ("dp4", 2, 3, "Mixtral"),
        ("dp4", 2, 3, "GptOss"),
        ("tp4", 2, 1, "Mixtral"),
        ("dp2 tp2", 1, 2, "Mixtral"),
    ],
)
@pytest.mark.second_tier(but=["dp2 tp2-4-1-Mixtral"])
def test_steps_beside_data_parallelism_are_those_of_one_rank(ranks, name, ep, stage, family):
    ranks.run(sharded, 4, name, ep, stage, family)


def saved(_group, family: str, folder: str) -> None:
    model, whole, runtime = model_on("dp2 tp2", 4, family=family)
    model.save_pretrained(folder)
    torch.distributed.barrier()
    again = AutoModelForCausalLM.from_pretrained(folder)
    for name, value in whole.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    model = parallelize(again, runtime.tp, "auto", experts=runtime.ep)
    with torch.no_grad():
        assert_near(model(input_ids=IDS).logits, whole(input_ids=IDS).logits, "logits", 1e-4)


@pytest.mark.parametrize("family", ["Mixtral", "GptOss", "Llama4Text"])
def test_it_is_saved_as_transformers_reads_it(ranks, tmp_path, family):
    ranks.run(saved, 4, family, str(tmp_path))


def refused(group, name: str, ep: int, model: str, experts: str) -> None:
    runtime = runtime_of(name, ep)
    given = group if experts == "all ranks" else getattr(runtime, experts)
    parallelize(build(model, SHAPES), runtime.tp, "auto", experts=given)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (("dp2 tp2", 4, "Llama", "ep"), "no experts of this model can be spread; leave out experts="),
        (("dp2 tp2", 4, "Mixtral", "dp"), "does not say which ranks hold the same experts; pass runtime.ep"),
    ],
)
def test_what_does_not_fit_is_refused(ranks, case, message):
    with pytest.raises(RankError, match=message):
        ranks.run(refused, 4, *case)
