"""Attention over a sequence that is cut over ranks equals attention over the whole of it."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
import torch
from torch import Tensor

import pyruntime
from pyruntime import comm
from pyruntime.comm import CommError
from pyruntime.context import positions, ring_attention, take_shard
from pyruntime.ops.attention import causal_attention
from tests.context.test_layouts import documents, visible
from tests.ranks import without_processes
from tests.transports import TRANSPORTS, take

BATCH, DIM = 2, 12
LAYOUTS = ("contiguous", "zigzag", "striped")
VARIANTS = ("ring", "all_gather_kv", "ulysses")


def inputs(seq: int, heads: int, groups: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """q, k, v and the gradient of the result, [B, S, heads, d]."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (heads, groups, groups, heads)
    return [
        torch.randn(BATCH, seq, n, DIM, generator=generator, dtype=torch.float64).to(dtype) for n in sizes
    ]


def dense(
    whole: list[Tensor], causal: bool, ids: Tensor | None, scale: float, window: int | None = None
) -> list[Tensor]:
    """out, dq, dk, dv in float64."""
    q, k, v, grad = (x.double() for x in whole)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    shared = q.shape[2] // k.shape[2]
    keys, values = (x.repeat_interleave(shared, dim=2) for x in (k, v))
    scores = scale * torch.einsum("bqhd,bkhd->bhqk", q, keys)
    seen = visible(q.shape[1], causal, None if ids is None else ids.view(-1, q.shape[1]), window)
    weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
    out = torch.einsum("bhqk,bkhd->bqhd", weights, values)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def own_results(group, transport, whole, causal, layout, ids, scale, variant, queries=None, window=None):
    """This rank's out, dq, dk and dv, twice over where they differ from call to call. queries: the last so
    many of its tokens; all by default."""
    take(group, transport)
    rank, size = group.rank(), group.size()
    q, k, v, grad = (take_shard(x, layout, size, rank, ids) for x in whole)
    q, grad = (x[:, -(queries or q.shape[1]) :] for x in (q, grad))
    runs = []
    for _ in range(2):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = ring_attention(
            *leaves, group, causal=causal, layout=layout, document_ids=ids, scale=scale, variant=variant,
            window=window,
        )  # fmt: skip
        runs.append([out.detach(), *torch.autograd.grad(out, leaves, grad)])
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))
    return runs[0]


def joined(results, layout: str, seq: int, ids: Tensor | None) -> list[Tensor]:
    order = positions(layout, seq, len(results), ids).flatten().argsort()
    return [torch.cat(parts, 1)[:, order] for parts in zip(*results, strict=True)]


def check(
    ranks, world, seq, heads=2, groups=1, *, transport="symmetric_memory", causal=True, layout="zigzag",
    ids=None, variant="ring", dtype=torch.float64, tolerance=1e-12, window=None,
):  # fmt: skip
    whole, scale = inputs(seq, heads, groups, dtype), 0.3
    arguments = (transport, whole, causal, layout, ids, scale, variant, None, window)
    results = ranks.run(own_results, world, *arguments)
    for found, expected in zip(
        joined(results, layout, seq, ids), dense(whole, causal, ids, scale, window), strict=True
    ):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [True, False])
def test_equals_dense_attention(ranks, world, layout, causal):
    check(ranks, world, 2 * world * 7, layout=layout, causal=causal)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.second_tier("4-process_group-ring")
