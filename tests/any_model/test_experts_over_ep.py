"""Experts of transformers' mixtures over `runtime.ep`, a group of their own, by parallelize()."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from transformers import MixtralForCausalLM

from pyruntime import explain, parallelize, verify
from pyruntime.nn import ParallelExperts
from tests.any_model.test_auto import BATCH, COMMON, IDS, build
from tests.any_model.test_experts import MIXTRAL, steps_are_those_of_one_rank
from tests.nn.cases import assert_near
from tests.nn.test_expert_groups import runtime_of
from tests.ranks import RankError

SHAPES = {"Mixtral": MIXTRAL | {"num_local_experts": 7}, "Llama": COMMON}


def model_on(name: str, ep: int, plan: str | dict[str, str] = "auto"):
    """A Mixtral on a folding of the ranks, the whole one, and the Runtime."""
    runtime = runtime_of(name, ep)
    whole = build("Mixtral", SHAPES)
    return parallelize(copy.deepcopy(whole), runtime.tp, plan, experts=runtime.ep), whole, runtime


def is_the_whole_model(_group, name: str, ep: int, plan: str | dict[str, str] = "auto") -> None:
    """Output, loss and gradients, in training and in evaluation; a call without gradients; text."""
    model, whole, runtime = model_on(name, ep, plan)
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


def test_a_plan_of_the_caller_keeps_activations_whole(ranks):
    ranks.run(is_the_whole_model, 4, "dp2 tp2", 4, {"*.experts": "experts"})


def sharded(_group, name: str, ep: int, stage: int) -> None:
    """Steps in which data-parallel ranks have batches of other lengths."""
    logging.disable(logging.WARNING)
    model, whole, runtime = model_on(name, ep)
    data = runtime.replicas
    lengths = tuple(5 + 3 * rank for rank in range(data.size))
    steps_are_those_of_one_rank(model, whole, data, data.rank, stage, lengths)


@pytest.mark.parametrize(
    ("name", "ep", "stage"), [("dp2 tp2", 4, 1), ("dp4", 2, 3), ("tp4", 2, 1), ("dp2 tp2", 1, 2)]
)
@pytest.mark.second_tier(but=["dp2 tp2-4-1"])
def test_steps_beside_data_parallelism_are_those_of_one_rank(ranks, name, ep, stage):
    ranks.run(sharded, 4, name, ep, stage)


def saved(_group, folder: str) -> None:
    model, whole, _ = model_on("dp2 tp2", 4)
    model.save_pretrained(folder)
    torch.distributed.barrier()
    again = MixtralForCausalLM.from_pretrained(folder)
    for name, value in whole.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_it_is_saved_as_transformers_reads_it(ranks, tmp_path):
    ranks.run(saved, 4, str(tmp_path))


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
