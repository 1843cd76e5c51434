"""Parallel linears against nn.Linear in double precision: outputs and every gradient."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pyruntime.nn import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from tests.nn.cases import assert_near, in_double, my_features, my_rows, seeded_linear


class Case(NamedTuple):
    rows: int  # over all ranks; 13 is divisible by no group, 2 is less than 3 and 4 ranks
    dim: int
    sequence_parallel: bool
    bias: bool

    def x(self, features: int) -> torch.Tensor:
        shape = (self.rows, features) if self.dim == 0 else (2, self.rows, features)
        return torch.randn(shape, generator=torch.Generator().manual_seed(self.rows + features))


CASES = [Case(*c) for c in itertools.product((13, 8, 2), (0, 1), (True, False), (True, False))]
WIDTHS = [(12, 24), (10, 15)]  # in and out; 10 and 15 are ragged over 3 or 4 ranks


def leaf(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone().requires_grad_()


def column_matches(group, in_features: int, out_features: int, gather_output: bool) -> None:
    for case in CASES:
        linear = seeded_linear(in_features, out_features, case.bias)
        reference, options = in_double(linear), case._asdict()
        layer = ColumnParallelLinear.from_linear(
            linear, group, sequence_parallel=case.sequence_parallel, dim=case.dim, gather_output=gather_output
        )
        x_full = case.x(in_features)
        x_reference = leaf(x_full.double())
        x = leaf(my_rows(x_full, group, case.dim) if case.sequence_parallel else x_full)
        y_reference, y = reference(x_reference), layer(x)
        grad = torch.randn_like(y_reference, dtype=torch.float32)
        y_reference.backward(grad.double())
        y.backward(grad if gather_output else my_features(grad, group))
        assert_near(y, y_reference if gather_output else my_features(y_reference, group), f"y, {options}")
        x_grad = x_reference.grad
        assert_near(
            x.grad, my_rows(x_grad, group, case.dim) if case.sequence_parallel else x_grad, f"dx, {options}"
        )
        assert_near(layer.weight.grad, my_features(reference.weight.grad, group, 0), f"dW, {options}")
        if case.bias:
            assert_near(layer.bias.grad, my_features(reference.bias.grad, group, 0), f"db, {options}")


def row_matches(group, in_features: int, out_features: int) -> None:
    for case in CASES:
        linear = seeded_linear(in_features, out_features, case.bias)
        reference, options = in_double(linear), case._asdict()
        layer = RowParallelLinear.from_linear(
            linear, group, sequence_parallel=case.sequence_parallel, dim=case.dim
        )
        x_full = case.x(in_features)
        x_reference, x = leaf(x_full.double()), leaf(my_features(x_full, group))
        y_reference, y = reference(x_reference), layer(x)
        grad = torch.randn_like(y_reference, dtype=torch.float32)
        y_reference.backward(grad.double())
        cut = (lambda t, dim=case.dim: my_rows(t, group, dim)) if case.sequence_parallel else (lambda t: t)
        y.backward(cut(grad))
        assert_near(y, cut(y_reference), f"y, {options}")
        assert_near(x.grad, my_features(x_reference.grad, group), f"dx, {options}")
        assert_near(layer.weight.grad, my_features(reference.weight.grad, group, 1), f"dW, {options}")
        if case.bias:
            assert_near(layer.bias.grad, reference.bias.grad, f"db, {options}")


def merged_matches(group) -> None:
    sizes = {"q": 16, "k": 8, "v": 7}
    for case in CASES:
        linears = {
            name: seeded_linear(10, n, case.bias, seed) for seed, (name, n) in enumerate(sizes.items())
        }
        references = {name: in_double(linear) for name, linear in linears.items()}
        layer = MergedColumnParallelLinear.from_linears(
            linears, group, sequence_parallel=case.sequence_parallel, dim=case.dim
        )
        x_full = case.x(10)
        x_reference = leaf(x_full.double())
        x = leaf(my_rows(x_full, group, case.dim) if case.sequence_parallel else x_full)
        y = layer(x, rows=case.rows)
        ys_reference = [reference(x_reference) for reference in references.values()]
        assert [part.shape[-1] for part in y.split(list(layer.local_features.values()), -1)] == [
            my_features(y_reference, group).shape[-1] for y_reference in ys_reference
        ]
        grads = [torch.randn_like(y_reference) for y_reference in ys_reference]
        torch.autograd.backward(ys_reference, grads)
        y.backward(torch.cat([my_features(grad, group) for grad in grads], -1).float())
        assert_near(y, torch.cat([my_features(r, group) for r in ys_reference], -1), f"y, {case}")
        x_grad = x_reference.grad
        assert_near(
            x.grad, my_rows(x_grad, group, case.dim) if case.sequence_parallel else x_grad, f"dx, {case}"
        )
        weight_grads = [my_features(reference.weight.grad, group, 0) for reference in references.values()]
        assert_near(layer.weight.grad, torch.cat(weight_grads), f"dW, {case}")


def merged_is_gathered(group) -> None:
    linears = {name: seeded_linear(10, n, True, n) for name, n in {"a": 24, "b": 12}.items()}
    layer = MergedColumnParallelLinear.from_linears(linears, group, gather_output=True)
    x_full = torch.randn(7, 10, generator=torch.Generator().manual_seed(0))
    y = layer(my_rows(x_full, group))
    assert_near(y, torch.cat([linear(x_full) for linear in linears.values()], -1), "y")
    y.square().sum().backward()
    for linear in linears.values():
        linear(x_full).square().sum().backward()
    grads = [my_features(linear.weight.grad, group, 0) for linear in linears.values()]
    assert_near(layer.weight.grad, torch.cat(grads), "dW")


def mlp_matches(group, dtype: torch.dtype, tolerance: float) -> None:
    """What the layers are for: column, activation, row, with one communication at each end."""
    up, down = seeded_linear(12, 22, True, 1).to(dtype), seeded_linear(22, 12, True, 2).to(dtype)
    reference = nn.Sequential(in_double(up), nn.GELU(), in_double(down))
    column, row = ColumnParallelLinear.from_linear(up, group), RowParallelLinear.from_linear(down, group)
    x_full = torch.randn(9, 12, generator=torch.Generator().manual_seed(0)).to(dtype)
    x, x_reference = leaf(my_rows(x_full, group)), leaf(x_full.double())
    y, y_reference = row(F.gelu(column(x, rows=9))), reference(x_reference)
    (y.double() ** 2).sum().backward()
    (y_reference**2).sum().backward()
    assert_near(y, my_rows(y_reference, group), "y", tolerance)
    assert_near(x.grad, my_rows(x_reference.grad, group), "dx", tolerance)
    assert_near(
        column.weight.grad, my_features(reference[0].weight.grad, group, 0), "dW of column", tolerance
    )
    assert_near(row.weight.grad, my_features(reference[2].weight.grad, group, 1), "dW of row", tolerance)
    assert_near(row.bias.grad, reference[2].bias.grad, "db of row", tolerance)


def keeping_the_gathered_input_changes_no_bit(group) -> None:
    results = []
    for keep in (False, True):
        layer = ColumnParallelLinear.from_linear(
            seeded_linear(12, 15, True), group, keep_gathered=keep, tier="chunked"
        )
        x = leaf(my_rows(Case(13, 0, True, True).x(12), group))
        y = layer(x)
        y.square().sum().backward()
        results.append((y, x.grad, layer.weight.grad, layer.bias.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def uneven_layers_after_even_ones(group, sequence_parallel: bool) -> None:
    """On rank 0 of 2 the uneven layer (12 and 11 features) has the shape of the even one, which "auto" has
    measured by then; on rank 1 it has not. The ranks must still take the same path."""
    x_full = torch.randn(14, 10, generator=torch.Generator().manual_seed(0))
    for out_features in (24, 23):
        linear = seeded_linear(10, out_features, False)
        layer = ColumnParallelLinear.from_linear(linear, group, sequence_parallel=sequence_parallel)
        x = leaf(my_rows(x_full, group) if sequence_parallel else x_full)
        y = layer(x)
        y.sum().backward()
        assert_near(y, my_features(linear(x_full), group), f"y of {out_features} features")


def init_is_a_slice_of_one_model(group) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(3)
    column = ColumnParallelLinear(6, 10, bias=True, group=group)
    merged = MergedColumnParallelLinear(6, {"a": 8, "b": 7}, group=group)
    row = RowParallelLinear(10, 6, bias=True, group=group)
    modules = (column, merged, row)
    return tuple(value.full_tensor() for module in modules for value in module.state_dict().values())


def wrong_inputs(group) -> list[str]:
    column = ColumnParallelLinear(8, 8, group=group)
    row = RowParallelLinear(8, 8, group=group)
    row.label = "layers.0.down"
    messages = []
    for layer, x in ((column, torch.ones(4, 7)), (row, torch.ones(4, 8))):
        with pytest.raises(ValueError) as caught:
            layer(x)
        messages.append(str(caught.value))
    for build in (
        lambda: ColumnParallelLinear(8, 1, group=group),
        lambda: RowParallelLinear(1, 8, group=group),
        lambda: ColumnParallelLinear(8, 8, group=group, tier="quick"),
        lambda: ColumnParallelLinear(8, 8, group=group, wire="fp4"),
        lambda: RowParallelLinear(8, 8, group=group, wire="fp8", sequence_parallel=False),
        lambda: RowParallelLinear(8, 8, group=None, wire="fp8"),
        lambda: MergedColumnParallelLinear(8, {}, group=group),
        lambda: MergedColumnParallelLinear.from_linears({"a": nn.Linear(4, 4), "b": nn.Linear(5, 4)}, group),
    ):
        with pytest.raises(ValueError) as caught:
            build()
        messages.append(str(caught.value))
    return messages


def second_derivatives_are_refused(group) -> None:
    for cls, sequence_parallel, of in itertools.product(
        (ColumnParallelLinear, RowParallelLinear), (True, False), (group, None)
    ):
        layer = cls(8, 8, bias=True, group=of, sequence_parallel=sequence_parallel)
        y = layer(torch.randn(2, layer.weight.size(1)))
        with pytest.raises(NotImplementedError, match="create_graph=True, but second derivatives are not"):
            torch.autograd.grad(y.square().sum(), layer.weight, create_graph=True)
        # Nothing is left under way: the next step is one as any other.
        layer(torch.randn(2, layer.weight.size(1))).square().sum().backward()
        assert layer.weight.grad.isfinite().all()


def kept_for_the_backward(pack: list[torch.Tensor], weight: torch.Tensor) -> int:
    """Bytes of memory that autograd saved, without the weight's."""
    saved = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in pack}
    saved.pop(weight.untyped_storage().data_ptr(), None)
    return sum(saved.values())


