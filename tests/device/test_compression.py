"""Compressed gradients on devices: the bits of the CPU's formats, exchanges equal to those of CPU ranks, and
no wait of the host."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from pyruntime.comm import Runtime
from pyruntime.data_parallel.axes import axes_of
from pyruntime.data_parallel.compression import Compression
from pyruntime.ops import compression
from tests.cuda import build as kernels
from tests.data_parallel.compression import cases
from tests.device import sim
from tests.device.test_training import ONCE_A_STEP, job, learned, waits_of_steps
from tests.train import jobs

pytestmark = pytest.mark.usefixtures("simulated")

METHODS = [
    Compression("quantize", bits=2),
    Compression("quantize", bits=5, error_feedback=False, seed=3),
    Compression("top_k", density=0.05),
    Compression("power_sgd", rank=3),
]


def uneven(count: int, dtype: torch.dtype, strange: float = 0.0) -> torch.Tensor:
    """Values of very different sizes, many of them equal, and one that is not finite if that is asked."""
    values = torch.randn(count).mul(8).round().div(8) * torch.logspace(-9, 2, count)[torch.randperm(count)]
    values[::7] = 0.25
    values[1::14] = -0.25
    if strange:
        values[count // 2] = strange
    return values.to(dtype)


def outcomes(values, residual, device):
    """Packed bytes, what is left and a sum to which they were added, by each codec."""
    values = values.to(device)
    for bits, rounding in ((1, None), (2, None), (4, None), (8, None), (1, (7, 3)), (3, (7, 3))):
        packed = torch.zeros(compression.quantized_bytes(len(values), bits), dtype=torch.uint8, device=device)
        left, total, alone = (residual.to(device, copy=True) for _ in range(3))
        compression.quantize(values, bits, packed, left, rounding)
        compression.dequantize(packed, bits, total, add=True)
        compression.dequantize(packed, bits, alone)
        yield f"{bits} bits, {rounding}", (packed, left, total, alone)
    for k in (0, 1, len(values) // 9, len(values)):
        packed = torch.zeros(compression.top_k_bytes(k), dtype=torch.uint8, device=device)
        left, total = (residual.to(device, copy=True) for _ in range(2))
        compression.top_k(values, k, packed, left)
        compression.add_top_k(packed, total)
        yield f"the largest {k}", (packed, left, total)


def compare_bits(group):
    sim.begin(delays=4)
    sim.use_kernels(kernels.LIBRARY)
    for count, dtype, strange in (
        (1300, torch.float32, 0.0),
        (512, torch.bfloat16, 0.0),
        (77, torch.float16, 0.0),
        (1300, torch.float32, float("nan")),
        (600, torch.float32, float("-inf")),
    ):
        values, residual = uneven(count, dtype, strange), uneven(count, torch.float32)
        both = zip(outcomes(values, residual, "cpu"), outcomes(values, residual, sim.DEVICE), strict=True)
        for (name, here), (_, there) in both:
            for one, other in zip(here, there, strict=True):
                one, other = (
                    each.view(torch.uint8) for each in (one.nan_to_num(7.0), other.cpu().nan_to_num(7.0))
                )
                assert torch.equal(one, other), (name, count, dtype, strange)
        bits, ks = [1, 2, 5, 8], [0, 3, count // 9, count]
        for function, numbers in ((compression.quantization_errors, bits), (compression.top_k_errors, ks)):
            here, there = (
                torch.tensor(function(values.to(device), numbers, residual.to(device)), dtype=torch.float64)
                for device in ("cpu", sim.DEVICE)
            )
            if strange:
                assert not here.isfinite().any() and not there.isfinite().any()
            else:
                torch.testing.assert_close(there, here, rtol=1e-4, atol=1e-12)


def test_packed_bytes_and_residuals_have_the_bits_of_the_cpu(ranks):
    ranks.run(compare_bits, 1)


def send_everywhere(group):
    sim.begin_rank(delays=5)
    sim.use_kernels(kernels.LIBRARY)
    with Runtime.start(dp=2, device=sim.DEVICE) as runtime:
        on_cpu = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        for stage in (0, 1):
            for settings in METHODS:
                here = cases.send_over(axes_of(on_cpu, stage), settings)
                there = cases.send_over(axes_of(runtime.dp.mesh, stage), settings, device=sim.DEVICE)
                assert here.marks == there.marks and here.numbers == there.numbers
                for one, other in zip(
                    (*here.reduced, *here.lost), (*there.reduced, *there.lost), strict=True
                ):
                    if settings.method == "power_sgd":  # sums of products, in other orders
                        limit = 1e-4 * float(one.abs().max())
                        torch.testing.assert_close(other, one, rtol=0, atol=limit)
                    else:
                        assert torch.equal(one, other), settings


def test_exchanges_have_the_bits_of_cpu_ranks(ranks):
    for rank in ranks.launch(send_everywhere, 2, init=False, timeout=120.0):
        assert rank.error is None, rank.error


def compressed(tmp_path, method: str, plan_every: int = 0):
    config = job(tmp_path, parallel={"tp": 1, "dp": 2, "zero": 2})
    plan = {"compression_plan_every": plan_every} if method != "none" else {}
    return jobs.changed(config, "data_parallel", compression=method, **plan)


@pytest.mark.parametrize(
    ("method", "plan_every"),
    [("quantize", 0), ("top_k", 0), ("power_sgd", 0), ("quantize", 2), ("power_sgd", 2)],
)
@pytest.mark.second_tier(but=["power_sgd-0"])
def test_the_trainer_learns_what_cpu_ranks_learn(ranks, tmp_path, method, plan_every):
    """The last bits of gradients differ between the two, and so may single codes."""
    config = compressed(tmp_path, method, plan_every)
    expected = learned(ranks, config, "cpu", str(tmp_path / "cpu"))
    found = learned(ranks, config, sim.DEVICE, str(tmp_path / "sim"), delays=len(method))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=0)


@pytest.mark.second_tier
@pytest.mark.parametrize("method", ["quantize", "top_k", "power_sgd"])
def test_a_steady_step_waits_no_more_than_without(ranks, tmp_path, method):
    assert waits_of_steps(ranks, compressed(tmp_path, method), tmp_path) == ONCE_A_STEP