def test_every_variant_over_every_transport(ranks, world, transport, variant):
    check(ranks, world, 2 * world * 5, 2 * world, world, transport=transport, variant=variant)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("world", "layout", "queries", "variant", "transport"),
    [
        (1, "striped", 3, "ring", "symmetric_memory"),
        (2, "zigzag", 7, "ring", "process_group"),
        (3, "striped", 5, "ring", "process_group"),
        (4, "striped", 1, "ring", "hierarchical"),
        (4, "contiguous", 9, "ring", "symmetric_memory"),
        (3, "zigzag", 7, "all_gather_kv", "symmetric_memory"),
        (2, "striped", 5, "all_gather_kv", "process_group"),
        (2, "zigzag", 7, "ulysses", "symmetric_memory"),
        (4, "striped", 3, "ulysses", "process_group"),
    ],
)
@pytest.mark.second_tier("4-striped-1-ring-hierarchical-True")
def test_queries_may_be_the_last_tokens_alone(ranks, world, layout, queries, variant, transport, causal):
    seq, scale = 14 * world, 0.3
    whole = inputs(seq, 2 * world, world, torch.float64)
    of_ranks = positions(layout, seq, world)[:, -queries:]
    last = of_ranks.flatten().sort().values
    grad = torch.zeros_like(whole[3])
    grad[:, last] = whole[3][:, last]
    arguments = (transport, whole, causal, layout, None, scale, variant, queries)
    results = ranks.run(own_results, world, *arguments)
    out, dq, dk, dv = dense([*whole[:3], grad], causal, None, scale)
    found_q, found_k = [result[:2] for result in results], [result[2:] for result in results]
    order = of_ranks.flatten().argsort()
    found = [torch.cat(parts, 1)[:, order] for parts in zip(*found_q, strict=True)]
    found += joined(found_k, layout, seq, None)
    for one, expected in zip(found, (out[:, last], dq[:, last], dk, dv), strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shared", [1, 2, 4, 8])
@pytest.mark.parametrize("variant", ["ring", "ulysses"])
def test_query_heads_share_key_heads(ranks, shared, variant):
    check(ranks, 2, 20, 2 * shared, 2, variant=variant)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("layout", [*LAYOUTS, "balanced", "placed"])
@pytest.mark.parametrize(("world", "variant"), [(3, "ring"), (2, "all_gather_kv"), (2, "ulysses")])
def test_documents_do_not_see_each_other(ranks, world, variant, layout, causal):
    seq = 2 * world * 11
    ids = documents(BATCH, seq, seed=5)
    check(ranks, world, seq, 4, 2, layout=layout, ids=ids, causal=causal, variant=variant)


@pytest.mark.parametrize("window", [1, 9, 1000])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("world", "variant"), [(3, "ring"), (4, "ring"), (2, "all_gather_kv"), (2, "ulysses")]
)
def test_a_query_sees_the_last_keys_of_its_window(ranks, world, variant, layout, window):
    seq = 2 * world * 11
    check(ranks, world, seq, 4, 2, layout=layout, variant=variant, window=window)
    check(
        ranks, world, seq, 4, 2, layout=layout, variant=variant, window=window,
        ids=documents(BATCH, seq, seed=5),
    )  # fmt: skip


def test_document_ids_may_be_of_one_row_for_all(ranks):
    check(ranks, 2, 24, ids=documents(1, 24, seed=2)[0])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_other_dtypes(ranks, dtype, tolerance, variant):
    check(ranks, 2, 40, 4, 2, dtype=dtype, tolerance=tolerance, variant=variant)


@pytest.mark.parametrize("world", [3, 4])
def test_a_sequence_of_one_token_for_each_rank(ranks, world):
    check(ranks, world, world, layout="striped")


@pytest.mark.parametrize(
    ("world", "transport"), [(3, "process_group"), (4, "hierarchical"), (5, "process_group")]
)
@pytest.mark.parametrize("documented", [False, True])
@pytest.mark.second_tier("False-5-process_group", "True-5-process_group")
def test_an_odd_number_of_tokens_for_each_rank(ranks, world, transport, documented):
    """One way has more of them than the other."""
    ids = documents(BATCH, 7 * world, seed=3) if documented else None
    check(ranks, world, 7 * world, transport=transport, layout="contiguous", ids=ids)


# -- numbers


