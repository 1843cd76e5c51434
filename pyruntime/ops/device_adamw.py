"""AdamW with the device kernels (csrc/cuda/portable/layers/adamw.cu), for captured graphs and for tests."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor


class StepSettings:
    """Learning rate and step in device memory, where a kernel reads them when it runs.

    Laid out as `PyruntimeAdamwOptions` of csrc/cuda/launchers.h: lr, beta1, beta2, eps as doubles, then step.
    """

    def __init__(self, device: torch.device | str, *, beta1: float, beta2: float, eps: float):
        self._constants = (beta1, beta2, eps)
        self.tensor = torch.zeros(5, dtype=torch.int64, device=device)
        on_host = torch.zeros(5, dtype=torch.int64)
        kind = self.tensor.device.type
        self._staging = on_host if kind == "cpu" else on_host.pin_memory()
        self._copied = None if kind == "cpu" else torch.Event(kind)

    def write(self, lr: float, step: int) -> None:
        """Sets the values for kernels that the current stream runs after this. Waits for the last write."""
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
    rounding: Sequence[tuple[int, int]] = (),
) -> None:
    """`pyruntime.ops.layers.adamw_` with only the device kernels: one launch for every 48 parameters of one
    dtype. They are float32, bfloat16 and float16 with float32 masters, or bfloat16 with `rounding`, all on
    one device.

    settings: the kernel reads them in place of lr, betas, eps and step. grad_scale: one number on the device;
    if it is NaN when the kernel runs, nothing is updated. rounding: as in `adamw_`. The host does not wait.

    Raises NotImplementedError if the kernels are not built, TypeError for other dtypes, ValueError for shapes
    and devices that do not fit, and for settings with `rounding`.
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
        seeds=[seed for seed, _ in rounding],
        firsts=[first for _, first in rounding],
    )
