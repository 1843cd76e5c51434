"""The passes over all parameters in an optimizer step: AdamW, sums of squares, additions; how they round."""

from __future__ import annotations

import itertools

import pytest
import torch

from pyruntime.ops import layers
from tests.ops.cases import dtypes, implementations, randn

ops = torch.ops.pyruntime


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


@pytest.mark.parametrize("param_dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("stochastic", [False, True])
def test_a_step_ahead_writes_the_bits_of_the_step(param_dtype, stochastic):
    """Three steps, of which the masters take up the first two later than the rows do."""
    if stochastic and param_dtype != torch.bfloat16:
        pytest.skip("rounding at random is of bfloat16")
    grad_dtype = torch.float64 if param_dtype == torch.float64 else torch.bfloat16
    shapes = [(20_001,), (7, 5), ()]
    params = [randn(*shape, dtype=param_dtype) for shape in shapes]
    has_master = not stochastic and param_dtype in (torch.bfloat16, torch.float16)
    masters = [p.float() for p in params] if has_master else []
    state = torch.float64 if param_dtype == torch.float64 else torch.float32
    moments = [[randn(*shape, dtype=state).square() for shape in shapes] for _ in range(2)]
    ours = [[t.clone() for t in each] for each in (params, *moments, masters)]
    options = dict(beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=[0.1, 0.0, 0.1], grad_scale=1 / 3)
    earlier, earlier_lr = [], 0.0
    for step, lr in enumerate((1e-2, 2e-2, 3e-2), 5):
        grads = [randn(*shape, dtype=grad_dtype) for shape in shapes]
        rounding = [(step, first) for first in (0, 9, 99)] if stochastic else []
        layers.adamw_(params, grads, *moments, masters, lr=lr, step=step, rounding=rounding, **options)
        ahead = [torch.empty_like(p) for p in ours[0]]
        before = [[t.clone() for t in each] for each in ours]
        layers.adamw_ahead_(
            ahead, *ours[:1], grads, *ours[1:], earlier, lr=lr, step=step, earlier_lr=earlier_lr,
            rounding=rounding, **options,
        )  # fmt: skip
        assert all(torch.equal(one, other) for one, other in zip(ahead, params, strict=True))
        if has_master:
            assert (step > 5) == any(not torch.equal(*pair) for pair in zip(ours[3], before[3], strict=True))
            ours[0], earlier, earlier_lr = ahead, grads, lr
        else:
            assert all(torch.equal(*pair) for pair in zip(ours[1], before[1], strict=True))
            layers.adamw_(ours[0], grads, *ours[1:3], lr=lr, step=step, rounding=rounding, **options)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"ahead": [torch.zeros(3)]}, r"ahead\[0\] is"),
        ({"ahead": []}, "1 params came with 0 tensors"),
        ({"earlier_grads": [torch.zeros(4)]}, "has no master"),
        ({"earlier_grads": [torch.zeros(4)], "step": 1}, "no step before the first"),
    ],
)
def test_a_step_ahead_refuses_what_does_not_fit(changed, message):
    names = ("ahead", "params", "grads", "exp_avg", "exp_avg_sq")
    lists = {name: [torch.zeros(4)] for name in names}
    options = dict(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=[0.0], grad_scale=1.0, step=2)
    with pytest.raises(ValueError, match=message):
        layers.adamw_ahead_(**{**lists, **options, **changed})


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
    "dtypes", list(itertools.product([torch.float32, torch.bfloat16, torch.float64], repeat=2))
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
