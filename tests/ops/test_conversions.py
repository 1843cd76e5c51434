"""Conversions between placements give the placement that was asked for, and move what they say."""

from __future__ import annotations

import itertools

import pytest
import torch

import pyruntime
from pyruntime.nn import ColumnParallelLinear, ParallelExperts, RowParallelLinear, VocabParallelEmbedding
from pyruntime.nn.head_loss import loss_of_input, losses_of_logits
from pyruntime.ops.conversions import convert, linear_ways, moved
from tests.transports import on_transport, take

PLACEMENTS = ["S(0)", "S(1)", "B", "P", "P(max)"]
ROWS, COLUMNS = [8, 7], 12


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (64, {"gather W": 786_432, "sum Y": 208_896, "gather X": 294_912}),
        (4096, {"gather W": 786_432, "sum Y": 13_369_344, "gather X": 6_488_064}),
    ],
)
def test_the_ways_of_a_linear(rows, expected):
    """With many rows it is the weight that should travel."""
    assert linear_ways(rows, 256, 1024, 4) == expected


def test_what_is_no_placement_is_refused():
    with pytest.raises(ValueError, match=r"'S' is no placement; write B, P, P\(max\), or S\(0\)"):
        moved("S", "B", 1, 2)


def held(whole, placement, group):
    """This rank's part of a tensor, and of each rank's term of it, that is the same on every rank."""
    ranks, rank = group.size(), group.rank()
    if placement == "B":
        return whole
    if placement == "P":
        return whole * (2 * rank + 1) / ranks**2  # the odd numbers up to 2 p add up to p squared
    if placement == "P(max)":
        return torch.where(torch.arange(whole.numel()).view(whole.shape) % ranks == rank, whole, whole - 9)
    return whole.tensor_split(ranks, int(placement[2]))[rank].contiguous()


def converted(group, source, target, rows):
    """Bytes that this rank received. Raises AssertionError for another result."""
    whole = torch.arange(rows * COLUMNS, dtype=torch.float32).view(rows, COLUMNS)
    size = whole.shape[int(source[2])] if source[0] == "S" else None
    own = held(whole, source, group)
    convert(own, source, target, group, size=size)  # opens the group
    with pyruntime.ledger() as ledger:
        found = convert(own, source, target, group, size=size)
    if target[0] == "P":
        found = found.clone()
        reduce = torch.distributed.ReduceOp.SUM if target == "P" else torch.distributed.ReduceOp.MAX
        torch.distributed.all_reduce(found, reduce, group=group)
    torch.testing.assert_close(found, whole if target[0] == "P" else held(whole, target, group))
    return sum(axis.bytes_read for axis in ledger.account().axes.values())


@pytest.mark.parametrize("transport", ["symmetric_memory", "process_group"])
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.second_tier(but=["4-symmetric_memory"])
def test_every_conversion_moves_what_it_says(ranks, transport, n):
    for source, target, rows in itertools.product(PLACEMENTS, PLACEMENTS, ROWS):
        if source[0] == target[0] == "S" and source != target and rows % n:
            continue
        found = ranks.run(on_transport, n, transport, converted, source, target, rows)
        assert sum(found) == 4 * moved(source, target, rows * COLUMNS, n), (source, target, rows)


def log_sum_exp(group, logits):
    """Ranks share a vocabulary: each has a term of the maximum, and then of the sum."""
    own = held(logits, "S(1)", group)
    largest = convert(own.amax(1), "P(max)", "B", group)
    total = convert((own - largest[:, None]).exp().sum(1), "P", "B", group)
    return largest + total.log()


@pytest.mark.parametrize("n", [2, 4])
def test_the_logsumexp_of_a_cut_vocabulary(ranks, n):
    logits = 100 * torch.randn(5, 11, dtype=torch.float64)
    for found in ranks.run(log_sum_exp, n, logits):
        torch.testing.assert_close(found, logits.logsumexp(1), rtol=1e-13, atol=0)


def ragged(group):
    convert(torch.ones(3, 13), "S(0)", "S(1)", group)


def test_parts_that_do_not_divide_are_refused(ranks):
    for error in ranks.run(ragged, 2, expect_errors=True):
        assert isinstance(error, ValueError)
        assert "dimension 1 has 13 elements, no multiple of the 2 ranks; go through B" in str(error)


class Net(torch.nn.Module):
    def __init__(self, group, sequence_parallel, dtype):
        super().__init__()
        options = {"group": group, "sequence_parallel": sequence_parallel, "dtype": dtype}
        self.embed = VocabParallelEmbedding(32, 8, **options)
        self.up = ColumnParallelLinear(8, 16, **options)
        self.kept = ColumnParallelLinear(8, 16, keep_gathered=True, **options)
        self.down = RowParallelLinear(16, 8, **options)

    def forward(self, ids):
        x = self.embed(ids)
        return self.down(self.up(x).relu() * self.kept(x))


def explained(group, transport, sequence_parallel, rows, dtype):
    """What explain() says moves in each layer, and what this rank's ledger counted there."""
    take(group, transport)
    net = Net(group, sequence_parallel, dtype)
    ids = torch.arange(rows) % 32
    net(ids).sum().backward()
    with pyruntime.ledger() as ledger:
        net(ids).sum().backward()
    said: dict[str, int] = {}
    for row in pyruntime.explain(net).rows:
        said[row.name] = said.get(row.name, 0) + row.moved
    counted = dict.fromkeys(said, 0)
    for line in ledger.account().lines:
        counted[line.layer] += line.bytes
    return said, counted, str(pyruntime.explain(net))


