"""What the backward pass computes again in place of what the forward pass would keep for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyruntime.choices import Recomputation, check_value, values


def check(recompute: str) -> None:
    """Raises ValueError for what is none of Recomputation."""
    check_value("recompute", recompute, values(Recomputation))


class _Again(NamedTuple):
    """In the place of a tensor: what computes the one in whose memory it lay, and where it lay there."""

    compute: Callable[[], Tensor]
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        with torch.no_grad():
            return self.compute().as_strided(self.size, self.stride, self.offset)


@contextlib.contextmanager
def computed_again(x: Tensor, compute: Callable[[], Tensor]) -> Iterator[None]:
    """Within it, who saves x for its backward pass keeps none of it, and is given what `compute` makes then:
    the same as x, in memory laid out alike. Whatever else is saved is kept.

    compute: refers to no part of a graph (detached tensors), or graph and it would keep each other. It must
    neither wait for other ranks nor write to what it reads.
    """
    # x is alive as long as this is open, so that its memory is nobody else's.
    place = x.untyped_storage().data_ptr()

    def pack(saved: Tensor) -> Tensor | _Again:
        if saved.untyped_storage().data_ptr() != place:
            return saved
        return _Again(compute, saved.size(), saved.stride(), saved.storage_offset())

    def unpack(packed: Any) -> Tensor:
        return packed.tensor() if isinstance(packed, _Again) else packed

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