def frozen_linears_keep_no_input(group) -> None:
    """With the same gradients of x, bit by bit."""
    for cls, sequence_parallel, dim, keeps in itertools.product(
        (ColumnParallelLinear, RowParallelLinear), (True, False), (0, 1), (None, True)
    ):
        if keeps and cls is RowParallelLinear:
            continue
        options = {"sequence_parallel": sequence_parallel, "dim": dim, "group": group}
        layer = cls(24, 12, **options, **({"keep_gathered": keeps} if keeps else {}))
        found = []
        for trains in (True, False):
            layer.requires_grad_(trains)
            x = torch.randn(13, 14, layer.weight.size(1), generator=torch.Generator().manual_seed(3))
            if cls is ColumnParallelLinear and sequence_parallel:
                x = my_rows(x, group, dim)
            x.requires_grad_()
            pack: list[torch.Tensor] = []
            keep = lambda t, kept=pack: kept.append(t) or t  # noqa: E731
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
                y = layer(x * 1)
            kept = kept_for_the_backward(pack, layer.weight)
            assert kept >= x.nbytes if trains else kept <= 64, (cls, options, kept)
            y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(4)))
            found.append(x.grad)
        assert torch.equal(*found), (cls, options)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
class TestAgainstOneRank:
    @pytest.mark.second_tier("1", "4")
    def test_frozen_linears_keep_no_input(self, ranks, world_size):
        ranks.run(frozen_linears_keep_no_input, world_size)

    @pytest.mark.parametrize("widths", WIDTHS)
    @pytest.mark.parametrize("gather_output", [False, True])
    @pytest.mark.second_tier("False-widths0-1", "False-widths0-4", "True-widths1-4")
    def test_column(self, ranks, world_size, widths, gather_output):
        ranks.run(column_matches, world_size, *widths, gather_output)

    @pytest.mark.parametrize("widths", WIDTHS)
    @pytest.mark.second_tier("widths1-3", "widths1-4")
    def test_row(self, ranks, world_size, widths):
        ranks.run(row_matches, world_size, *widths)

    @pytest.mark.second_tier("2", "4")
    def test_merged_column(self, ranks, world_size):
        ranks.run(merged_matches, world_size)

    @pytest.mark.second_tier("1", "3", "4")
    def test_a_gathered_merged_column_is_its_parts_one_after_the_other(self, ranks, world_size):
        ranks.run(merged_is_gathered, world_size)

    @pytest.mark.parametrize(
        ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)]
    )
    def test_mlp(self, ranks, world_size, dtype, tolerance):
        ranks.run(mlp_matches, world_size, dtype, tolerance)

    def test_keeping_the_gathered_input_changes_no_bit(self, ranks, world_size):
        ranks.run(keeping_the_gathered_input_changes_no_bit, world_size)

    def test_second_derivatives_are_refused(self, ranks, world_size):
        ranks.run(second_derivatives_are_refused, world_size)

    def test_init_is_a_slice_of_one_model(self, ranks, world_size):
        whole = ranks.run(init_is_a_slice_of_one_model, 1)[0]
        for found in ranks.run(init_is_a_slice_of_one_model, world_size):
            for mine, one in zip(found, whole, strict=True):
                assert torch.equal(mine, one)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_uneven_layers_agree_on_a_tier(ranks, sequence_parallel):
    ranks.run(uneven_layers_after_even_ones, 2, sequence_parallel)


def test_wrong_inputs_are_sentences(ranks):
    messages = ranks.run(wrong_inputs, 2)[0]
    for message, part in zip(
        messages,
        [
            "takes in_features=8, but its input is [4, 7]",
            "layers.0.down holds 4 of in_features=8 on rank 0 of 2",
            "tp=2 cuts dimension 0 of weight, which is 1, into chunks of 1, and only 1 of 2 ranks get one",
            "tp=2 cuts dimension 1 of weight",
            "tier='quick' is none of auto, unfused, chunked, fused",
            "wire='fp4' is none of same, bf16, fp8",
            'wire="fp8" was asked for, and without sequence_parallel no rows are gathered',
            'wire="fp8" was asked for, and one rank alone gathers nothing',
            "at least one part",
            "'b' has in_features=5",
        ],
        strict=True,
    ):
        assert part in message
