"""A bucket's worth of random gradients, sent compressed without a model around it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pyruntime.data_parallel.axes import Axes, axes_of
from pyruntime.data_parallel.bucket_sum import WriteChunk
from pyruntime.data_parallel.buckets import Bucket, cut_into_buckets
from pyruntime.data_parallel.compression import Compression
from pyruntime.data_parallel.compression.compressor import Compressor
from tests.transports import take

SHAPES = [(37, 50), (64, 33), (5, 7), (70, 41)]
"""Of matrices that no number of ranks divides; one is too small to be worth a loss."""
STEPS = 6


@dataclass
class Sent:
    """What came of steps on one rank; flat memory of the buckets' lines, marks left out as zeros."""

    given: list[Tensor]
    """By bucket: the sum of this rank's gradients over the steps, fp64."""
    reduced: list[Tensor]
    """What the steps made of all ranks' gradients: this rank's segment at its place, zero elsewhere."""
    last: list[Tensor]
    """Of the last step."""
    lost: list[Tensor]
    """Residuals."""
    numbers: dict[str, int]
    marks: list[list[bool]]


def buckets_of(
    together: bool, segments: int, dtype: torch.dtype, shapes=SHAPES, device: str = "cpu"
) -> list[Bucket]:
    """The matrices in one bucket, or each in one of its own."""
    zeros = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
    named = [(f"w{i}", nn.Parameter(zero)) for i, zero in enumerate(zeros)]
    return cut_into_buckets(named, segments, 1 << 30 if together else 1)


def opened(group, transport: str, stage: int) -> Axes:
    take(group, transport)
    return axes_of(DeviceMesh.from_group(group, "cpu"), stage)


def send(
    group,
    transport: str,
    stage: int,
    settings: Compression,
    together: bool = True,
    dtype: torch.dtype = torch.float32,
    got: tuple[int, ...] = (),
    shapes=SHAPES,
) -> Sent:
    """Steps of random gradients, of which some values are far larger than others. got: ranks that have a
    gradient for the first matrix; empty: all."""
    return send_over(opened(group, transport, stage), settings, together, dtype, got, shapes)


def send_over(
    axes: Axes,
    settings: Compression,
    together: bool = True,
    dtype: torch.dtype = torch.float32,
    got: tuple[int, ...] = (),
    shapes=SHAPES,
    device: str = "cpu",
) -> Sent:
    """The same over axes of ranks on that device."""
    axis = axes.shard if axes.shard.size > 1 else axes.replicate
    buckets = buckets_of(together, axes.shard.size, dtype, shapes, device)
    compressor = Compressor(settings, buckets, [], axes)
    generator = torch.Generator().manual_seed(17 + axis.rank)
    places = {id(bucket): i for i, bucket in enumerate(buckets)}
    sizes = [bucket.lines * bucket.width for bucket in buckets]
    given = [torch.zeros(size, dtype=torch.float64) for size in sizes]
    reduced = [torch.zeros(size, dtype=torch.float64) for size in sizes]
    last = [torch.zeros(size, dtype=torch.float64) for size in sizes]
    marks: list[list[bool]] = [[] for _ in buckets]

    def on_reduced(bucket: Bucket, gradient: Tensor) -> None:
        assert gradient.dtype == dtype and gradient.shape == (bucket.segment_lines, bucket.width)
        i = places[id(bucket)]
        gradient = gradient.cpu()
        marks[i] = bucket.got(gradient).tolist()
        size = gradient.numel()
        begin = axis.rank * size if bucket.segments > 1 else 0
        flat = without_marks(bucket, gradient).flatten().double()
        reduced[i][begin : begin + size] += flat
        last[i].zero_()[begin : begin + size] = flat

    for _ in range(STEPS):
        for i, bucket in enumerate(buckets):
            whole = torch.randn(bucket.lines, bucket.width, generator=generator).pow(3)
            whole *= torch.logspace(0, 3, bucket.lines).unsqueeze(1) * 10.0**i
            has = [not got or axis.rank in got or each is not first(buckets) for each in bucket.parameters]
            fill(bucket, whole, has)
            whole = whole.to(dtype)
            segments = whole.view(-1, bucket.segment_lines, bucket.width)
            given[i] += torch.cat([without_marks(bucket, each) for each in segments]).flatten().double()

            compressor.launch(bucket, dtype, axes, copied_from(whole, bucket), on_reduced)
        axis.complete_all()
        compressor.end_step()
    lost = []
    for one in compressor._packed.values():
        size = one.bucket.lines * one.bucket.width
        residual = torch.zeros(size) if one.residual is None else one.residual.cpu()
        segments = residual.view(-1, one.bucket.segment_lines, one.bucket.width)
        lost.append(torch.cat([without_marks(one.bucket, each) for each in segments]).flatten().double())
    return Sent(given, reduced, last, lost, compressor.plan, marks)


def copied_from(whole: Tensor, bucket: Bucket) -> WriteChunk:
    """Writes chunks of a gradient [lines, width]."""
    segments = whole.view(-1, bucket.segment_lines, bucket.width)

    def write(chunk: Tensor, segment: int, line: int) -> None:
        chunk.copy_(segments[segment : segment + len(chunk), line : line + chunk.shape[1]])

    return write


def first(buckets: list[Bucket]) -> nn.Parameter:
    return buckets[0].parameters[0]


def fill(bucket: Bucket, whole: Tensor, has: list[bool]) -> None:
    """Writes marks into each segment, zeros where a parameter has no gradient."""
    for segment in whole.view(-1, bucket.segment_lines, bucket.width):
        segment[bucket.marks :] = 0
        for part in bucket.parts:
            if not has[part.owner]:
                segment[part.offset : part.offset + part.lines] = 0
        for owner, one in enumerate(has):
            segment[bucket.marks + owner, 0] = float(one)


def without_marks(bucket: Bucket, segment: Tensor) -> Tensor:
    result = segment.clone()
    result[bucket.marks :] = 0
    return result
