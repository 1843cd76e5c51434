"""Llama 4's mixtures pass every row, times its weight or 0, to every expert. Where their experts are spread
over ranks, rows go only to the experts that the router has chosen: an expert makes 0 of 0."""

from __future__ import annotations

import types

from torch import Tensor, nn

from pyruntime.nn.parallel_experts import ParallelExperts


def route_rows(model: nn.Module) -> None:
    """Gives mixtures of Llama 4 whose experts are spread a forward that calls them with the rows' experts."""
    for module in model.modules():
        if type(module).__name__ == "Llama4TextMoe" and isinstance(module.experts, ParallelExperts):
            module.forward = types.MethodType(_forward, module)


def _forward(mixture: nn.Module, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Returns what the mixture does: its output [T, D] and the router's logits [T, E]."""
    rows = hidden_states.reshape(-1, mixture.hidden_dim)
    scores, logits = mixture.router(rows)  # [T, E], 0 for experts that are not chosen
    weights, ids = scores.topk(mixture.top_k, dim=1)
    return mixture.shared_expert(rows) + mixture.experts(rows, ids, weights), logits
