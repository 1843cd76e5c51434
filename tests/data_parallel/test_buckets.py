"""A chunk of several segments is written and read as its segments, one after the other."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn

from pyruntime.data_parallel import bucket_sum
from pyruntime.data_parallel.bucket_sum import blocks_of
from pyruntime.data_parallel.buckets import Bucket
from pyruntime.nn import MergedColumnParallelLinear
from pyruntime.nn.rows import rows_of

ROWS = {"q": 10, "k": 4, "v": 5}


def merged(width=3):
    return [("qkv.weight", MergedColumnParallelLinear(width, ROWS, group=None, bias=False).weight)]


NAMED = {
    "a matrix": lambda: [("weight", nn.Parameter(torch.zeros(19, 3)))],
    "a merged matrix": merged,
    "small matrices": lambda: [(name, nn.Parameter(torch.zeros(rows, 2))) for name, rows in ROWS.items()],
    "a stack of matrices": lambda: [("experts", nn.Parameter(torch.zeros(5, 2, 64)))],
    "vectors": lambda: [(name, nn.Parameter(torch.zeros(rows))) for name, rows in ROWS.items()],
}


def written(bucket, wholes, chunk, segment, line):
    """The chunk, of rows of `wholes` and marks of all parameters but the first."""
    segments, lines = range(segment, segment + len(chunk)), range(line, line + chunk.shape[1])
    for span in bucket.spans(segments, lines):
        span.of_chunk(chunk).copy_(span.of_parameter(bucket.lines_of(wholes[span.owner])))
    bucket.fill(chunk, segment, line, [owner > 0 for owner in range(len(bucket.parameters))])
    return chunk


@pytest.mark.parametrize("segments", [1, 2, 3, 4, 7, 25])
@pytest.mark.parametrize("kind", NAMED)
def test_segments_are_written_together_as_alone_and_come_back(kind, segments):
    bucket = Bucket(NAMED[kind](), segments)
    wholes = [torch.randn_like(each) for each in bucket.parameters]
    unwritten = torch.full((segments, bucket.segment_lines, bucket.width), torch.nan)
    alone = unwritten.clone()
    for segment in range(segments):
        for line in range(bucket.segment_lines):
            written(bucket, wholes, alone[segment : segment + 1, line : line + 1], segment, line)
    for first in range(segments):
        for line in (0, 1, bucket.segment_lines - 1):
            some = slice(first, segments), slice(line, bucket.segment_lines)
            together = written(bucket, wholes, unwritten.clone()[some], first, line)
            assert torch.equal(together, alone[some])
    back = [torch.full_like(each, torch.nan) for each in wholes]
    for span in bucket.spans(range(segments), range(bucket.segment_lines)):
        span.of_parameter(bucket.lines_of(back[span.owner])).copy_(span.of_chunk(alone))
    assert all(torch.equal(one, other) for one, other in zip(back, wholes, strict=True))
    for rank, segment in enumerate(alone):
        views = bucket.views(segment, rank)
        rows = [
            rows_of(wholes[part.owner])[part.first_row + rank * part.share :][: len(view)]
            for part, view in zip(bucket.parts, views, strict=True)
        ]
        assert all(torch.equal(view, each) for view, each in zip(views, rows, strict=True))
        assert bucket.got(segment).tolist() == [owner > 0 for owner in range(len(bucket.parameters))]


def test_lines_of_a_flight_are_a_chunk_of_its_piece():
    bucket = Bucket(NAMED["a matrix"](), 4)  # 5 rows and a mark a segment
    assert bucket.segment_lines == 6
    memory = torch.arange(12 * 3).view(12, 3)
    chunk, segment, line = bucket.chunk_of(memory, 6)
    assert (chunk.shape, segment, line) == ((2, 6, 3), 1, 0)
    chunk, segment, line = bucket.chunk_of(memory[:8], 4, range(2, 4))
    assert (chunk.shape, segment, line) == ((4, 2, 3), 2, 2)
    chunk, segment, line = bucket.chunk_of(memory[:2], 15)
    assert (chunk.shape, segment, line) == ((1, 2, 3), 2, 3)
    assert bucket.chunk_of(memory[:0], 6)[0].shape == (1, 0, 3)


def test_the_mark_of_a_stack_is_a_row_of_its_matrices():
    stack = Bucket([("experts", nn.Parameter(torch.zeros(16, 96, 64)))], 8)
    assert (stack.width, stack.segment_lines) == (64, 2 * 96 + 1)


def test_blocks_are_the_rows_of_a_part_that_a_flight_takes_of_a_rank():
    bucket = Bucket(merged(), 2)  # 5, 2 and 3 rows, and a mark
    assert blocks_of(bucket, torch.float32) == [5, 2, 3]
    with mock.patch.object(bucket_sum, "most_bytes", lambda _: 2 * 4 * 3 * 4):
        assert blocks_of(bucket, torch.float32) == [4, 1, 2, 1, 2]
