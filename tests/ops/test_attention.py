"""The attention op against a float64 reference in plain torch, and what torch asks of an op."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyruntime.ops.attention import causal_attention
from tests.ops.cases import dtypes, randn, statistics_dtype, wide

LENGTHS = [1, 3, 17, 65, 257, 530]  # within a tile, a block of queries, and over several blocks of keys
DIMS = [1, 5, 32, 80]


ops = torch.ops.pyruntime

# ---- helpers ----


def heads(batch: int, count: int, seq: int, dim: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """[B, heads, S, D] over memory of tokens, as the rotary kernel leaves it."""
    return randn(batch, seq, count, dim, dtype=dtype).transpose(1, 2)


def qkv(batch: int, groups: int, shared: int, seq: int, dim: int, dtype: torch.dtype = torch.float64):
    return tuple(heads(batch, count, seq, dim, dtype) for count in (groups * shared, groups, groups))


def reference(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    scores = (scale * q @ k.transpose(2, 3)).masked_fill(hidden, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2), scores.logsumexp(-1)


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype, parts: Tensor | None = None) -> None:
    """`found` is of `dtype` and `expected` but for a few roundings to it and sums over the sequence.

    `parts` are what `expected` is a sum of, where they may cancel.
    """
    assert found.dtype == dtype
    assert found.shape == expected.shape
    scale = max(t.abs().max().item() for t in (expected, parts) if t is not None)
    sums = torch.finfo(statistics_dtype(dtype)).eps * max(LENGTHS) ** 0.5
    error = (found.double() - expected).abs()
    assert error.max() <= 8 * (torch.finfo(dtype).eps + sums) * scale
    assert error.square().mean().sqrt() <= 2 * (torch.finfo(dtype).eps + sums) * scale


def check_against_float64(q, k, v, scale):
    dtype = q.dtype
    out, lse = ops.causal_attention(q, k, v, scale)
    grad = randn(*out.shape, dtype=dtype)
    dq, dk, dv = ops.causal_attention_backward(grad, q, k, v, out, lse, scale)

    inputs = wide(q, k, v)
    expected_out, expected_lse = reference(*inputs, scale)
    expected_dq, expected_dk, expected_dv = torch.autograd.grad(expected_out, inputs, grad.double())
    assert_close(out, expected_out, dtype)
    assert_close(lse, expected_lse, statistics_dtype(dtype), parts=torch.ones(()))
    # dS is a difference of products of dO with V, which is exactly 0 for the first query.
    parts = scale * grad.double().abs().max() * inputs[2].detach().abs().max()
    assert_close(dq, expected_dq, dtype, parts=parts * inputs[1].detach().abs().max())
    assert_close(dk, expected_dk, dtype, parts=parts * inputs[0].detach().abs().max())
    assert_close(dv, expected_dv, dtype)
    assert out.is_contiguous()
    assert lse.is_contiguous()
    assert all(t.transpose(1, 2).is_contiguous() for t in (dq, dk, dv))


# ---- numbers ----


@dtypes
@pytest.mark.parametrize("seq", LENGTHS)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.second_tier("80-530-bfloat16", "80-530-float16", "80-530-float64")
def test_out_lse_and_gradients_match_float64(dtype, seq, dim):
    check_against_float64(*qkv(2, 2, 2, seq, dim, dtype), dim**-0.5)


@dtypes
@pytest.mark.parametrize("shared", [1, 2, 4])
def test_any_number_of_query_heads_share_a_key_head(dtype, shared):
    check_against_float64(*qkv(2, 3, shared, 70, 24, dtype), 0.3)


@dtypes
@pytest.mark.parametrize("scale", [-0.7, 0.0, 2.5])
def test_any_scale(dtype, scale):
    check_against_float64(*qkv(1, 1, 2, 100, 16, dtype), scale)


@dtypes
def test_inputs_may_have_any_strides(dtype):
    q, k, v = qkv(2, 2, 2, 66, 18, dtype)
    expected = ops.causal_attention(q, k, v, 0.2)
    spread = torch.empty(*q.shape[:-1], 36, dtype=dtype)[..., ::2].copy_(q)
    found = ops.causal_attention(spread, k.contiguous(), v.transpose(2, 3).contiguous().transpose(2, 3), 0.2)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@dtypes
def test_scores_far_from_zero_neither_overflow_nor_vanish(dtype):
    q, k, v = qkv(1, 1, 1, 600, 8, dtype)
    # The largest score moves from key to key over several blocks of keys.
    q, k = q.abs() * 10, k.abs() * torch.linspace(1, 30, 600, dtype=dtype)[:, None]
    out, lse = ops.causal_attention(q, k, v, 1.0)
    expected_out, expected_lse = reference(q.double(), k.double(), v.double(), 1.0)
    assert expected_lse.max() > 3000
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-3)
    # Half the distance of neighbouring floats at these scores is what a probability may be wrong by.
    torch.testing.assert_close(out.double(), expected_out, rtol=2e-2, atol=2e-2)


@dtypes
def test_later_keys_and_values_change_nothing(dtype):
    q, k, v = qkv(1, 2, 2, 130, 16, dtype)
    before = ops.causal_attention(q, k, v, 0.25)
    k[:, :, 97:], v[:, :, 97:] = 5.0, -3.0
    after = ops.causal_attention(q, k, v, 0.25)
    assert torch.equal(before[0][:, :97], after[0][:, :97])
    assert torch.equal(before[1][:, :, :97], after[1][:, :, :97])
    assert not torch.equal(before[0][:, 97:], after[0][:, 97:])


def test_a_query_that_is_not_a_number_spoils_its_own_row_alone():
    q, k, v = qkv(1, 1, 1, 80, 8, torch.float32)
    expected, _ = ops.causal_attention(q, k, v, 1.0)
    q[0, 0, 33, 2] = float("nan")
    out, lse = ops.causal_attention(q, k, v, 1.0)
    others = torch.arange(80) != 33
    assert out[0, 33].isnan().all()
    assert lse[0, 0, 33].isnan()
    assert torch.equal(out[0, others], expected[0, others])


@pytest.mark.parametrize("shape", [(0, 2, 4, 8), (2, 2, 0, 8)])
def test_nothing_in_nothing_out(shape):
    q = torch.randn(shape)
    out, lse = ops.causal_attention(q, q, q, 1.0)
    assert out.shape == (shape[0], shape[2], 16)
    assert lse.shape == shape[:3]
    assert all(g.shape == shape for g in ops.causal_attention_backward(out, q, q, q, out, lse, 1.0))


# ---- what autograd, the compiler and a user of several threads rely on ----


@pytest.mark.parametrize(("seq", "dim", "shared"), [(1, 3, 1), (9, 4, 2), (70, 2, 1)])
def test_gradcheck(seq, dim, shared):
    inputs = [t.requires_grad_() for t in qkv(1, 1, shared, seq, dim)]
    assert torch.autograd.gradcheck(lambda *args: causal_attention(*args)[0], inputs, fast_mode=seq > 20)


@dtypes
@pytest.mark.second_tier(but=["float64"])
def test_opcheck(dtype):
    q, k, v = (t.requires_grad_() for t in qkv(2, 2, 2, 9, 6, dtype))
    torch.library.opcheck(ops.causal_attention.default, (q, k, v, 0.4))
    out, lse = ops.causal_attention(*(t.detach() for t in (q, k, v)), 0.4)
    plain = (randn(*out.shape, dtype=dtype), *(t.detach() for t in (q, k, v)), out, lse, 0.4)
    torch.library.opcheck(ops.causal_attention_backward.default, plain)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.second_tier("True")
def test_compiles_as_one_graph(dynamic):
    def layer(q, k, v):
        out, lse = causal_attention(q * 1.5, k, v)
        return out.sin(), lse

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for seq in (20, 33):
        q, k, v = (t.requires_grad_() for t in qkv(2, 2, 2, seq, 8, torch.float32))
        grad = randn(2, seq, 32, dtype=torch.float32)
        expected, found = layer(q, k, v), compiled(q, k, v)
        gradients = (torch.autograd.grad(out[0], (q, k, v), grad) for out in (expected, found))
        for a, b in zip((*expected, *next(gradients)), (*found, *next(gradients)), strict=True):
            assert torch.equal(a, b)


@dtypes
def test_results_are_bitwise_the_same_again_and_with_more_threads(dtype):
    q, k, v = qkv(2, 3, 2, 150, 20, dtype)

    def run():
        out, lse = ops.causal_attention(q, k, v, 0.2)
        return out, lse, *ops.causal_attention_backward(out.cos(), q, k, v, out, lse, 0.2)

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = run()
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            assert all(torch.equal(a, b) for a, b in zip(expected, run(), strict=True)), count
    finally:
        torch.set_num_threads(threads)


def test_lse_carries_no_gradient_and_the_backward_cannot_be_differentiated():
    q, k, v = (t.requires_grad_() for t in qkv(1, 1, 1, 5, 4, torch.float32))
    out, lse = causal_attention(q, k, v)
    assert out.requires_grad
    assert not lse.requires_grad
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="causal_attention_backward"):
        dq.sum().backward()


def test_the_scale_is_one_over_the_root_of_the_head_size_unless_given():
    q, k, v = qkv(1, 1, 1, 7, 16, torch.float32)
    assert torch.equal(causal_attention(q, k, v)[0], causal_attention(q, k, v, 0.25)[0])
    assert not torch.equal(causal_attention(q, k, v)[0], causal_attention(q, k, v, 0.5)[0])


# ---- errors ----


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 4, 5, 8), (2, 3, 5, 8), (2, 3, 5, 8)), "q has 4 heads and k and v have 3; .* must divide"),
        (((2, 4, 5, 8), (2, 0, 5, 8), (2, 0, 5, 8)), "k and v have 0; .* must divide"),
        (((2, 4, 5, 8), (2, 4, 6, 8), (2, 4, 6, 8)), r"shapes \[2, 4, 5, 8\].*they must be \[B, H, S, D\]"),
        (((2, 4, 5, 8), (2, 4, 5, 8), (2, 4, 5, 9)), r"\[2, 4, 5, 9\]; they must be"),
        (((2, 4, 5, 8), (1, 4, 5, 8), (1, 4, 5, 8)), r"they must be"),
        (((4, 5, 8), (4, 5, 8), (4, 5, 8)), r"they must be"),
        (((1, 1, 5, 0), (1, 1, 5, 0), (1, 1, 5, 0)), "D at least 1"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes, message):
    with pytest.raises(ValueError, match=message):
        ops.causal_attention(*(torch.zeros(shape) for shape in shapes), 1.0)


def test_dtypes_that_do_not_fit_are_refused():
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(TypeError, match="q has dtype Float and v has BFloat16; convert one"):
        ops.causal_attention(q, q, q.bfloat16(), 1.0)
    with pytest.raises(TypeError, match="q has dtype Int; it must be float32"):
        ops.causal_attention(q.int(), q.int(), q.int(), 1.0)


def test_a_backward_that_does_not_fit_its_forward_is_refused():
    q = torch.zeros(1, 1, 2, 4)
    out, lse = ops.causal_attention(q, q, q, 1.0)
    backward = ops.causal_attention_backward
    with pytest.raises(ValueError, match=r"for q of shape \[1, 1, 2, 4\] both must be \[1, 2, 4\]"):
        backward(out[:, :1], q, q, q, out, lse, 1.0)
    with pytest.raises(ValueError, match=r"lse has shape \[1, 1, 1\].* must be \[1, 1, 2\] of Float"):
        backward(out, q, q, q, out, lse[:, :, :1], 1.0)
    with pytest.raises(ValueError, match="dtype Double; it must be"):
        backward(out, q, q, q, out, lse.double(), 1.0)
