"""What the tests of operators without ranks share: both implementations, dtypes, references' precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
WIDTHS = [1, 7, 33, 1000]
ROWS = [0, 1, 5, 130]  # 130 rows: more than one block of the weight gradient
EPS = 1e-5


def cpu(op, *args, **kwargs):
    """The kernel that tensors on the CPU get."""
    return op(*args, **kwargs)


def composite(op, *args, **kwargs):
    """The composite that devices without kernels get, here run on CPU tensors."""
    return op.default._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)


implementations = pytest.mark.parametrize("run", [cpu, composite])
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


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


def rotary_tables(seq: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    frequencies = 100.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(seq, dtype=torch.float64), frequencies)
    angles = torch.cat((angles, angles), dim=1)
    return angles.cos().to(dtype), angles.sin().to(dtype)
