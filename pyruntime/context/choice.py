"""Which variant of ring attention is the fastest here, found by trying them."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from pyruntime import ops
from pyruntime.comm import companion, process_group
from pyruntime.context.mask import mask_of
from pyruntime.context.variants import attend, attend_backward

ROUNDS = 2
"""Of which the faster one counts."""

_chosen: dict[tuple[Any, ...], str] = {}


@torch.compiler.disable
@torch.no_grad()
def choose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    document_ids: Tensor | None,
    group: str,
    causal: bool,
    layout: str,
    scale: float,
) -> str:
    """The variant whose slowest rank was the fastest, forward and backward together; remembered by group,
    shapes, dtype, layout and mask. The first call tries them all, on every rank alike."""
    has_documents = document_ids is not None
    key = (
        group,
        id(process_group(group)),
        tuple(q.shape),
        tuple(k.shape),
        q.dtype,
        q.device.type,
        causal,
        layout,
        has_documents,
    )
    if key not in _chosen:
        own = process_group(group)
        ranks = own.size()
        candidates = ["ring", "all_gather_kv"] + (["ulysses"] if k.shape[2] % ranks == 0 else [])
        mask = mask_of(layout, q.shape[1] * ranks, ranks, own.rank(), causal, document_ids)

        def seconds(variant: str) -> float:
            begin = time.perf_counter()
            done = attend(variant, q, k, v, group, mask, scale)
            attend_backward(variant, q, q, k, v, done, group, mask, scale)
            return time.perf_counter() - begin

        rounds = [[seconds(variant) for variant in candidates] for _ in range(1 + ROUNDS)][1:]
        least = torch.tensor(rounds, dtype=torch.float64).min(0).values
        if ranks > 1:
            least = ops.collectives.all_gather_stats(least, companion(group, "cp").name).max(0).values
        _chosen[key] = candidates[int(least.argmin())]
    return _chosen[key]
