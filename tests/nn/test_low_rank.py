"""Low-rank adapters beside parallel linears, against their equation in double precision."""

from __future__ import annotations

import pytest
import torch

from pyruntime.nn import MergedColumnParallelLinear, RowParallelLinear
from pyruntime.nn.cut import memory_of
from pyruntime.nn.low_rank import ColumnAdapter, LoRA, RowAdapter
from tests.nn.cases import assert_near, my_features, my_rows, same_on_all_ranks, seeded_linear

RANK, SCALE = 3, 0.7
SIZES = {"q": 12, "k": 6, "v": 18}


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def column(group, rows: int, parts: tuple[str, ...]) -> None:
    """A merged linear with adapters on some parts: result, gradients of x, A and B, and the merged weight."""
    linears = {
        name: seeded_linear(10, size, False, place) for place, (name, size) in enumerate(SIZES.items())
    }
    full_x = drawn(rows, 10, seed=5)
    full = {f"{name}.lora_A.weight": drawn(RANK, 10, seed=6 + len(name + name)) for name in parts}
    full |= {f"{name}.lora_B.weight": drawn(SIZES[name], RANK, seed=ord(name)) for name in parts}
    grads = {name: drawn(rows, size, seed=70 + size) for name, size in SIZES.items()}
    doubles = {name: value.double().requires_grad_() for name, value in full.items()}
    x_reference = full_x.double().requires_grad_()
    expected, merged = {}, {}
    for name, linear in linears.items():
        weight = linear.weight.detach().double()
        if name in parts:
            a, b = doubles[f"{name}.lora_A.weight"], doubles[f"{name}.lora_B.weight"]
            weight = weight + SCALE * (b @ a)
        merged[name] = weight.detach()
        expected[name] = x_reference @ weight.T
    torch.autograd.backward(list(expected.values()), [each.double() for each in grads.values()])

    linear = MergedColumnParallelLinear.from_linears(linears, group)
    linear.requires_grad_(False)
    adapter = ColumnAdapter(linear, parts, RANK, SCALE)
    adapter.load_full(full)
    x = my_rows(full_x, group).requires_grad_() if group else full_x.clone().requires_grad_()
    y = adapter(linear(x, rows), x, rows)
    found = dict(zip(SIZES, y.split(list(linear.local_features.values()), 1), strict=True))
    own = (lambda full, dim=-1: my_features(full, group, dim)) if group else (lambda full, dim=-1: full)
    for name in SIZES:
        assert_near(found[name], own(expected[name]), name)
    y.backward(torch.cat([own(each) for each in grads.values()], 1))
    assert_near(x.grad, my_rows(x_reference.grad, group) if group else x_reference.grad, "dx")
    assert linear.weight.grad is None
    of_b = memory_of(adapter.B.grad).split([linear.local_features[name] for name in SIZES if name in parts])
    for name, db in zip([name for name in SIZES if name in parts], of_b, strict=True):
        assert_near(db, own(doubles[f"{name}.lora_B.weight"].grad, 0), f"dB of {name}")
        da = memory_of(adapter.get_parameter(f"A_{name}").grad)
        assert_near(da, doubles[f"{name}.lora_A.weight"].grad, f"dA of {name}")
        assert group is None or same_on_all_ranks(da, group)
    weights = (memory_of(linear.weight) + adapter.deltas()).split(list(linear.local_features.values()))
    for name, weight in zip(SIZES, weights, strict=True):
        assert_near(weight, own(merged[name], 0), f"merged {name}")


def row(group, rows: int) -> None:
    """A row linear with an adapter: the same."""
    whole = seeded_linear(12, 10, True, 1)
    full_x, grad = drawn(rows, 12, seed=2), drawn(rows, 10, seed=3)
    full = {"lora_A.weight": drawn(RANK, 12, seed=4), "lora_B.weight": drawn(10, RANK, seed=5)}
    a, b = (each.double().requires_grad_() for each in full.values())
    x_reference = full_x.double().requires_grad_()
    weight = whole.weight.detach().double() + SCALE * (b @ a)
    expected = x_reference @ weight.T + whole.bias.detach().double()
    expected.backward(grad.double())

    linear = RowParallelLinear.from_linear(whole, group)
    linear.requires_grad_(False)
    adapter = RowAdapter(linear, RANK, SCALE)
    adapter.load_full(full)
    own, of_rows = (
        (lambda t, dim=-1: my_features(t, group, dim), lambda t: my_rows(t, group))
        if group
        else (lambda t, dim=-1: t.clone(), lambda t: t)
    )
    x = own(full_x).requires_grad_()
    y = adapter(linear(x), x)
    assert_near(y, of_rows(expected), "y")
    y.backward(of_rows(grad))
    assert_near(x.grad, own(x_reference.grad), "dx")
    assert_near(memory_of(adapter.A.grad), own(a.grad), "dA")
    assert_near(memory_of(adapter.B.grad), b.grad, "dB")
    assert group is None or same_on_all_ranks(memory_of(adapter.B.grad), group)
    assert linear.weight.grad is None
    assert_near(memory_of(linear.weight) + adapter.deltas(), own(weight.detach()), "merged")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_column_adapter_is_its_equation(ranks, world_size):
    for parts in (("q", "k", "v"), ("k",), ("q", "v")):
        ranks.run(column, world_size, 7, parts)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_row_adapter_is_its_equation(ranks, world_size):
    ranks.run(row, world_size, 7)


def test_without_a_group_there_is_no_communication():
    column(None, 5, ("q", "v"))
    row(None, 5)


def test_the_scale_is_that_of_lora_or_of_rslora():
    assert LoRA(16, 32.0, ()).scale == 2.0
    assert LoRA(16, 32.0, (), rslora=True).scale == 8.0
