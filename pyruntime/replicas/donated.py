"""The state of the outer and the inner optimizer that a joining replica takes over."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

from torch import Tensor

from pyruntime.replicas.connection import bytes_of
from pyruntime.replicas.outer_optimizer import OuterOptimizer


class OuterState:
    """Outer iterate and outer momentum of `outer`, and the tensors that `inner` returns. Those are state of
    the inner optimizer that a replica should not begin without, such as the moments of AdamW; they come from
    the middle of the donor's round."""

    def __init__(self, outer: OuterOptimizer, inner: Callable[[], Sequence[Tensor]] = lambda: ()):
        self._outer, self._inner = outer, inner

    def tensors(self) -> list[Tensor]:
        return [*self._outer.common(), *self._inner()]

    def advance(self, sums: Tensor, scale: float | None) -> None:
        self._outer.advance(sums, scale)

    def checksum(self) -> int:
        """Returns a CRC-32 of what all replicas have in common."""
        found = 0
        for tensor in self._outer.common():
            found = zlib.crc32(bytes_of(tensor.cpu()), found)
        return found
