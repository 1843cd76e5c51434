"""Attention against a plain reference in fp64, at ragged lengths."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyruntime.llama.attention import causal_attention


def reference(q, k, v):
    """In fp64, with keys and values repeated and the whole mask written out."""
    q, k, v = q.double(), k.double(), v.double()
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(2, 3) / q.shape[3] ** 0.5
    hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu(scores.shape[3] - scores.shape[2] + 1)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v


def heads(batch, heads, seq, dim, dtype=torch.float32):
    """As the rotary kernel leaves them: [B, H, S, d] over memory of tokens."""
    return torch.randn(batch, seq, heads, dim, dtype=dtype).transpose(1, 2).requires_grad_()


@given(
    batch=st.integers(1, 3),
    groups=st.integers(1, 3),
    shared=st.integers(1, 3),
    seq=st.integers(1, 300),
    dim=st.sampled_from([2, 8, 20]),
)
def test_attention_and_its_gradients(batch, groups, shared, seq, dim):
    q, k, v = (
        heads(batch, groups * shared, seq, dim),
        heads(batch, groups, seq, dim),
        heads(batch, groups, seq, dim),
    )
    out, wanted = causal_attention(q, k, v), reference(q, k, v)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)
    d_out = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), d_out)
    for grad, exact in zip(found, torch.autograd.grad(wanted, (q, k, v), d_out.double()), strict=True):
        torch.testing.assert_close(grad, exact, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_is_as_exact_as_torchs_in_half_precision(dtype):
    q, k, v = heads(2, 6, 150, 16, dtype), heads(2, 3, 150, 16, dtype), heads(2, 3, 150, 16, dtype)
    d_out = torch.randn(2, 6, 150, 16, dtype=dtype)

    def errors(attention):
        out = attention(q, k, v)
        wanted = reference(q, k, v)
        found = (out, *torch.autograd.grad(out, (q, k, v), d_out))
        exact = (wanted, *torch.autograd.grad(wanted, (q, k, v), d_out.double()))
        return [
            ((a - b).double().norm() / b.double().norm()).item() for a, b in zip(found, exact, strict=True)
        ]

    def torchs(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    for ours, theirs in zip(errors(causal_attention), errors(torchs), strict=True):
        assert ours < 1.1 * theirs


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 9), (4, 9), (70, 70), (1100, 1100)])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.second_tier("False-1100-1100")
def test_queries_see_what_came_before_them(queries, keys, training):
    q, k, v = heads(2, 4, queries, 8), heads(2, 2, keys, 8), heads(2, 2, keys, 8)
    with torch.set_grad_enabled(training):
        out = causal_attention(q, k, v)
    torch.testing.assert_close(out.double(), reference(q, k, v), rtol=1e-5, atol=1e-5)
    assert out.requires_grad == training


def test_the_output_is_tokens_in_memory():
    out = causal_attention(heads(2, 4, 5, 8), heads(2, 2, 5, 8), heads(2, 2, 5, 8))
    assert out.transpose(1, 2).is_contiguous()  # so that the output projection reads it without a copy
