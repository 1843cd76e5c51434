"""The rotary embedding of Q, K and V against float64 references in plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyruntime.ops import layers
from tests.ops.cases import (
    assert_close,
    dtypes,
    implementations,
    randn,
    rotary_tables,
    statistics_dtype,
    wide,
)

ops = torch.ops.pyruntime


def reference_rope(qkv: Tensor, cos: Tensor, sin: Tensor, batch: int, seq: int, heads: int, kv_heads: int):
    def rotate(x):
        a, b = x.chunk(2, -1)
        return x * cos[:seq] + torch.cat((-b, a), -1) * sin[:seq]

    q, k, v = qkv.view(batch, seq, heads + 2 * kv_heads, cos.shape[1]).split(
        (heads, kv_heads, kv_heads), dim=2
    )
    return rotate(q.transpose(1, 2)), rotate(k.transpose(1, 2)), v.transpose(1, 2)


ROPE_SHAPES = [  # batch, seq, heads, kv heads, head dim
    (2, 5, 4, 2, 32),
    (1, 7, 3, 1, 64),
    (1, 3, 2, 2, 128),
    (2, 3, 3, 1, 2),
    (3, 4, 1, 1, 10),
    (0, 4, 2, 1, 32),
]


@implementations
@dtypes
@pytest.mark.parametrize("batch,seq,heads,kv_heads,head_dim", ROPE_SHAPES)
def test_rope_and_its_gradient_match_float64(run, dtype, batch, seq, heads, kv_heads, head_dim):
    qkv = randn(batch * seq, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    cos, sin = rotary_tables(seq + 2, head_dim, statistics_dtype(dtype))
    sizes = (batch, seq, heads, kv_heads)
    parts = run(ops.apply_rope_qkv, qkv, cos, sin, *sizes)
    (qkv64,) = wide(qkv)
    expected = reference_rope(qkv64, cos.double(), sin.double(), *sizes)
    for found, reference in zip(parts, expected, strict=True):
        assert_close(found, reference, dtype)

    # gradients as attention may lay them out: contiguous, transposed, and with strides in the last dimension
    grads = [randn(*part.shape, dtype=dtype) for part in parts]
    grads[1] = grads[1].transpose(1, 2).contiguous().transpose(1, 2)
    grads[2] = grads[2].transpose(2, 3).contiguous().transpose(2, 3)
    (expected_grad,) = torch.autograd.grad(expected, qkv64, [g.double() for g in grads])
    assert_close(run(ops.apply_rope_qkv_backward, *grads, cos, sin), expected_grad, dtype)


def test_rope_reads_rows_of_a_wider_matrix_in_place():
    cos, sin = rotary_tables(4, 32, torch.float32)
    whole = randn(8, 4 * 32 + 5, dtype=torch.float32)
    found = layers.apply_rope_qkv(whole[:, 5:], cos, sin, 2, 4, 2, 1)
    expected = layers.apply_rope_qkv(whole[:, 5:].contiguous(), cos, sin, 2, 4, 2, 1)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_rope_tables_need_not_repeat_their_halves():
    cos, sin = randn(3, 8), randn(3, 8)
    qkv = randn(3, 4 * 8, grad=True)
    assert torch.autograd.gradcheck(lambda t: layers.apply_rope_qkv(t, cos, sin, 1, 3, 2, 1), qkv)


@dtypes
def test_rope_in_place_gives_the_same_and_its_gradient(dtype):
    cos, sin = rotary_tables(4, 32, statistics_dtype(dtype))
    leaf = randn(8, 4 * 32, dtype=dtype, grad=True)
    made = leaf * 1
    values = made[:, 3 * 32 :].clone()
    found = layers.apply_rope_qkv(made, cos, sin, 2, 4, 2, 1, overwrite_qkv=True)
    expected = layers.apply_rope_qkv(leaf, cos, sin, 2, 4, 2, 1)
    addresses = [made.data_ptr() + head * 32 * made.element_size() for head in (0, 2, 3)]
    assert [part.data_ptr() for part in found] == addresses
    assert torch.equal(made[:, 3 * 32 :], values)
    grads = [randn(*part.shape, dtype=dtype) for part in found]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    (mine,) = torch.autograd.grad(found, leaf, grads)
    (theirs,) = torch.autograd.grad(expected, leaf, grads)
    assert torch.equal(mine, theirs)


@implementations
def test_a_rotation_in_place_is_that_of_rope(run):
    cos, sin = rotary_tables(3, 10, torch.float32)
    rotated = randn(6, 4 * 10, dtype=torch.bfloat16)
    expected = run(ops.apply_rope_qkv, rotated, cos, sin, 2, 3, 2, 1)
    run(ops.rotate_qkv_, rotated, cos, sin, 2, 3, 2, 1)
    fused = torch.cat([part.transpose(1, 2) for part in expected], 2).reshape(6, 4 * 10)
    assert torch.equal(rotated, fused)


def test_a_backward_that_had_saved_what_was_rotated_in_place_is_refused():
    cos, sin = rotary_tables(4, 8, torch.float32)
    made = randn(4, 3 * 8, dtype=torch.float32, grad=True) * 1
    squares = made.square()  # saves it
    layers.apply_rope_qkv(made, cos, sin, 1, 4, 1, 1, overwrite_qkv=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.sum().backward()
