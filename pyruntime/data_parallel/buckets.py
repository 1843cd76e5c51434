"""Cuts parameters over the data-parallel ranks, into buckets that travel together.

A parameter is cut by rows (pyruntime/nn/rows.py) as DTensor's Shard(0) cuts: every rank ceil(n / S) rows, the
last ones fewer. A stack of experts is cut as one matrix of all their rows. Each part of a merged parameter
(q, k, v) is cut by itself. A Bucket travels in one flight: one weight matrix, or several
small parameters. It consists of lines of `width` elements in S segments of equal size, one for each rank::

    segment r = [rank r's rows of part 0 | of part 1 | ... | one mark for each parameter]

If a rank has fewer rows than the first, zeros fill its segment. A mark says that its parameter got a
gradient. A chunk of a flight is any run of lines of one segment, or several whole segments, so one arithmetic
serves every transport.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pyruntime.data_parallel.axes import Axes, own_axes
from pyruntime.nn.cut import memory_of
from pyruntime.nn.rows import row_count, rows_of, shape_of_rows


@dataclass(frozen=True)
class BucketPart:
    """Rows of one parameter that are one tensor in a state dict.

    Lines count within a segment; a row of the parameter is `lines_per_row` of them.
    """

    owner: int
    """Index of its parameter in the bucket."""
    key: str
    """Name in a state dict."""
    shape: tuple[int, ...]
    """Shape of the tensor that they are all together, as tensor parallelism cuts it."""
    first_row: int
    rows: int
    share: int
    """Rows of each rank, ceil(rows / S)."""
    lines_per_row: int
    offset: int
    """First line in a segment."""

    def local_rows(self, segment: int) -> int:
        """Returns the number of rows that rank `segment` really holds."""
        return max(0, min(self.share, self.rows - segment * self.share))

    def own_rows(self, whole: Tensor, segment: int) -> Tensor:
        """Returns rank `segment`'s rows of a tensor with the parameter's shape."""
        first = self.first_row + segment * self.share
        return rows_of(whole)[first : first + self.local_rows(segment)]

    @property
    def lines(self) -> int:
        return self.share * self.lines_per_row


@dataclass(frozen=True)
class LineSpan:
    """Lines of a chunk [segments, lines, width] that are rows of one parameter, seen as [-1, width]."""

    segments: slice
    """Those of the chunk's segments that have such lines."""
    lines: slice
    """The lines that each of these segments has."""
    owner: int
    source: int
    """The first of the first segment's lines in the parameter."""
    step: int
    """From there to the first of the next segment's."""

    def of_chunk(self, chunk: Tensor) -> Tensor:
        """Returns these lines of the chunk, [segments, lines, width]."""
        return chunk[self.segments, self.lines]

    def of_parameter(self, lines: Tensor) -> Tensor:
        """Returns the same of the parameter's lines [-1, width]."""
        segments, count = self.segments.stop - self.segments.start, self.lines.stop - self.lines.start
        if segments == 1:
            return lines[self.source : self.source + count].unsqueeze(0)
        past = self.source + (segments - 1) * self.step + count
        return lines[self.source : past].unfold(0, count, self.step).transpose(1, 2)


