"""AdamW of many tensors by the device kernels, here in the host dialect: the CPU kernel's figures."""

from __future__ import annotations

import pytest
import torch

from pyruntime.comm.core import _C
from pyruntime.ops.device_adamw import StepSettings, device_adamw_
from pyruntime.ops.layers import adamw_
from tests.cuda import build

pytestmark = pytest.mark.second_tier

SHAPES = [(5, 7), (129,), (1,), (300, 70), (0, 4)] + [(17, 3)] * 60  # more than one launch holds
CONSTANTS = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}


@pytest.fixture(autouse=True)
def kernels(host_kernels):
    _C.use_device_library("cpu", str(build.LIBRARY))


def lists(dtype: torch.dtype, seed: int):
    """Parameters, moments, masters (none of float32), weight decay, and gradients of three steps."""
    draw = torch.Generator().manual_seed(seed)
    whole = [torch.randn(shape, generator=draw) for shape in SHAPES]
    params = [each.to(dtype) for each in whole]
    masters = [param.float() for param in params] if dtype != torch.float32 else []
    moments = [[torch.zeros(shape) for shape in SHAPES] for _ in range(2)]
    decay = [0.1 * (i % 2) for i in range(len(SHAPES))]
    grads = [[torch.randn(shape, generator=draw).to(dtype) for shape in SHAPES] for _ in range(3)]
    return params, moments, masters, decay, grads


def stepped(step_of, dtype, seed, device="cpu"):
    params, moments, masters, decay, grads = lists(dtype, seed)
    params, masters = ([tensor.to(device) for tensor in tensors] for tensors in (params, masters))
    moments, grads = ([[tensor.to(device) for tensor in of] for of in each] for each in (moments, grads))
    for step, of_step in enumerate(grads, 1):
        step_of(params, of_step, *moments, masters, weight_decay=decay, lr=1e-2 / step, step=step)
    return [*params, *moments[0], *moments[1], *masters]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_takes_the_steps_of_the_cpu_kernel(dtype):
    seed, scale = int(torch.randint(2**31, ())), torch.tensor(0.7)
    mine = stepped(lambda *a, **k: device_adamw_(*a, **k, **CONSTANTS, grad_scale=scale), dtype, seed)
    theirs = stepped(lambda *a, **k: adamw_(*a, **k, **CONSTANTS, grad_scale=scale), dtype, seed)
    for a, b in zip(mine, theirs, strict=True):
        rtol = 2e-6 if a.dtype == torch.float32 else 1e-2
        torch.testing.assert_close(a, b, rtol=rtol, atol=1e-7)


def test_it_follows_torchs_own():
    seed = int(torch.randint(2**31, ()))
    mine = stepped(lambda *a, **k: device_adamw_(*a, **k, **CONSTANTS), torch.float32, seed)
    params, _, _, decay, grads = lists(torch.float32, seed)
    copies = [torch.nn.Parameter(param.double()) for param in params]
    groups = [{"params": [p], "weight_decay": d} for p, d in zip(copies, decay, strict=True)]
    theirs = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    for step, of_step in enumerate(grads, 1):
        for copy, grad in zip(copies, of_step, strict=True):
            copy.grad = grad.double()
        for group in theirs.param_groups:
            group["lr"] = 1e-2 / step
        theirs.step()
    for a, b in zip(mine, copies, strict=False):
        torch.testing.assert_close(a.double(), b.detach(), rtol=1e-5, atol=1e-6)


def test_settings_in_memory_are_read_in_place_of_arguments():
    seed = int(torch.randint(2**31, ()))
    settings = StepSettings("cpu", **CONSTANTS)

    def by_settings(*lists, lr, step, **rest):
        settings.write(lr, step)
        device_adamw_(*lists, **rest, **CONSTANTS, lr=0.5, step=77, settings=settings)

    mine = stepped(by_settings, torch.bfloat16, seed)
    theirs = stepped(lambda *a, **k: device_adamw_(*a, **k, **CONSTANTS), torch.bfloat16, seed)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("step_of", [device_adamw_, adamw_])
def test_a_scale_that_is_no_number_updates_nothing(step_of):
    params, moments, masters, decay, grads = lists(torch.bfloat16, 3)
    before = [each.clone() for each in (*params, *masters)]
    nan = torch.tensor(float("nan"))
    step_of(
        params, grads[0], *moments, masters, weight_decay=decay, lr=0.1, step=1, grad_scale=nan, **CONSTANTS
    )
    assert all(torch.equal(a, b) for a, b in zip((*params, *masters), before, strict=True))
    assert all(not each.any() for kind in moments for each in kind)


def test_what_it_cannot_keep_in_fp32_is_refused():
    double, half = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"must be float32, lower with a float32 master, or"):
        device_adamw_([double], [double], [double], [double], [], weight_decay=[0.0], **CONSTANTS)
    moments = [torch.zeros(3)]
    with pytest.raises(TypeError, match=r"params.0. has dtype BFloat16"):
        device_adamw_([half], [half], moments, moments, [], weight_decay=[0.0], **CONSTANTS)
