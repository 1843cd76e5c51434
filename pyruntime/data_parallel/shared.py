"""Parameters that several parts of a model hold, as the first and the last stage of a pipeline hold tied
embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from pyruntime import ops
from pyruntime.comm import Group


@dataclass(frozen=True)
class Holders:
    """The ranks that hold a parameter, each of which takes the same steps from the sum of their gradients."""

    group: Group
    """Of these ranks, as `pyruntime.ops` takes it."""
    counts: bool
    """Whether this rank is the one that counts the parameter in the norm of all parts."""

    def sum(self, gradient: Tensor) -> Tensor:
        """The sum of what they all have; each of them calls it."""
        return ops.all_reduce(gradient.contiguous(), self.group)


Shared = Mapping[nn.Parameter, Holders]
