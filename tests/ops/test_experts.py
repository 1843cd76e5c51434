"""The experts' operator against fp64 on one rank: values, gradients, ragged numbers, errors."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pyruntime import ops
from pyruntime.comm import group_rank, group_size
from pyruntime.ops.experts import SWIGLU, ExpertForm
from tests.ranks import RankError
from tests.transports import TRANSPORTS, on_transport

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}
"""A few roundings of products and one of each rank's sum, relative to the largest exact value."""
D, WIDTH = 24, 20


GPT_OSS = ExpertForm(transposed=True, interleaved=True, alpha=1.702, limit=7.0, shift=1.0)


LLAMA4 = ExpertForm(scales_input=True)


def reference(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *biases: Tensor,
    llama4: bool = False,
) -> Tensor:
    """The definition, expert by expert; with biases GPT-OSS'."""
    y = torch.zeros_like(x)
    for expert in range(gate_up.shape[0]):
        row, slot = (ids == expert).nonzero(as_tuple=True)
        p = weights[row, slot].unsqueeze(-1)
        if biases:
            both = x[row] @ gate_up[expert] + biases[0][expert]
            gate, up = both[:, ::2].clamp(max=7), both[:, 1::2].clamp(-7, 7)
            joined = (up + 1) * gate * torch.sigmoid(1.702 * gate)
            made = p * (joined @ down[expert] + biases[1][expert])
        elif llama4:
            gate, up = ((p * x[row]) @ gate_up[expert].T).chunk(2, -1)
            made = (F.silu(gate) * up) @ down[expert].T
        else:
            gate, up = (x[row] @ gate_up[expert].T).chunk(2, -1)
            made = (p * F.silu(gate) * up) @ down[expert].T
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


