"""AdamW over tensor-parallel shards: each rank updates what it holds; the gradient norm is the whole
model's."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pyruntime.data_parallel.shared import Shared
from pyruntime.ops.device_adamw import StepSettings, device_adamw_
from pyruntime.ops.layers import adamw_, random_rounding, sum_of_squares
from pyruntime.train.config import Optimizer


class AdamW:
    """AdamW (Loshchilov and Hutter 2019) with fp32 state, in one fused pass over all parameters.

        m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g^2
        w = w (1 - lr * decay) - lr * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

    Matrices decay, vectors (norm weights, biases) do not. With bf16 parameters w is the fp32 master copy and
    the parameter its rounding, or, with rounding="stochastic", the parameter itself, rounded at random.
    """

    def __init__(self, model: nn.Module, settings: Optimizer, shared: Shared | None = None):
        """shared: parameters that are another rank's too, with the same gradients there; the norm counts them
        once."""
        self._settings = settings
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._names, self._parameters = list(named), list(named.values())
        self._weight_decay = [settings.weight_decay if p.dim() >= 2 else 0.0 for p in self._parameters]
        self._exp_avg = [torch.zeros_like(p, dtype=torch.float32) for p in self._parameters]
        self._exp_avg_sq = [torch.zeros_like(p, dtype=torch.float32) for p in self._parameters]
        low_precision = any(p.dtype != torch.float32 for p in self._parameters)
        low_precision &= settings.rounding == "nearest"
        self._master = [p.detach().float() for p in self._parameters] if low_precision else []
        shared = shared or {}
        counted = [p for p in self._parameters if p not in shared or shared[p].counts]
        self._sharded = [p for p in counted if p.tp_dim is not None]
        self._replicated = [p for p in counted if p.tp_dim is None]

    def squared_norms(self) -> tuple[float, float]:
        """Sums of squares of this rank's gradients: of sharded parameters, to be summed over the ranks, and
        of replicated ones, which are the same on every rank and count once."""
        sharded, replicated = (
            sum_of_squares(self._gradients(of)) for of in (self._sharded, self._replicated)
        )
        return sharded.item(), replicated.item()

    def squared_norm(self) -> Tensor:
        """Sum of squares of all gradients of this rank, float64, where they are: of a rank that is alone."""
        return sum_of_squares(self._gradients([*self._sharded, *self._replicated]))

    @torch.no_grad()
    def step(self, step: int, lr: float, grad_scale: float | Tensor) -> None:
        """Updates the parameters with `grad_scale` times their gradients, which it drops; not where
        grad_scale is NaN. `step` counts from 1. On devices, with a grad_scale that lies there, the host does
        not wait."""
        rounding = self._settings.rounding == "stochastic"
        adamw_(
            *self._lists(),
            **self._constants(),
            lr=lr,
            step=step,
            grad_scale=grad_scale,
            rounding=[random_rounding(name, step) for name in self._names] if rounding else (),
        )
        self._drop_gradients()

    @torch.no_grad()
    def step_by_settings(self, settings: StepSettings, grad_scale: Tensor) -> None:
        """As `step`, with learning rate and step from memory of the device, which a captured graph reads anew
        in every replay. The gradients stay, as the graph's own memory."""
        device_adamw_(*self._lists(), **self._constants(), settings=settings, grad_scale=grad_scale)

    def _lists(self) -> tuple[list[Tensor], ...]:
        gradients = self._gradients(self._parameters)
        return self._parameters, gradients, self._exp_avg, self._exp_avg_sq, self._master

    def _constants(self) -> dict:
        settings = self._settings
        return {
            "beta1": settings.beta1,
            "beta2": settings.beta2,
            "eps": settings.eps,
            "weight_decay": self._weight_decay,
        }

    @staticmethod
    def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        return [parameter.grad for parameter in parameters]

    def _drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def state_dict(self) -> dict[str, Tensor]:
        """The state as DTensors over its own storage, {"exp_avg.<parameter>": ...}; what is loaded into them
        is loaded into the state."""
        kinds = {"exp_avg": self._exp_avg, "exp_avg_sq": self._exp_avg_sq}
        if self._master:
            kinds["master"] = self._master
        return {
            f"{kind}.{key}": value
            for kind, states in kinds.items()
            for name, parameter, state in zip(self._names, self._parameters, states, strict=True)
            for key, value in _full_names(name, parameter, state).items()
        }


def clip_coefficient(norm: float, max_norm: float) -> float:
    """Factor that brings a gradient of norm `norm` down to `max_norm` (as torch.nn.utils.clip_grad_norm_); 0:
    1."""
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm else 1.0


def clip_on_device(norm: Tensor, max_norm: float) -> Tensor:
    """`clip_coefficient` as a float32 scalar where `norm` is, without waiting for it."""
    if not max_norm:
        return torch.ones_like(norm, dtype=torch.float32)
    return (max_norm / (norm + 1e-6)).clamp(max=1.0).float()


def global_norm(sharded: list[float], replicated: float) -> float:
    """Norm of the whole model's gradient out of every rank's sharded sum of squares and the replicated
    one."""
    return math.sqrt(math.fsum(sharded) + replicated)


def _full_names(name: str, parameter: nn.Parameter, state: Tensor) -> dict[str, Tensor]:
    """`state`, laid out as `parameter` is, under the names that a whole checkpoint has for its parts."""
    prefix, _, _ = name.rpartition(".")
    return {
        f"{prefix}.{key}" if prefix else key: value
        for key, value in parameter.tp_layout.to_dtensors(state).items()
    }
