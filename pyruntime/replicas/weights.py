"""The tensors that an outer optimizer averages and an inner optimizer writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Value:
    """A tensor that the inner optimizer writes and the outer one moves."""

    name: str
    tensor: Tensor
    """Contiguous, all on one device; this rank's part of a parameter, or of its master weights."""
    travels_as: torch.dtype
    """Dtype of its displacement on the wire."""
    counts: bool = True
    """Whether this rank counts it in norms over a replica's parts; only one of its holders does."""
    rounded: Tensor | None = None
    """A copy in lower precision, of the same shape; a write to one writes both. None: no copy."""


class Weights(Protocol):
    """The owner of the averaged tensors."""

    def current(self) -> list[Value]:
        """Returns the same tensors every time, with all steps of the inner optimizer so far."""

    def written(self) -> None:
        """Is called after a write to the tensors: updates what depends on them."""


class ModuleWeights:
    """The parameters of a module, which a torch optimizer updates in place.

    Raises ValueError if no parameter requires a gradient, one is not contiguous, or they are on several
    devices.
    """

    def __init__(self, module: nn.Module):
        self._values = [Value(name, p, p.dtype) for name, p in module.named_parameters() if p.requires_grad]
        if not self._values:
            raise ValueError(f"{type(module).__name__} has no parameter that requires a gradient.")
        first = self._values[0]
        for value in self._values:
            if value.tensor.device != first.tensor.device:
                raise ValueError(
                    f"{value.name} is on {value.tensor.device} and {first.name} on {first.tensor.device}, "
                    "but outer steps need all parameters on one device; move the module to one."
                )
            if not value.tensor.is_contiguous():
                raise ValueError(
                    f"{value.name} is not contiguous, but outer steps need contiguous parameters; make it so."
                )

    def current(self) -> list[Value]:
        return self._values

    def written(self) -> None:
        """Does nothing: the tensors are the parameters themselves."""
