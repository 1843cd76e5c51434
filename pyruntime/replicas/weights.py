"""What an outer optimizer averages: tensors that an inner optimizer writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Value:
    """A tensor that the inner optimizer writes, and the outer one moves."""

    name: str
    tensor: Tensor
    """Contiguous, on the CPU; this rank's part of a parameter, or of its master weights."""
    travels_as: torch.dtype
    """Its displacement."""
    counts: bool = True
    """In norms over all parts of a replica: of ranks that hold the same, one counts it."""
    rounded: Tensor | None = None
    """Its copy of lower precision, of the same shape, which whoever writes it writes too; None: it has
    none."""


class Weights(Protocol):
    """Who holds them."""

    def current(self) -> list[Value]:
        """The same tensors every time, with all steps of the inner optimizer until now."""

    def written(self) -> None:
        """Something was written into them: what reads them follows."""


class ModuleWeights:
    """The parameters of a module, which an optimizer of torch's updates in place.

    Raises ValueError where there are none that require a gradient, or one is on a device or not contiguous.
    """

    def __init__(self, module: nn.Module):
        self._values = [Value(name, p, p.dtype) for name, p in module.named_parameters() if p.requires_grad]
        if not self._values:
            raise ValueError(f"{type(module).__name__} has no parameter that requires a gradient.")
        for value in self._values:
            if value.tensor.device.type != "cpu" or not value.tensor.is_contiguous():
                where = f"on {value.tensor.device}" if value.tensor.device.type != "cpu" else "not contiguous"
                raise ValueError(
                    f"{value.name} is {where}, and outer steps are of contiguous parameters on the CPU; move "
                    "the module there, or make the parameter contiguous."
                )

    def current(self) -> list[Value]:
        return self._values

    def written(self) -> None:
        """They are the parameters themselves."""
