"""In which bits the tiers agree: what docs/explanation/correctness.md says."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from pyruntime import ops
from tests.transports import TRANSPORTS, on_transport

SIZES = (8, 17, 64, 100, 256, 257)
TIMES = 4


def column(group, x: Tensor, weight: Tensor, dy: Tensor, tier: str) -> dict[str, Tensor]:
    mine = leaf(x.tensor_split(group.size())[group.rank()])
    weight = leaf(weight)
    y = ops.all_gather_matmul(mine, weight, group, rows=len(x), tier=tier)
    return after(y, dy, mine, weight)


def row(group, x: Tensor, weight: Tensor, dy: Tensor, tier: str) -> dict[str, Tensor]:
    x, weight = leaf(x), leaf(weight)
    y = ops.matmul_reduce_scatter(x, weight, group, tier=tier)
    return after(y, dy.tensor_split(group.size())[group.rank()], x, weight)


def replicated(group, x: Tensor, weight: Tensor, dy: Tensor, tier: str) -> dict[str, Tensor]:
    x, weight = leaf(x), leaf(weight)
    return after(ops.replicated_matmul(x, weight, group, tier=tier), dy, x, weight)


def all_reduce(group, x: Tensor, weight: Tensor, dy: Tensor, tier: str) -> dict[str, Tensor]:
    x, weight = leaf(x), leaf(weight)
    return after(ops.matmul_all_reduce(x, weight, group, tier=tier), dy, x, weight)


def leaf(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_()


def after(y: Tensor, dy: Tensor, x: Tensor, weight: Tensor) -> dict[str, Tensor]:
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad, "dw": weight.grad}


def differences(group, seed: int, dtype: torch.dtype) -> set[str]:
    """What had other bits in one tier than in the other, as "row dw"."""
    draw, generator, found = random.Random(seed), torch.Generator().manual_seed(seed), set()
    for _ in range(TIMES):
        rows, n, k = (draw.choice(SIZES) for _ in range(3))
        x, dy = (torch.randn(rows, width, generator=generator).to(dtype) for width in (k, n))
        weight = (torch.randn(n, k, generator=generator) / 8).to(dtype)
        for op in (column, row, replicated, all_reduce):
            one, other = (op(group, x, weight, dy, tier) for tier in ("chunked", "unfused"))
            for name, tensor in one.items():
                if not torch.equal(tensor, other[name]):
                    found.add(f"{op.__name__} {name}")
                    scale = other[name].abs().max().item()
                    tolerance = {torch.bfloat16: 2**-6, torch.float32: 2**-18}[dtype]
                    torch.testing.assert_close(tensor, other[name], rtol=0, atol=tolerance * scale)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.second_tier(
    but=[
        "symmetric_memory-2-torch.float32",
        "symmetric_memory-4-torch.float32",
        "symmetric_memory-4-torch.bfloat16",
    ]
)
def test_dw_has_the_same_bits_in_every_tier_but_of_row_linears_between_hosts(ranks, transport, size, dtype):
    """...and what differs does so in its last bits."""
    seed = random.randrange(1 << 30)
    allowed = set() if transport == "symmetric_memory" else {"row dw"}
    for found in ranks.run(on_transport, size, transport, differences, seed, dtype):
        assert {each for each in found if each.endswith("dw")} <= allowed, f"seed {seed}"
