"""Checks of the kernels' Python face that hold on any device."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from pyruntime import ops
from pyruntime.cuda import Kernels
from pyruntime.llama import Llama

UNIT = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
DEVICE_LAYERS = {"swiglu", "swiglu_backward", "apply_rope_qkv", "rotate_qkv_", "apply_rope_qkv_backward"}
DEVICE_LAYERS |= {"cross_entropy_stats", "cross_entropy_backward", "cross_entropy_backward_"}
"""Ops with kernels of csrc/cuda/portable (csrc/ops/device_layers.cpp)."""


def on_device(op, *args, **kwargs):
    """What is registered for CUDA, whatever device the tensors are on."""
    return op.default.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), *args, **kwargs)


class OnDevice(TorchDispatchMode):
    """Below autograd, layers of CPU tensors run what is registered for CUDA; `ours`: those that did."""

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
    """Loss and every gradient of a Llama on `device`, its layers by the kernels, are those on the CPU."""
    theirs, mine = make(), make().to(device)
    ids, labels = torch.randint(500, (2, 2, 37)).unbind()
    labels[:, -3:] = -100
    expected = theirs(ids, labels)
    expected.backward()
    with OnDevice() as seen:
        loss = mine(ids.to(device), labels.to(device))
        loss.backward()
    assert seen.ours == DEVICE_LAYERS - {"apply_rope_qkv", "cross_entropy_backward"}
    low = mine.head.weight.dtype != torch.float32
    torch.testing.assert_close(loss.cpu(), expected, rtol=2e-3 if low else 1e-5, atol=0)
    for (name, found), wanted in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        assert wanted.grad is not None and found.grad is not None, name
        error = (found.grad.cpu().double() - wanted.grad.double()).norm() / wanted.grad.double().norm()
        assert error < (0.03 if low else 1e-5), f"{name}: {error:.1e}"


def operands(layout: str, m: int, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    a = torch.randn(k, m) if layout == "TN" else torch.randn(m, k)
    b = torch.randn(n, k) if layout == "NT" else torch.randn(k, n)
    return a.to(dtype), b.to(dtype)


def product(layout: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """In fp64."""
    a, b = a.double(), b.double()
    return (a.t() if layout == "TN" else a) @ (b.t() if layout == "NT" else b)


def error_in_roundings(seen: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> float:
    """The largest error over what a few roundings of the values explain; NaN counts as infinite."""
    allowed = 3 * UNIT[dtype] * (wanted.abs() + wanted.abs().mean() + 1e-3)
    ratio = (seen.cpu().double() - wanted).abs() / allowed
    return float(ratio.nan_to_num(float("inf")).max()) if ratio.numel() else 0.0


def check_matmul(kernels: Kernels, device, layout: str, dtype, m: int, n: int, k: int) -> None:
    a, b = operands(layout, m, n, k, dtype)
    bias = torch.randn(n).to(dtype)
    seen = kernels.matmul(a.to(device), b.to(device), layout, bias.to(device))
    assert error_in_roundings(seen, product(layout, a, b) + bias.double(), dtype) < 1


def check_reduce(kernels: Kernels, device, count: int, shape: tuple[int, ...]) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        parts = [torch.randn(shape).to(dtype) for _ in range(count)]
        bias = torch.randn(shape[-1]).to(dtype)
        wanted = torch.zeros(shape)
        for part in parts:
            wanted = wanted + part.float()
        seen = kernels.reduce([part.to(device) for part in parts], bias.to(device))
        assert torch.equal(seen.cpu(), (wanted + bias.float()).to(dtype))


def check_adamw(kernels: Kernels, device, shapes: list[tuple[int, ...]]) -> None:
    masters = [torch.randn(shape) for shape in shapes]
    params = [master.bfloat16() for master in masters]
    moments = [[torch.zeros(shape) for shape in shapes] for _ in range(2)]
    ours = [[tensor.clone().to(device) for tensor in tensors] for tensors in (params, masters, *moments)]
    decay = [0.1 * (i % 2) for i in range(len(shapes))]
    scale = torch.tensor(0.7)
    for step in range(1, 4):
        grads = [torch.randn(shape).bfloat16() for shape in shapes]
        torch.ops.pyruntime.adamw_(
            params,
            grads,
            *moments,
            masters,
            scale,
            lr=1e-2,
            beta1=0.9,
            beta2=0.95,
            eps=1e-8,
            weight_decay=decay,
            step=step,
        )
        kernels.adamw_(
            ours[0],
            [grad.to(device) for grad in grads],
            ours[1],
            ours[2],
            ours[3],
            lr=1e-2,
            betas=(0.9, 0.95),
            eps=1e-8,
            weight_decay=decay,
            step=step,
            grad_scale=scale.to(device),
        )
    for tensors, wanted in zip(ours[1:], (masters, *moments), strict=True):
        for seen, expected in zip(tensors, wanted, strict=True):
            torch.testing.assert_close(seen.cpu(), expected, rtol=2e-6, atol=2e-6)
    for param, master in zip(ours[0], ours[1], strict=True):
        assert torch.equal(param, master.bfloat16())


def check_lse_merge(kernels: Kernels, device) -> None:
    batch, tokens, heads, width, keys = 2, 5, 3, 24, 9
    q, k, v = torch.randn(batch, heads, tokens, width), *torch.randn(2, batch, heads, keys, width)

    def attention(first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        scores = q.double() @ k[:, :, first:end].double().transpose(-1, -2)
        out = scores.softmax(-1) @ v[:, :, first:end].double()
        return out.transpose(1, 2).float().contiguous().to(device), scores.logsumexp(-1).float().to(device)

    out = torch.zeros(batch, tokens, heads, width, device=device)
    lse = torch.full((batch, heads, tokens), float("-inf"), device=device)
    for first, end in ((0, 4), (4, 5), (5, keys)):
        block_out, block_lse = attention(first, end)
        kernels.lse_merge_(out, lse, block_out, block_lse)
    for seen, wanted in zip((out, lse), attention(0, keys), strict=True):
        torch.testing.assert_close(seen, wanted, rtol=1e-5, atol=1e-5)


def steps_in_tier(
    group: dist.ProcessGroup, device: torch.device, tier: str, calls: list[tuple[int, int, int]]
) -> list[float]:
    """Errors, in roundings, of both linears, forward and backward: of products [m, n] = [m, k] @ [k, n] on
    fresh numbers that all ranks draw alike. What travels is k wide."""
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
