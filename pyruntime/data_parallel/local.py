"""Gradients of a rank that shares them with no other: `.grad` has them until the optimizer takes them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from torch import Tensor

from pyruntime.data_parallel.buckets import Bucket
from pyruntime.nn.cut import gradient_of, memory_of
from pyruntime.nn.weight_sinks import AddedToGrad


class LocalGradients(AddedToGrad):
    """Does for one rank what `GradientReducer` does for several. `finish()` calls on_gradient(bucket, rows of
    each part, None if there are none) for every bucket."""

    def __init__(self, buckets: Sequence[Bucket], on_gradient: Callable[[Bucket, list[Tensor | None]], None]):
        super().__init__()
        self._buckets, self._on_gradient = buckets, on_gradient

    def accumulate(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def finish(self) -> None:
        """Hands over what `.grad` holds, without a copy, and leaves nothing there."""
        for bucket in self._buckets:
            rows: list[Tensor | None] = []
            for part in bucket.parts:
                gradient = gradient_of(bucket.parameters[part.owner])
                rows.append(None if gradient is None else part.own_rows(memory_of(gradient), 0))
            for parameter in bucket.parameters:
                parameter.grad = None
            self._on_gradient(bucket, rows)

    def close(self) -> None:
        """Does nothing: autograd has the gradients already."""