class Bucket:
    """Parameters that travel together; see the module's docstring.

    named: of one dtype and device. segments: S. A line is a row of a bucket's only matrix, or one element.
    axes: the ranks over which its gradient is summed, and its rows are cut; None: this one alone.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], segments: int, axes: Axes | None = None):
        self.axes = own_axes() if axes is None else axes
        (first, alone), *more = named
        self.name = f"{first} and {len(more)} more" if more else first
        self.parameters, self.segments = [parameter for _, parameter in named], segments
        self.is_matrix = not more and alone.dim() >= 2
        """Whether it is one parameter, whose rows are the lines."""
        self.width = max(1, alone.numel() // max(1, row_count(alone.shape))) if self.is_matrix else 1
        """Elements of a line; it divides every parameter's row."""
        self.parts: list[BucketPart] = []
        offset = 0
        for owner, (name, parameter) in enumerate(named):
            row, first_row = parameter.numel() // max(1, row_count(parameter.shape)), 0
            for key, shape in _parts_of(name, parameter):
                rows = row_count(shape)
                share = -(-rows // segments)
                part = BucketPart(owner, key, shape, first_row, rows, share, row // self.width, offset)
                self.parts.append(part)
                first_row += rows
                offset += part.lines
        self.marks = offset
        """First line of the marks."""
        self.segment_lines = offset + len(self.parameters)
        self.dtype, self.device = alone.dtype, alone.device

    @property
    def lines(self) -> int:
        return self.segments * self.segment_lines

    @property
    def nbytes(self) -> int:
        """Bytes that travel, in the bucket's dtype."""
        return self.lines * self.width * self.dtype.itemsize

    def lines_of(self, tensor: Tensor) -> Tensor:
        """Returns a tensor with the shape of one of the parameters as lines [-1, width]."""
        return memory_of(tensor).reshape(-1, self.width)

    def chunk_of(self, memory: Tensor, begin: int, piece: range | None = None) -> tuple[Tensor, int, int]:
        """Returns lines [count, width] of a flight as a chunk [segments, lines, width], its first segment,
        and the first line in each.

        begin: the first of these lines in the flight. piece: the lines of every segment that the flight has;
        None: all. A chunk has lines of one segment, or several whole pieces."""
        piece = range(self.segment_lines) if piece is None else piece
        segment, within = divmod(begin, len(piece))
        lines = min(len(memory), len(piece))
        segments = len(memory) // lines if lines else 1
        assert within + lines <= len(piece) and segments * lines == len(memory), (begin, len(memory), piece)
        return memory.view(segments, lines, memory.shape[1]), segment, piece.start + within

    def spans(self, segments: range, lines: range) -> Iterator[LineSpan]:
        """Yields the rows of parameters in a chunk of these segments, and of these lines of each of them."""
        for alike in self._alike(segments):
            for part in self.parts:
                filled = part.local_rows(alike.start) * part.lines_per_row
                low, high = max(lines.start, part.offset), min(lines.stop, part.offset + filled)
                if low < high:
                    yield LineSpan(
                        slice(alike.start - segments.start, alike.stop - segments.start),
                        slice(low - lines.start, high - lines.start),
                        part.owner,
                        part.first_row * part.lines_per_row + alike.start * part.lines + low - part.offset,
                        part.lines,
                    )

    def _alike(self, segments: range) -> Iterator[range]:
        """Yields neighbours among `segments` that hold equally many rows of every part."""

        def rows(segment: int) -> list[int]:
            return [part.local_rows(segment) for part in self.parts]

        for _, alike in itertools.groupby(segments, rows):
            ranks = list(alike)
            yield range(ranks[0], ranks[-1] + 1)

    def fill(self, chunk: Tensor, segment: int, line: int, got: Sequence[bool]) -> None:
        """Writes the rest of a chunk [segments, lines, width] beside its rows: zeros, and marks of `got`, by
        parameter. segment, line: its first ones."""
        lines = range(line, line + chunk.shape[1])
        for alike in self._alike(range(segment, segment + len(chunk))):
            rest = chunk[alike.start - segment : alike.stop - segment]
            at = 0
            for span in self.spans(alike, lines):
                if at < span.lines.start:
                    rest[:, at : span.lines.start].zero_()
                at = span.lines.stop
            if at < len(lines):
                rest[:, at:].zero_()
        for owner, one in enumerate(got):
            if one and self.marks + owner in lines:
                chunk[:, self.marks + owner - line, 0] = 1

    @property
    def is_table(self) -> bool:
        """Whether every line is a row of the parameter or a mark."""
        return self.is_matrix and len(self.parts) == 1

    def lines_with(self, rows: Tensor) -> Tensor:
        """Returns a table's bool [lines]: true for `rows`, bool by row of the parameter, and for marks."""
        (part,) = self.parts
        filled = rows.new_zeros(self.segments, part.share)
        filled.view(-1)[: len(rows)] = rows
        return torch.nn.functional.pad(filled, (0, 1), value=True).flatten()

    def rows_of(self, lines: Tensor) -> tuple[Tensor, Tensor]:
        """Returns for lines of a table the parameter's rows, int64, and whether each is a mark instead, bool.
        A mark has row 0."""
        segment, within = lines // self.segment_lines, lines % self.segment_lines
        marks = within == self.marks
        return torch.where(marks, 0, segment * self.marks + within), marks

    def views(self, segment: Tensor, rank: int) -> list[Tensor]:
        """Returns the rows of each part, [local rows, ...], in a rank's segment [segment_lines, width]."""
        result = []
        for part in self.parts:
            lines = part.local_rows(rank) * part.lines_per_row
            shape = shape_of_rows(part.shape, part.local_rows(rank))
            result.append(segment[part.offset : part.offset + lines].view(shape))
        return result

    def got(self, segment: Tensor) -> Tensor:
        """Returns by a reduced segment's marks which parameters got a gradient: bool, on its device."""
        return segment[self.marks :, 0] != 0

    def mark(self, segment: Tensor, got: Tensor) -> None:
        """Writes `got` as the marks of a reduced segment; the inverse of got()."""
        segment[self.marks :, 0] = got.to(segment.dtype)


def _parts_of(name: str, parameter: nn.Parameter) -> list[tuple[str, tuple[int, ...]]]:
    """Returns the state-dict key and the shape of the tensors that a parameter's rows are."""
    layout = getattr(parameter, "tp_layout", None)
    if layout is None or layout.dim != 0 or len(layout.parts) == 1:
        key = name if layout is None else _sibling(name, layout.parts[0].key)
        return [(key, tuple(parameter.shape))]
    return [(_sibling(name, part.key), layout.local_shape_of(part)) for part in layout.parts]


def bytes_of(parameter: nn.Parameter) -> int:
    """Returns the bytes by which a parameter's bucket is chosen. Ranks with other experts, of which the last
    may have fewer, share the order of buckets: so the rank's with most count. So they do for unequal shares
    of tensor-parallel ranks, which must agree on what stage 3 cuts."""
    layout = getattr(parameter, "tp_layout", None)
    if layout is not None and any(part.shares for part in layout.parts):
        return parameter.nbytes // parameter.shape[layout.dim] * sum(map(layout.largest, layout.parts))
    if layout is None or layout.group.copies is None:
        return parameter.nbytes
    experts, *others = layout.parts[0].shape
    return -(-experts // layout.group.size) * math.prod(others) * parameter.element_size()


def _sibling(name: str, key: str) -> str:
    prefix, _, _ = name.rpartition(".")
    return f"{prefix}.{key}" if prefix else key


def cut_into_buckets(
    named: Sequence[tuple[str, nn.Parameter]], segments: int, bucket_bytes: int, axes: Axes | None = None
) -> list[Bucket]:
    """Puts `named` parameters into buckets. A matrix of `bucket_bytes` or more has its own. Smaller matrices
    share buckets of at most that size, by dtype and device, and so do vectors."""
    buckets: list[Bucket] = []
    filling: dict[tuple, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in named:
        is_matrix, size = parameter.dim() >= 2, bytes_of(parameter)
        if is_matrix and size >= bucket_bytes:
            buckets.append(Bucket([(name, parameter)], segments, axes))
            continue
        key = (parameter.dtype, parameter.device, is_matrix)
        held = sum(bytes_of(other) for _, other in filling.get(key, []))
        if held and held + size > bucket_bytes:
            buckets.append(Bucket(filling.pop(key), segments, axes))
        filling.setdefault(key, []).append((name, parameter))
    return buckets + [Bucket(together, segments, axes) for together in filling.values()]
