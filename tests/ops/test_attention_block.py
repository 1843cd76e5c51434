"""One block of attention against a dense float64 reference in plain torch, and what torch asks of an op."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from pyruntime.ops.attention import attention_block_, attention_block_backward_, causal_attention
from tests.ops.cases import cpu, dtypes, implementations, statistics_dtype

# Queries and keys: within a tile, over a block of queries, over several blocks of keys.
LENGTHS = [(1, 1), (1, 257), (3, 17), (17, 3), (65, 65), (65, 530), (257, 1), (257, 65)]
LENGTHS += [(257, 530), (530, 257), (530, 530)]
INFINITY = float("inf")


ops = torch.ops.pyruntime

# ---- helpers ----


def heads(batch: int, count: int, seq: int, dim: int, dtype: torch.dtype) -> Tensor:
    """[B, heads, S, D] over memory of tokens, as the rotary kernel leaves it."""
    return torch.randn(batch, seq, count, dim, dtype=torch.float64).to(dtype).transpose(1, 2)


def qkv(batch: int, groups: int, shared: int, queries: int, keys: int, dim: int, dtype: torch.dtype):
    lengths = ((groups * shared, queries), (groups, keys), (groups, keys))
    return tuple(heads(batch, count, seq, dim, dtype) for count, seq in lengths)


def nothing_seen(q: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse before the first block."""
    batch, count, seq, dim = q.shape
    dtype = statistics_dtype(q.dtype)
    out = torch.zeros(batch, seq, count, dim, dtype=dtype).transpose(1, 2)
    return out, torch.full((batch, count, seq), -INFINITY, dtype=dtype)


def zero_sums(*like: Tensor) -> tuple[Tensor, ...]:
    return tuple(
        torch.zeros(x.transpose(1, 2).shape, dtype=statistics_dtype(x.dtype)).transpose(1, 2) for x in like
    )


def int32(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.to(torch.int32) for t in tensors)


# Ranges (begin, end) [B, Sq].


def full(batch: int, queries: int, keys: int):
    """The same for every batch, which is expanded."""
    begin, end = torch.zeros(1, queries), torch.full((1, queries), keys)
    return tuple(t.expand(batch, queries) for t in int32(begin, end))


def prefix(batch: int, queries: int, keys: int):
    """Causal where the last query sees the last key."""
    end = (torch.arange(queries) + 1 + keys - queries).expand(batch, queries)
    return int32(torch.zeros(batch, queries), end)


def documents(batch: int, queries: int, keys: int):
    """Causal within documents of random lengths."""
    own = torch.arange(queries) * keys // queries
    starts = torch.rand(batch, keys) < 0.05
    starts[:, 0] = True
    begin = torch.where(starts, torch.arange(keys), 0).cummax(1).values[:, own]
    return int32(begin, (own + 1).expand(batch, queries))


