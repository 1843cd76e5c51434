"""How long a GPU takes for a GEMM, in seconds: the planner's model of it, and that of virtual time.

It follows bench/gpu/model.py: a tile's step over k takes the longest of its tensor cores', shared memory's
and L2's clocks, and tiles run in waves over the multiprocessors. The fastest of tiles, and of cuts of k,
counts. Clocks are scaled so that a GEMM of 8192 x 8192 x 8192 reaches the given efficiency: GPUs lower
theirs under load.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from functools import cached_property

from pyruntime.plan.gpus import (
    DEPTH,
    FIRST_LOAD_S,
    L2_BYTES_PER_CLOCK,
    LAUNCH_S,
    SHARED_BYTES_PER_CLOCK,
    Gpu,
)

LARGE = 8192
"""The m, n and k of the GEMM that reaches the efficiency."""
EPILOGUE_ELEMENTS_PER_CLOCK = 64
"""Elements of C that a multiprocessor rounds and stores in a clock, as in bench/gpu/model.py."""
CLUSTER_OF_BLOCKS = 2
"""Blocks below each other that load B once."""
TILES = ((128, 256), (128, 128), (64, 256), (64, 128), (64, 64))
"""Tiles of the vendor's GEMMs, rows by columns. Assumed: the sizes that NVIDIA's guide names for large GEMMs
("Matrix Multiplication Background User's Guide", tile quantization), and smaller ones of 64."""
MOST_SPLITS = 4
"""The most parts into which they cut k; assumed."""


GROUPED = 0.9
"""The rate of torch's grouped GEMM, as a share of that of one GEMM with as many rows. Estimated."""
HALF_A_TILE = 64
"""Rows."""


@dataclass(frozen=True)
class Gemms:
    """The GEMMs of a GPU."""

    gpu: Gpu
    peak_flops: float
    """Operations/s of the GPU in 16-bit GEMMs."""
    efficiency: float
    """Share of the peak that the GEMM of LARGE reaches."""
    memory_bandwidth: float
    """Bytes/s of the GPU's memory."""

    def seconds(
        self, m: float, n: float, k: float, batch: int = 1, size: int = 2, of_result: int | None = None
    ) -> float:
        """Returns the seconds of `batch` products [m, k] [k, n], elements of `size` bytes. Elements of 4
        bytes take the time of TF32, half the rate of bf16. of_result: bytes that are written, and read
        where products are added to it, for an element of the result; None: `size`."""
        if not (m and n and k and batch):
            return LAUNCH_S
        slower = size / 2
        of_result = size if of_result is None else of_result
        moved = self.touch(batch * (size * (m * k + k * n) + of_result * m * n))
        return max(slower * self._tiled(m, n, k, batch) / self.sustained + LAUNCH_S + FIRST_LOAD_S, moved)

    def grouped(self, groups: float, rows: float, n: float, k: float) -> float:
        """Returns the seconds of one launch of `rows` rows times the matrices [k, n] of `groups`, each of
        which ends in half a tile."""
        return self.seconds(rows + HALF_A_TILE * groups, n, k) / GROUPED

    def grouped_gradients(self, groups: float, rows: float, n: float, k: float) -> float:
        """Returns the seconds of one launch of sums [n, k] over the rows of each group."""
        return self.seconds(groups * n, k, rows / groups) / GROUPED

    def touch(self, nbytes: float) -> float:
        """Returns the seconds of a launch that reads or writes `nbytes` of the GPU's memory."""
        return LAUNCH_S + nbytes / self.memory_bandwidth

    def touch_beside(self, nbytes: float, blocks: float) -> float:
        """Returns the seconds of a launch of so many blocks of 256 threads that reads or writes `nbytes`
        beside GEMMs: its multiprocessors get their share of what the L2 cache delivers."""
        share = multiprocessors_of(blocks) / self.gpu.multiprocessors
        delivered = min(self.memory_bandwidth, share * L2_BYTES_PER_CLOCK * self.gpu.clock_hz)
        return LAUNCH_S + nbytes / delivered

    @cached_property
    def sustained(self) -> float:
        """Share of the nominal clock at which GEMMs run."""
        ideal = 2.0 * LARGE**3 / (self.peak_flops * self._tiled(LARGE, LARGE, LARGE, 1))
        return self.efficiency / ideal

    def _tiled(self, m: float, n: float, k: float, batch: int) -> float:
        """Returns seconds at the nominal clock, without launch, of the best tiles."""
        return _best_of_tiles(self.gpu, self.memory_bandwidth, m, n, k, batch)


def multiprocessors_of(blocks: float) -> float:
    """Returns how many multiprocessors blocks of 256 threads fill."""
    return blocks / (2048 / 256)


@functools.lru_cache(maxsize=1 << 16)
def _best_of_tiles(gpu: Gpu, memory_bandwidth: float, m: float, n: float, k: float, batch: int) -> float:
    return min(
        _of_tiles(gpu, memory_bandwidth, tile, splits, (m, n, k, batch))
        for tile in TILES
        for splits in range(1, MOST_SPLITS + 1)
    )


def _of_tiles(
    gpu: Gpu,
    memory_bandwidth: float,
    tile: tuple[int, int],
    splits: int,
    sizes: tuple[float, float, float, int],
) -> float:
    (rows, columns), (m, n, k, batch) = tile, sizes
    tiles = batch * splits * math.ceil(m / rows) * math.ceil(n / columns)
    waves = math.ceil(tiles / gpu.multiprocessors)
    steps = math.ceil(math.ceil(k / DEPTH) / splits)
    clocks = waves * (
        steps * _clocks_of_step(gpu, rows, columns) + rows * columns / EPILOGUE_ELEMENTS_PER_CLOCK
    )
    seconds = clocks / gpu.clock_hz
    if splits > 1:  # parts in fp32, written and read, in another launch
        seconds += LAUNCH_S + 4 * batch * m * n * (splits + 1) / memory_bandwidth
    return seconds


def _clocks_of_step(gpu: Gpu, rows: int, columns: int) -> float:
    """Returns the clocks of a tile for DEPTH of k."""
    loaded = (rows + columns) * DEPTH * 2
    read = math.ceil(rows / 64) * (64 + columns) * DEPTH * 2
    fetched = (rows + columns / CLUSTER_OF_BLOCKS) * DEPTH * 2
    return max(
        2.0 * rows * columns * DEPTH / gpu.flops_per_clock,
        (read + loaded) / SHARED_BYTES_PER_CLOCK,
        fetched * gpu.multiprocessors / L2_BYTES_PER_CLOCK,
    )
