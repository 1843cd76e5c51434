"""The experts' operator against fp64 on one rank: values, gradients, ragged numbers, errors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pyruntime import ops
from pyruntime.comm import group_rank, group_size
from tests.ranks import RankError
from tests.transports import TRANSPORTS, on_transport

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}
"""A few roundings of products and one of each rank's sum, relative to the largest exact value."""
D, WIDTH = 24, 20


def reference(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The definition, expert by expert."""
    y = torch.zeros_like(x)
    for expert in range(gate_up.shape[0]):
        row, slot = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[row] @ gate_up[expert].T).chunk(2, -1)
        made = (weights[row, slot].unsqueeze(-1) * F.silu(gate) * up) @ down[expert].T
        y = y.index_add(0, row, made)
    return y


def routing(kind: str, generator: torch.Generator, rows: int, experts: int, k: int) -> Tensor:
    """ids [rows, k]."""
    scores = torch.rand(rows, experts, generator=generator)
    if kind == "one expert":
        scores[:, experts - 1] = 2.0
    if kind == "few experts":
        scores[:, k:] -= 2.0
    return scores.topk(k, dim=-1).indices


def operands(seed: int, rows: int, experts: int, k: int, kind: str, dtype: torch.dtype) -> list[Tensor]:
    """x, ids, weights, gate_up, down and a gradient of y, which `dtype` holds exactly; fp64."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).double()

    ids = routing(kind, generator, rows, experts, k)
    weights = torch.rand(rows, k, generator=generator).double()
    down = draw(experts, D, WIDTH)
    return [draw(rows, D), ids, weights, draw(experts, 2 * WIDTH, D), down, draw(rows, D)]


def own(full: Tensor, group, cut: bool = True) -> Tensor:
    return full if not cut else full.tensor_split(group_size(group))[group_rank(group)]


def own_experts(full: Tensor, group) -> Tensor:
    chunks = full.chunk(group_size(group))
    rank = group_rank(group)
    return chunks[rank] if rank < len(chunks) else full[:0]


def run(group, given: list[Tensor], dtype: torch.dtype, **options) -> list[Tensor]:
    """y and the gradients of x, weights, gate_up and down on this rank."""
    x, ids, weights, gate_up, down, grad = given
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    cut = options.get("cut", True)
    leaves = [
        own(x, group, cut).to(dtype),
        own(weights, group, cut).to(precise),
        own_experts(gate_up, group).to(dtype),
        own_experts(down, group).to(dtype),
    ]
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    y = ops.experts(leaves[0], own(ids, group, cut), *leaves[1:], group, experts=gate_up.shape[0], **options)
    y.backward(own(grad, group, cut).to(dtype))
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def case(group, seed, rows, experts, k, kind, dtype, options):
    given = operands(seed, rows, experts, k, kind, dtype)
    found = run(group, given, dtype, **options)
    leaves = [given[i].clone().requires_grad_() for i in (0, 2, 3, 4)]
    y = reference(leaves[0], given[1], *leaves[1:])
    y.backward(given[5])
    rows_cut = options.get("cut", True)
    of_rows, of_experts = (lambda t: own(t, group, rows_cut)), (lambda t: own_experts(t, group))
    cut = (of_rows, of_rows, of_rows, of_experts, of_experts)
    wholes = [y.detach(), *(leaf.grad for leaf in leaves)]
    for name, each, whole, part in zip(
        ("y", "dx", "dp", "dgate_up", "ddown"), found, wholes, cut, strict=True
    ):
        exact = part(whole)
        assert each.shape == exact.shape, name
        if exact.numel():
            error = (each.double() - exact).abs().max() / whole.abs().max().clamp_min(1.0)
            assert error <= TOLERANCE[dtype], f"{name}: relative error {error:.2e}"
    again = run(group, given, dtype, **options)
    assert all(map(torch.equal, found, again))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_equals_one_process_over_any_transport(ranks, transport, world_size):
    for i, (rows, experts, k, kind) in enumerate(
        [(37, 8, 2, "random"), (16, 7, 3, "random"), (9, 5, 1, "one expert"), (2, 6, 2, "few experts")]
    ):
        dtype = (torch.float32, torch.bfloat16)[i % 2]
        options = {"rows": rows, "tier": "unfused"} if i == 3 else {"cut": i != 1}
        ranks.run(on_transport, world_size, transport, case, i, rows, experts, k, kind, dtype, options)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_many_rows_of_few_experts_are_computed_as_they_arrive(ranks, transport):
    # Between hosts in several parts, own rows before and after; what nobody chose is no part at all.
    for rows, experts, k, kind in [(900, 3, 2, "random"), (600, 4, 1, "one expert")]:
        ranks.run(on_transport, 3, transport, case, rows, rows, experts, k, kind, torch.bfloat16, {})


def test_one_rank_has_all_experts(ranks):
    for dtype in TOLERANCE:
        ranks.run(case, 1, 5, 33, 6, 2, "random", dtype, {})


def published(group):
    """The vector of the two experts that was computed by hand from the definition."""
    x = torch.tensor([[1.0, 2.0], [-1.0, 0.5]], dtype=torch.float64)
    gate_up = torch.tensor(
        [[[0.5, -0.25], [1, 0], [0.25, 0.5], [-1, 1]], [[0, 1], [-0.5, 0.5], [1, 1], [0.5, -0.5]]]
    ).double()
    down = torch.tensor([[[1.0, -1.0], [0.5, 2.0]], [[-0.5, 1.0], [1.0, 1.0]]]).double()
    ids, p = torch.tensor([[0, 1], [1, 0]]), torch.tensor([[0.75, 0.25], [0.5, 0.5]]).double()
    grad = torch.tensor([[1.0, -1.0], [0.5, 2.0]]).double()
    return run(group, [x, ids, p, gate_up, down, grad], torch.float64)


def test_known_values(ranks):
    for world_size in (1, 2):
        parts = ranks.run(published, world_size)
        y, dx, dp = (torch.cat([part[i] for part in parts]) for i in range(3))
        assert torch.allclose(
            y, torch.tensor([[-1.247795451, 2.378879777], [0.049590765, -0.672238558]]).double(), atol=1e-9
        )
        assert torch.allclose(
            dx, torch.tensor([[-0.985787158, -3.591205640], [1.605315239, -1.317101992]]).double(), atol=1e-9
        )
        assert torch.allclose(
            dp, torch.tensor([[-2.193175736, -7.927173702], [-1.227421003, -1.411942462]]).double(), atol=1e-9
        )
        sums = [sum(part[i].abs().sum().item() for part in parts) for i in (3, 4)]
        assert sums == pytest.approx([19.781784133, 4.635796848], abs=1e-8)


def wrong(group, change):
    given = operands(0, 8, 4, 2, "random", torch.float32)
    x, ids, weights, gate_up, down, _ = given
    arguments = {
        "x": own(x, group).float(),
        "ids": own(ids, group),
        "weights": own(weights, group).float(),
        "gate_up": own_experts(gate_up, group).float(),
        "down": own_experts(down, group).float(),
    }
    experts = 4
    if change == "ids":
        arguments["ids"] = arguments["ids"] + 4
    elif change == "experts":
        experts = 5
    elif change == "dtype":
        arguments["down"] = arguments["down"].double()
    elif change == "k":
        arguments["weights"] = arguments["weights"][:, :1]
    ops.experts(*arguments.values(), group, experts=experts)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("ids", r"ids reach from 4 to 7; they must be in \[0, 4\)"),
        ("experts", r"its share of experts=5"),
        ("dtype", r"they must agree"),
        ("k", r"both must be \[4, k\]"),
    ],
)
def test_what_does_not_fit_is_refused(ranks, change, said):
    with pytest.raises(RankError, match=said):
        ranks.run(wrong, 2, change)