def some_see_nothing(batch: int, queries: int, keys: int):
    """Runs of queries that see nothing, longer and shorter than a tile; the others see all keys."""
    see = (torch.rand(batch, queries) < 0.5) & (torch.arange(queries) % 100 < 60)
    return int32(
        torch.full((batch, queries), keys // 2), torch.where(see, keys, torch.randint(0, keys // 2 + 1, ()))
    )


def scattered(batch: int, queries: int, keys: int):
    """Random ranges in no order, partly empty and partly beyond the keys there are."""
    a, b = (torch.randint(-3, keys + 4, (batch, queries)) for _ in range(2))
    return int32(a, torch.where(torch.rand(batch, queries) < 0.8, torch.maximum(a, b), b))


RANGES = [full, prefix, documents, some_see_nothing, scattered]


def seen(begin: Tensor, end: Tensor, keys: int) -> Tensor:
    """[B, 1, Sq, Sk], True where query i sees key j."""
    key = torch.arange(keys)
    return ((begin[..., None] <= key) & (key < end[..., None]))[:, None]


def reference(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """out [B, H, Sq, D] and lse [B, H, Sq], 0 and -inf for a query that sees nothing."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = (scale * q @ k.transpose(2, 3)).masked_fill(~visible, -INFINITY)
    lse = scores.logsumexp(-1)
    p = (scores - lse.detach().masked_fill(lse == -INFINITY, 0)[..., None]).exp()
    return (p / p.sum(-1, keepdim=True).clamp_min(1e-300)) @ v, lse


def wide(*tensors: Tensor) -> tuple[Tensor, ...]:
    """float64 leaves with the same values."""
    return tuple(t.detach().double().requires_grad_() for t in tensors)


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype, parts: float = 0.0) -> None:
    """`found` is `expected` but for a few roundings to `dtype`, that of the inputs, and sums over the keys.

    `parts` are what `expected` is a sum of, where they may cancel.
    """
    assert found.dtype == statistics_dtype(dtype)
    assert found.shape == expected.shape
    assert not found.isnan().any()
    hidden = expected == -INFINITY
    assert torch.equal(found == -INFINITY, hidden)
    error = (found.double() - expected).masked_fill(hidden, 0).abs()
    if error.numel() == 0:
        return
    scale = max(parts, expected.masked_fill(hidden, 0).abs().max().item())
    bound = torch.finfo(dtype).eps + torch.finfo(statistics_dtype(dtype)).eps * 530**0.5
    assert error.max() <= 8 * bound * scale
    assert error.square().mean().sqrt() <= 2 * bound * scale


def check_against_float64(run, q, k, v, begin, end, scale):
    dtype = q.dtype
    inputs = wide(q, k, v)
    expected_out, expected_lse = reference(*inputs, seen(begin, end, k.shape[2]), scale)
    out, lse = nothing_seen(q)
    run(ops.attention_block_, q, k, v, begin, end, scale, out, lse)
    assert_close(out, expected_out.detach(), dtype)
    assert_close(lse, expected_lse.detach(), statistics_dtype(dtype), parts=1.0)

    grad = heads(*q.shape, dtype)
    expected = torch.autograd.grad(expected_out, inputs, grad.double())
    delta = (grad.to(out.dtype) * out).sum(-1)
    found = zero_sums(q, k, v)
    run(ops.attention_block_backward_, grad, q, k, v, begin, end, delta, lse, scale, *found)
    largest = [x.abs().max().item() if x.numel() else 0.0 for x in (q, k, v, grad)]
    parts = scale * largest[3] * largest[2]
    for one, other, size in zip(
        found, expected, (parts * largest[1], parts * largest[0], largest[3]), strict=True
    ):
        assert_close(one, other, dtype, parts=size)


def attend_blocks(run, q, k, v, begin, end, scale, cuts):
    """Forward and backward block by block; block i has the keys cuts[i] .. cuts[i + 1].

    The gradient of out is cos(out).
    """
    spans = list(pairwise(cuts))
    blocks = [(k[:, :, a:b], v[:, :, a:b], *int32(begin - a, end - a)) for a, b in spans]
    out, lse = nothing_seen(q)
    for block in blocks:
        run(ops.attention_block_, q, *block, scale, out, lse)
    grad = out.cos().to(q.dtype)
    delta = (grad.to(out.dtype) * out).sum(-1)
    dq, dk, dv = zero_sums(q, k, v)
    for (a, b), block in zip(spans, blocks, strict=True):
        sums = (dq, dk[:, :, a:b], dv[:, :, a:b])
        run(ops.attention_block_backward_, grad, q, *block, delta, lse, scale, *sums)
    return out, lse, grad, dq, dk, dv


# ---- numbers ----


@implementations
@dtypes
@pytest.mark.parametrize("queries, keys", LENGTHS)
@pytest.mark.second_tier(but=["1-1-float32-cpu"])
def test_out_lse_and_gradients_match_float64(run, dtype, queries, keys):
    for ranges in RANGES:
        inputs = qkv(2, 1, 2, queries, keys, 24, dtype)
        check_against_float64(run, *inputs, *ranges(2, queries, keys), 24**-0.5)


@implementations
@dtypes
@pytest.mark.parametrize("shared", [1, 2, 4, 8])
@pytest.mark.parametrize("dim", [1, 5, 80])
def test_any_number_of_query_heads_share_a_key_head(run, dtype, shared, dim):
    inputs = qkv(2, 2, shared, 70, 90, dim, dtype)
    check_against_float64(run, *inputs, *documents(2, 70, 90), 0.3)


@implementations
@dtypes
@pytest.mark.parametrize("ranges", RANGES)
def test_blocks_in_sequence_are_one_attention(run, dtype, ranges):
    q, k, v = qkv(2, 2, 2, 150, 400, 16, dtype)
    begin, end = ranges(2, 150, 400)
    inputs = wide(q, k, v)
    expected_out, expected_lse = reference(*inputs, seen(begin, end, 400), 0.25)

    def root_mean_square_errors(cuts):
        out, lse, grad, *gradients = attend_blocks(run, q, k, v, begin, end, 0.25, cuts)
        assert_close(out, expected_out.detach(), dtype)
        assert_close(lse, expected_lse.detach(), statistics_dtype(dtype), parts=1.0)
        expected = torch.autograd.grad(expected_out, inputs, grad.double(), retain_graph=True)
        pairs = zip((out, *gradients), (expected_out, *expected), strict=True)
        return torch.stack([(found.double() - exact).square().mean().sqrt() for found, exact in pairs])

    # Nothing is rounded to bfloat16 between blocks: the error is that of one call over all keys.
    one_call = root_mean_square_errors([0, 400])
    blocks = root_mean_square_errors([0, 100, 100, 163, 290, 400])
    assert (blocks <= 1.2 * one_call + 8 * torch.finfo(statistics_dtype(dtype)).eps).all()


@dtypes
def test_the_causal_op_is_the_block_that_begins_at_the_first_key(dtype):
    q, k, v = qkv(2, 2, 2, 300, 300, 20, dtype)
    expected_out, expected_lse = causal_attention(q, k, v, 0.2)
    out, lse = nothing_seen(q)
    attention_block_(q, k, v, *prefix(2, 300, 300), out, lse, 0.2)
    assert torch.equal(out.transpose(1, 2).flatten(2).to(dtype), expected_out)
    assert torch.equal(lse, expected_lse)


@implementations
@dtypes
@pytest.mark.parametrize("signs", [(1, 0), (0, 1), (-1, 0), (0, -1), (1, -1), (-1, 1)])
def test_scores_far_apart_from_block_to_block_neither_overflow_nor_vanish(run, dtype, signs):
    q, k, v = qkv(1, 1, 2, 40, 80, 8, dtype)
    # Scores of about 1e4, 1 or -1e4 by the block.
    q[..., 0] = 64
    for block, sign in enumerate(signs):
        k[:, :, 40 * block : 40 * block + 40, 0] = sign * 160
    begin, end = full(1, 40, 80)
    out, lse, grad, *gradients = attend_blocks(run, q, k, v, begin, end, 1.0, [0, 40, 80])
    inputs = wide(q, k, v)
    expected_out, expected_lse = reference(*inputs, seen(begin, end, 80), 1.0)
    assert (expected_lse.abs().max() > 9000) == (max(signs) > 0)
    torch.testing.assert_close(lse.double(), expected_lse.detach(), rtol=1e-6, atol=1e-3)
    # Half the distance of neighbouring floats at these scores is what a probability may be wrong by.
    torch.testing.assert_close(out.double(), expected_out.detach(), rtol=2e-2, atol=2e-2)
    expected = torch.autograd.grad(expected_out, inputs, grad.double())
    # dq and dk are sums of dS, of which each part may be wrong by what a probability is, with k and q.
    largest = (
        v.abs().max() * k.abs().amax((0, 1, 2)),
        v.abs().max() * q.abs().amax((0, 1, 2)),
        torch.ones(8),
    )
    for one, other, size in zip(gradients, expected, largest, strict=True):
        assert ((one.double() - other).abs() <= 2e-2 * (other.abs() + size.double())).all()


@implementations
@dtypes
def test_queries_that_see_nothing_stay_as_they_are(run, dtype):
    q, k, v = qkv(1, 2, 1, 40, 50, 8, dtype)
    begin, end = full(1, 40, 50)
    end = end.clone()
    end[:, 5:29] = 0  # whole tiles and parts of tiles
    out, lse = nothing_seen(q)
    run(ops.attention_block_, q, k, v, begin, end, 1.0, out, lse)
    assert (lse[:, :, 5:29] == -INFINITY).all()
    assert (out[:, :, 5:29] == 0).all()

    run(ops.attention_block_, q, k, v, *full(1, 40, 50), 1.0, out, lse)
    before = out.clone(), lse.clone()
    run(ops.attention_block_, q, k + 1, v, begin, end, 1.0, out, lse)
    assert torch.equal(out[:, :, 5:29], before[0][:, :, 5:29])
    assert torch.equal(lse[:, :, 5:29], before[1][:, :, 5:29])
    assert not torch.equal(lse, before[1])


@implementations
@dtypes
def test_the_backward_adds_and_leaves_out_queries_that_saw_nothing(run, dtype):
    q, k, v = qkv(1, 2, 2, 40, 50, 8, dtype)
    ranges = full(1, 40, 50)
    out, lse = nothing_seen(q)
    run(ops.attention_block_, q, k, v, *ranges, 0.3, out, lse)
    grad = torch.ones_like(q)
    delta = out.sum(-1)
    unseen = torch.arange(40) % 3 == 0
    lse[:, :, unseen] = -INFINITY
    once, twice = zero_sums(q, k, v), zero_sums(q, k, v)
    for count, sums in ((1, once), (2, twice)):
        for _ in range(count):
            run(ops.attention_block_backward_, grad, q, k, v, *ranges, delta, lse, 0.3, *sums)
    assert (once[0][:, :, unseen] == 0).all()
    for one, two in zip(once, twice, strict=True):
        assert one.abs().sum() > 0
        torch.testing.assert_close(two, 2 * one)

    kept, hidden_end = zero_sums(q, k, v), ranges[1].masked_fill(unseen, 0)
    run(ops.attention_block_backward_, grad, q, k, v, ranges[0], hidden_end, delta, lse, 0.3, *kept)
    assert all(torch.equal(a, b) for a, b in zip(once, kept, strict=True))


@dtypes
def test_keys_that_nobody_sees_are_not_read(dtype):
    q, k, v = qkv(1, 2, 2, 100, 200, 8, dtype)
    k[:, :, :33], v[:, :, 150:] = float("nan"), float("nan")
    k[:, :, 150:], v[:, :, :33] = float("nan"), float("nan")
    begin, end = full(1, 100, 200)
    begin, end = begin + 33, end - 50
    out, lse = nothing_seen(q)
    ops.attention_block_(q, k, v, begin, end, 0.5, out, lse)
    sums = zero_sums(q, k, v)
    ops.attention_block_backward_(torch.ones_like(q), q, k, v, begin, end, out.sum(-1), lse, 0.5, *sums)
    assert all(t.isfinite().all() for t in (out, lse, *sums))
    assert (sums[1][:, :, :33] == 0).all()
    assert (sums[2][:, :, 150:] == 0).all()


@implementations
@dtypes
def test_tensors_may_have_any_strides(run, dtype):
    q, k, v = qkv(2, 2, 2, 66, 50, 18, dtype)
    begin, end = documents(2, 66, 50)

    def attend(layout, q, k, v, begin, end):
        out, lse = nothing_seen(q)
        out = layout(out)
        run(ops.attention_block_, q, k, v, begin, end, 0.2, out, lse)
        sums = tuple(layout(t) for t in zero_sums(q, k, v))
        grad = v.transpose(2, 3).contiguous().transpose(2, 3).cos().repeat(1, 2, 2, 1)[:, :, : q.shape[2]]
        run(ops.attention_block_backward_, grad, q, k, v, begin, end, out.sum(-1), lse, 0.2, *sums)
        return out, lse, *sums

    spread = torch.empty(*q.shape[:-1], 36, dtype=dtype)[..., ::2].copy_(q)
    columns = v.transpose(2, 3).contiguous().transpose(2, 3)
    wide_ranges = torch.stack([begin, end], dim=-1)
    expected = attend(lambda t: t, q, k, v, begin, end)
    found = attend(torch.Tensor.contiguous, spread, k.contiguous(), columns, *wide_ranges.unbind(-1))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@implementations
@pytest.mark.parametrize("queries, keys", [(0, 5), (5, 0), (0, 0)])
def test_nothing_in_nothing_changes(run, queries, keys):
    q, k, v = qkv(2, 2, 1, queries, keys, 8, torch.float32)
    ranges = full(2, queries, keys)
    out, lse = nothing_seen(q)
    run(ops.attention_block_, q, k, v, *ranges, 1.0, out, lse)
    sums = zero_sums(q, k, v)
    run(ops.attention_block_backward_, q, q, k, v, *ranges, lse, lse, 1.0, *sums)
    assert (lse == -INFINITY).all()
    assert all((t == 0).all() for t in (out, *sums))


# ---- what autograd, the compiler and a user of several threads rely on ----


def arguments(dtype: torch.dtype, queries: int = 9, keys: int = 11, dim: int = 6):
    """Of attention_block_ and of attention_block_backward_, after a first block."""
    q, k, v = qkv(2, 2, 2, queries, keys, dim, dtype)
    begin, end = documents(2, queries, keys)
    out, lse = nothing_seen(q)
    ops.attention_block_(q, k, v, begin, end, 0.4, out, lse)
    forward = (q, k, v, begin, end, 0.4, out, lse)
    backward = (out.cos().to(dtype), q, k, v, begin, end, out.sum(-1), lse.clone(), 0.4, *zero_sums(q, k, v))
    return forward, backward


@dtypes
@pytest.mark.second_tier(but=["bfloat16"])
def test_opcheck(dtype):
    forward, backward = arguments(dtype)
    torch.library.opcheck(ops.attention_block_.default, forward)
    torch.library.opcheck(ops.attention_block_backward_.default, backward)


def test_compiles_as_one_graph():
    def layer(q, k, v, begin, end, out, lse):
        out, lse = out.clone(), lse.clone()
        attention_block_(q * 1.5, k, v, begin, end, out, lse, 0.4)
        sums = [torch.zeros_like(t) for t in (q, k, v)]
        attention_block_backward_(q, q * 1.5, k, v, begin, end, out.sum(-1), lse, *sums, 0.4)
        return out.sin(), lse, *sums

    q, k, v, begin, end, _, out, lse = arguments(torch.float32)[0]
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    args = (q, k, v, begin, end, out, lse)
    assert all(torch.equal(a, b) for a, b in zip(layer(*args), compiled(*args), strict=True))


@dtypes
def test_results_are_bitwise_the_same_again_and_with_more_threads(dtype):
    q, k, v = qkv(2, 3, 2, 150, 170, 20, dtype)
    ranges = scattered(2, 150, 170)

    def run():
        return attend_blocks(cpu, q, k, v, *ranges, 0.2, [0, 60, 170])

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = run()
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            assert all(torch.equal(a, b) for a, b in zip(expected, run(), strict=True)), count
    finally:
        torch.set_num_threads(threads)


def test_neither_op_can_be_differentiated():
    for op, place, args in zip(
        (ops.attention_block_, ops.attention_block_backward_), (0, 1), arguments(torch.float32), strict=True
    ):
        args = replaced(args, place, args[place].clone().requires_grad_())
        with pytest.raises(
            RuntimeError, match=f"{op._qualified_op_name.split('::')[1]}: q requires a gradient"
        ):
            op(*args)
        with torch.no_grad():
            op(*args)


@implementations
def test_autograd_learns_of_what_is_written(run):
    for op, args, written in zip(
        (ops.attention_block_, ops.attention_block_backward_), arguments(torch.float32), (2, 3), strict=True
    ):
        versions = [t._version for t in args[-written:]]
        run(op, *args)
        assert all(t._version > old for t, old in zip(args[-written:], versions, strict=True))


# ---- errors ----


def replaced(args: tuple, place: int, value) -> tuple:
    return (*args[:place], value, *args[place + 1 :])


FORWARD_ERRORS = [  # place, what becomes of the argument there, error, message
    (0, lambda q: q[:, :3], ValueError, "attention_block_: q has 3 heads and k and v have 2; .* must divide"),
    (1, lambda k: k[:, :, :5], ValueError, r"they must be \[B, H, Sq, D\], \[B, Hkv, Sk, D\]"),
    (0, lambda q: q[..., :5], ValueError, r"they must be \[B, H, Sq, D\]"),
    (0, lambda q: q.bfloat16(), TypeError, "q has dtype BFloat16 and k has Float; convert one"),
    (3, lambda begin: begin.long(), TypeError, r"begin and end have dtypes Long and Int; both must be Int"),
    (
        4,
        lambda end: end[:, :8],
        ValueError,
        r"shapes \[2, 9\] and \[2, 8\]; .* both must be \[B, Sq\] = \[2, 9\]",
    ),
    (3, lambda begin: begin[0], ValueError, r"begin and end have shapes \[9\]"),
    (6, lambda out: out.bfloat16(), TypeError, "out has dtype BFloat16; it must be Float"),
    (6, lambda out: out.flatten(2), ValueError, r"out has shape \[2, 4, 54\]; it must be \[2, 4, 9, 6\]"),
    (6, lambda out: out.mT.contiguous().mT, ValueError, "out has strides .* the last must be 1"),
    (6, lambda out: out[:, :1].expand_as(out), ValueError, "out has strides .* none may be 0"),
    (7, lambda lse: lse.double(), TypeError, "lse has dtype Double; it must be Float"),
    (7, lambda lse: lse[0], ValueError, r"lse has shape \[4, 9\]; it must be \[2, 4, 9\]"),
    (7, lambda lse: lse.mT.contiguous().mT, ValueError, "lse has strides .* must be contiguous"),
]

BACKWARD_ERRORS = [
    (0, lambda grad: grad.double(), TypeError, "grad_out has dtype Double; it must be Float"),
    (0, lambda grad: grad.flatten(2), ValueError, r"grad_out has shape .* it must be \[2, 4, 9, 6\]"),
    (1, lambda q: q[:, :3], ValueError, "attention_block_backward_: q has 3 heads"),
    (5, lambda end: end.long(), TypeError, "begin and end have dtypes Int and Long"),
    (6, lambda delta: delta[0], ValueError, r"delta has shape \[4, 9\]; it must be \[2, 4, 9\]"),
    (7, lambda lse: lse.half(), TypeError, "lse has dtype Half; it must be Float"),
    (9, lambda dq: dq.bfloat16(), TypeError, "dq has dtype BFloat16; it must be Float"),
    (10, lambda dk: dk[:, :, :3], ValueError, r"dk has shape .* it must be \[2, 2, 11, 6\]"),
    (11, lambda dv: dv.mT.contiguous().mT, ValueError, "dv has strides .* the last must be 1"),
]


@implementations
@pytest.mark.parametrize(("place", "change", "error", "message"), FORWARD_ERRORS)
def test_arguments_that_do_not_fit_are_refused(run, place, change, error, message):
    args, _ = arguments(torch.float32)
    with pytest.raises(error, match=message):
        run(ops.attention_block_, *replaced(args, place, change(args[place])))


@implementations
@pytest.mark.parametrize(("place", "change", "error", "message"), BACKWARD_ERRORS)
def test_arguments_of_the_backward_that_do_not_fit_are_refused(run, place, change, error, message):
    _, args = arguments(torch.float32)
    with pytest.raises(error, match=message):
        run(ops.attention_block_backward_, *replaced(args, place, change(args[place])))
