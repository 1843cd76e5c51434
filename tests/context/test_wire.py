"""Keys and values that are rounded on their way round the ring: exact attention to the rounded ones."""

from __future__ import annotations

import pytest
import torch

from pyruntime import comm
from pyruntime.comm.wire import Wire
from pyruntime.context import ring_attention, take_shard
from tests.context.test_ring_attention import DIM, dense, inputs, joined
from tests.transports import take

SCALE = 0.3


def results(group, transport, whole, layout, wire):
    """This rank's out, dq, dk, dv; and the bytes that its forward pass read."""
    take(group, transport)
    q, k, v, grad = (take_shard(x, layout, group.size(), group.rank(), None) for x in whole)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    ring_attention(*leaves, group, layout=layout, scale=SCALE, wire=wire)  # makes room
    before = comm.bytes_read("cp")
    out = ring_attention(*leaves, group, layout=layout, scale=SCALE, wire=wire)
    taken = comm.bytes_read("cp") - before
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)], taken


@pytest.mark.parametrize("wire", ["bf16", "fp8"])
@pytest.mark.parametrize(
    ("world", "layout", "transport"),
    [(2, "zigzag", "symmetric_memory"), (3, "striped", "process_group"), (4, "zigzag", "process_group")],
)
def test_it_is_attention_to_rounded_keys_and_values(ranks, world, layout, transport, wire):
    seq = 2 * world * 7
    whole = inputs(seq, 4, 2, torch.float32)
    rows = Wire(wire, DIM, torch.float32)
    rounded = [whole[0], *(rows.unpacked(rows.packed(x)) for x in whole[1:3]), whole[3]]
    expected, plain = (dense(each, True, None, SCALE) for each in (rounded, whole))
    of_ranks = [found for found, _ in ranks.run(results, world, transport, whole, layout, wire)]
    for place, found in enumerate(joined(of_ranks, layout, seq, None)):
        torch.testing.assert_close(found.double(), expected[place], rtol=1e-4, atol=1e-5)
        assert not torch.allclose(found.double(), plain[place], rtol=1e-4, atol=1e-5)


def test_the_bytes_fall_as_the_values_do(ranks):
    whole = inputs(2 * 2 * 7, 4, 2, torch.float32)
    taken = {
        wire: [each for _, each in ranks.run(results, 2, "process_group", whole, "striped", wire)]
        for wire in ("same", "bf16", "fp8")
    }
    assert min(taken["same"]) > 0
    for same, bf16, fp8 in zip(*taken.values(), strict=True):
        assert bf16 / same == 1 / 2 and fp8 / same == (DIM + 1) / (4 * DIM)


def refused(group):
    x = torch.randn(1, 4, 2, 8)
    with pytest.raises(ValueError, match='wire="fp8" is only for variant="ring", not for "all_gather_kv"'):
        ring_attention(x, x, x, group, variant="all_gather_kv", wire="fp8")
    with pytest.raises(ValueError, match=r"rows are torch\.float64"):
        ring_attention(x.double(), x.double(), x.double(), group, wire="fp8")


def test_what_cannot_be_rounded_is_refused(ranks):
    ranks.run(refused, 2)
