"""Recomputation: the backward pass computes tensors again that the forward pass would otherwise keep."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyruntime.choices import Recomputation, check_value, values


def check(recompute: str) -> None:
    """Raises ValueError unless `recompute` is a value of Recomputation."""
    check_value("recompute", recompute, values(Recomputation))


class _Again(NamedTuple):
    """Stands for a saved tensor: the function that computes its memory again, and its place in there."""

    compute: Callable[[], Tensor]
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        with torch.no_grad():
            return self.compute().as_strided(self.size, self.stride, self.offset)


@contextlib.contextmanager
def computed_again(x: Tensor, compute: Callable[[], Tensor]) -> Iterator[None]:
    """Within this context, an operator that saves x for its backward pass does not keep it. The backward pass
    calls `compute`, which must return the values of x in the same memory layout. Other tensors are kept.

    compute: must use detached tensors only, or it and the graph would keep each other alive. It must not wait
    for other ranks, nor write to its inputs.
    """
    # x lives at least as long as this context, so no other tensor gets its memory.
    place = x.untyped_storage().data_ptr()

    def pack(saved: Tensor) -> Tensor | _Again:
        if saved.untyped_storage().data_ptr() != place:
            return saved
        return _Again(compute, saved.size(), saved.stride(), saved.storage_offset())

    def unpack(packed: Any) -> Tensor:
        return packed.tensor() if isinstance(packed, _Again) else packed

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
