"""Attention over a cut sequence by flash attention: its pieces are the mask, and their sum is the whole."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from pyruntime.context import flash
from pyruntime.context.flash import pieces_of
from pyruntime.context.mask import mask_of
from tests.context.test_layouts import visible
from tests.context.test_ring_attention import LAYOUTS, VARIANTS, dense, inputs, joined, own_results


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_pieces_are_what_queries_see(monkeypatch, ranks, layout, causal, window):
    monkeypatch.setattr(flash, "is_there", lambda q: True)
    share = 6
    expected, most = visible(ranks * share, causal, None, window)[0], 0
    for rank in range(ranks):
        for queries in (share, 4):
            mask = mask_of(layout, ranks * share, ranks, rank, causal, None, queries, window=window)
            for other in range(ranks):
                pieces = mask.of_rank(other).pieces(torch.empty(1, queries, 1, 8), share)
                assert pieces is not None
                most = max(most, len(pieces))
                seen = torch.zeros(queries, share, dtype=torch.int64)
                for each in pieces:
                    rows = seen[each.queries, each.keys]
                    assert not each.causal or rows.shape[0] == rows.shape[1]
                    rows += torch.ones_like(rows).tril() if each.causal else 1
                places = mask.positions
                assert torch.equal(seen, expected[places[rank][-queries:]][:, places[other]].long())
    assert most <= 3 or window is not None


def test_masks_of_many_pieces_and_of_different_sequences_are_left_to_others():
    begin, end = torch.zeros(1, 40, dtype=torch.int32), torch.arange(40, dtype=torch.int32)[None] * 3
    assert pieces_of(begin, end) is None
    assert pieces_of(begin.expand(2, -1), end.expand(2, -1)) is None
    assert pieces_of(begin[:, :0], end[:, :0]) == ()
    assert pieces_of(begin, begin) == ()


def _scores(q: Tensor, k: Tensor, is_causal: bool, scale: float) -> Tensor:
    scores = scale * q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(2, 3)
    if is_causal:
        assert scores.shape[2] == scores.shape[3]
        scores = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, float("-inf"))
    return scores


def _forward(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float) -> tuple[Tensor, ...]:
    """What torch's flash attention gives, of [B, H, S, d]."""
    scores = _scores(q, k, is_causal, scale)
    lse = scores.logsumexp(-1)
    out = (scores - lse[..., None]).exp() @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return out, lse, None, None, len(q), len(k), None, None, None


def _backward(grad, q, k, v, out, lse, _q, _k, queries, keys, dropout, is_causal, _s, _o, *, scale):
    assert (queries, keys, dropout) == (q.shape[2], k.shape[2], 0.0)
    assert lse.is_contiguous()
    shared = q.shape[1] // k.shape[1]
    p = (_scores(q, k, is_causal, scale) - lse[..., None]).exp()
    values = v.repeat_interleave(shared, 1)
    ds = p * (grad @ values.transpose(2, 3) - (grad * out).sum(-1, keepdim=True))
    dk, dv = ds.transpose(2, 3) @ q * scale, p.transpose(2, 3) @ grad
    dq = ds @ k.repeat_interleave(shared, 1) * scale
    return dq, *(each.unflatten(1, (-1, shared)).sum(2) for each in (dk, dv))


def results_by_flash(group, *arguments):
    """own_results, by flash attention as its definition is; and its calls."""
    forward, backward = mock.Mock(side_effect=_forward), mock.Mock(side_effect=_backward)
    with (
        mock.patch.object(flash, "is_there", lambda q: True),
        mock.patch.object(torch.ops.aten, "_scaled_dot_product_flash_attention", forward),
        mock.patch.object(torch.ops.aten, "_scaled_dot_product_flash_attention_backward", backward),
    ):
        return own_results(group, *arguments), (forward.call_count, backward.call_count)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_equals_attention_over_the_whole_sequence(ranks, world, variant, layout, causal):
    heads = 2 * world if variant == "ulysses" else 4
    whole, seq, scale = inputs(world * 12, heads, heads // 2, torch.float64), world * 12, 0.3
    found = ranks.run(
        results_by_flash, world, "symmetric_memory", whole, causal, layout, None, scale, variant
    )
    expected = dense(whole, causal, None, scale)
    for own, one in zip(joined([each for each, _ in found], layout, seq, None), expected, strict=True):
        torch.testing.assert_close(own, one, rtol=0, atol=1e-12)
    assert all(min(calls) > 0 for _, calls in found)
