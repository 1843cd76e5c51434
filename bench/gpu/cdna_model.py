"""Estimates from its instructions how fast each fused GEMM can be on an AMD GPU.

    python -m bench.gpu.cdna_model [--gpu MI250X]

It simulates one turn of the loop that multiplies (32 of k) for all waves of a compute unit, instruction by
instruction. A wave issues in order and waits at `s_waitcnt` and `s_barrier`. It shares the matrix unit with
the other waves of its SIMD, and shared memory with all. So the figure includes work that nothing hides, such
as stores into shared memory between two barriers. Beside it stands the time in which L2 must bring the
operands. No GPU is needed. The figure is a limit: it leaves out clocks that fall under load, bank conflicts,
latencies above the assumed ones, and the beginning and end of a tile.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import deque
from dataclasses import dataclass, field

from bench.common.tables import table
from bench.gpu.cdna_code import MATRIX, Kernel, kernels_in
from bench.gpu.model import LAYOUTS, PORTABLE
from tools import build_cuda, build_hip

DEPTH = 32  # of k in a turn: kDepth
SIMDS = 4  # of a compute unit
LANES = 64
SHARED_BYTES_PER_CLOCK = 128  # CDNA2 and CDNA3 ISA, "LDS"
SHARED_BYTES = 64 * 1024
VGPRS_PER_SIMD_LANE = 512  # ordinary and accumulation registers
ISSUE_CLOCKS = 4  # from one instruction of a wave to its next
SHARED_LATENCY = 120  # clocks; estimated
GLOBAL_LATENCY = 800  # clocks, from L2 or HBM; estimated
BARRIER_CLOCKS = 20  # estimated
TURNS, SETTLED = 10, 4


@dataclass(frozen=True)
class Gpu:
    """A device as a process sees it (one of the two of an MI250X), by the vendor's data sheets."""

    name: str
    architecture: str
    compute_units: int
    clock_hz: float
    flops_per_clock: float  # of a compute unit, bf16 and fp16, dense
    l2_bytes_per_clock: float  # of the whole device


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("MI250X", "gfx90a", 110, 1.7e9, 1024, 4096),
        Gpu("MI300X", "gfx942", 304, 2.1e9, 2048, 16384),
    )
}


@dataclass(frozen=True)
class Tile:
    """A fused GEMM with the sizes in its name."""

    code: Kernel
    job: str
    dtype: str
    layout: str
    rows: int
    columns: int
    waves: int  # of a block
    blocks: int  # on a compute unit
    stages: int

    @property
    def stage_bytes(self) -> int:
        return (self.rows + self.columns) * DEPTH * 2

    @property
    def shared_bytes(self) -> int:
        """Returns the bytes that a launch requests: the operands, whose place the result takes over (Tiles in
        tile_gemm.cuh)."""
        return max(self.stages * self.stage_bytes, self.rows * (self.columns * 2 + 16))

    @property
    def loads(self) -> int:
        """Returns a lane's loads of 16 bytes for a turn's operands."""
        return self.stage_bytes // (self.waves * LANES * 16)

    @property
    def waves_a_simd(self) -> int:
        return self.waves * self.blocks // SIMDS

    def turn(self) -> list[str]:
        """Returns one turn of the loop. Raises ValueError if none multiplies and loads 16 bytes at a time."""
        found = self.code.turn(self.loads)
        if found is None:
            raise ValueError(f"{self.code.name} has no loop that multiplies and loads 16 bytes at a time.")
        return found


def tile_of(code: Kernel) -> Tile | None:
    """Returns the fused GEMM of a kernel; None for other kernels."""
    match = PORTABLE.match(code.name)
    if match is None:
        return None
    rows, columns, down, across, stages, blocks = (int(number) for number in match[1].split(","))
    layout, waves = LAYOUTS[int(match[3])], down * across
    return Tile(code, match[4], match[2], layout, rows, columns, waves, blocks, stages)


@dataclass
class _Wave:
    simd: int
    block: int
    at: int = 0  # counted over all its turns
    ready: float = 0
    shared: deque[float] = field(default_factory=deque)  # end times of running accesses, in order
    memory: deque[float] = field(default_factory=deque)


