"""check_composition() passes what fits and refuses what does not, by name, before anything travels."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pyruntime
from pyruntime.any_model.compositions import check_composition
from pyruntime.llama import Llama, LlamaConfig
from pyruntime.nn import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)
from pyruntime.nn.head_loss import loss_of_input
from pyruntime.ops.conversions import convert
from pyruntime.ops.placements import PlacementError

D, HEADS, WORDS = 8, 4, 23


class Model(nn.Module):
    """A block of attention and MLP with its loss. Subclasses plant one mistake each."""

    in_features = "column"
    rows = True

    def __init__(self, group):
        super().__init__()
        options = {"group": group, "sequence_parallel": self.rows}
        self.group = group
        self.embed = VocabParallelEmbedding(WORDS, D, **options)
        self.norm = nn.LayerNorm(D)
        self.qkv = MergedColumnParallelLinear(D, {"q": D, "k": D, "v": D}, **options)
        self.out = RowParallelLinear(D, D, **options)
        self.up = ColumnParallelLinear(D, 16, **options)
        self.inner = nn.LayerNorm(16 // group.size())
        self.down = RowParallelLinear(16, D, **options)
        self.last = RMSNorm(D, 1e-5)
        self.head = ColumnParallelLinear(D, WORDS, **options)

    def forward(self, ids):
        x = self.embed(ids)
        q, k, v = (
            each.view(len(each), -1, D // HEADS).transpose(0, 1)
            for each in self.qkv(self.norm(x), rows=len(ids)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(0, 1).flatten(1))
        x = x + self.down(self.between(F.silu(self.up(x, rows=len(ids)))))
        return self.loss(self.last(x), ids)

    def between(self, h):
        return h

    def logits(self, x, ids):
        return self.head(x, rows=len(ids))

    def loss(self, x, ids):
        start = self.head.vocab_start
        return vocab_parallel_cross_entropy(self.logits(x, ids), ids, self.group, vocab_start=start).mean()


class WholeRows(Model):
    rows = False


class ByChunks(Model):
    def loss(self, x, ids):
        return loss_of_input(self.head, x, ids)


class OwnLoss(Model):
    """The log-sum-exp of a cut vocabulary, by conversions."""

    def loss(self, x, ids):
        logits = self.logits(x, ids)
        largest = convert(logits.amax(1), "P(max)", "B", self.group)
        return convert((logits - largest[:, None]).exp().sum(1), "P", "B", self.group).log() + largest


class SumOfMaximum(OwnLoss):
    def loss(self, x, ids):
        return pyruntime.ops.all_reduce(self.logits(x, ids).amax(1), self.group)


class MaximumAsSum(OwnLoss):
    def loss(self, x, ids):
        return convert(self.logits(x, ids).amax(1), "P", "B", self.group)


class MaximumUsed(OwnLoss):
    def loss(self, x, ids):
        logits = self.logits(x, ids)
        return (logits - logits.amax(1)[:, None]).exp()


class SumUsed(OwnLoss):
    def loss(self, x, ids):
        return self.logits(x, ids).exp().sum(-1).log()


class NormOfOwnFeatures(Model):
    def between(self, h):
        return self.inner(h)


class MeanOfOwnFeatures(Model):
    def between(self, h):
        return h - h.mean(-1, keepdim=True)


class SoftmaxOfOwnWords(Model):
    def loss(self, x, ids):
        return self.logits(x, ids).softmax(-1)


class TorchsLoss(Model):
    def loss(self, x, ids):
        return F.cross_entropy(self.logits(x, ids), ids)


class WholeInput(Model):
    def __init__(self, group):
        super().__init__(group)
        self.up = ColumnParallelLinear(D, 16, group=group, gather_output=True)


class WholeRowsIn(Model):
    def __init__(self, group):
        super().__init__(group)
        self.embed = VocabParallelEmbedding(WORDS, D, group=group, sequence_parallel=False)


class OwnRowsIn(Model):
    def __init__(self, group):
        super().__init__(group)
        self.qkv = MergedColumnParallelLinear(
            D, {"q": D, "k": D, "v": D}, group=group, sequence_parallel=False
        )


class ColumnAfterColumn(Model):
    def between(self, h):
        return self.up(h)


class MaximumMultiplied(OwnLoss):
    def loss(self, x, ids):
        return self.logits(x, ids).amax(1)[None] @ torch.ones(len(ids), 2)


class MaximaAndSums(OwnLoss):
    def loss(self, x, ids):
        logits = self.logits(x, ids)
        return torch.stack([logits.amax(1), logits.sum(1)])


class MeanOfOwnRows(Model):
    def loss(self, x, ids):
        return x.mean(0)


class WholeBesideOwn(Model):
    def __init__(self, group):
        super().__init__(group)
        self.gain = nn.Parameter(torch.ones(16 // group.size()))

    def between(self, h):
        return h * self.gain


REFUSED = {
    SumOfMaximum: r"the model: all_reduce needs P, but gets P\(max\), \[13\] on.*convert\(x, 'P\(max\)'",
    MaximumAsSum: r"the model: convert needs P as its source, but gets P\(max\).*name 'P\(max\)' there",
    MaximumUsed: r"the model: getitem|sub needs B or S, but gets P\(max\).*term of a maximum",
    SumUsed: r"the model: log needs B or S, but gets P, .*convert\(x, 'P', 'B', group\) takes a sum first",
    NormOfOwnFeatures: r"inner: layer_norm needs B along dimension 1, but gets S\(1\), \[13, \d+\]",
    MeanOfOwnFeatures: r"the model: mean needs B along dimension 1, but gets S\(1\).*gather_output=True",
    SoftmaxOfOwnWords: r"softmax needs B along dimension 1, but gets S\(1\).*vocab_parallel_cross_entropy",
    TorchsLoss: r"cross_entropy needs B along the vocabulary, but gets S\(1\).*vocab_parallel_cross_entropy",
    WholeInput: r"down \(RowParallelLinear\) needs X S\(1\), but gets B, \[13, 16\].*leave out gather_output",
    WholeRowsIn: r"qkv \(Merged\w+\) needs X S\(0\), but gets B, \[13, 8\].*sequence_parallel=False at it",
    OwnRowsIn: r"qkv \(Merged\w+\) needs X B, but gets S\(0\), \[\d+, 8\].*sequence_parallel=True at it",
    ColumnAfterColumn: r"up \(Column\w+\) needs X S\(0\), but gets S\(1\).*put a row-parallel linear between",
    MaximumMultiplied: r"the model: matmul needs B or S, but gets P\(max\), .*takes a maximum first",
    MaximaAndSums: r"the model: stack needs B or S, but gets P\(max\), .*takes a maximum first",
    MeanOfOwnRows: r"the model: mean needs B along dimension 0, but gets S\(0\).*convert\(x, 'S\(0\)', 'B'",
    WholeBesideOwn: r"the model: mul needs S\(0\) beside \[13, \d+\] S\(1\), but gets B, \[\d+\]",
}


def checked(group, kind):
    """Returns what could not be followed, or the message; and how many bytes it moved."""
    model = kind(group)
    before = [vars(layer).copy() for layer in (model.up, model.head)]
    with pyruntime.ledger() as ledger:
        try:
            found = check_composition(model, (torch.zeros(13, dtype=torch.int64),))
        except PlacementError as error:
            found = str(error)
    assert [vars(layer) for layer in (model.up, model.head)] == before
    return found, sum(axis.bytes_read for axis in ledger.account().axes.values())


@pytest.mark.parametrize("n", [2, 4])
def test_what_fits_passes(ranks, n):
    for kind in (Model, WholeRows, ByChunks, OwnLoss):
        assert ranks.run(checked, n, kind) == [((), 0)] * n, kind


def checked_llama(group):
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    ids = torch.zeros(3, 7, dtype=torch.int64)
    return check_composition(Llama(config, group), (ids, ids))


def test_the_compact_model_passes_and_all_of_it_is_followed(ranks):
    assert ranks.run(checked_llama, 2) == [()] * 2


def beside(group):
    """Returns the functions that cannot be followed, and the refusals of models."""
    layer = ColumnParallelLinear(D, 16, group=group)
    model = nn.Sequential(layer, nn.GLU(), nn.Linear(4, 8))
    unknown = check_composition(model, (torch.zeros(3, D),), ("S(0)",))
    errors = []
    for wrong in (
        lambda: check_composition(layer, (torch.zeros(3, D),), ("S(0)", "B")),
        lambda: check_composition(layer, (torch.zeros(3, D),), ("S",)),
        lambda: check_composition(
            pyruntime.parallelize(nn.Sequential(nn.Linear(8, 8)), group, {"0": "column"}), ()
        ),
    ):
        with pytest.raises(ValueError) as error:
            wrong()
        errors.append(str(error.value))
    return unknown, errors


def test_what_it_cannot_follow_is_told(ranks):
    for unknown, errors in ranks.run(beside, 2):
        assert unknown == ("1: glu",)
        for message, words in zip(
            errors, ("name one for each", "'S' is no placement", "whose first call compares it"), strict=True
        ):
            assert words in message


@pytest.mark.parametrize("kind", REFUSED)
def test_what_does_not_fit_is_refused_by_name(ranks, kind):
    for n in (2, 4):
        for message, moved in ranks.run(checked, n, kind):
            assert moved == 0 and re.search(REFUSED[kind], message), message
