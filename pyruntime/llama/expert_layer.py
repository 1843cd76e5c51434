"""The experts of a layer, in the place of its feed-forward network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from pyruntime.llama.mixture import Mixture
from pyruntime.nn import (
    MergedColumnParallelLinear,
    ParallelExperts,
    Router,
    RouterLosses,
    RowParallelLinear,
    SigmoidRouter,
)
from pyruntime.nn.parameters import TensorGroup
from pyruntime.nn.router import Scores
from pyruntime.ops.layers import swiglu


class MixtureOfExperts(nn.Module):
    """y = sum over a row's experts of their weight times E_i(x), plus sigmoid(x w) S(x) if there is a shared
    expert S, or S(x) if routers are by sigmoid. Call: layer(x, rows) with this rank's rows [T/P, D] of the T
    rows; returns [T/P, D]."""

    def __init__(
        self,
        mixture: Mixture,
        hidden: int,
        losses: RouterLosses | None,
        options: dict[str, Any],
        over: TensorGroup,
    ):
        """over: the ranks over which experts lie."""
        super().__init__()
        place = {name: options[name] for name in ("group", "dtype", "device")}
        sizes = hidden, mixture.experts, mixture.per_token
        common = {"renormalize": mixture.renormalize, "losses": losses, **place}
        self.router: Router
        if mixture.sigmoid:
            of_groups = {name: getattr(mixture, name) for name in ("groups", "best_groups", "factor")}
            self.router = SigmoidRouter(*sizes, **of_groups, **common)
        else:
            self.router = Router(*sizes, **common)
        self.experts = ParallelExperts(
            mixture.experts, hidden, mixture.width, tier=options["tier"], **{**place, "group": over}
        )
        self.has_shared = mixture.shared_width > 0
        if self.has_shared:
            width = mixture.shared_width
            self.shared_gate_up = MergedColumnParallelLinear(
                hidden, {"gate": width, "up": width}, False, **options
            )
            self.shared_down = RowParallelLinear(width, hidden, False, **options)
        self.has_shared_gate = mixture.has_shared_gate
        if self.has_shared_gate:
            self.shared_gate = Scores(hidden, 1, **place)

    def forward(self, x: Tensor, rows: int) -> Tensor:
        routed = self.router(x)
        y = self.experts(x, *routed, self.rows_of_experts(rows))
        if not self.has_shared:
            return y
        shared = self.shared_down(swiglu(self.shared_gate_up(x, rows)))
        if not self.has_shared_gate:
            return y + shared
        return y + self.shared_gate(x).sigmoid().to(y.dtype) * shared

    def rows_of_experts(self, rows: int) -> int | None:
        """Returns the number that the experts take for T rows; None: ranks exchange theirs."""
        if not self.experts.has_own_rows:
            return rows
        # Data-parallel ranks learn from equally many tokens, but may validate with others.
        return -(-rows // self.router.group.size) if self.training else None

    def rows_of_slices(self, rows: Sequence[int]) -> list[int]:
        """Returns the numbers that the experts take for slices of so many rows."""
        found = [each for each in map(self.rows_of_experts, rows) if each is not None]
        if found:
            return found
        ranks, rank = self.router.group.size, self.router.group.rank
        return self.experts.most_rows([each // ranks + (rank < each % ranks) for each in rows])