def operands(
    seed: int, rows: int, experts: int, k: int, kind: str, dtype: torch.dtype, gpt_oss: bool = False
) -> list[Tensor]:
    """x, ids, weights, gate_up, down, for GPT-OSS biases, and a gradient of y, which `dtype` holds exactly;
    fp64."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).double()

    ids = routing(kind, generator, rows, experts, k)
    weights = torch.rand(rows, k, generator=generator).double()
    down, x, gate_up, grad = (
        draw(*shape) for shape in ((experts, D, WIDTH), (rows, D), (experts, 2 * WIDTH, D), (rows, D))
    )
    if not gpt_oss:
        return [x, ids, weights, gate_up, down, grad]
    biases = [draw(experts, 2 * WIDTH), draw(experts, D)]
    if dtype == torch.bfloat16:  # no rounding crosses the limit, where gradients jump
        gate_up = gate_up / 8
    return [x, ids, weights, gate_up.mT.contiguous(), down.mT.contiguous(), *biases, grad]


def own(full: Tensor, group, cut: bool = True) -> Tensor:
    return full if not cut else full.tensor_split(group_size(group))[group_rank(group)]


def own_experts(full: Tensor, group) -> Tensor:
    chunks = full.chunk(group_size(group))
    rank = group_rank(group)
    return chunks[rank] if rank < len(chunks) else full[:0]


def run(group, given: list[Tensor], dtype: torch.dtype, device: str = "cpu", **options) -> list[Tensor]:
    """y and the gradients of x, weights, gate_up, down and biases on this rank, computed on `device`."""
    given = [each.to(device) for each in given]
    x, ids, weights, gate_up, down, *biases, grad = given
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    cut = options.get("cut", True)
    leaves = [
        own(x, group, cut).to(dtype),
        own(weights, group, cut).to(precise),
        own_experts(gate_up, group).to(dtype),
        own_experts(down, group).to(dtype),
        *(own_experts(bias, group).to(dtype) for bias in biases),
    ]
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    if biases:
        options |= {"gate_up_bias": leaves[4], "down_bias": leaves[5], "form": GPT_OSS}
    y = ops.experts(leaves[0], own(ids, group, cut), *leaves[1:4], group, experts=gate_up.shape[0], **options)
    y.backward(own(grad, group, cut).to(dtype))
    return [each.cpu() for each in (y.detach(), *(leaf.grad for leaf in leaves))]


def case(group, seed, rows, experts, k, kind, dtype, options, gpt_oss=False):
    given = operands(seed, rows, experts, k, kind, dtype, gpt_oss)
    found = run(group, given, dtype, **options)
    leaves = [each.clone().requires_grad_() for i, each in enumerate(given[:-1]) if i != 1]
    y = reference(leaves[0], given[1], *leaves[1:], llama4=options.get("form") == LLAMA4)
    y.backward(given[-1])
    rows_cut = options.get("cut", True)
    of_rows, of_experts = (lambda t: own(t, group, rows_cut)), (lambda t: own_experts(t, group))
    cut = (of_rows, of_rows, of_rows, of_experts, of_experts, of_experts, of_experts)
    wholes = [y.detach(), *(leaf.grad for leaf in leaves)]
    names = ("y", "dx", "dp", "dgate_up", "ddown", "dgate_up_bias", "ddown_bias")
    for name, each, whole, part in zip(names[: len(found)], found, wholes, cut[: len(found)], strict=True):
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


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_biases_limits_and_transposed_matrices_of_gpt_oss(ranks, transport):
    for i, dtype in enumerate((torch.float32, torch.bfloat16, torch.float64)):
        options = {"cut": i != 1}
        ranks.run(on_transport, 3, transport, case, i, 41, 7, 3, "random", dtype, options, True)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_weights_of_llama_4_scale_what_experts_take(ranks, transport):
    for i, dtype in enumerate((torch.float32, torch.bfloat16)):
        for cut in (True, False):
            options = {"cut": cut, "form": LLAMA4}
            ranks.run(on_transport, 3, transport, case, i, 41, 7, 3, "random", dtype, options)


def of_each_way(group, dtype, cut, gpt_oss, form):
    """By which of gate_up and down train: y and the gradients of x and weights, those of the matrices and
    biases, and the bytes kept for the backward pass."""
    x, ids, weights, gate_up, down, *biases, grad = operands(7, 41, 7, 3, "random", dtype, gpt_oss)
    rows = [own(x, group, cut).to(dtype), own(weights, group, cut).float()]
    matrices = [own_experts(each, group).to(dtype) for each in (gate_up, down, *biases)]
    found = {}
    for trains in itertools.product((True, False), repeat=2):
        given = [each.clone().requires_grad_() for each in rows]
        held = [each.clone().requires_grad_(trains[i % 2]) for i, each in enumerate(matrices)]
        named = dict(zip(("gate_up_bias", "down_bias"), held[2:], strict=False))
        kept: dict[int, int] = {}

        def keep(saved, kept=kept):
            kept[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
            return saved

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
            y = ops.experts(
                given[0],
                own(ids, group, cut),
                given[1],
                *held[:2],
                group,
                experts=7,
                cut=cut,
                form=form,
                **named,
            )
        y.backward(own(grad, group, cut).to(dtype))
        found[trains] = (
            [y.detach(), *(each.grad for each in given)],
            [each.grad for each in held],
            sum(kept.values()),
        )
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kind", ["swiglu", "gpt_oss", "llama4"])
@pytest.mark.second_tier(but=["swiglu-symmetric_memory", "gpt_oss-process_group"])
def test_frozen_experts_get_no_gradient_and_change_no_other(ranks, transport, kind):
    """Rows that only the gradient of gate_up reads are not kept."""
    form = {"swiglu": SWIGLU, "gpt_oss": GPT_OSS, "llama4": LLAMA4}[kind]
    for cut in (True, False):
        for found in ranks.run(
            on_transport, 3, transport, of_each_way, torch.bfloat16, cut, kind == "gpt_oss", form
        ):
            of_rows, of_matrices, kept = found[True, True]
            for trains, (rows, matrices, less) in found.items():
                assert all(map(torch.equal, rows, of_rows)), trains
                for i, (each, expected) in enumerate(zip(matrices, of_matrices, strict=True)):
                    assert torch.equal(each, expected) if trains[i % 2] else each is None, (trains, i)
                keeps_inputs = trains[0] or kind == "llama4"
                assert less == kept if keeps_inputs else less < kept, trains


def joined(gate: Tensor, up: Tensor, group) -> list[Tensor]:
    """What one expert of width 4 makes of gate and up, by an identity for `down`, and their gradients."""
    both = torch.stack([gate, up], 1).flatten().double().requires_grad_()
    x, weights = torch.ones(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    x = torch.cat([x, torch.zeros(1, 3, dtype=torch.float64)], 1)
    matrices = (
        torch.cat([both[None], torch.zeros(3, 8, dtype=torch.float64)])[None],
        torch.eye(4).double()[None],
    )
    ids = torch.zeros(1, 1, dtype=torch.long)
    y = ops.experts(x, ids, weights, *matrices, group, experts=1, form=GPT_OSS)
    y.sum().backward()
    return [y.detach()[0], *both.grad.view(4, 2).unbind(1)]


def published_of_gpt_oss(group) -> list[Tensor]:
    return joined(torch.tensor([1, 8, -9, 0.5]), torch.tensor([2, -8, 9, -0.25]), group)


def test_known_values_of_gpt_oss(ranks):
    """Beyond the limits of gate (from above) and up there is no gradient."""
    y, dgate, dup = ranks.run(published_of_gpt_oss, 1)[0]
    expected = torch.tensor([2.537387, -41.999719, -0.000016025, 0.262791]).double()
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=5e-7)
    assert [value != 0 for value in dgate.tolist()] == [True, False, True, True]
    assert [value != 0 for value in dup.tolist()] == [True, False, False, True]


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


def products_of_many_routings(group) -> list[tuple]:
    """The sizes of all products of experts in 15 routings, in fp64, which only the library multiplies."""
    gate_up, down = (
        torch.randn(8, features, 128, dtype=torch.float64, requires_grad=True) for features in (256, 128)
    )
    with torch.profiler.profile(record_shapes=True) as profile:
        for _ in range(15):
            x = torch.randn(800, 128, dtype=torch.float64, requires_grad=True)
            weights, ids = torch.rand(800, 8, dtype=torch.float64).topk(2)
            ops.experts(x, ids, weights, gate_up, down, group, experts=8).sum().backward()
    return [
        tuple(tuple(sizes) for sizes in event.input_shapes[:2])
        for event in profile.events()
        if event.name == "aten::mm"
    ]


def test_libraries_prepare_products_of_few_numbers_of_rows(ranks):
    """The rows of eight experts in 15 routings, some 200 on average, have about 60 numbers; with places of 16
    there are no more than 7 from 144 to 256. Of six products of an expert two
    have the same sizes; a library prepares itself for each of five."""
    products = ranks.run(products_of_many_routings, 1)[0]
    assert len(products) == 15 * 8 * 6
    sizes = set(products)
    assert 5 <= len(sizes) <= 5 * 7


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
    biases = {"down_bias": torch.zeros(2, D)} if change == "bias" else {}
    if change == "dtype of a bias":
        biases = {"gate_up_bias": torch.zeros(2, 2 * WIDTH), "down_bias": torch.zeros(2, D).double()}
    ops.experts(*arguments.values(), group, experts=experts, **biases)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("ids", r"ids reach from 4 to 7; they must be in \[0, 4\)"),
        ("experts", r"its share of experts=5"),
        ("dtype", r"they must agree"),
        ("k", r"both must be \[4, k\]"),
        ("bias", r"biases must be \[2, 40\] and \[2, 24\], or both left out; these are not"),
        (
            "dtype of a bias",
            r"TypeError: experts: a bias has dtype Double and gate_up Float; they must agree",
        ),
    ],
)
def test_what_does_not_fit_is_refused(ranks, change, said):
    with pytest.raises(RankError, match=said):
        ranks.run(wrong, 2, change)