def shared_bytes_of(line: str) -> int:
    """Returns the bytes of shared-memory bandwidth that a wave's instruction uses, at least 4 a lane."""
    match = re.match(r"ds_(?:read|write|load|store)(2?)\w*?_(?:b|u|i)(\d+)", line)
    if match is None:
        return 0
    return LANES * max(4, int(match[2]) // 8) * (2 if match[1] else 1)


def clocks_of_turn(tile: Tile, gpu: Gpu, turn: list[str]) -> float:
    """Returns the clocks of one turn of all waves on a compute unit, in the steady state."""
    matrix = 2 * 16**3 / (gpu.flops_per_clock / SIMDS)  # an instruction of 16x16x16
    waves = [_Wave(i % SIMDS, i // tile.waves) for i in range(tile.waves * tile.blocks)]
    issue_free, matrix_free, shared_free = [0.0] * SIMDS, [0.0] * SIMDS, 0.0
    at_barrier: dict[int, list[_Wave]] = {block: [] for block in range(tile.blocks)}
    ended: list[list[float]] = [[] for _ in range(TURNS)]
    running = list(waves)
    while running:
        wave = min(running, key=lambda w: w.ready)
        line, number = turn[wave.at % len(turn)], wave.at // len(turn)
        start = max(wave.ready, issue_free[wave.simd])
        if line.startswith(MATRIX) and start < matrix_free[wave.simd]:
            wave.ready = matrix_free[wave.simd]  # others issue meanwhile
            continue
        if line.startswith("s_waitcnt"):
            for name, queue in (("lgkmcnt", wave.shared), ("vmcnt", wave.memory)):
                if (match := re.search(rf"{name}\((\d+)\)", line)) is not None:
                    while len(queue) > int(match[1]):
                        start = max(start, queue.popleft())
        wave.at += 1
        wave.ready = start + ISSUE_CLOCKS
        if not line.startswith("s_"):  # scalar instructions have their own issue port
            issue_free[wave.simd] = start + 1
        if line.startswith(MATRIX):
            matrix_free[wave.simd] = start + matrix
        elif moved := shared_bytes_of(line):
            shared_free = max(shared_free, start) + moved / SHARED_BYTES_PER_CLOCK
            wave.shared.append(shared_free + SHARED_LATENCY)
        elif re.match(r"(global|flat)_load", line):
            wave.memory.append(start + GLOBAL_LATENCY)
        elif line.startswith("s_barrier"):
            meeting = at_barrier[wave.block]
            meeting.append(wave)
            running.remove(wave)
            if len(meeting) == tile.waves:
                for other in meeting:
                    other.ready = start + BARRIER_CLOCKS
                running += meeting
                meeting.clear()
        if wave.at % len(turn) == 0:
            ended[number].append(wave.ready)
            if number == TURNS - 1 and wave in running:
                running.remove(wave)
    return (max(ended[-1]) - max(ended[SETTLED - 1])) / (TURNS - SETTLED)


@dataclass(frozen=True)
class Estimate:
    """The estimate of one turn of the loop that multiplies, in clocks of a compute unit."""

    instructions: int  # of a wave
    matrix: float  # clocks that the matrix units need
    played: float
    l2: float

    @property
    def of_peak(self) -> float:
        return self.matrix / max(self.played, self.l2)


def estimate(tile: Tile, gpu: Gpu) -> Estimate:
    turn = tile.turn()
    return Estimate(
        len(turn),
        2 * tile.rows * tile.columns * DEPTH * tile.blocks / gpu.flops_per_clock,
        clocks_of_turn(tile, gpu, turn),
        tile.stage_bytes * tile.blocks * gpu.compute_units / gpu.l2_bytes_per_clock,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--gpu", default="MI250X", choices=sorted(GPUS), help="default %(default)s")
    gpu = GPUS[parser.parse_args().gpu]
    rows = []
    try:
        for name in build_cuda.instances():
            for kernel in kernels_in(build_hip.assembly(name, gpu.architecture)):
                if (tile := tile_of(kernel)) is None:
                    continue
                guess = estimate(tile, gpu)
                figures = (guess.instructions, guess.matrix, guess.played, guess.l2)
                rows.append(
                    [
                        f"{tile.job.removesuffix('Job').lower()} {tile.dtype} {tile.layout}",
                        f"{tile.rows}x{tile.columns}",
                        f"{tile.waves} x {tile.blocks}",
                        f"{kernel.vgprs}",
                        f"{tile.shared_bytes / 1024:.0f}",
                        *(f"{value:.0f}" for value in figures),
                        f"{guess.of_peak:.2f}",
                    ]
                )
    except (OSError, ValueError) as error:
        print(f"bench/gpu/cdna_model.py: {error}", file=sys.stderr)
        return 2
    head = ["GEMM", "tile", "waves x blocks", "registers", "KB", "instr.", "matrix", "played", "L2"]
    print(table([*head, "of peak"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
