"""Seconds of a step and of a part of it, as `step.py` predicts them."""

from __future__ import annotations

import operator
from dataclasses import dataclass

from pyruntime.plan.overlap import Exposed


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds of one layer, or of a rank's layers, and one micro-batch on one rank."""

    forward: float
    """Compute only."""
    backward_input: float
    """Compute, including recomputation."""
    backward_weight: float
    attention: float
    """Attention's part of the compute, forward and backward."""
    tp_forward: float
    """Exposed; so are the next three."""
    tp_backward: float
    cp_forward: float
    cp_backward: float
    between_forward: float
    """Seconds of transfers that occupy the node's adapters, exposed or not."""
    between_backward: float
    ep_forward: float = 0.0
    """Exposed; so is the next: what experts on GPUs wait for."""
    ep_backward: float = 0.0
    again: float = 0.0
    """Of `backward_input`: what was not kept is computed again."""
    linears: tuple[Exposed, ...] = ()

    @property
    def waits_forward(self) -> float:
        return self.tp_forward + self.cp_forward + self.ep_forward

    @property
    def waits_backward(self) -> float:
        return self.tp_backward + self.cp_backward + self.ep_backward

    def times(self, layers: int) -> LayerSeconds:
        """Returns the seconds of so many layers, without their linears."""
        return LayerSeconds(*(layers * each for each in self._seconds()))  # type: ignore[arg-type]

    def beside(self, other: LayerSeconds) -> LayerSeconds:
        """Returns the seconds of these layers and others, without their linears."""
        return LayerSeconds(*map(operator.add, self._seconds(), other._seconds()))

    def _seconds(self) -> list[float]:
        """All but the linears, which are last."""
        return list(vars(self).values())[:-1]


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of one step of the whole job; they add up to `total`."""

    compute: float
    recompute: float
    tp: float
    """Exposed, as are cp, ep, pp, z and dp. AxoNN's y and x count as tp."""
    cp: float
    ep: float
    pp: float
    z: float
    dp: float
    bubble: float
    optimizer: float

    @property
    def exposed(self) -> float:
        """All except compute, recomputation, bubble and optimizer."""
        return self.tp + self.cp + self.ep + self.pp + self.z + self.dp

    @property
    def total(self) -> float:
        return self.compute + self.recompute + self.exposed + self.bubble + self.optimizer
