"""The fused layer kernels against float64 references in plain torch, and what torch asks of an op."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pyruntime.ops import layers

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
WIDTHS = [1, 7, 33, 1000]
ROWS = [0, 1, 5, 130]  # 130 rows: more than one block of the weight gradient
EPS = 1e-5

ops = torch.ops.pyruntime

# ---- helpers ----


def cpu(op, *args, **kwargs):
    """The kernel that tensors on the CPU get."""
    return op(*args, **kwargs)


def composite(op, *args, **kwargs):
    """The composite that every other device gets, here run on CPU tensors."""
    other_device = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    return op.default.redispatch(other_device, *args, **kwargs)


implementations = pytest.mark.parametrize("run", [cpu, composite])
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def randn(*shape: int, dtype: torch.dtype = torch.float64, grad: bool = False) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_(grad)


def wide(*tensors: Tensor) -> tuple[Tensor, ...]:
    """float64 leaves with the same values."""
    return tuple(t.detach().double().requires_grad_(t.is_floating_point()) for t in tensors)


def assert_close(
    found: Tensor, expected: Tensor, dtype: torch.dtype, terms: int = 1, parts: Tensor | None = None
) -> None:
    """`found` is `expected` but for rounding to `dtype` and float32 (float64) arithmetic over `terms` terms.

    `parts` are what `expected` is a difference of, where they may cancel.
    """
    arithmetic = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    scale = max((t.abs().max().item() for t in (expected, parts) if t is not None and t.numel()), default=0.0)
    rounding = torch.finfo(dtype).eps
    tiny = torch.finfo(dtype).smallest_normal if dtype == torch.float16 else 0.0
    torch.testing.assert_close(
        found.double(),
        expected,
        rtol=rounding + 8 * arithmetic,
        atol=8 * arithmetic * scale * max(1, terms) ** 0.5 + tiny,
    )
    assert found.dtype == dtype


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def reference_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def reference_swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return gate * torch.sigmoid(gate) * up


def rotary_tables(seq: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    frequencies = 100.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(seq, dtype=torch.float64), frequencies)
    angles = torch.cat((angles, angles), dim=1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def reference_rope(qkv: Tensor, cos: Tensor, sin: Tensor, batch: int, seq: int, heads: int, kv_heads: int):
    def rotate(x):
        a, b = x.chunk(2, -1)
        return x * cos[:seq] + torch.cat((-b, a), -1) * sin[:seq]

    q, k, v = qkv.view(batch, seq, heads + 2 * kv_heads, cos.shape[1]).split(
        (heads, kv_heads, kv_heads), dim=2
    )
    return rotate(q.transpose(1, 2)), rotate(k.transpose(1, 2)), v.transpose(1, 2)


# ---- RMSNorm ----


@implementations
@dtypes
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", ROWS)
def test_rms_norm_and_its_gradients_match_float64(run, dtype, width, rows):
    x, weight, grad = (
        randn(rows, width, dtype=dtype),
        randn(width, dtype=dtype),
        randn(rows, width, dtype=dtype),
    )
    y, rstd = run(ops.rms_norm, x, weight, EPS)
    dx, dweight = run(ops.rms_norm_backward, grad, x, weight, rstd, None)

    x64, weight64 = wide(x, weight)
    expected = reference_rms_norm(x64, weight64)
    expected_dx, expected_dweight = torch.autograd.grad(expected, (x64, weight64), grad.double())
    assert_close(y, expected, dtype, width)
    assert_close(dx, expected_dx, dtype, width, parts=grad.double() * weight64 * rstd[:, None])
    assert_close(dweight, expected_dweight, dtype, rows)
    assert rstd.dtype == statistics_dtype(dtype)


@implementations
@dtypes
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", ROWS)
def test_add_rms_norm_and_its_gradients_match_float64(run, dtype, width, rows):
    x, residual, weight = (
        randn(rows, width, dtype=dtype),
        randn(rows, width, dtype=dtype),
        randn(width, dtype=dtype),
    )
    grad, grad_sum = randn(rows, width, dtype=dtype), randn(rows, width, dtype=dtype)
    y, summed, rstd = run(ops.add_rms_norm, x, residual, weight, EPS)
    dx, dweight = run(ops.rms_norm_backward, grad, summed, weight, rstd, grad_sum)

    assert torch.equal(
        summed, (x.float() + residual.float()).to(dtype) if dtype != torch.float64 else x + residual
    )
    summed64, weight64 = wide(summed, weight)
    expected = reference_rms_norm(summed64, weight64)
    expected_dx, expected_dweight = torch.autograd.grad(expected, (summed64, weight64), grad.double())
    assert_close(y, expected, dtype, width)
    parts = grad.double() * weight64 * rstd[:, None]
    assert_close(dx, expected_dx + grad_sum.double(), dtype, width, parts)
    assert_close(dweight, expected_dweight, dtype, rows)


def test_add_rms_norm_differentiates_through_either_output_alone():
    x, residual, weight = randn(5, 33, grad=True), randn(5, 33, grad=True), randn(33, grad=True)
    normed, summed = layers.add_rms_norm(x, residual, weight, EPS)
    dx, dresidual, dweight = torch.autograd.grad(
        summed.sum(), (x, residual, weight), allow_unused=True, retain_graph=True
    )
    assert torch.equal(dx, torch.ones_like(x)) and torch.equal(dresidual, dx) and dweight is None
    found = torch.autograd.grad(normed.sum(), (x, residual, weight))
    expected = torch.autograd.grad(reference_rms_norm(x + residual, weight).sum(), (x, residual, weight))
    torch.testing.assert_close(found, expected)


def test_rms_norm_takes_any_strides_and_leading_dimensions():
    x, weight = randn(4, 6, 3, dtype=torch.float32).transpose(0, 2), randn(8, dtype=torch.float32)[::2]
    torch.testing.assert_close(layers.rms_norm(x, weight, EPS), F.rms_norm(x, (4,), weight, EPS))


# ---- SwiGLU ----


@implementations
@dtypes
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", ROWS)
def test_swiglu_and_its_gradient_match_float64(run, dtype, width, rows):
    gate_up, grad = randn(rows, 2 * width, dtype=dtype) * 4, randn(rows, width, dtype=dtype)
    (gate_up64,) = wide(gate_up)
    expected = reference_swiglu(gate_up64)
    assert_close(run(ops.swiglu, gate_up), expected, dtype)
    (expected_grad,) = torch.autograd.grad(expected, gate_up64, grad.double())
    assert_close(run(ops.swiglu_backward, grad, gate_up), expected_grad, dtype)


@dtypes
def test_swiglu_of_extreme_values_is_finite_and_of_nan_is_nan(dtype):
    gate = torch.tensor(
        [-3e4, -200.0, -100.0, -88.0, 0.0, 88.0, 100.0, 200.0, 3e4, float("nan")], dtype=dtype
    )
    y = layers.swiglu(torch.cat((gate, torch.ones_like(gate))))
    assert_close(y[:-1], reference_swiglu(torch.cat((gate[:-1], torch.ones_like(gate[:-1]))).double()), dtype)
    assert y[-1].isnan()


# ---- rotary embedding ----

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


# ---- cross-entropy ----


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


# ---- the optimizer's passes ----


@implementations
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adamw_follows_torch_over_five_steps(run, dtype):
    shapes = [(33,), (7, 5), (0, 3), (), (40_001,)]
    decay = [0.0, 0.1, 0.1, 0.0, 0.1]
    params = [randn(*shape, dtype=dtype) for shape in shapes]
    twins = [p.clone().requires_grad_() for p in params]
    optimizer = torch.optim.AdamW(
        [{"params": [t], "weight_decay": d} for t, d in zip(twins, decay, strict=True)],
        lr=1e-2, betas=(0.9, 0.95), eps=1e-8,
    )  # fmt: skip
    exp_avg, exp_avg_sq = ([torch.zeros_like(p) for p in params] for _ in range(2))
    for step in range(1, 6):
        grads = [randn(*shape, dtype=dtype) for shape in shapes]
        for twin, grad in zip(twins, grads, strict=True):
            twin.grad = grad * 0.5
        optimizer.step()
        run(
            ops.adamw_, params, grads, exp_avg, exp_avg_sq, [], torch.tensor(0.5),
            lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=decay, step=step,
        )  # fmt: skip
    torch.testing.assert_close(params, [t.detach() for t in twins], rtol=1e-5, atol=1e-6)


@implementations
@pytest.mark.parametrize("param_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_adamw_updates_the_master_and_rounds_it(run, param_dtype, grad_dtype):
    """In one call: a parameter with a master, one without, and the same numbers in float32 throughout."""
    start, grad = randn(20_000, dtype=param_dtype), randn(20_000, dtype=grad_dtype)
    mastered, bare, exact = start.clone(), start.clone(), start.float()
    low_precision = param_dtype != torch.float32
    masters = [start.float() if low_precision else torch.empty(0), torch.empty(0), torch.empty(0)]
    exp_avg, exp_avg_sq = ([torch.zeros(20_000) for _ in range(3)] for _ in range(2))
    for step in range(1, 4):
        run(
            ops.adamw_, [mastered, bare, exact], [grad] * 3, exp_avg, exp_avg_sq, masters, None,
            lr=1e-3, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=[0.1] * 3, step=step,
        )  # fmt: skip
        if step == 1:
            torch.testing.assert_close(
                bare, exact.to(param_dtype), rtol=torch.finfo(param_dtype).eps, atol=1e-6
            )
    if low_precision:
        torch.testing.assert_close(masters[0], exact, rtol=1e-6, atol=1e-7)
        assert torch.equal(mastered, masters[0].to(param_dtype))


def test_adamw_rounds_at_random_so_that_the_mean_is_exact():
    exact, grad = torch.empty(3000).uniform_(0.5, 1.0).to(torch.bfloat16), torch.full((3000,), 1e-3)
    options = dict(lr=1e-3, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0, step=1)
    after = exact.float() - 1e-3  # a quarter of the last bit
    drawn = []
    for seed in range(400):
        param, state = exact.clone(), [torch.zeros(3000) for _ in range(2)]
        layers.adamw_([param], [grad], state[:1], state[1:], rounding=[(seed, 0)], **options)
        assert ((param.float() - after).abs() < 2**-8).all()
        drawn.append(param.float())
    # The mean of 400 draws between numbers 2^-8 apart has a standard deviation of at most 2^-9 / 20.
    assert ((torch.stack(drawn).mean(0) - after).abs() < 6 * 2**-9 / 20).all()
    assert abs((torch.stack(drawn).mean() - after.mean()).item()) < 6 * 2**-9 / 20 / 3000**0.5


def test_adamw_rounds_an_element_alike_wherever_it_lies():
    start, grad = randn(40_001, dtype=torch.bfloat16), randn(40_001, dtype=torch.float32)
    options = dict(lr=1e-3, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, step=1)

    def updated(begin, end, seed):
        param, size = start[begin:end].clone(), end - begin
        states = [torch.zeros(size) for _ in range(2)]
        layers.adamw_([param], [grad[begin:end]], states[:1], states[1:], rounding=[(seed, begin)], **options)
        return param

    whole = updated(0, 40_001, 7)
    assert torch.equal(torch.cat([updated(0, 17_003, 7), updated(17_003, 40_001, 7)]), whole)
    assert not torch.equal(updated(0, 40_001, 8), whole)
    assert updated(0, 3, 7).isfinite().all()


def test_adamw_takes_plain_numbers_and_one_weight_decay():
    param, twin, grad = randn(9), None, randn(9)
    twin = param.clone()
    state = [torch.zeros(9, dtype=torch.float64) for _ in range(4)]
    options = dict(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, step=1)
    layers.adamw_([param], [grad], state[:1], state[1:2], weight_decay=0.1, grad_scale=0.25, **options)
    layers.adamw_([twin], [grad * 0.25], state[2:3], state[3:], weight_decay=[0.1], **options)
    torch.testing.assert_close(param, twin)


@implementations
@dtypes
def test_sum_of_squares_is_exact_to_float64(run, dtype):
    tensors = [randn(*shape, dtype=dtype) for shape in [(33,), (0,), (), (7, 5), (40_001,)]]
    tensors.append(randn(6, 4, dtype=dtype).t())
    found = run(ops.sum_of_squares, tensors)
    assert found.dtype == torch.float64 and found.shape == ()
    torch.testing.assert_close(found, sum(t.double().square().sum() for t in tensors), rtol=1e-12, atol=0)


def test_sum_of_squares_of_nothing_is_zero_and_does_not_overflow():
    assert layers.sum_of_squares([]).item() == 0
    assert layers.sum_of_squares([torch.full((3,), 1e30)]).item() == pytest.approx(3e60, rel=1e-6)


@implementations
@pytest.mark.parametrize(
    "dtypes", itertools.product([torch.float32, torch.bfloat16, torch.float64], repeat=2)
)
@pytest.mark.parametrize("shape", [(), (0,), (7, 5), (40_001,), (6, 4)])
def test_additions_of_two_dtypes_are_torchs_to_the_last_bit(run, dtypes, shape):
    sum, other = (3 * randn(*shape, dtype=dtype) for dtype in dtypes)
    if sum.numel() > 30:
        sum.view(-1)[:4] = torch.tensor([float("nan"), float("inf"), float("inf"), 3e38])
        other.view(-1)[:4] = torch.tensor([1.0, 1.0, -float("inf"), 3e38])
    if shape == (6, 4):
        sum, other = sum.t(), other.t()
    expected = sum.clone().add_(other)
    assert run(ops.add_, sum, other) is None
    assert torch.equal(sum.nan_to_num(7.5), expected.nan_to_num(7.5))


def test_additions_of_other_shapes_are_refused():
    with pytest.raises(ValueError, match=r"add_: sum has shape \[3\] and other \[1\]"):
        layers.add_(torch.ones(3), torch.ones(1))


# ---- number formats ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_to_low_precision_is_torchs_for_every_kind_of_number(dtype):
    """master -> param with lr = 0 is a bare conversion: ties, subnormals, overflow, infinities and NaN."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    finite = every[every.isfinite()].sort().values
    between = (finite[:-1].double() + finite[1:].double()) / 2
    ties = between.float()
    master = torch.cat(
        (every, ties, ties.nextafter(finite[1:]), ties.nextafter(finite[:-1]), randn(999).float() * 1e5)
    )
    master = torch.cat((master, torch.tensor([65519.0, 65520.0, 3.4e38, -3.4e38, 1e-40, -1e-45])))
    param = torch.zeros(master.shape, dtype=dtype)
    zeros = [torch.zeros_like(master) for _ in range(3)]
    layers.adamw_(
        [param], [zeros[0]], [zeros[1]], [zeros[2]], [master.clone()],
        lr=0.0, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0, step=1,
    )  # fmt: skip
    expected = master.to(dtype)
    assert torch.equal(param.isnan(), expected.isnan())
    assert torch.equal(param.nan_to_num(0.0), expected.nan_to_num(0.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_low_precision_number_is_read_exactly(dtype):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    finite = every[every.isfinite()]
    assert layers.sum_of_squares([finite]).item() == pytest.approx(
        finite.double().square().sum().item(), rel=1e-12
    )
    stats = layers.cross_entropy_stats(finite[:, None], torch.zeros(len(finite), dtype=torch.int64), 0)
    assert torch.equal(stats[:, 2], finite.float())


# ---- what torch asks of an op ----


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    stats = layers.cross_entropy_stats(logits, labels, 3)[None]
    return layers.cross_entropy_loss(logits, labels, stats, 3, 40)[0]


def test_gradcheck():
    x, y, weight = randn(3, 7, grad=True), randn(3, 7, grad=True), randn(7, grad=True)
    assert torch.autograd.gradcheck(lambda *a: layers.rms_norm(*a, EPS), (x, weight))
    assert torch.autograd.gradcheck(lambda *a: layers.add_rms_norm(*a, EPS), (x, y, weight))
    assert torch.autograd.gradcheck(layers.swiglu, randn(3, 14, grad=True))
    cos, sin = rotary_tables(3, 6, torch.float64)
    qkv = randn(6, 4 * 6, grad=True)
    assert torch.autograd.gradcheck(lambda t: layers.apply_rope_qkv(t, cos, sin, 2, 3, 2, 1), qkv)
    labels = torch.tensor([3, 9, -100, 5])
    assert torch.autograd.gradcheck(lambda t: loss_of(t, labels), randn(4, 7, grad=True))


def opcheck_cases():
    f32 = torch.float32
    x, weight, rstd = randn(5, 33, dtype=f32), randn(33, dtype=f32), torch.rand(5)
    cos, sin = rotary_tables(4, 32, f32)
    labels = torch.randint(0, 33, (5,))
    grads = [randn(2, heads, 4, 32, dtype=f32) for heads in (2, 1, 1)]
    lists = [[randn(9, dtype=f32), randn(2, 3, dtype=f32)] for _ in range(3)]
    low = [t.bfloat16() for t in lists[0]]
    squares = [t.square() for t in lists[2]]
    adamw = dict(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=[0.1, 0.0], step=1)
    yield "rms_norm", (x, weight, EPS), {}
    yield "rms_norm", (leaf(x), leaf(weight), EPS), {}
    yield "add_rms_norm", (leaf(x), leaf(x), leaf(weight), EPS), {}
    yield "rms_norm_backward", (x, x, weight, rstd, None), {}
    yield "rms_norm_backward", (x, x, weight, rstd, x), {}
    yield "swiglu", (leaf(randn(5, 66, dtype=f32)),), {}
    yield "swiglu_backward", (x, randn(5, 66, dtype=f32)), {}
    yield "apply_rope_qkv", (leaf(randn(8, 4 * 32, dtype=f32)), cos, sin, 2, 4, 2, 1), {}
    yield "apply_rope_qkv_backward", (*grads, cos, sin), {}
    yield "cross_entropy_stats", (leaf(x), labels, 3), {}
    yield "cross_entropy_loss", (leaf(x), labels, torch.rand(2, 5, 3), 3, 40), {}
    yield "cross_entropy_backward", (x, labels, rstd, rstd, 3), {}
    yield "cross_entropy_backward_", (x.clone(), labels, rstd, rstd, 3), {}
    yield "adamw_", (lists[0], lists[1], lists[2], squares, [], None), adamw
    yield "adamw_", (low, lists[1], lists[2], squares, lists[0], torch.tensor(0.5)), adamw
    yield "sum_of_squares", (lists[0],), {}


def leaf(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_()


@pytest.mark.parametrize("index", range(16))
def test_opcheck(index):
    cases = list(opcheck_cases())
    assert len(cases) == 16
    name, args, kwargs = cases[index]
    torch.library.opcheck(getattr(ops, name).default, args, kwargs)


class Block(torch.nn.Module):
    """One attention block, one feed-forward block and a loss, out of every differentiable op."""

    def __init__(self, dim=32, heads=4, kv_heads=2, ffn=24, vocab=40):
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        head_dim = dim // heads
        self.norms = torch.nn.ParameterList(torch.nn.Parameter(torch.rand(dim) + 0.5) for _ in range(2))
        self.qkv = torch.nn.Linear(dim, (heads + 2 * kv_heads) * head_dim, bias=False)
        self.out = torch.nn.Linear(dim, dim, bias=False)
        self.gate_up = torch.nn.Linear(dim, 2 * ffn, bias=False)
        self.down = torch.nn.Linear(ffn, dim, bias=False)
        self.head = torch.nn.Linear(dim, vocab, bias=False)
        cos, sin = rotary_tables(8, head_dim, torch.float32)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, x: Tensor, labels: Tensor, batch: int, overwrite: bool) -> Tensor:
        tokens, dim = x.shape
        qkv = self.qkv(layers.rms_norm(x, self.norms[0], EPS))
        q, k, v = layers.apply_rope_qkv(
            qkv, self.cos, self.sin, batch, tokens // batch, self.heads, self.kv_heads
        )
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        attention = self.out(attention.transpose(1, 2).reshape(tokens, dim))
        normed, x = layers.add_rms_norm(x, attention, self.norms[1], EPS)
        logits = self.head(x + self.down(layers.swiglu(self.gate_up(normed))))
        stats = layers.cross_entropy_stats(logits, labels, 0)[None]
        loss, _ = layers.cross_entropy_loss(
            logits, labels, stats, 0, logits.shape[1], overwrite_logits=overwrite
        )
        return loss.mean()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_block_compiles_to_one_graph_with_the_same_gradients(dynamic, overwrite):
    torch._dynamo.reset()
    block = Block()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for batch in (2, 3) if dynamic else (2,):
        x, labels = randn(batch * 8, 32, dtype=torch.float32, grad=True), torch.randint(0, 40, (batch * 8,))
        inputs = (x, *block.parameters())
        expected_loss = block(x, labels, batch, overwrite)
        expected = torch.autograd.grad(expected_loss, inputs)
        loss = compiled(x, labels, batch, overwrite)
        torch.testing.assert_close(loss, expected_loss)
        torch.testing.assert_close(torch.autograd.grad(loss, inputs), expected)


def test_results_are_bitwise_the_same_again_and_with_more_threads():
    def everything() -> list[Tensor]:
        torch.manual_seed(1)
        x, weight = (
            randn(301, 520, dtype=torch.bfloat16, grad=True),
            randn(520, dtype=torch.bfloat16, grad=True),
        )
        normed, summed = layers.add_rms_norm(layers.rms_norm(x, weight, EPS), x, weight, EPS)
        loss = loss_of(layers.swiglu(normed) + summed[:, :260], torch.randint(3, 40, (301,)))
        grads = torch.autograd.grad(loss.sum(), (x, weight))
        cos, sin = rotary_tables(301, 130, torch.float32)
        heads = layers.apply_rope_qkv(x.detach(), cos, sin, 1, 301, 2, 1)
        param, state = randn(200_003).float(), [torch.zeros(200_003) for _ in range(2)]
        layers.adamw_(
            [param], [param * 0.1], state[:1], state[1:],
            lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, step=1,
        )  # fmt: skip
        return [normed, summed, loss, *grads, *heads, param, *state, layers.sum_of_squares([param])]

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        first, again = everything(), everything()
        torch.set_num_threads(3)
        threaded = everything()
    finally:
        torch.set_num_threads(threads)
    for a, b, c in zip(first, again, threaded, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_differentiating_a_backward_op_is_an_error_and_not_a_missing_gradient():
    gate_up = randn(2, 6, grad=True)
    (grad,) = torch.autograd.grad(layers.swiglu(gate_up).sum(), gate_up, create_graph=True)
    with pytest.raises(RuntimeError, match="swiglu_backward is not implemented"):
        grad.sum().backward()


# ---- bad input ----

X, W = torch.zeros(4, 6), torch.ones(6)
LABELS = torch.zeros(4, dtype=torch.int64)
STATS = torch.zeros(1, 4, 3)
TABLE = torch.zeros(4, 2)
ADAMW = dict(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0, step=1)

BAD_CALLS = [
    (ValueError, r"weight must have shape \[6\]", lambda: layers.rms_norm(X, torch.ones(5), EPS)),
    (ValueError, "x is a scalar", lambda: layers.rms_norm(torch.tensor(1.0), W, EPS)),
    (ValueError, "nothing to normalise", lambda: layers.rms_norm(X[:, :0], W[:0], EPS)),
    (TypeError, "x has dtype Long", lambda: layers.rms_norm(X.long(), W, EPS)),
    (TypeError, "x has dtype Float and weight has BFloat16", lambda: layers.rms_norm(X, W.bfloat16(), EPS)),
    (ValueError, "they must be equal", lambda: layers.add_rms_norm(X, X[:2], W, EPS)),
    (TypeError, "residual has Half", lambda: layers.add_rms_norm(X, X.half(), W, EPS)),
    (ValueError, r"gate_up has shape \[4, 5\]", lambda: layers.swiglu(X[:, :5])),
    (TypeError, "gate_up has dtype Int", lambda: layers.swiglu(X.int())),
    (ValueError, "need \\[6, 3 \\* head_dim\\]", lambda: layers.apply_rope_qkv(X, TABLE, TABLE, 2, 3, 1, 1)),
    (ValueError, "even head_dim", lambda: layers.apply_rope_qkv(X[:, :3], TABLE, TABLE, 1, 4, 1, 1)),
    (ValueError, "num_kv_heads=0", lambda: layers.apply_rope_qkv(X, TABLE, TABLE, 1, 4, 1, 0)),
    (
        ValueError,
        "at least the 4 positions",
        lambda: layers.apply_rope_qkv(X, TABLE[:3], TABLE[:3], 1, 4, 1, 1),
    ),
    (TypeError, "both must be Float", lambda: layers.apply_rope_qkv(X, TABLE.half(), TABLE, 1, 4, 1, 1)),
    (
        ValueError,
        "detach them",
        lambda: layers.apply_rope_qkv(X, TABLE.clone().requires_grad_(), TABLE, 1, 4, 1, 1),
    ),
    (ValueError, r"must be \[rows, vocabulary\]", lambda: layers.cross_entropy_stats(X[0], LABELS, 0)),
    (ValueError, r"it must be \[4\]", lambda: layers.cross_entropy_stats(X, LABELS[:3], 0)),
    (TypeError, "must be int64", lambda: layers.cross_entropy_stats(X, LABELS.int(), 0)),
    (ValueError, r"must be \[shards, 4, 3\]", lambda: layers.cross_entropy_loss(X, LABELS, STATS[0], 0, 6)),
    (
        IndexError,
        r"label 7 of row 0 is neither",
        lambda: layers.cross_entropy_loss(X, LABELS + 7, STATS, 0, 6),
    ),
    (
        ValueError,
        "overwrite_logits=True would destroy",
        lambda: layers.cross_entropy_loss(
            X.clone().requires_grad_(), LABELS, STATS, 0, 6, overwrite_logits=True
        ),
    ),
    (ValueError, "lse has shape", lambda: layers.cross_entropy_backward(X, LABELS, W, X[:, 0], 0)),
    (
        TypeError,
        "grad has dtype Double",
        lambda: layers.cross_entropy_backward(X, LABELS, X[:, 0], X[:, 0].double(), 0),
    ),
    (
        ValueError,
        "written in place and must be contiguous",
        lambda: layers.cross_entropy_backward(X.t(), LABELS.new_zeros(6), W, W, 0, overwrite_logits=True),
    ),
    (ValueError, "2 params came with 1 grads", lambda: layers.adamw_([X, X], [X], [X], [X], **ADAMW)),
    (ValueError, r"grads\[0\] has shape \[6\]", lambda: layers.adamw_([X], [W], [X], [X], **ADAMW)),
    (ValueError, r"exp_avg_sq\[0\] has shape", lambda: layers.adamw_([X], [X], [X], [W], **ADAMW)),
    (TypeError, r"exp_avg\[0\] has dtype Half", lambda: layers.adamw_([X], [X], [X.half()], [X], **ADAMW)),
    (
        TypeError,
        "is not rounded at random",
        lambda: layers.adamw_([X.half()], [X], [X], [X], rounding=[(1, 0)], **ADAMW),
    ),
    (
        ValueError,
        "has a master",
        lambda: layers.adamw_([X.bfloat16()], [X], [X], [X], [X.clone()], rounding=[(1, 0)], **ADAMW),
    ),
    (
        ValueError,
        "came with 2 seeds",
        lambda: layers.adamw_([X], [X], [X], [X], rounding=2 * [(1, 0)], **ADAMW),
    ),
    (ValueError, "its own master", lambda: layers.adamw_([X], [X], [X], [X], [X], **ADAMW)),
    (ValueError, "must be contiguous", lambda: layers.adamw_([X.t()], [X.t()], [X.t()], [X.t()], **ADAMW)),
    (ValueError, "lr=nan", lambda: layers.adamw_([X], [X], [X], [X], **ADAMW | {"lr": float("nan")})),
    (ValueError, "first step is 1", lambda: layers.adamw_([X], [X], [X], [X], **ADAMW | {"step": 0})),
    (ValueError, r"in \[0, 1\)", lambda: layers.adamw_([X], [X], [X], [X], **ADAMW | {"beta2": 1.0})),
    (TypeError, "a tensor has dtype Long", lambda: layers.sum_of_squares([LABELS])),
]


@pytest.mark.parametrize("error,sentence,call", BAD_CALLS, ids=[sentence for _, sentence, _ in BAD_CALLS])
def test_bad_input_is_refused_in_a_sentence(error, sentence, call):
    with pytest.raises(error, match=sentence):
        call()