def errors(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    return [float((f.double() - e).norm() / e.norm()) for f, e in zip(found, expected, strict=True)]


def test_bf16_errors_do_not_grow_with_the_ring(ranks):
    """The known failure of others: block outputs in bf16, so that errors add up round the ring."""
    seq, scale = 256, DIM**-0.5
    whole = inputs(seq, 2, 1, torch.bfloat16)
    expected = dense(whole, True, None, scale)
    leaves = [x.transpose(1, 2).detach().requires_grad_() for x in whole[:3]]
    out, _ = causal_attention(*leaves, scale)
    grads = torch.autograd.grad(out, leaves, whole[3].flatten(2))
    alone = errors([out.detach().view_as(whole[0]), *(g.transpose(1, 2) for g in grads)], expected)
    results = ranks.run(own_results, 8, "symmetric_memory", whole, True, "zigzag", None, scale, "ring")
    over_ranks = errors(joined(results, "zigzag", seq, None), expected)
    assert all(one <= 1.5 * other for one, other in zip(over_ranks, alone, strict=True)), (over_ranks, alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.second_tier("dtype0")
def test_extreme_scores_neither_overflow_nor_vanish(ranks, dtype):
    seq, scale = 48, 40.0
    whole = inputs(seq, 2, 2, dtype)
    whole[1][:, 5] *= 30  # scores of tens of thousands, in one rank's block
    results = ranks.run(own_results, 3, "symmetric_memory", whole, True, "zigzag", None, scale, "ring")
    found = joined(results, "zigzag", seq, None)
    assert all(x.isfinite().all() for x in found)
    torch.testing.assert_close(found[0].double(), dense(whole, True, None, scale)[0], rtol=0.03, atol=0.03)


def compiled_like_eager(group, whole, layout):
    q, k, v, _ = (take_shard(x, layout, group.size(), group.rank()) for x in whole)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def attend(q, k, v):
        return ring_attention(2 * q, k, v, group.group_name, layout=layout).sum()

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    expected = torch.autograd.grad(attend(*leaves), leaves)
    found = torch.autograd.grad(compiled(*leaves), leaves)
    return all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


def test_a_compiled_caller_gets_the_same(ranks):
    assert ranks.run(compiled_like_eager, 2, inputs(16, 2, 1, torch.float64), "zigzag") == [True, True]


def by_auto_and_by_ring(group, whole):
    q, k, v, _ = (take_shard(x, "zigzag", group.size(), group.rank()) for x in whole)
    return [ring_attention(q, k, v, group, variant=variant) for variant in ("auto", "ring")]


def test_auto_is_the_ring_bit_for_bit(ranks):
    for auto, ring in ranks.run(by_auto_and_by_ring, 2, inputs(32, 4, 2, torch.float32)):
        assert torch.equal(auto, ring)


# -- what does not fit


@pytest.mark.parametrize(
    ("changes", "kind", "sentence"),
    [
        ({"layout": "zigzag", "share": 5}, ValueError, "pad the sequence to 12 tokens"),
        ({"layout": "spiral"}, ValueError, "is none of contiguous, zigzag, striped, placed, balanced"),
        ({"variant": "tree"}, ValueError, "is none of ring, all_gather_kv, ulysses, auto"),
        ({"variant": "ulysses"}, ValueError, "2 ranks do not divide 1 key/value heads"),
        ({"groups": 2, "heads": 3}, ValueError, "must divide q's heads"),
        ({"queries": 5}, ValueError, "q must have as many tokens as k, or only 1 or more of the last"),
        ({"queries": 0}, ValueError, "q must have as many tokens as k, or only 1 or more of the last"),
        ({"layout": "balanced"}, ValueError, "pass document_ids"),
        (
            {"document_ids": torch.zeros(7, dtype=torch.long)},
            ValueError,
            r"must be integers \[2, 8\] or \[8\]",
        ),
        ({"dtype": torch.bfloat16}, TypeError, "cast them to one dtype"),
        ({"window": 0}, ValueError, "window=0 with causal=True: a window is 1 or more keys"),
        ({"window": 3, "causal": False}, ValueError, "window=3 with causal=False"),
    ],
)
def test_what_does_not_fit_is_said(ranks, changes, kind, sentence):
    raised = ranks.run(refused, 2, changes)
    assert all(isinstance(error, kind) for error in raised), raised
    assert all(re.search(sentence, str(error)) for error in raised), raised


def refused(group, changes):
    options = dict(changes)
    share, heads, groups = options.pop("share", 4), options.pop("heads", 2), options.pop("groups", 1)
    dtype = options.pop("dtype", torch.float32)
    q = torch.zeros(BATCH, options.pop("queries", share), heads, DIM)
    k = torch.zeros(BATCH, share, groups, DIM, dtype=dtype)
    try:
        ring_attention(q, k, k, group, **options)
    except (ValueError, TypeError) as error:
        return error
    return None


# -- faults


def late(group, whole, delay):
    q, k, v, grad = (take_shard(x, "zigzag", group.size(), group.rank()) for x in whole)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    if group.rank() == 1:
        time.sleep(delay)
    out = ring_attention(*leaves, group)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def test_a_late_rank_does_no_harm(ranks):
    whole = inputs(36, 2, 1, torch.float64)
    found = joined(ranks.run(late, 3, whole, 0.7), "zigzag", 36, None)
    for one, expected in zip(found, dense(whole, True, None, DIM**-0.5), strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-12, atol=1e-12)


def killed(group, in_backward):
    comm.set_deadline(group, 8.0)
    x = torch.randn(1, 64, 2, DIM, requires_grad=True)
    begin = time.monotonic()
    try:
        for step in range(1000):
            out = ring_attention(x, x, x, group)
            if step == 20 and group.rank() == 2:
                if in_backward:
                    x.register_hook(lambda _: None)
                    out.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
                else:
                    os.kill(os.getpid(), signal.SIGKILL)
            begin = time.monotonic()
            out.sum().backward()
    except CommError as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "", "", 0.0


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.second_tier("True")
def test_a_killed_rank_ends_all(ranks, in_backward):
    outcomes = ranks.launch(killed, 3, in_backward)
    for rank in (0, 1):
        name, message, seconds = outcomes[rank].value
        assert name == "PeerLost", (rank, message)
        assert "rank" in message and seconds < 5.0, (message, seconds)
    assert outcomes[2].exit_code == -signal.SIGKILL


def traffic(group, causal):
    take(group, "process_group")
    before = pyruntime.comm.traffic().get("cp")
    q = torch.randn(1, 32, 4, DIM)
    ring_attention(q, q[:, :, :2], q[:, :, :2], group, causal=causal)
    torch.distributed.barrier(group)
    after = pyruntime.comm.traffic()["cp"]
    return after.bytes_sent - (before.bytes_sent if before else 0)


def test_each_rank_sends_keys_and_values_of_all_but_one_rank(ranks):
    """Bytes in the arbiter's class of context parallelism: P - 1 times this rank's K and V."""
    for world in (2, 3, 4):
        own = 2 * 32 * 2 * DIM * 4
        for sent in ranks.run(traffic, world, False):
            assert sent == (world - 1) * own


def test_what_no_rank_further_on_sees_does_not_travel(ranks):
    """Causal, zigzag: the second half of a rank's tokens goes to the ranks before it alone."""
    for world in (2, 3, 4):
        half = 2 * 16 * 2 * DIM * 4
        assert sum(ranks.run(traffic, world, True)) == half * world * (world - 1) * 3 // 2


# -- ranks that do not agree, and the way back


def disagrees(group, variant, changes):
    comm.set_deadline(group, 3.0)
    take(group, "symmetric_memory")
    comm.close(group)
    options = {"variant": variant}
    shape = [2, 8, 4, DIM]
    if group.rank() == 1:
        options |= {name: value for name, value in changes.items() if name not in ("shape", "queries")}
        shape = changes.get("shape", shape)
    q = torch.randn(shape, dtype=torch.float64)
    queries = changes.get("queries", 0) if group.rank() == 1 else 0
    try:
        ring_attention(q[:, -queries:], q, q, group, **options)
    except ValueError as error:
        return str(error)
    except CommError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "changes",
    [
        {"layout": "striped"},
        {"causal": False},
        {"scale": 0.5},
        {"window": 5},
        {"document_ids": torch.arange(16) // 5},
        {"shape": [4, 4, 4, DIM]},
        {"shape": [2, 4, 8, DIM]},
        {"queries": 3},
    ],
    ids=str,
)
def test_ranks_that_disagree_are_told_so(ranks, variant, changes):
    told = ranks.run(disagrees, 2, variant, changes)
    assert all("disagree" in message.lower() for message in told), told
    assert ranks.run(all_well, 2) == [True] * 2
    assert ranks.run(all_well, 4) == [True] * 4  # the pool's other ranks have heard of the failure too


def all_well(group):
    comm.close(group)
    torch.distributed.barrier(group)
    comm.set_deadline(group, 60.0)
    x = torch.randn(1, 4, 2, DIM)
    return bool(ring_attention(x, x, x, group).isfinite().all())


def late_then_closed(group):
    comm.set_deadline(group, 1.0)
    x = torch.randn(1, 4, 2, DIM)
    ring_attention(x, x, x, group)
    message = ""
    try:
        if group.rank() == 1:
            time.sleep(3)
        for _ in range(20):
            ring_attention(x, x, x, group)
    except CommError as error:
        message = str(error)
    time.sleep(1)
    return message, all_well(group)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.second_tier("3", "4")
def test_a_group_that_failed_works_again_when_it_is_closed(ranks, world):
    outcomes = ranks.launch(late_then_closed, world)
    assert [outcome.value[1] for outcome in outcomes] == [True] * world, outcomes
    causes = {outcome.value[0].split(" reports: ")[-1] for outcome in outcomes}
    # All ranks round the ring are kept waiting within milliseconds; whose deadline ends first is named, and
    # with four it may be that of rank 3, which waits for rank 2, which waits for rank 1.
    awaited = "1" if world < 4 else "[0-3]"
    named = rf"rank \d waiting for rank {awaited} to .*not within the deadline of 1 s"
    assert any(re.search(named, without_processes(cause)) for cause in causes), causes


def refused_then_well(group):
    x = torch.ones(1, 4, 2, DIM, dtype=torch.int32)
    with pytest.raises(TypeError, match="use float32, bfloat16, float16 or float64"):
        ring_attention(x, x, x, group)
    y = torch.randn(1, 4, 2, DIM)
    return bool(ring_attention(y, y, y, group).isfinite().all())


def test_a_refusal_leaves_nothing_behind(ranks):
    assert ranks.run(refused_then_well, 3) == [True] * 3


def documents_change(group):
    ids = torch.zeros(16, dtype=torch.long)
    x = torch.randn(1, 8, 2, DIM, dtype=torch.float64)
    one = ring_attention(x, x, x, group, document_ids=ids)
    ids.numpy()[8:] = 1  # which torch does not see
    other = ring_attention(x, x, x, group, document_ids=ids)
    leaf = x.clone().requires_grad_()
    out = ring_attention(leaf, x, x, group, document_ids=ids)
    ids += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    return bool((one != other).any())


def test_documents_that_change_are_seen(ranks):
    assert any(ranks.run(documents_change, 2))


def checked(group, variant):
    q = torch.randn(1, 3, 2 * group.size(), DIM, dtype=torch.float64, requires_grad=True)
    k = torch.randn(1, 4, group.size(), DIM, dtype=torch.float64, requires_grad=True)
    arguments = (q, k, k, None, group.group_name, True, "zigzag", 0.3, variant, "same", 5)
    torch.library.opcheck(torch.ops.pyruntime.ring_attention.default, arguments)
    return True


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.second_tier(but=["ring"])
def test_is_what_torch_asks_of_an_op(ranks, variant):
    """One key head for each rank, where a transposed result would pass for contiguous, and fewer queries than
    keys."""
    assert ranks.run(checked, 2, variant) == [True, True]