@pytest.mark.parametrize("transport", ["symmetric_memory", "process_group"])
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.second_tier(but=["4-symmetric_memory"])
def test_explain_says_what_every_layer_moves(ranks, transport, n):
    for sequence_parallel in (True, False):
        for rows, dtype in ((24, torch.float32), (13, torch.bfloat16)):
            found = ranks.run(explained, n, transport, sequence_parallel, rows, dtype)
            for layer, said in found[0][0].items():
                assert said == sum(counted[layer] for _, counted, _ in found), (layer, rows)
                assert said > 0
            text = found[0][2]
            wanted = ["X S(0) > B, W S(0), Y S(1)", "X S(1), W S(1), Y P > S(0)", "ids B, W S(0), Y P > S(0)"]
            if not sequence_parallel:
                wanted = ["X B, W S(0), Y S(1)", "X S(1), W S(1), Y P > B", "dY S(1), dX P > B"]
            assert all(each in text for each in wanted)


class ExpertNet(torch.nn.Module):
    def __init__(self, group, sequence_parallel, dtype):
        super().__init__()
        self.experts = ParallelExperts(8, 6, 5, group=group, sequence_parallel=sequence_parallel, dtype=dtype)

    def forward(self, x, ids, weights, rows):
        return self.experts(x, ids, weights, rows=rows)


def explained_experts(group, transport, sequence_parallel, rows, dtype):
    """Returns the bytes of experts by explain() and by this rank's ledger, and the text."""
    take(group, transport)
    net = ExpertNet(group, sequence_parallel, dtype)
    generator = torch.Generator().manual_seed(rows)
    given = [
        torch.randn(rows, 6, generator=generator).to(dtype),
        torch.randint(8, (rows, 2), generator=generator),
        torch.rand(rows, 2, generator=generator),
    ]
    if sequence_parallel:
        given = [each.tensor_split(group.size())[group.rank()].contiguous() for each in given]
    x, ids, weights = given[0].requires_grad_(), given[1], given[2].requires_grad_()
    for _ in range(2):
        with pyruntime.ledger() as ledger:
            net(x, ids, weights, rows if sequence_parallel else None).sum().backward()
    report = pyruntime.explain(net)
    read = sum(axis.bytes_read for axis in ledger.account().axes.values())
    return sum(row.moved for row in report.rows), read, str(report)


@pytest.mark.parametrize("transport", ["symmetric_memory", "process_group"])
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.second_tier(but=["4-symmetric_memory"])
def test_explain_says_what_experts_move(ranks, transport, n):
    """All rows come to every rank, whose experts read those that are theirs."""
    for sequence_parallel in (True, False):
        for rows, dtype in ((24, torch.float32), (13, torch.bfloat16), (5, torch.float64)):
            found = ranks.run(explained_experts, n, transport, sequence_parallel, rows, dtype)
            assert found[0][0] == sum(read for _, read, _ in found) > 0, (sequence_parallel, rows)
            wanted = "X B, routes B, W S(0), Y P > B"
            if sequence_parallel:
                wanted = "X S(0) > B, routes S(0) > B, W S(0), Y P > S(0)"
            assert wanted in found[0][2]


class HeadNet(torch.nn.Module):
    def __init__(self, group, sequence_parallel, words, dtype):
        super().__init__()
        options = {"group": group, "sequence_parallel": sequence_parallel, "dtype": dtype}
        self.embed = VocabParallelEmbedding(words, 8, **options)
        self.head = ColumnParallelLinear(8, words, **options)

    def forward(self, ids, chunk_rows):
        x = self.embed(ids)
        if not chunk_rows:
            return losses_of_logits(self.head, self.head(x), ids, ignore_index=3).sum()
        return loss_of_input(self.head, x, ids, ignore_index=3, chunk_rows=chunk_rows)


def explained_head(group, transport, sequence_parallel, rows, dtype, chunk_rows):
    """Returns the bytes of each line by explain() and by this rank's ledger, and the lines without a loss."""
    take(group, transport)
    net = HeadNet(group, sequence_parallel, 27, dtype)
    ids = torch.arange(rows) % 27
    for _ in range(2):
        with pyruntime.ledger() as ledger:
            net(ids, chunk_rows).backward()
    report = pyruntime.explain(net)
    said = {(row.name, row.when, row.op): row.moved for row in report.rows}
    counted = sum(axis.bytes_read for axis in ledger.account().axes.values())
    with torch.no_grad():
        net.head(net.embed(ids))
    without = [row.op for row in pyruntime.explain(net).rows if row.name == "head"]
    return said, counted, str(report), without


@pytest.mark.parametrize("transport", ["symmetric_memory", "process_group"])
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.second_tier(but=["4-symmetric_memory"])
def test_explain_says_what_a_loss_moves(ranks, transport, n):
    """Three numbers of each row from every rank to every other; by chunks, rows of x are gathered once."""
    for sequence_parallel, chunk_rows in ((True, 0), (False, 0), (True, 5)):
        for rows, dtype in ((24, torch.float32), (13, torch.bfloat16), (5, torch.float64)):
            case = (transport, sequence_parallel, rows, dtype, chunk_rows)
            found = ranks.run(explained_head, n, *case)
            said, _, text, without = found[0]
            assert sum(said.values()) == sum(counted for _, counted, _, _ in found), case
            numbers = max(4, torch.finfo(dtype).bits // 8)
            assert said["head", "forward", "cross_entropy"] == n * (n - 1) * rows * 3 * numbers
            assert "logits S(1), max P(max), sums P, terms S(0) > B, loss B" in text
            assert not chunk_rows or "dY S(1), X B, dX P > S(0)" in text
            assert len(without) == 2 and "cross_entropy" not in without
