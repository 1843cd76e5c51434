"""How parameters are cut over the data-parallel ranks and travel together.

A parameter is cut by rows as DTensor's Shard(0) cuts (every rank ceil(n / S) rows, the last ones fewer), each
part of a merged one (q, k, v) by itself. What travels in one flight is a Unit: one weight matrix, or a bucket
of small parameters. A unit is seen as lines of `width` elements in S segments of equal size, one for each
rank::

    segment r = [rank r's rows of part 0 | of part 1 | ... | one mark for each parameter]

Where a rank has fewer rows than the first, zeros fill its segment. A mark says that its parameter got a
gradient. A chunk of a flight is any run of lines of one segment, so the same arithmetic serves every
transport.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Part:
    """Rows of one parameter that are one tensor in a state dict.

    lines are per segment; a parameter's row is `lines_per_row` of them.
    """

    owner: int
    """Which of the unit's parameters."""
    key: str
    """Name in a state dict."""
    first_row: int
    rows: int
    share: int
    """Rows of each rank, ceil(rows / S)."""
    lines_per_row: int
    offset: int
    """First line in a segment."""

    def local_rows(self, segment: int) -> int:
        """Rows that rank `segment` really holds."""
        return max(0, min(self.share, self.rows - segment * self.share))

    @property
    def lines(self) -> int:
        return self.share * self.lines_per_row


@dataclass(frozen=True)
class Span:
    """Lines of a chunk that are rows of one parameter: [place, place + count) of the chunk are lines [source,
    source + count) of the parameter, seen as [-1, width]."""

    place: int
    count: int
    owner: int
    source: int


class Unit:
    """Parameters that travel together; see the module's docstring.

    parameters: of one dtype and device. parts: (owner, key, first row, rows) of each, in order.
    width: elements of a line, which divides every parameter's row. segments: S.
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[nn.Parameter],
        parts: Sequence[tuple[int, str, int, int]],
        width: int,
        segments: int,
    ):
        self.name, self.parameters, self.width, self.segments = name, list(parameters), width, segments
        self.parts: list[Part] = []
        offset = 0
        for owner, key, first_row, rows in parts:
            parameter = self.parameters[owner]
            row = parameter.numel() // max(1, _rows(parameter))
            share = -(-rows // segments)
            part = Part(owner, key, first_row, rows, share, row // width, offset)
            self.parts.append(part)
            offset += part.lines
        self.marks = offset
        """First line of the marks."""
        self.segment_lines = offset + len(self.parameters)
        self.dtype, self.device = self.parameters[0].dtype, self.parameters[0].device

    @property
    def lines(self) -> int:
        return self.segments * self.segment_lines

    def is_matrix(self) -> bool:
        """One parameter, whose rows are the lines."""
        return len(self.parameters) == 1 and self.width == max(1, self.parameters[0][:1].numel())

    def lines_of(self, owner: int, tensor: Tensor) -> Tensor:
        """A tensor of the shape of parameter `owner` as lines [-1, width]."""
        return tensor.reshape(-1, self.width)

    def spans(self, begin: int, count: int) -> Iterator[Span]:
        """The rows of parameters in the lines [begin, begin + count), which lie in one segment."""
        segment, start = divmod(begin, self.segment_lines)
        end = start + count
        for part in self.parts:
            filled = part.local_rows(segment) * part.lines_per_row
            low, high = max(start, part.offset), min(end, part.offset + filled)
            if low < high:
                source = (part.first_row + segment * part.share) * part.lines_per_row + low - part.offset
                yield Span(low - start, high - low, part.owner, source)

    def fill(self, chunk: Tensor, begin: int, got: Sequence[bool]) -> None:
        """Writes what a chunk [count, width] holds beside rows: zeros, and the marks of `got` by
        parameter."""
        count = len(chunk)
        at = 0
        for span in self.spans(begin, count):
            chunk[at : span.place].zero_()
            at = span.place + span.count
        chunk[at:].zero_()
        start = begin % self.segment_lines
        for owner, one in enumerate(got):
            if one and start <= self.marks + owner < start + count:
                chunk[self.marks + owner - start, 0] = 1

    def views(self, segment: Tensor, rank: int) -> list[Tensor]:
        """What a segment's tensor [segment_lines, width] holds of each part, [local rows, ...]."""
        result = []
        for part in self.parts:
            lines = part.local_rows(rank) * part.lines_per_row
            shape = (part.local_rows(rank), *self.parameters[part.owner].shape[1:])
            result.append(segment[part.offset : part.offset + lines].view(shape))
        return result

    def got(self, segment: Tensor) -> Tensor:
        """Which parameters some rank had a gradient for, by the marks of a reduced segment: bool, where that
        is."""
        return segment[self.marks :, 0] != 0


