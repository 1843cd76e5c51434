"""Cross-entropy over shards of the vocabulary against torch in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pyruntime.ops import layers
from tests.ops.cases import (
    ROWS,
    WIDTHS,
    assert_close,
    composite,
    cpu,
    dtypes,
    implementations,
    randn,
    statistics_dtype,
    wide,
)

ops = torch.ops.pyruntime


def shard_losses(logits: Tensor, labels: Tensor, shards: int, **options) -> tuple[Tensor, Tensor]:
    """Losses over logits cut in shards, with the gradient of the sum of the losses' squares (gathered)."""
    parts = [part.detach().clone().requires_grad_() for part in logits.tensor_split(shards, dim=1)]
    starts = [sum(p.shape[1] for p in parts[:i]) for i in range(shards)]
    outputs = [part * 1 for part in parts]  # not leaves: their memory may be overwritten
    stats = torch.stack(
        [layers.cross_entropy_stats(o, labels, start) for o, start in zip(outputs, starts, strict=True)]
    )
    losses = [
        layers.cross_entropy_loss(o, labels, stats, start, logits.shape[1], **options)[0]
        for o, start in zip(outputs, starts, strict=True)
    ]
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    grads = [torch.autograd.grad(loss.square().sum(), p)[0] for loss, p in zip(losses, parts, strict=True)]
    return losses[0].detach(), torch.cat(grads, dim=1)


@dtypes
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("vocab", [5, 33, 5000])  # 5000: more than one chunk of a row
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("overwrite", [False, True])
def test_cross_entropy_over_shards_matches_torch_in_float64(dtype, shards, vocab, rows, overwrite):
    logits = randn(rows, vocab, dtype=dtype) * 5
    labels = torch.randint(0, vocab, (rows,))
    labels[2:3] = -100
    loss, grad = shard_losses(logits, labels, shards, overwrite_logits=overwrite)
    (logits64,) = wide(logits)
    expected = F.cross_entropy(logits64, labels, reduction="none")
    (expected_grad,) = torch.autograd.grad(expected.square().sum(), logits64)
    assert_close(loss, expected.detach(), statistics_dtype(dtype), vocab)
    assert_close(grad, expected_grad, dtype, vocab)


@dtypes
@pytest.mark.parametrize("width", [0, *WIDTHS])
@pytest.mark.parametrize("rows", ROWS)
def test_cross_entropy_composites_equal_the_cpu_kernels(dtype, width, rows):
    logits, labels, start = randn(rows, width, dtype=dtype), torch.randint(0, 40, (rows,)), 5
    logits[:, 2:4] = float("-inf")
    labels[1:2] = start + 2  # a target of probability 0
    stats = cpu(ops.cross_entropy_stats, logits, labels, start)
    torch.testing.assert_close(composite(ops.cross_entropy_stats, logits, labels, start), stats)
    both = torch.stack((stats, torch.ones_like(stats)))
    loss, lse = cpu(ops.cross_entropy_loss, logits, labels, both, start, 40)
    torch.testing.assert_close(
        composite(ops.cross_entropy_loss, logits, labels, both, start, 40), (loss, lse)
    )
    grad = randn(rows, dtype=loss.dtype)
    grad[3:] = 0
    expected = cpu(ops.cross_entropy_backward, logits, labels, lse, grad, start)
    found = composite(ops.cross_entropy_backward, logits, labels, lse, grad, start)
    torch.testing.assert_close(found, expected)
    for run in (cpu, composite):
        overwritten = logits.clone()
        run(ops.cross_entropy_backward_, overwritten, labels, lse, grad, start)
        assert torch.equal(overwritten, expected if run is cpu else found)


@implementations
def test_a_shard_that_is_masked_out_contributes_nothing(run):
    masked = torch.full((2, 50), float("-inf"))
    labels = torch.tensor([60, 99])
    stats = run(ops.cross_entropy_stats, masked, labels, 0)
    assert stats[:, 0].eq(float("-inf")).all() and stats[:, 1].eq(0).all()
    logits = randn(2, 50, dtype=torch.float32)
    both = torch.stack((stats, run(ops.cross_entropy_stats, logits, labels, 50)))
    loss, _ = run(ops.cross_entropy_loss, masked, labels, both, 0, 100)
    torch.testing.assert_close(loss, F.cross_entropy(logits, labels - 50, reduction="none"))


@implementations
def test_nan_logits_give_a_nan_loss(run):
    logits = randn(2, 40, dtype=torch.float32)
    logits[1, 7] = float("nan")
    labels = torch.tensor([1, 2])
    stats = run(ops.cross_entropy_stats, logits, labels, 0)[None]
    loss, _ = run(ops.cross_entropy_loss, logits, labels, stats, 0, 40)
    assert loss.isnan().tolist() == [False, True]


def test_a_second_backward_over_overwritten_logits_is_refused():
    logits, labels = randn(3, 8, grad=True) * 1, torch.tensor([1, 2, 3])
    stats = layers.cross_entropy_stats(logits, labels, 0)[None]
    loss, _ = layers.cross_entropy_loss(logits, labels, stats, 0, 8, overwrite_logits=True)
    loss.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.sum().backward()
