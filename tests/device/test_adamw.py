"""AdamW on devices takes the CPU's steps with its random numbers, by the kernels and by torch's operators."""

from __future__ import annotations

import math

import pytest
import torch

from pyruntime.ops.layers import adamw_, adamw_ahead_
from tests.cuda import build as kernels
from tests.device import sim
from tests.device.test_training import job, learned
from tests.train import jobs

pytestmark = pytest.mark.usefixtures("simulated")

FEW = [(129, 33), (0, 4), (20_001,)]
MANY = FEW + [(5, 3)] * 50  # more than one launch holds
CONSTANTS = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
FUSES = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
"""Whether the CPU's kernel, as the device's, rounds a product and the sum with it once."""


def made(shapes, dtype: torch.dtype, grad_dtype: torch.dtype):
    draw = torch.Generator().manual_seed(5)
    params = [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]
    moments = [[torch.zeros(shape) for shape in shapes] for _ in range(2)]
    grads = [[torch.randn(shape, generator=draw).to(grad_dtype) for shape in shapes] for _ in range(2)]
    return params, moments, grads


def stepped(device: str, shapes, dtype: torch.dtype, grad_dtype: torch.dtype, ahead: bool):
    """Parameters and moments after two steps rounded at random. ahead: what `adamw_ahead_` says is returned
    for the parameters."""
    params, moments, grads = made(shapes, dtype, grad_dtype)
    params = [each.to(device) for each in params]
    moments = [[each.to(device) for each in kind] for kind in moments]
    decay = [0.1 * (i % 2) for i in range(len(params))]
    shown = []
    for step, of_step in enumerate(grads, 1):
        of_step = [each.to(device) for each in of_step]
        options = {"lr": 1e-2, "step": step, "weight_decay": decay, **CONSTANTS}
        options["rounding"] = [(77 * step + i, 2**32 - 100 * i) for i in range(len(params))]
        if ahead:
            shown = [torch.empty_like(each) for each in params]
            adamw_ahead_(shown, params, of_step, *moments, grad_scale=0.5, **options)
        scale = torch.tensor(0.5, device=device)
        adamw_(params, of_step, *moments, grad_scale=scale, **options)
    nan = torch.tensor(math.nan, device=device)
    adamw_(params, of_step, *moments, grad_scale=nan, **options)  # updates nothing
    return [each.cpu() for each in (*(shown or params), *moments[0], *moments[1])]


def compare(group):
    sim.begin(delays=3)
    for by_kernels in (False, True):
        if by_kernels:
            sim.use_kernels(kernels.LIBRARY)
        dtypes = [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32,) * 2]
        shapes = MANY if by_kernels else FEW
        for dtype, grad_dtype in dtypes if by_kernels else dtypes[:1]:
            expected = stepped("cpu", shapes, dtype, grad_dtype, False)
            for ahead in (False, True):
                found = stepped(sim.DEVICE, shapes, dtype, grad_dtype, ahead)
                for one, other in zip(found, expected, strict=True):
                    if by_kernels and FUSES:
                        assert torch.equal(one, other)
                    elif one.dtype == torch.float32:
                        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
                    elif one.numel():  # a last bit of fp32 seldom changes that of bf16
                        assert (one != other).float().mean() <= 1e-3


def test_rounding_at_random_gives_the_bits_of_the_cpu(ranks):
    ranks.run(compare, 1)


@pytest.mark.second_tier
def test_the_trainer_rounds_at_random_as_on_cpus(ranks, tmp_path):
    config = job(tmp_path, parallel={"tp": 1, "dp": 2, "zero": 2}, optimizer={"rounding": "stochastic"})
    config = jobs.changed(config, "train", dtype="bf16")
    expected = learned(ranks, config, "cpu", str(tmp_path / "cpu"))
    found = learned(ranks, config, sim.DEVICE, str(tmp_path / "sim"), delays=9)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=0)
