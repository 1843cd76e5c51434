"""Of a table, the rows that the next forward pass reads return before the others.

A token embedding's gradient is complete last and its weights are read first, so that nothing hides the return
of a large table. But a batch reads few of its rows: these travel by themselves, and the whole table, they
among it, behind all other weights, under the forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pyruntime.comm.core import _C
from pyruntime.comm.ranges import marked
from pyruntime.nn import VocabParallelEmbedding

if TYPE_CHECKING:
    from pyruntime.data_parallel.weights import BucketWeights


class FirstRows:
    """Some rows of a table on their way, once; under way they are a flight of the table's axis.

    whole: the table, whose bucket `is_table`. rows: bool by row of the parameter, the same on every rank.
    """

    def __init__(self, whole: BucketWeights, rows: Tensor):
        self.whole, self.axis = whole, whole.axis
        self.is_current = self.is_under_way = False
        self._wanted = rows
        (part,) = whole.bucket.parts
        self._rows = rows.nonzero().flatten()
        self._first_own = whole.axis.rank * part.share
        segment = self._rows // part.share
        self._lines = segment * whole.bucket.segment_lines + self._rows % part.share
        self._gather: _C.LineGather | None = None

    def holds(self, module: nn.Module, arguments: Sequence[Any]) -> bool:
        """Whether the embedding, called so, reads these rows alone."""
        return len(arguments) == 1 and bool(self._wanted[rows_of(module, arguments[0])].all())

    def has_changed(self) -> None:
        """The table has, or will not be what was sent of it. What is under way lands first."""
        if self.is_under_way:
            self.axis.complete_up_to(self)
        self.is_current = False

    def begin(self) -> None:
        """The gather is under way when it returns, unless it was before."""
        if not self.is_current and not self.is_under_way:
            self._begin(self.whole.rows)

    def begin_ahead(self, rows: Sequence[Tensor]) -> None:
        """As begin(), of what this rank's rows are going to be."""
        self.whole.has_changed()
        self._begin(rows)

    def bring(self) -> None:
        """The rows are current when it returns."""
        self.begin()
        if self.is_under_way:
            self.axis.complete_up_to(self)

    def _begin(self, rows: Sequence[Tensor]) -> None:
        self.axis.make_room()
        bucket = self.whole.bucket
        gather = _C.LineGather(
            self.axis.name, bucket.lines, bucket.width, bucket.dtype, str(bucket.device), self._lines.tolist()
        )
        with marked("dp send first rows", bucket.name):
            own = bucket.lines_of(rows[0])
            for index, (begin, count) in enumerate(gather.own_chunks()):
                wanted = self._rows[begin : begin + count] - self._first_own
                torch.index_select(own, 0, wanted, out=gather.own(index))
                gather.publish(index)
        self._gather, self.is_under_way = gather, True
        self.axis.add(self)

    # -- as a flight

    def advance(self) -> None:
        if self._gather is not None and self._gather.has_come():
            self._take(self._gather)

    def complete(self) -> None:
        if self._gather is not None:
            self._take(self._gather)
        self.is_under_way, self.is_current = False, True

    def drop(self) -> None:
        self._gather, self.is_under_way = None, False

    def has_landed(self) -> bool:
        return self._gather is None

    def _take(self, gather: _C.LineGather) -> None:
        bucket = self.whole.bucket
        with marked("dp take first rows", bucket.name):
            table = bucket.lines_of(bucket.parameters[0].data)
            for index, (begin, count) in enumerate(gather.chunks()):
                table.index_copy_(0, self._rows[begin : begin + count], gather.chunk(index))
            gather.finish()
        self._gather = None


def rows_of(embedding: nn.Module, ids: Tensor) -> Tensor:
    """The rows of this rank's table that `embedding` reads for some ids, int64 [n]."""
    if not isinstance(embedding, VocabParallelEmbedding):
        return ids.flatten()
    local = ids.flatten() - embedding.vocab_start
    return local[(local >= 0) & (local < len(embedding.weight))]
