"""Finds the rows of a table that a step has touched; an embedding's gradient is zero in all others.

Rows are found in the gradient, not from ids. However else the table was used, a row travels unless all of
its bits are zero (-0 is not zero: +0 + -0 is +0). So the sums are those of all rows, bit by bit. A table
whose every row has a gradient (tied, regularised) travels whole.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pyruntime.nn import VocabParallelEmbedding
from pyruntime.nn.weight_sinks import readers_of

MOST_TOUCHED = 0.5
"""Share of the lines. If the ranks together touched more, all lines travel."""


def tables_of(model: nn.Module) -> list[nn.Parameter]:
    """Returns the trainable weights that only one embedding reads, so that a search is worth it."""
    readers = readers_of(model)
    return [
        module.weight
        for module in model.modules()
        if isinstance(module, nn.Embedding | VocabParallelEmbedding)
        and module.weight.requires_grad
        and readers[id(module.weight)] == 1
    ]


def touched_rows(gradients: Iterable[Tensor | None], rows: int) -> Tensor:
    """Returns bool [rows]: whether a gradient, [rows, width] on the CPU, has a bit set in that row."""
    touched = torch.zeros(rows, dtype=torch.bool)
    for gradient in gradients:
        if gradient is not None and gradient.numel() > 0:
            octets = gradient.contiguous().view(rows, -1).view(torch.uint8)
            touched |= octets.amax(1) != 0  # any(1) takes much longer
    return touched


def packed(flags: Tensor) -> Tensor:
    """Packs bool [n] as bits, uint8 [ceil(n / 8)]."""
    padded = torch.nn.functional.pad(flags.to(torch.uint8), (0, -len(flags) % 8))
    return (padded.view(-1, 8) << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8)


def unpacked(bits: Tensor, count: int) -> Tensor:
    """Returns the first `count` flags that packed() made these bits of."""
    flags = (bits.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8)) & 1
    return flags.flatten()[:count].bool()
