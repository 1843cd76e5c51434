"""Weight gradients of pipelines whose tensor-parallel ranks are on several hosts: multiplied under waits
until the schedule wants them, with the bits of those at once."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

import pyruntime
from pyruntime.comm import group_rank
from pyruntime.llama import Llama
from pyruntime.llama.model import ModelPart
from pyruntime.llama.presets import preset
from pyruntime.llama.stage import LlamaStage
from pyruntime.nn.weight_sinks import AddedToGrad
from pyruntime.pipeline.weight_gradients import WeightGradients
from tests.transports import take

MICRO_BATCHES, ROWS = 3, 64
PRODUCT = "linear weight gradient"


class AtOnce(AddedToGrad):
    """Whose products wait for nobody."""

    def begin_product(self, *product):
        super().begin_product(*product)()
        return lambda: None


def passes(group, taker: AddedToGrad, split: bool, late: int | None) -> tuple[list[Tensor], float]:
    """Gradients of a stage after some micro-batches, and the seconds of products before they were wanted."""
    config = preset("debug", vocab_size=64, num_hidden_layers=3, hidden_size=320, intermediate_size=880)
    model = Llama(config, group, part=ModelPart((1,), False, False))
    stage = LlamaStage(model, [1], 1, [ROWS])
    weights = WeightGradients([stage], taker)
    generator = torch.Generator().manual_seed(3)
    rank, wanted, waiting = group_rank(group), 0.0, []
    with pyruntime.ledger() as ledger, taker.passes():
        for _ in range(MICRO_BATCHES):
            x = torch.randn(ROWS, 320, generator=generator).tensor_split(group.size())[rank]
            y = stage(x.clone().requires_grad_())
            if late == rank:
                y.register_hook(lambda _: time.sleep(0.05))
            if split:
                with weights.deferred() as products:
                    y.square().sum().backward()
                waiting.append(products)
            else:
                y.square().sum().backward()
        wanted = time.monotonic()
        for products in waiting:
            weights.take(products)
    weights.close()
    done = [e.seconds for e in ledger.stretch.entries if e.name == PRODUCT and e.end < wanted]
    return [p.grad for p in stage.parameters()], sum(done)


def bits(group, split: bool) -> float:
    take(group, "process_group")
    plain, _ = passes(group, AtOnce(), split, None)
    done = 0.0
    for late in (None, 0, 1):
        found, before = passes(group, AddedToGrad(), split, late)
        assert all(torch.equal(one, two) for one, two in zip(found, plain, strict=True)), late
        done += before
    return done


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.second_tier("True")
def test_products_under_waits_have_the_bits_of_those_at_once(ranks, split):
    """Deferred ones, and those of ordinary backward passes."""
    assert all(seconds > 0 for seconds in ranks.run(bits, 2, split))


def near_those_of_one_host(group) -> None:
    """Of one host, where they are multiplied at once."""
    take(group, "symmetric_memory")
    taker = AddedToGrad()
    found, _ = passes(group, taker, True, None)
    take(group, "process_group")
    other, _ = passes(group, AddedToGrad(), True, None)
    for one, two in zip(found, other, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4 * float(one.abs().max()))


def test_they_are_those_of_one_host(ranks):
    ranks.run(near_those_of_one_host, 2)


def dropped(group) -> None:
    """Products of a step that failed are in no later one."""
    take(group, "process_group")
    taker = AddedToGrad()
    config = preset("debug", vocab_size=64, num_hidden_layers=3)
    stage = LlamaStage(Llama(config, group, part=ModelPart((1,), False, False)), [1], 1, [ROWS])
    weights = WeightGradients([stage], taker)
    x = torch.randn(ROWS, config.hidden_size, generator=torch.Generator().manual_seed(3))
    found = []
    for fails in (False, True):
        stage.zero_grad()
        if fails:
            with pytest.raises(RuntimeError, match="of this test"), taker.passes():
                stage(x.tensor_split(2)[group_rank(group)].requires_grad_()).sum().backward()
                raise RuntimeError("of this test")
            stage.zero_grad()
        with taker.passes():
            stage(x.tensor_split(2)[group_rank(group)].requires_grad_()).sum().backward()
        found.append([p.grad for p in stage.parameters()])
    weights.close()
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_a_step_that_fails_takes_its_products_with_it(ranks):
    ranks.run(dropped, 2)
