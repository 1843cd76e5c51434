"""AdamW by the device kernels (csrc/cuda/portable/adamw.cu), for captured graphs and for tests."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor


class StepSettings:
    """Learning rate and step in memory of a device, where a kernel reads them when it runs.

    `PyruntimeAdamwOptions` of csrc/cuda/launchers.h: lr, beta1, beta2 and eps as doubles, then the step.
    """

    def __init__(self, device: torch.device | str, *, beta1: float, beta2: float, eps: float):
        self._constants = (beta1, beta2, eps)
        self.tensor = torch.zeros(5, dtype=torch.int64, device=device)
        on_host = torch.zeros(5, dtype=torch.int64)
        self._staging = on_host.pin_memory() if self.tensor.is_cuda else on_host
        self._copied = torch.cuda.Event() if self.tensor.is_cuda else None

    def write(self, lr: float, step: int) -> None:
        """What the kernels read that the current stream runs after this. Waits for the write before."""
        if self._copied is not None:
            self._copied.synchronize()
        self._staging.copy_(torch.tensor(struct.unpack("5q", struct.pack("4dq", lr, *self._constants, step))))
        self.tensor.copy_(self._staging, non_blocking=True)
        if self._copied is not None:
            self._copied.record()


@torch.no_grad()
def device_adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avg: Sequence[Tensor],
    exp_avg_sq: Sequence[Tensor],
    masters: Sequence[Tensor],
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: Sequence[float],
    lr: float = 0.0,
    step: int = 1,
    settings: StepSettings | None = None,
    grad_scale: Tensor | None = None,
) -> None:
    """`pyruntime.ops.layers.adamw_` by the device kernels and nothing else: parameters float32, or bfloat16
    and float16 with float32 masters, all on one device; one launch for every 48 of one dtype.

    settings: read by the kernel in place of lr, step and the betas. grad_scale: one number on the device;
    where it is NaN when the kernel runs, nothing is updated. The host does not wait.

    Raises NotImplementedError where the kernels are not built, TypeError for other dtypes, ValueError for
    shapes and devices that do not fit.
    """
    torch.ops.pyruntime.device_adamw_(
        params,
        grads,
        exp_avg,
        exp_avg_sq,
        masters,
        grad_scale,
        None if settings is None else settings.tensor,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        step=step,
    )
