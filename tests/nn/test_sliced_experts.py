"""Experts slice by slice, against each slice as a call of its own, in fp64: values, gradients, forms, frozen
matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyruntime.comm import group_rank, group_size
from pyruntime.nn import ParallelExperts
from pyruntime.nn.router import Routed
from pyruntime.nn.sliced import SlicedExperts
from pyruntime.ops.experts import SWIGLU, ExpertForm
from tests.ops.test_experts import GPT_OSS, LLAMA4
from tests.transports import TRANSPORTS, on_transport

D, WIDTH, EXPERTS, K = 24, 20, 7, 2
ROWS = (13, 2, 9)
"""Rows of each slice over all ranks; of two rows, the third rank has none."""
FORMS = {"swiglu": (SWIGLU, False), "gpt_oss": (GPT_OSS, True), "llama4": (LLAMA4, False)}


def whole(layer: ParallelExperts, slices: list[tuple[Tensor, ...]]) -> list[Tensor]:
    return [layer(x, ids, weights, rows) for (x, ids, weights), rows in zip(slices, ROWS, strict=True)]


def sliced(layer: ParallelExperts, slices: list[tuple[Tensor, ...]]) -> list[Tensor]:
    """Two slices at a time, as without tensor parallelism."""
    experts, ys = SlicedExperts(layer, ROWS), {}
    for pair in ((0, 1), (2,)):
        for part in pair:
            x, ids, weights = slices[part]
            experts.begin(part, x, Routed(ids, weights))
        for part in pair:
            experts.multiply(part)
            experts.scatter(part)
        for part in pair:
            ys[part] = experts.end(part)
    return [ys[part] for part in range(len(ROWS))]


def results(group, form: ExpertForm, bias: bool, frozen: str, compute) -> list[Tensor | None]:
    torch.manual_seed(3)
    layer = ParallelExperts(
        EXPERTS, D, WIDTH, group=group, form=form, bias=bias, dtype=torch.float64, device="cpu"
    )
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen) if frozen else True)
    slices, grads = [], []
    for rows in ROWS:
        given = (
            torch.randn(rows, D, dtype=torch.float64),
            torch.rand(rows, EXPERTS).topk(K).indices,
            torch.rand(rows, K, dtype=torch.float64),
            torch.randn(rows, D, dtype=torch.float64),
        )
        x, ids, weights, grad = (each.tensor_split(group_size(group))[group_rank(group)] for each in given)
        slices.append((x.clone().requires_grad_(), ids, weights.clone().requires_grad_()))
        grads.append(grad)
    ys = compute(layer, slices)
    torch.autograd.backward(ys, grads)
    inputs = [each.grad for x, _, weights in slices for each in (x, weights)]
    return [y.detach() for y in ys] + inputs + [parameter.grad for parameter in layer.parameters()]


def compare(group, transport: str, kind: str, frozen: str) -> None:
    expected, found, again = (
        on_transport(group, transport, results, *FORMS[kind], frozen, compute)
        for compute in (whole, sliced, sliced)
    )
    for wanted, first, second in zip(expected, found, again, strict=True):
        assert (wanted is None) == (first is None)
        if wanted is not None:
            torch.testing.assert_close(first, wanted, rtol=1e-11, atol=1e-12)
            assert torch.equal(first, second)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("kind", "frozen"), [("swiglu", ""), ("gpt_oss", ""), ("llama4", "gate_up"), ("swiglu", "down")]
)
@pytest.mark.second_tier(but=["swiglu--symmetric_memory", "gpt_oss--process_group"])
def test_slices_are_calls_of_their_own(ranks, transport, kind, frozen):
    ranks.run(compare, 3, transport, kind, frozen)
