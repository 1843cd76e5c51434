"""The interface of torch.optim.Optimizer for an optimizer over shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer


class OneGroup(Optimizer):
    """A torch.optim.Optimizer with one group, for learning-rate schedulers. Only its "lr" may be set.
    GradScaler is refused: bf16 needs no scale. drop: drops the gradients of a step."""

    takes_shards: ClassVar[bool] = True  # its gradients are not in `.grad`

    def __init__(
        self, parameters: Sequence[nn.Parameter], drop: Callable[[], None], *, lr: float, **fixed: Any
    ):
        super().__init__(parameters, {"lr": lr, **fixed})
        self._fixed, self._drop = fixed, drop

    @property
    def lr(self) -> float:
        return self.param_groups[0]["lr"]

    @lr.setter
    def lr(self, lr: float) -> None:
        self.param_groups[0]["lr"] = lr

    def check_group(self) -> None:
        """Raises RuntimeError if something other than lr was set."""
        for name, value in self._fixed.items():
            found = self.param_groups[0].get(name)
            if found is not value and found != value:
                raise RuntimeError(
                    f"{name} was set to {found} in the optimizer's group, and only lr may change; it was "
                    f"made with {value} (OneCycleLR, say, takes cycle_momentum=False)."
                )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients of this step. Every rank calls it."""
        self._drop()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.param_groups:
            raise RuntimeError(
                "The optimizer of a sharded model has one group, the parameters that shard() found; close() "
                "the handle and shard() the model again to train other parameters."
            )
        super().add_param_group(param_group)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Refuses GradScaler, which reads this first."""
        raise RuntimeError(
            "GradScaler scales losses so that fp16 gradients do not vanish, but this optimizer takes "
            "gradients without a scale; train in bf16 without it, or with GradScaler(enabled=False)."
        )
