"""`OPS` says what each operator makes: held to its values on two ranks and to derivatives across them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pyruntime import ops
from pyruntime.comm import group_name
from pyruntime.nn import linear_cross_entropy
from pyruntime.ops.layers import cross_entropy_loss, cross_entropy_stats
from pyruntime.ops.placements import OPS, PlacementCheck

LABELS = torch.tensor([0, 5, 2, 3])
STEP = 1e-5


def operation(name, group, own, same):
    """(a function, operands of which each rank has its own, operands that both have alike); own, same: draw
    such tensors."""
    sliced, classes = torch.ops.pyruntime, torch.classes.pyruntime

    def column(x, weight):
        shared, flight = classes.SlicedWeight([4]), classes.SlicedFlight(0)
        mark = sliced.share_weight(weight, shared)
        begun = sliced.begin_column(x, weight.detach(), mark, group, 4, "auto", "same", shared, flight)
        return sliced.end_column(begun, x.detach(), mark, None, shared, flight)

    def row(x, weight, bias):
        shared, flight = classes.SlicedWeight([4]), classes.SlicedFlight(0)
        weight = sliced.share_weight(weight, shared)
        begun = sliced.begin_row(x, weight, bias, shared, group, "auto", "same", flight)
        return sliced.end_row(begun, flight)

    def loss(logits):
        start = 3 * dist.get_rank()
        stats = ops.all_gather_stats(cross_entropy_stats(logits, LABELS, start), group)
        return cross_entropy_loss(logits, LABELS, stats, start, 6)[0]

    def head(x, weight):
        start = 3 * dist.get_rank()
        return linear_cross_entropy(x, weight, LABELS, group, vocab_start=start, vocab_size=6, chunk_rows=2)

    x, rows, weight = own(4, 3), own(2, 3), own(5, 3)
    return {
        "all_gather": (lambda x: ops.all_gather(x, group), [rows], []),
        "all_gather_stats": (lambda x: ops.all_gather_stats(x, group), [x], []),
        "all_reduce": (lambda x: ops.all_reduce(x, group), [x], []),
        "reduce_scatter": (lambda x: ops.reduce_scatter(x, group), [x], []),
        "replicate_grad": (lambda w: ops.replicate_grad(w, group), [], [same(3)]),
        "all_gather_matmul": (lambda x, w: ops.all_gather_matmul(x, w, group), [rows, weight], []),
        "matmul_reduce_scatter": (
            lambda x, w, b: ops.matmul_reduce_scatter(x, w, group, bias=b), [x, weight], [same(5)],
        ),
        "matmul_all_reduce": (
            lambda x, w, b: ops.matmul_all_reduce(x, w, group, bias=b), [x, weight], [same(5)],
        ),
        "replicated_matmul": (lambda w, x: ops.replicated_matmul(x, w, group), [weight], [same(4, 3)]),
        "share_weight": (column, [rows, weight], []),
        "begin_column": (column, [rows, weight], []),
        "end_column": (column, [rows, weight], []),
        "begin_row": (row, [x, weight], [same(5)]),
        "end_row": (row, [x, weight], [same(5)]),
        "cross_entropy_loss": (loss, [x], []),
        "linear_cross_entropy": (head, [rows, own(3, 3)], []),
    }[name]  # fmt: skip


def measured(group, name):
    """What the check says the operator makes, which placements agree with numbers, and whether terms of a sum
    may be dealt to the ranks in another way."""
    rank = dist.get_rank(group)
    apart, alike = (torch.Generator().manual_seed(seed) for seed in (1 + rank, 7))
    like = {"dtype": torch.float64}

    def own(*shape):
        return torch.randn(shape, generator=apart, **like)

    def same(*shape):
        return torch.randn(shape, generator=alike, **like)

    def both(value):
        value = value.detach().clone()
        dist.all_reduce(value, group=group)
        return value

    compute, owns, sames = operation(name, group_name(group), own, same)
    operands = [each.requires_grad_() for each in (*owns, *sames)]
    check = PlacementCheck({"tp": [group_name(group)]})
    for place, each in enumerate(operands):
        check.mark(each, tp="sharded" if place < len(owns) else "replicated")
    with check:
        result = compute(*operands)
        said = check.of(result, "tp")
    is_same = torch.equal(both(result), 2 * result.detach())

    def holds(placement):
        """Whether derivatives are those of the function that has its value once (replicated), or of the sum
        of the ranks' functions (sharded)."""
        if placement == "replicated" and not is_same:
            return False
        if not result.requires_grad:
            return is_same == (placement == "replicated")
        once = placement == "replicated"
        gradient = (same if once else own)(*result.shape)
        ways = [*(own(*each.shape) for each in owns), *(same(*each.shape) for each in sames)]
        values = []
        with torch.no_grad():
            for step in (STEP, -STEP):
                moved = [each + step * way for each, way in zip(operands, ways, strict=True)]
                value = (compute(*moved).double() * gradient).sum()
                values.append(value if once else both(value))
        wanted = (values[0] - values[1]) / (2 * STEP)
        gradients = torch.autograd.grad(result, operands, gradient.to(result.dtype), retain_graph=True)
        terms = [(g * way).sum() for g, way in zip(gradients, ways, strict=True)]
        of_owns, of_sames = sum(terms[: len(owns)], torch.zeros(())), sum(terms[len(owns) :], torch.zeros(()))
        found = both(of_owns.double()) + of_sames
        return bool((found - wanted).abs() < 1e-5 * (1 + wanted.abs()))

    agree = [placement for placement in ("replicated", "sharded") if holds(placement)]
    with torch.no_grad():
        shift = same(*operands[0].shape) * (1 - 2 * rank)
        after = compute(operands[0] + shift, *operands[1:])
    terms = (after, result) if name != "all_gather_stats" else (after.sum(0), result.sum(0))
    return said, agree, torch.allclose(*terms)


@pytest.mark.parametrize("name", OPS)
def test_each_rule_is_what_numbers_say(ranks, name):
    for said, agree, sums in ranks.run(measured, 2, name):
        assert agree == [said]
        assert OPS[name].result in (None, said)
        assert OPS[name].sums == sums
