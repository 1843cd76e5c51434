"""A head's whole logits are gathered when something reads them, and in training nothing does."""

from __future__ import annotations

import copy
import io
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pyruntime import parallelize
from pyruntime.any_model.activations.when_read import GatheredWhenRead
from pyruntime.nn import gather
from tests.any_model.test_auto import BATCH, IDS, build
from tests.nn.cases import assert_near


class Twice(torch.autograd.Function):
    """[x, x] along the last dimension, put together when it is read."""

    @staticmethod
    def forward(ctx, x, read):
        def gathered():
            read.append(1)
            padded = torch.cat([x.detach()] * 2 + [x.detach()[..., :1]], -1)
            return padded[..., :-1]  # with gaps, as of words that the ranks do not share evenly

        return GatheredWhenRead((*x.shape[:-1], 2 * x.shape[-1]), x, gathered)

    @staticmethod
    def backward(ctx, grad):
        return sum(grad.chunk(2, -1)), None


LABELS = torch.tensor([1, 5])


def written_to(y):
    y[..., :2].mul_(3)
    return y * 1


def saved(y):
    file = io.BytesIO()
    torch.save(y, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize(
    "read",
    [
        lambda y: F.cross_entropy(y, LABELS),
        lambda y: y[..., :-1].double(),
        lambda y: y.view(3, 4).float(),
        lambda y: y.reshape(-1) * y.contiguous().view(12),
        lambda y: torch.stack(list(y)),
        lambda y: y.mul_(2),
        lambda y: y.softmax(-1) @ y.T,
        written_to,
    ],
)
def test_whatever_reads_it_finds_the_whole_and_its_gradient(read):
    mine, its = (torch.arange(6.0).view(2, 3).requires_grad_() for _ in range(2))
    count: list[int] = []
    y = Twice.apply(mine, count)
    assert (y.shape, y.dtype, y.device.type, y.requires_grad) == ((2, 6), torch.float32, "cpu", True)
    assert not count
    found, wanted = read(y), read(torch.cat([its * 1] * 2, -1))
    assert torch.equal(found, wanted) and count == [1]
    found.square().sum().backward()
    wanted.square().sum().backward()
    torch.testing.assert_close(mine.grad, its.grad)
    y.sum()
    assert count == [1]


@pytest.mark.parametrize(
    "read",
    [
        lambda y: y.tolist(),
        lambda y: y.detach().numpy(),
        lambda y: np.asarray(y.detach()),
        lambda y: y.cpu().data,
        lambda y: float(y[1, 4].detach()),
        lambda y: saved(y).detach(),
        repr,
    ],
)
def test_what_leaves_torch_is_the_whole(read):
    x = torch.arange(6.0).view(2, 3)
    found, wanted = read(Twice.apply(x.requires_grad_(), [])), read(torch.cat([x.detach()] * 2, -1))
    if isinstance(wanted, (np.ndarray, torch.Tensor)):
        found, wanted = found.tolist(), wanted.tolist()
    assert found == wanted or found.startswith(wanted[:-1])  # a repr names what has no graph otherwise


def gathers_of_a_step(group) -> None:
    whole = build("Llama").train()
    model = parallelize(copy.deepcopy(whole), group, "auto")
    model(**BATCH)  # the first call compares
    with mock.patch.object(gather, "_gather", side_effect=gather._gather) as called:

        def of_logits() -> int:
            return sum(call.args[4] == (whole.config.vocab_size,) for call in called.call_args_list)

        out = model(**BATCH)
        out.loss.backward()
        assert of_logits() == 0
        assert_near(out.logits, whole(**BATCH).logits, "logits, after the backward pass")
        assert of_logits() == 1
        with torch.no_grad():
            assert type(model(**BATCH).logits) is torch.Tensor
        assert of_logits() == 2
    model.zero_grad()
    for each in (model, whole):
        F.cross_entropy(each(input_ids=IDS).logits.flatten(0, 1), IDS.flatten()).backward()
    assert_near(model.model.norm.weight.grad, whole.model.norm.weight.grad, "of a loss of whole logits")


def test_no_logits_travel_in_training_unless_they_are_read(ranks):
    ranks.run(gathers_of_a_step, 2)
    ranks.run(gathers_of_a_step, 3)  # of 101 words
