"""Estimates from its machine code how fast each kernel of the library can be on one multiprocessor.

    python -m bench.gpu.model [--library FILE] [--gpu H100] [--results bench.json]

For a fused GEMM it counts the clocks that 64 elements of k of one tile need on the tensor cores, the
schedulers (instructions), shared memory and L2. The largest of the four is the main loop's time. A tile also
costs its epilogue, and in portable kernels the first load. The number of waves of tiles gives the kernel's
time. For a kernel that moves memory it compares the instructions for each byte with those that the schedulers
can start while HBM brings that byte.

With --results, a report of bench/gpu, the measured figures stand beside the estimates. No GPU is needed. The
model leaves out clocks that fall under load, bank conflicts and exposed latency. It is a lower limit; none of
the five explains a measured time far above it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import Any

from bench.common.tables import table
from bench.gpu import problem
from bench.gpu.machine_code import Kernel, Loop, kernels_in
from pyruntime.plan.gpus import (
    DEPTH,
    FIRST_LOAD_S,
    GPUS,
    L2_BYTES_PER_CLOCK,
    LAUNCH_S,
    SHARED_BYTES_PER_CLOCK,
    Gpu,
)

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "pyruntime" / "libpyruntime_cuda.so"

SCHEDULERS = 4  # of a multiprocessor; each starts one warp's instruction a clock
MATRIX_BYTES = 512  # that ldmatrix.x4 brings to one warp
EPILOGUE_INSTRUCTIONS = 2.0  # per sum of a thread: rounding, a share of a store, addresses; estimated
HBM_REACHED = 0.92  # of the peak, by a copy


def gpu_named(name: str) -> Gpu | None:
    """Returns the GPU whose name occurs in the driver's name ("NVIDIA H100 80GB HBM3"); None for others."""
    return next((gpu for short, gpu in GPUS.items() if short in name), None)


@dataclass(frozen=True)
class Clocks:
    """The clocks of one step of one tile on one multiprocessor, by resource."""

    tensor: float
    issue: float
    shared: float
    l2: float

    @property
    def most(self) -> float:
        return max(vars(self).values())

    @property
    def bound_by(self) -> str:
        return max(vars(self), key=vars(self).__getitem__)


