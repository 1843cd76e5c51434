"""Cases of the ops that tests run on GPUs, and on the CPU through the host dialect."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from pyruntime import ops
from pyruntime.llama import Llama

UNIT = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
DEVICE_LAYERS = {"swiglu", "swiglu_backward", "apply_rope_qkv", "rotate_qkv_", "apply_rope_qkv_backward"}
DEVICE_LAYERS |= {"rms_norm", "add_rms_norm", "rms_norm_backward"}
DEVICE_LAYERS |= {"weighted_gating", "weighted_gating_backward_"}
DEVICE_LAYERS |= {"cross_entropy_stats", "cross_entropy_backward", "cross_entropy_backward_"}
"""Ops with kernels of csrc/cuda/portable (csrc/ops/device/device_layers.cpp)."""


def on_device(op, *args, **kwargs):
    """Calls the op's CUDA implementation, whatever device the tensors are on."""
    return op.default.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), *args, **kwargs)


class OnDevice(TorchDispatchMode):
    """Runs layers of CPU tensors, below autograd, with their CUDA implementation; `ours`: these ops."""

    def __init__(self) -> None:
        super().__init__()
        self.ours: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("pyruntime::")
        if name not in DEVICE_LAYERS:
            return function(*args, **(kwargs or {}))
        self.ours.add(name)
        return function.redispatch(
            torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), *args, **(kwargs or {})
        )


def check_training_step(make: Callable[[], Llama], device: str) -> None:
    """Checks loss and gradients of a Llama on `device`, its layers by the kernels, against the CPU's."""
    theirs, mine = make(), make().to(device)
    ids, labels = torch.randint(500, (2, 2, 37)).unbind()
    labels[:, -3:] = -100
    expected = theirs(ids, labels)
    expected.backward()
    with OnDevice() as seen:
        loss = mine(ids.to(device), labels.to(device))
        loss.backward()
    of_others = {"apply_rope_qkv", "cross_entropy_backward", "weighted_gating", "weighted_gating_backward_"}
    assert seen.ours == DEVICE_LAYERS - of_others
    low = mine.head.weight.dtype != torch.float32
    torch.testing.assert_close(loss.cpu(), expected, rtol=2e-3 if low else 1e-5, atol=0)
    for (name, found), wanted in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        assert wanted.grad is not None and found.grad is not None, name
        error = (found.grad.cpu().double() - wanted.grad.double()).norm() / wanted.grad.double().norm()
        assert error < (0.03 if low else 1e-5), f"{name}: {error:.1e}"


def error_in_roundings(seen: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> float:
    """Returns the largest error, relative to what three roundings explain; NaN counts as infinite."""
    allowed = 3 * UNIT[dtype] * (wanted.abs() + wanted.abs().mean() + 1e-3)
    ratio = (seen.cpu().double() - wanted).abs() / allowed
    return float(ratio.nan_to_num(float("inf")).max()) if ratio.numel() else 0.0


def integers_case(
    group: dist.ProcessGroup, device: torch.device, tier_of_call: Callable[[int, int], str], calls: int
) -> list[torch.Tensor]:
    """Returns results of both linears, forward and backward, on integers: GEMMs are exact, sums are rounded.
    tier_of_call(rank, call) names the tier."""
    rank, world_size = group.rank(), group.size()
    sizes = torch.Generator().manual_seed(5)
    generator = torch.Generator().manual_seed(6 + rank)

    def draw(*shape):
        return torch.randint(-9, 10, shape, generator=generator).bfloat16().to(device).requires_grad_()

    found = []
    for call in range(calls):
        rows, n = (int(size) for size in torch.randint(1, 300, (2,), generator=sizes))
        k = 8 * int(torch.randint(1, 30, (), generator=sizes))
        shard = len(torch.arange(rows).tensor_split(world_size)[rank])
        x, weight, hidden, down = draw(shard, k), draw(n, k), draw(rows, n), draw(k, n)
        bias, dy, dz = draw(k).detach(), draw(rows, n).detach(), draw(shard, k).detach()
        tier = tier_of_call(rank, call)
        y = ops.all_gather_matmul(x, weight, group, rows=rows, tier=tier)
        y.backward(dy)
        z = ops.matmul_reduce_scatter(hidden, down, group, bias=bias, tier=tier)
        z.backward(dz)
        found += [y.detach(), x.grad, weight.grad, z.detach(), hidden.grad, down.grad]
    return [tensor.cpu() for tensor in found]


def steps_in_tier(
    group: dist.ProcessGroup, device: torch.device, tier: str, calls: list[tuple[int, int, int]]
) -> list[float]:
    """Returns errors, in roundings, of both linears, forward and backward: products [m, n] = [m, k] @ [k, n]
    on random numbers that all ranks draw alike. Rows that travel are k wide."""
    rank, world_size, errors = group.rank(), group.size(), []
    for number, (m, n, k) in enumerate(calls):
        torch.manual_seed(number)
        dtype = torch.bfloat16 if number % 2 == 0 else torch.float16
        whole, grad = torch.randn(m, k).to(dtype), torch.randn(world_size, m, n).to(dtype)
        weights, bias = torch.randn(world_size, n, k).to(dtype), torch.randn(n).to(dtype)
        shard = whole.tensor_split(world_size)[rank].to(device).requires_grad_()
        weight = weights[rank].to(device).requires_grad_()
        y = ops.all_gather_matmul(shard, weight, group, rows=m, bias=bias.to(device), tier=tier)
        y.backward(grad[rank].to(device))
        dx = sum(g.double() @ w.double() for g, w in zip(grad, weights, strict=True))
        hidden = grad[rank].to(device).requires_grad_()
        down = weight.detach().t().contiguous().requires_grad_()
        z = ops.matmul_reduce_scatter(hidden, down, group, tier=tier)
        z.backward(whole.tensor_split(world_size)[rank].to(device))
        for found, wanted in (
            (y, whole.double() @ weights[rank].double().t() + bias.double()),
            (shard.grad, dx.tensor_split(world_size)[rank]),
            (weight.grad, grad[rank].double().t() @ whole.double()),
            (z, dx.tensor_split(world_size)[rank]),
            (hidden.grad, whole.double() @ weights[rank].double().t()),
            (down.grad, whole.double().t() @ grad[rank].double()),
        ):
            errors.append(error_in_roundings(found.detach(), wanted, dtype))
    return errors
