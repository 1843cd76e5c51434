"""The load of experts in a step, from what routers have counted in its backward passes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pyruntime.llama import Llama
from pyruntime.nn import Router
from pyruntime.train.resolved import ResolvedRun


class ExpertLoad:
    """Collects the load of a model's experts on the device: `take` after a step. There is none of models
    without experts, and none without losses and biases of routers, for which rows are counted.

    A rank's numbers: for each layer of the model with experts the imbalances of experts and of ranks, alike
    on all ranks of its pipeline stage, and this rank's share of the entropy, or zeros in place of other
    stages' layers; then this rank's shares of both losses, which are means over layers."""

    def __init__(self, layers: Sequence[int], routers: Mapping[int, Router], ep: int, device: torch.device):
        """layers: numbers of the model's layers with experts. routers: those of this rank's, by number. ep:
        ranks over which experts lie."""
        self._layers, self._routers, self._ep = list(layers), list(routers.values()), ep
        self._places = torch.tensor([self._layers.index(number) for number in routers], device=device)

    @classmethod
    def of_run(cls, run: ResolvedRun, model: Llama, ep: int, device: torch.device) -> ExpertLoad:
        mixture, train = run.shape.mixture, run.config.train
        if mixture is None or not (train.balance_loss or train.router_z_loss or mixture.sigmoid):
            return cls((), {}, ep, device)
        layers = [number for number in range(run.shape.num_hidden_layers) if mixture.has(number)]
        own = (number for number in model.part.layers if mixture.has(number))
        return cls(layers, {number: _router(model.layer(number)) for number in own}, ep, device)

    def take(self) -> Tensor | None:
        """Returns this rank's numbers of the step, fp64 [3 L + 2]; None if there are none."""
        if not self._layers:
            return None
        loads = [load for each in self._routers if (load := each.take_load()) is not None]
        found = torch.zeros(len(self._layers), 3, dtype=torch.float64, device=self._places.device)
        if not loads:
            return torch.cat([found.flatten(), found.new_zeros(2)])
        experts = self._routers[0].experts
        counts, shares = torch.stack(loads).split([experts, 3], -1)
        of_rank = math.ceil(experts / self._ep)  # as torch.chunk cuts them
        whole = nn.functional.pad(counts, (0, of_rank * self._ep - experts))
        ranks = whole.unflatten(-1, (self._ep, of_rank)).sum(-1)
        busiest = [each.amax(-1) / counts.sum(-1) * each_of for each, each_of in
                   ((counts, experts), (ranks, self._ep))]  # fmt: skip
        found.index_copy_(0, self._places, torch.stack([*busiest, shares[:, 0]], -1))
        return torch.cat([found.flatten(), shares[:, 1:].sum(0) / len(self._layers)])

    def figures(self, ranks: Tensor) -> dict[str, Any]:
        """Returns the figures of `StepMetrics` by name, from the numbers of all ranks [ranks, 3 L + 2]."""
        if not self._layers:
            return {}
        of_layers, losses = ranks.split([3 * len(self._layers), 2], -1)
        experts, of_ranks, entropy = of_layers.unflatten(-1, (len(self._layers), 3)).unbind(-1)
        found = {
            "expert_imbalance": experts.amax(0),
            "rank_imbalance": of_ranks.amax(0),
            "router_entropy": entropy.sum(0),
        }
        named = {
            name: dict(zip(map(str, self._layers), each.tolist(), strict=True))
            for name, each in found.items()
        }
        balance, z = losses.sum(0).tolist()
        return {**named, "balance_loss": balance, "router_z_loss": z}


def _router(layer: nn.Module) -> Router:
    (found,) = (each for each in layer.modules() if isinstance(each, Router))
    return found
