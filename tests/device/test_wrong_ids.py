"""Ids and labels outside of the vocabulary end a device's work by a named assertion, and no kernel reads
memory by them."""

from __future__ import annotations

import pytest
import torch

from pyruntime.comm import Runtime
from pyruntime.nn import VocabParallelEmbedding, vocab_parallel_cross_entropy
from pyruntime.nn.module import Step
from pyruntime.ops.layers import cross_entropy_stats
from tests.cuda import build as kernels
from tests.device import sim

pytestmark = pytest.mark.usefixtures("simulated")

VOCABULARY = 11
FAR = [-1, VOCABULARY, 2**62, -(2**63)]


def embed(group, ids):
    layer = VocabParallelEmbedding(VOCABULARY, 4, group=group, device="sim")
    layer(Step(lambda: layer.own_share(ids, cut_rows=False)))  # without the other rank


def lose(group, labels):
    logits = torch.zeros(len(labels), VOCABULARY, device="sim", requires_grad=True)
    loss = vocab_parallel_cross_entropy(logits, labels, None, vocab_start=0, vocab_size=VOCABULARY)
    loss.sum().backward()


def ask(group):
    sim.begin_rank(delays=2)
    sim.use_kernels(kernels.LIBRARY)
    with Runtime.start(tp=2, device="sim") as runtime:
        wrong = torch.tensor(FAR, device="sim")
        logits = torch.full((len(FAR), VOCABULARY), 0.5, device="sim")
        stats = cross_entropy_stats(logits, wrong, 0).cpu()
        assert stats[:, 2].tolist() == [0.0] * len(FAR), stats  # no logit is the label's
        sound = torch.tensor([0, 5, 10], device="sim")
        for call in (embed, lose):
            call(runtime.tp, sound)
        torch.accelerator.synchronize()
        with pytest.raises(RuntimeError) as caught:
            (embed, lose)[runtime.rank](runtime.tp, wrong)
            torch.accelerator.synchronize()
        return str(caught.value)


def test_ids_and_labels_outside_of_the_vocabulary_are_told(ranks):
    outcomes = ranks.launch(ask, 2, init=False)
    assert [rank.error for rank in outcomes] == [None, None]
    ids, labels = (rank.value for rank in outcomes)
    assert "VocabParallelEmbedding: an id is outside [0, 11)" in ids
    assert "a label is neither in the vocabulary nor ignore_index" in labels
