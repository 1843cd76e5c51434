"""One bucket's parameters on this rank: the rows that it keeps, and the gather that restores the whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyruntime.choices import WireFormat
from pyruntime.comm.core import _C
from pyruntime.comm.ranges import marked
from pyruntime.comm.wire import Wire
from pyruntime.data_parallel.away import AwayWeight, give_back, mark_old, own_memory, take_back
from pyruntime.data_parallel.axes import FlightAxis
from pyruntime.data_parallel.buckets import Bucket, BucketPart
from pyruntime.nn.cut import memory_of
from pyruntime.nn.rows import shape_of_rows


class BucketWeights:
    """One bucket's parameters, and this rank's rows of them. Its gather is a flight of `axis`.

    apart: this rank's rows have memory of their own, because the parameters' memory comes and goes. frozen:
    the parameters are never updated; a write into the whole counts, and each rank takes its rows of it.
    wire: if the bucket is one matrix and apart, the format in which rows travel. In the parameter this
    rank's own rows are rounded alike."""

    def __init__(
        self,
        bucket: Bucket,
        axis: FlightAxis,
        *,
        apart: bool,
        frozen: bool = False,
        wire: WireFormat = "same",
    ):
        self.bucket, self.axis, self.frozen = bucket, axis, frozen
        self._exact = Wire("same", bucket.width, bucket.dtype, bucket.device)
        self._rounding = self._exact
        if bucket.is_matrix and wire != "same":
            self._rounding = Wire(wire, bucket.width, bucket.dtype, bucket.device)
        self._wire = self._rounding
        """The format of the gather under way."""
        self.is_cut = axis.size > 1
        self.is_under_way = False
        self._gather: _C.LineGather | None = None
        self.is_current = True
        """Whether the parameters hold the values of all ranks' rows."""
        self._apart = apart and self.is_cut
        self._stays = False
        """Whether code other than its modules has read it: then it stays whole until the next update."""
        if self._apart and not any(map(_has_memory, bucket.parameters)):
            self.rows = [self._new_rows(part) for part in bucket.parts]
            """This rank's rows of each part, contiguous; the optimizer updates them."""
            self.free()
            return
        if self._apart:
            for parameter in bucket.parameters:
                own_memory(parameter, bucket.name)
        self.rows = [self._own_rows(part) for part in bucket.parts]
        if self._apart:
            self.rows = [rows.clone() for rows in self.rows]

    def _own_rows(self, part: BucketPart) -> Tensor:
        return part.own_rows(memory_of(self.bucket.parameters[part.owner]), self.axis.rank)

    def _new_rows(self, part: BucketPart) -> Tensor:
        parameter = self.bucket.parameters[part.owner]
        shape = shape_of_rows(part.shape, part.local_rows(self.axis.rank))
        return torch.empty(shape, dtype=parameter.dtype, device=parameter.device)

    def take_rows_of(self, owner: int, whole: Tensor) -> None:
        """Takes this rank's rows of the bucket's parameter number `owner` from `whole`."""
        for part, rows in zip(self.bucket.parts, self.rows, strict=True):
            if part.owner == owner:
                rows.copy_(part.own_rows(whole, self.axis.rank))

    def take_parameters(self) -> None:
        """Takes this rank's rows from the parameters, which are whole and have been written."""
        if self._apart and not any(isinstance(each, AwayWeight) for each in self.bucket.parameters):
            for part, rows in zip(self.bucket.parts, self.rows, strict=True):
                rows.copy_(self._own_rows(part))

    def has_changed(self) -> None:
        """Notes that this rank's rows were written. A gather under way has old values and is completed."""
        self._land()
        self.is_current, self._stays = not self.is_cut, False
        if self.is_cut and not self._apart:
            for parameter in self.bucket.parameters:
                mark_old(parameter)

    def begin(self) -> None:
        """Begins the gather, unless the parameters are current or it is under way."""
        if not self.is_current and not self.is_under_way:
            self._begin(self.rows)

    def begin_again(self) -> None:
        """Begins the gather, even if nothing has changed."""
        self.has_changed()
        self._begin(self.rows)

    def begin_ahead(self, rows: Sequence[Tensor]) -> None:
        """Begins the gather with `rows`, the values that this rank's rows are going to have."""
        self.has_changed()
        self._begin(rows)

    def _begin(self, rows: Sequence[Tensor]) -> None:
        self.axis.make_room()
        bucket, wire = self.bucket, self._wire
        self._gather = _C.LineGather(
            self.axis.name, bucket.lines, wire.travelling_width, wire.travels_as, str(bucket.device)
        )
        with marked("dp send weights", bucket.name):
            self._send(self._gather, rows)
        self.is_under_way = True
        self.axis.add(self)

    def bring(self) -> None:
        """Gathers the parameters; they are current when it returns."""
        self.begin()
        self._land()

    def bring_exact(self) -> None:
        """Gathers all ranks' rows without rounding. Modules gather them again in the wire's format."""
        if self._rounding is self._exact or not self.is_cut:
            self.bring()
            return
        self._land()
        self._wire = self._exact
        self.begin_again()
        self._land()
        self._wire, self.is_current = self._rounding, False

    def free(self) -> None:
        """Frees the parameters' memory, unless other code has read them; their shapes stay."""
        self._land()
        if self._stays:
            return
        if self.frozen and self.is_current and any(map(_has_memory, self.bucket.parameters)):
            self.take_parameters()
        for parameter in self.bucket.parameters:
            give_back(parameter, self._fetch, keeps_writes=self.frozen)
        self.is_current = False

    def end_stay(self) -> None:
        """Frees the parameters that stayed because other code read or wrote them."""
        if self._stays:
            self._stays = False
            self.free()

    def _fetch(self) -> None:
        with torch.no_grad():
            self.bring()
        self._stays = True

    def _land(self) -> None:
        if self.is_under_way:
            self.axis.complete_up_to(self)

    # -- as a flight

    def advance(self) -> None:
        # If apart, the parameters have no memory before a module reads them.
        if self._gather is not None and not self._apart and self._gather.has_come():
            self._take(self._gather)

    def complete(self) -> None:
        if self._gather is not None:
            self._take(self._gather)
        self.is_under_way, self.is_current = False, True

    def drop(self) -> None:
        self._gather, self.is_under_way = None, False

    def has_landed(self) -> bool:
        return self._gather is None

    def _send(self, gather: _C.LineGather, rows: Sequence[Tensor]) -> None:
        bucket = self.bucket
        own = [part.view(-1, bucket.width) for part in rows]
        for index, (begin, count) in enumerate(gather.own_chunks()):
            chunk = gather.own(index)
            start = begin % bucket.segment_lines
            for part, lines in zip(bucket.parts, own, strict=True):
                low, high = max(start, part.offset), min(start + count, part.offset + len(lines))
                if low < high:
                    self._wire.write(
                        lines[low - part.offset : high - part.offset], chunk[low - start : high - start]
                    )
            gather.publish(index)

    def _take(self, gather: _C.LineGather) -> None:
        """Copies the gathered rows into the parameters."""
        bucket = self.bucket
        with marked("dp take weights", bucket.name):
            for parameter in bucket.parameters:
                take_back(parameter)
            if self._apart:
                for part, rows in zip(bucket.parts, self.rows, strict=True):
                    own = self._wire.packed(rows.view(-1, bucket.width))
                    self._wire.read(own, self._own_rows(part).view(-1, bucket.width))
            whole = [bucket.lines_of(memory_of(parameter)) for parameter in bucket.parameters]
            for index, (begin, _) in enumerate(gather.chunks()):
                chunk, first, line = bucket.chunk_of(gather.chunk(index), begin)
                segments = range(first, first + len(chunk))
                for span in bucket.spans(segments, range(line, line + chunk.shape[1])):
                    self._wire.read(span.of_chunk(chunk), span.of_parameter(whole[span.owner]))
            gather.finish()
        self._gather = None


def _has_memory(parameter: Tensor) -> bool:
    return parameter.numel() == 0 or parameter.untyped_storage().nbytes() > 0