def _rows(parameter: Tensor) -> int:
    return parameter.shape[0] if parameter.dim() else 1


def matrix_unit(name: str, parameter: nn.Parameter, segments: int) -> Unit:
    """The unit of one parameter of two dimensions or more: a line is one of its rows."""
    parts = [(0, key, first, rows) for key, first, rows in _parts_of(name, parameter)]
    return Unit(name, [parameter], parts, max(1, parameter[:1].numel()), segments)


def bucket_unit(name: str, named: Sequence[tuple[str, nn.Parameter]], segments: int) -> Unit:
    """One unit of several parameters: a line is one element."""
    parts = [
        (owner, key, first, rows)
        for owner, (each, parameter) in enumerate(named)
        for key, first, rows in _parts_of(each, parameter)
    ]
    return Unit(name, [parameter for _, parameter in named], parts, 1, segments)


def _parts_of(name: str, parameter: nn.Parameter) -> list[tuple[str, int, int]]:
    """(state-dict key, first row, rows) of the tensors that a parameter's rows are."""
    layout = getattr(parameter, "tp_layout", None)
    if layout is None or layout.dim != 0 or len(layout.parts) == 1:
        key = name if layout is None else _sibling(name, layout.parts[0].key)
        return [(key, 0, _rows(parameter))]
    found, first = [], 0
    for part in layout.parts:
        rows = layout.local_shape_of(part)[0]
        found.append((_sibling(name, part.key), first, rows))
        first += rows
    return found


def _sibling(name: str, key: str) -> str:
    prefix, _, _ = name.rpartition(".")
    return f"{prefix}.{key}" if prefix else key


_BucketKey = tuple[torch.dtype, torch.device, bool]


@dataclass
class _Bucket:
    named: list[tuple[str, nn.Parameter]] = field(default_factory=list)
    nbytes: int = 0


def cut_into_units(named: Sequence[tuple[str, nn.Parameter]], segments: int, bucket_bytes: int) -> list[Unit]:
    """Units of `named` parameters in their order: matrices of `bucket_bytes` or more alone, what is smaller
    in buckets of up to that size, of matrices or of vectors, by dtype and device."""
    units: list[Unit] = []
    buckets: dict[_BucketKey, _Bucket] = {}

    def close(key: _BucketKey) -> None:
        together = buckets.pop(key).named
        first, parameter = together[0]
        if len(together) > 1:
            units.append(bucket_unit(f"{first} and {len(together) - 1} more", together, segments))
        elif parameter.dim() >= 2:
            units.append(matrix_unit(first, parameter, segments))
        else:
            units.append(bucket_unit(first, together, segments))

    for name, parameter in named:
        is_matrix = parameter.dim() >= 2
        if is_matrix and parameter.nbytes >= bucket_bytes:
            units.append(matrix_unit(name, parameter, segments))
            continue
        key = (parameter.dtype, parameter.device, is_matrix)
        if key in buckets and buckets[key].nbytes + parameter.nbytes > bucket_bytes:
            close(key)
        bucket = buckets.setdefault(key, _Bucket())
        bucket.named.append((name, parameter))
        bucket.nbytes += parameter.nbytes
    for key in list(buckets):
        close(key)
    return units
