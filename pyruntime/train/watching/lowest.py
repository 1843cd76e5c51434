"""The lowest validation loss of a run: when a run ends early, and which checkpoint is the best."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class LowestLoss:
    """patience: validations in a row without a lower loss after which the run ends; 0: it does not."""

    patience: int = 0
    loss: float = math.inf
    """The lowest loss so far, in nats per target."""
    since: int = 0
    """Validations since then."""

    def saw(self, loss: float) -> bool:
        """Counts a validation. Returns whether it is the lowest so far; one that is not finite never is."""
        if loss < self.loss:
            self.loss, self.since = loss, 0
            return True
        self.since += 1
        return False

    @property
    def has_ended(self) -> bool:
        """Whether the run is to end."""
        return 0 < self.patience <= self.since