@dataclass(frozen=True)
class FusedKernel:
    """A fused GEMM, described by its symbol and its instructions."""

    code: Kernel
    family: str  # "hopper" or "portable"
    job: str  # "GatherJob", "ScatterJob"; "" if one kernel is both
    dtype: str
    layout: str
    rows: int  # of a block's tile
    columns: int
    down: int  # blocks of a cluster below each other, which fetch B once
    across: int  # blocks of a cluster side by side, which fetch A once
    stages: int
    warps: int  # that multiply
    blocks: int  # on a multiprocessor

    @property
    def stage_bytes(self) -> int:
        return (self.rows + self.columns) * DEPTH * 2

    @cached_property
    def main_loop(self) -> Loop:
        """Returns the loop over k. Raises ValueError if the machine code has none."""
        found = self.code.innermost("HGMMA" if self.family == "hopper" else "HMMA")
        if found is None:
            raise ValueError(f"{self.code.name} has no loop that multiplies.")
        return found

    @property
    def steps_a_turn(self) -> int:
        """Returns the steps of k in one turn of the main loop."""
        if self.family == "hopper":
            return max(1, self.main_loop.opcodes["HGMMA"] * 16 // DEPTH)
        gemms = self.rows * self.columns * DEPTH // (16 * 8 * 16 * self.warps)
        return max(1, self.main_loop.opcodes["HMMA"] // gemms)

    def clocks(self, gpu: Gpu) -> Clocks:
        share = 1.0 if self.family == "hopper" else gpu.mma_share
        loop, turns = self.main_loop, self.steps_a_turn
        if self.family == "hopper":  # each warpgroup reads 64 rows of A and all of B
            warpgroups = self.warps // 4
            read = warpgroups * (64 + self.columns) * DEPTH * 2
        else:
            read = loop.opcodes["LDSM"] * MATRIX_BYTES * self.warps // turns
        fetched = (self.rows / self.across + self.columns / self.down) * DEPTH * 2
        return Clocks(
            tensor=2.0 * self.rows * self.columns * DEPTH / (gpu.flops_per_clock * share),
            issue=loop.instructions / turns * self.warps / SCHEDULERS,
            shared=(read + self.stage_bytes) / SHARED_BYTES_PER_CLOCK,
            l2=fetched * gpu.multiprocessors / L2_BYTES_PER_CLOCK,
        )

    def epilogue_clocks(self) -> float:
        sums = self.rows * self.columns / (self.warps * 32)
        return sums * EPILOGUE_INSTRUCTIONS * self.warps / SCHEDULERS


@dataclass(frozen=True)
class Estimate:
    """The estimate of a GEMM on a GPU."""

    seconds: float
    bound_by: str  # "tensor", "issue", "shared", "l2" or "hbm"
    waves: int
    of_peak: float  # FLOP/s over the peak


def estimate(
    kernel: FusedKernel, gpu: Gpu, shape: problem.Shape, chunks: int = problem.WORLD_SIZE
) -> Estimate:
    """Estimates a GEMM with all signals set. No tile spans two of the `chunks` of rows."""
    down = chunks * ceil(max(1, shape.m // chunks) / (kernel.rows * kernel.down))
    units = down * ceil(shape.n / (kernel.columns * kernel.across))
    at_once = max(1, gpu.multiprocessors // (kernel.down * kernel.across)) * kernel.blocks
    waves = ceil(units / at_once)
    clocks = kernel.clocks(gpu)
    # Blocks on one multiprocessor share its resources, and hide each other's ends.
    ends = kernel.epilogue_clocks() * kernel.blocks / gpu.clock_hz
    if kernel.family == "portable":  # it has no separate loader that runs ahead over the tiles
        ends += FIRST_LOAD_S / kernel.blocks
    steps = ceil(shape.k / DEPTH) * kernel.blocks * clocks.most / gpu.clock_hz
    seconds = LAUNCH_S + FIRST_LOAD_S + waves * (steps + ends)
    moved = 2 * (shape.m * shape.k + shape.n * shape.k + shape.m * shape.n)
    from_memory = LAUNCH_S + moved / (gpu.hbm_bytes_per_s * HBM_REACHED)
    bound_by = clocks.bound_by if seconds >= from_memory else "hbm"
    seconds = max(seconds, from_memory)
    return Estimate(seconds, bound_by, waves, shape.flops / seconds / gpu.peak_flops)


LAYOUTS = ("NT", "NN")  # as launchers.h numbers them
HOPPER = re.compile(r"multiply<Gemm<Tiles<([\d, ]+)>, (Bf16|Fp16), (\d)>>")
PORTABLE = re.compile(r"tile_gemm<Tiles<([\d, ]+)>, (Bf16|Fp16), (\d), (\w+Job)<")


def fused_kernel(code: Kernel) -> FusedKernel | None:
    """Returns the fused GEMM that a kernel's name describes; None for other kernels.

    The numbers are the parameters of Tiles in csrc/cuda/sm90/units.h and csrc/cuda/portable/tile_gemm.cuh.
    """
    if match := HOPPER.match(code.name):
        columns, down, across, stages = (int(number) for number in match[1].split(","))
        layout = LAYOUTS[int(match[3])]
        return FusedKernel(
            code, "hopper", "", match[2], layout, 128, columns, down, across, stages, warps=8, blocks=1
        )
    if match := PORTABLE.match(code.name):
        rows, columns, down, across, stages, blocks = (int(number) for number in match[1].split(","))
        layout = LAYOUTS[int(match[3])]
        return FusedKernel(
            code, "portable", match[4], match[2], layout, rows, columns, 1, 1, stages, down * across, blocks
        )
    return None


class Model:
    """The kernels of one library on one GPU."""

    def __init__(self, library: Path, gpu: Gpu):
        self.gpu = gpu
        self.kernels = [kernel for kernel in kernels_in(library) if kernel.architecture == gpu.architecture]
        self.fused = [found for kernel in self.kernels if (found := fused_kernel(kernel)) is not None]

    def of(self, family: str, op: str, tiles: str, shape: problem.Shape) -> Estimate | None:
        """Estimates the bf16 NT kernel of an op ("gather", "scatter"); `tiles` is "small" or "large"."""
        found = [
            kernel
            for kernel in self.fused
            if (kernel.family, kernel.dtype, kernel.layout) == (family, "Bf16", "NT")
            and kernel.job.lower() in ("", f"{op}job")
        ]
        found.sort(key=lambda kernel: kernel.rows * kernel.columns)
        if not found:
            return None
        return estimate(found[-1 if tiles == "large" else 0], self.gpu, shape)


def gemms_table(fused: Iterable[FusedKernel], gpu: Gpu) -> str:
    """Returns a line for each fused kernel: its sizes, and the clocks of a step."""
    rows = []
    for kernel in sorted(fused, key=lambda kernel: (kernel.family, kernel.job, kernel.rows * kernel.columns)):
        clocks = kernel.clocks(gpu)
        rows.append(
            [
                f"{kernel.family} {kernel.job.removesuffix('Job').lower()} {kernel.dtype} {kernel.layout}",
                f"{kernel.rows}x{kernel.columns}",
                f"{kernel.down}x{kernel.across}",
                f"{kernel.stages}",
                f"{kernel.stages * kernel.stage_bytes // 1024}",
                f"{kernel.code.registers}",
                f"{kernel.main_loop.instructions / kernel.steps_a_turn:.0f}",
                *(f"{value:.0f}" for value in vars(clocks).values()),
                clocks.bound_by,
                f"{clocks.tensor / clocks.most:.2f}",
            ]
        )
    head = ["GEMM", "tile", "cluster", "stages", "KB", "registers", "instr.", "tensor", "issue", "shared"]
    return table([*head, "L2", "bound by", "of tensor"], rows)


def memory_table(kernels: Iterable[Kernel], gpu: Gpu) -> str:
    """Returns a line for each other kernel with a loop that moves memory, for the loop that moves most."""
    rows = []
    per_clock = gpu.hbm_bytes_per_s * HBM_REACHED / gpu.multiprocessors / gpu.clock_hz
    for kernel in kernels:
        moving = [loop for loop in kernel.loops if loop.loaded_bytes + loop.stored_bytes >= 16]
        if not moving or fused_kernel(kernel) is not None:
            continue
        loop = max(moving, key=lambda loop: (loop.loaded_bytes + loop.stored_bytes) / loop.instructions)
        moved = loop.loaded_bytes + loop.stored_bytes
        # The schedulers' time as a share of HBM's time for these bytes.
        share = loop.instructions / (SCHEDULERS * 32) / (moved / per_clock)
        rows.append(
            [
                kernel.name,
                *(
                    str(n)
                    for n in (kernel.registers, loop.loaded_bytes, loop.stored_bytes, loop.instructions)
                ),
                f"{share:.2f}",
            ]
        )
    head = ["moves memory", "registers", "loads B", "stores B", "instr.", "issue / HBM"]
    return table(head, sorted(rows)) if rows else ""


def shapes_table(model: Model, measured: Iterable[dict[str, Any]]) -> str:
    """Returns a table of the GEMMs of bench/gpu: estimates, and measured times if there are any."""
    found = {(r["name"], r["op"], r["m"], r["n"], r["k"]): r for r in measured if r.get("kind") == "gemm"}
    rows = []
    for shape in problem.llama_shapes():
        result = found.get((shape.name, shape.op, shape.m, shape.n, shape.k), {})
        for family in ("hopper", "portable"):
            for tiles in ("small", "large"):
                guess = model.of(family, shape.op, tiles, shape)
                if guess is None:
                    continue
                label = family if result.get("tiles") == tiles else f"{family}, other tiles"
                seconds = result.get("seconds", {}).get(label)
                rows.append(
                    [f"{shape.name} {shape.op}", *(str(size) for size in (shape.m, shape.n, shape.k))]
                    + [f"{family} {tiles}", f"{guess.seconds * 1e6:.1f}", f"{guess.of_peak:.2f}"]
                    + [f"{guess.waves}", guess.bound_by]
                    + ([f"{seconds * 1e6:.1f}", f"{seconds / guess.seconds:.2f}"] if seconds else ["-", "-"])
                )
    head = ["GEMM", "m", "n", "k", "kernel", "model us", "of peak", "waves", "bound by", "found us", "x"]
    return table(head, rows) if rows else ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--library", type=Path, default=LIBRARY, help="default %(default)s")
    parser.add_argument("--gpu", default="H100", choices=sorted(GPUS), help="default %(default)s")
    parser.add_argument("--results", type=Path, help="a report of bench/gpu")
    args = parser.parse_args()
    gpu = GPUS[args.gpu]
    try:
        model = Model(args.library, gpu)
        measured = json.loads(args.results.read_text(encoding="utf-8"))["results"] if args.results else []
    except (OSError, ValueError, KeyError) as error:
        print(f"bench/gpu/model.py: {error}", file=sys.stderr)
        return 2
    made = [
        gemms_table(model.fused, gpu),
        memory_table(model.kernels, gpu),
        shapes_table(model, measured),
    ]
    print("\n\n".join(text for text in made if text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
