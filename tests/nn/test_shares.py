"""Modules whose features are cut by shares, against one rank in double precision."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate

from pyruntime.nn import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from pyruntime.nn.parameters import in_order, padding_of, ranges_of
from tests.nn.cases import assert_near, in_double, my_rows, seeded_linear

IN, OUT, ROWS = 10, 17, 7
SHARES = {2: (12, 5), 3: (3, 9, 5)}


@pytest.mark.parametrize("shares", SHARES.values())
def test_what_is_gathered_by_shares_is_the_whole(shares):
    ranks, whole = len(shares), torch.randn(3, OUT, 2)
    shards = []
    for rank in range(ranks):
        ((start, stop),) = ranges_of((OUT,), ranks, rank, shares=shares)
        missing = padding_of(OUT, ranks, stop - start, shares)
        shards.append(torch.cat([whole[:, start:stop], torch.zeros(3, missing, 2)], 1))
    assert torch.equal(in_order(torch.cat(shards, 1), -2, ranks, (OUT,), shares), whole)


def test_shares_that_do_not_cut_the_whole_are_refused():
    for shares in ((17,), (17, 0), (8, 8)):
        with pytest.raises(
            ValueError, match="do not cut w, which is 17, over 2 ranks; give one tensor a number"
        ):
            ranges_of((OUT,), 2, 0, "w", shares)


def refusals(group) -> list[str]:
    options = {"group": group, "shares": SHARES[2]}
    found = []
    for make in (
        lambda: ColumnParallelLinear(IN, OUT, packed=(12, 5), **options),
        lambda: MergedColumnParallelLinear(IN, {"a": OUT}, group=group, shares={"b": SHARES[2]}),
        lambda: RowParallelLinear(OUT + 1, IN, **options),
        lambda: VocabParallelEmbedding(OUT + 1, IN, **options),
    ):
        with pytest.raises(ValueError) as refused:
            make()
        found.append(str(refused.value))
    return found


def test_linears_say_which_shares_they_cannot_have(ranks):
    packed, unknown, features, rows = ranks.run(refusals, 2)[0]
    assert "cut part by part, or over two axes, is cut equally" in packed
    assert "shares name the parts ['b.'], and the linear has ['a.']" in unknown
    assert "do not cut dimension 1 of weight, which is 18" in features
    assert "do not cut dimension 0 of weight, which is 18" in rows


def through_linears(group, x, dy):
    """x through a column linear of unequal shares and a row linear after it, each with a bias; with gathered
    features in between, and without. Returns the results and the gradients of all."""
    shares = SHARES[group.size()]
    first, second = seeded_linear(IN, OUT, True), seeded_linear(OUT, IN, True, 1)
    found = []
    for whole in (False, True):
        column = ColumnParallelLinear.from_linear(first, group, shares=shares, gather_output=whole)
        row = RowParallelLinear.from_linear(second, group, shares=shares, split_input=whole)
        own = my_rows(x, group).requires_grad_()
        y = row(column(own, ROWS))
        y.backward(my_rows(dy, group))
        gradients = {
            f"{name}.{key}": layout.to_dtensors(parameter.grad.to_local())[key].full_tensor()
            if hasattr(parameter.grad, "to_local")
            else parameter.grad
            for name, module in (("column", column), ("row", row))
            for key, layout in module._layouts.items()
            for parameter in [module._parameters[key]]
        }
        found.append((y.detach(), own.grad, gradients, column.weight.full_tensor(), column.vocab_start))
    return found


@pytest.mark.parametrize("ranks_of_group", SHARES)
def test_a_column_linear_and_a_row_linear(ranks, ranks_of_group):
    x, dy = torch.randn(ROWS, IN), torch.randn(ROWS, IN)
    whole = nn.Sequential(seeded_linear(IN, OUT, True), seeded_linear(OUT, IN, True, 1))
    exact, wide = in_double(whole), x.double().requires_grad_()
    result = exact(wide)
    result.backward(dy.double())
    expected = {
        "column.weight": exact[0].weight.grad,
        "column.bias": exact[0].bias.grad,
        "row.weight": exact[1].weight.grad,
        "row.bias": exact[1].bias.grad,
    }
    shares = SHARES[ranks_of_group]
    for rank, of_forms in enumerate(ranks.run(through_linears, ranks_of_group, x, dy)):
        rows = [each.tensor_split(ranks_of_group)[rank] for each in (result.detach(), wide.grad)]
        for y, dx, gradients, weight, start in of_forms:
            assert_near(y, rows[0], "y")
            assert_near(dx, rows[1], "dx")
            assert gradients.keys() == expected.keys()
            for name, gradient in expected.items():
                assert_near(gradients[name], gradient, name)
            assert torch.equal(weight, whole[0].weight)
            assert start == sum(shares[:rank])


def other_modules(group, ids, x):
    shares = SHARES[group.size()]
    table = nn.Embedding(OUT, IN)
    torch.manual_seed(0)
    nn.init.normal_(table.weight)
    embedding = VocabParallelEmbedding.from_embedding(table, group, shares=shares, sequence_parallel=False)
    norm = RMSNorm(OUT, group=group, is_cut=True, shares=shares)
    start = sum(shares[: group.rank()])
    own = x[:, start : start + shares[group.rank()]].contiguous()
    state = norm.state_dict()["weight"]
    assert state.redistribute(placements=[Replicate()]).to_local().shape == (OUT,)
    return embedding(ids), table.weight[ids], norm(own), start


def test_an_embedding_and_a_norm(ranks):
    ids, x = torch.randint(OUT, (5,)), torch.randn(4, OUT)
    normed = nn.functional.rms_norm(x.double(), (OUT,), eps=1e-6)
    for found, expected, of_features, start in ranks.run(other_modules, 3, ids, x):
        assert torch.equal(found, expected)
        assert_near(of_features, normed[:, start : start + of_features.shape[1]], "normed")
