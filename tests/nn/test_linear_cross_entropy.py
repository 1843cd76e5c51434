"""A head and its loss by chunks of rows: against the whole logits in double precision, with the same bits."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from pyruntime import _C
from pyruntime.nn import linear_cross_entropy, shard_bounds, vocab_parallel_cross_entropy
from pyruntime.ops import gemm_tables
from pyruntime.ops.primitives import linear
from tests.nn.cases import assert_near, my_features, my_rows, same_on_all_ranks

HIDDEN, IGNORED, Z = 24, 7, 0.3


def drawn(rows: int, vocabulary: int) -> tuple[torch.Tensor, ...]:
    """x, weight, labels, of which some are ignored, and weights of tokens."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, HIDDEN, generator=generator)
    weight = torch.randn(vocabulary, HIDDEN, generator=generator) / 4
    labels = torch.randint(vocabulary, (rows,), generator=generator)
    labels[3:6] = IGNORED
    return x, weight, labels, torch.rand(rows, generator=generator)


def expected(x, weight, labels, weights, z_loss: float) -> tuple[torch.Tensor, ...]:
    """Loss, dX and dW of the whole, times 3, in double precision."""
    x, weight = (each.detach().double().clone().requires_grad_() for each in (x, weight))
    logits = x @ weight.T
    losses = F.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORED)
    losses = losses + z_loss * (logits.logsumexp(1) ** 2).masked_fill(labels == IGNORED, 0.0)
    loss = (weights.double() * losses).sum()
    (3 * loss).backward()
    return loss.detach(), x.grad, weight.grad


def matches(group, rows: int, vocabulary: int, chunk_rows: int, dtype: torch.dtype, frozen: str) -> None:
    x, weight, labels, weights = drawn(rows, vocabulary)
    x, weight = x.to(dtype), weight.to(dtype)
    own_x, own_weight = my_rows(x, group), my_features(weight, group, 0)
    loss, dx, dw = expected(x, weight, labels, weights, Z)
    own_x.requires_grad_(frozen != "x")
    own_weight.requires_grad_(frozen != "weight")
    start, _ = shard_bounds(vocabulary, dist.get_world_size(group), dist.get_rank(group))
    found = linear_cross_entropy(
        own_x,
        own_weight,
        labels,
        group,
        vocab_start=start,
        vocab_size=vocabulary,
        ignore_index=IGNORED,
        token_weights=weights,
        z_loss=Z,
        chunk_rows=chunk_rows,
    )
    (3 * found).backward()
    precise = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_near(found, loss, "loss", precise)
    assert same_on_all_ranks(found.detach(), group)
    dx, dw = my_rows(dx, group), my_features(dw, group, 0)
    for what, leaf, wanted in (("x", own_x, dx), ("weight", own_weight, dw)):
        if frozen == what:
            assert leaf.grad is None
        else:
            assert_near(leaf.grad, wanted, f"gradient of {what}", precise)


@pytest.mark.parametrize(
    ("size", "rows", "vocabulary", "chunk_rows", "dtype", "frozen"),
    [
        (1, 17, 50, 4, torch.float64, ""),
        (2, 17, 51, 5, torch.float64, ""),  # ragged rows, chunks and vocabulary
        (3, 17, 50, 7, torch.float64, "weight"),
        (3, 25, 50, 6, torch.float32, ""),
        (2, 64, 70, 16, torch.bfloat16, ""),
        (2, 17, 50, 100, torch.float32, "x"),  # one chunk
        (4, 5, 50, 2, torch.float32, ""),  # the last chunk has rows of one rank only
    ],
)
def test_chunks_match_the_whole_logits(ranks, size, rows, vocabulary, chunk_rows, dtype, frozen):
    ranks.run(matches, size, rows, vocabulary, chunk_rows, dtype, frozen)


@pytest.fixture
def own_gemm():
    if not _C.has_own_gemm():
        pytest.skip("the bf16 GEMM of this project needs AVX2, and no AMX")
    _C.use_gemm(True)
    yield
    gemm_tables.use(gemm_tables.read())


def test_any_number_of_chunks_has_the_bits_of_the_whole_logits(own_gemm):
    x, weight, labels, weights = drawn(130, 9001)
    x, weight = (each.bfloat16().requires_grad_() for each in (x, weight))
    losses = vocab_parallel_cross_entropy(
        linear(x, weight), labels, None, vocab_start=0, ignore_index=IGNORED, overwrite_logits=True
    )
    loss = (weights * losses).sum()
    whole = (loss.detach(), *torch.autograd.grad(loss, (x, weight)))
    for chunk_rows in (20, 33, 50, 130, 512):
        found = linear_cross_entropy(
            x, weight, labels, None, ignore_index=IGNORED, token_weights=weights, chunk_rows=chunk_rows
        )
        for wanted, given in zip(whole, (found, *torch.autograd.grad(found, (x, weight))), strict=True):
            assert torch.equal(wanted, given), chunk_rows


def test_without_gradients_no_gradient_is_computed():
    x, weight, labels, _ = drawn(17, 50)
    weight.requires_grad_()
    with torch.no_grad():
        assert not linear_cross_entropy(x, weight, labels, None, chunk_rows=4).requires_grad


def test_wrong_input_is_a_sentence():
    x, weight, labels, weights = drawn(17, 50)
    with pytest.raises(ValueError, match="x has 17 rows on rank 0 of 1; of the 16 rows that have labels"):
        linear_cross_entropy(x, weight, labels[:16], None)
    with pytest.raises(ValueError, match=r"labels have shape \[17\] and their weights \[16\]"):
        linear_cross_entropy(x, weight, labels, None, token_weights=weights[:16])
    with pytest.raises(ValueError, match="chunk_rows=0; pass at least 1"):
        linear_cross_entropy(x, weight, labels, None, chunk_rows=0)
    with pytest.raises(IndexError, match="is neither in"):
        linear_cross_entropy(x, weight, labels + 1000, None, vocab_size=50)
    with pytest.raises(TypeError, match="x is Double and weight 0 is Float"):
        linear_cross_entropy(x.double(), weight, labels, None)
