"""Tiles of the portable product, compiled at run time by NVRTC: tuning tries other ones than the library has,
and needs no nvcc for that.

The sources are those of csrc/cuda/portable. What Python believes of a variant (threads, shared memory, the
kernel's one argument byte by byte) is written into its source as static_asserts: where the sources say
otherwise, it does not compile.
"""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import Structure, c_int32, c_int64, c_void_p, sizeof
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyruntime.cuda.kernels import LAYOUTS, address, pitch, product_sizes
from pyruntime.cuda.library import CudaLibraryError
from pyruntime.cuda.nvrtc import Compiled, compile_cubin

DEPTH, UNIT, MOST_RANKS = 64, 16, 72
"""kDepth (operand_tile.cuh), the sides of a matrix instruction, PYRUNTIME_MOST_RANKS (launchers.h)."""
ELEMENTS = {torch.bfloat16: "Bf16", torch.float16: "Fp16"}
JOBS = {
    "matmul": ("MatmulJob", "matmul.cuh"),
    "all_gather_matmul": ("GatherJob", "all_gather_matmul.cuh"),
    "matmul_reduce_scatter": ("ScatterJob", "matmul_reduce_scatter.cuh"),
}


@dataclass(frozen=True)
class Tiles:
    """How a block computes its part of a product, as the template of the same name in tile_gemm.cuh takes
    it."""

    rows: int
    columns: int
    warps_down: int
    warps_across: int
    stages: int
    """Steps of 64 in k that lie in shared memory."""
    blocks: int
    """On a multiprocessor at least, which bounds the registers of a thread."""

    def __str__(self) -> str:
        warps = f"{self.warps_down}x{self.warps_across}"
        return f"{self.rows}x{self.columns}, {warps} warps, {self.stages} stages"

    @property
    def threads(self) -> int:
        return 32 * self.warps_down * self.warps_across

    @property
    def shared_bytes(self) -> int:
        return self.stages * (self.rows + self.columns) * DEPTH * 2

    def refusal(self, layout: str) -> str:
        """Why the kernels cannot be compiled for these tiles in that layout; empty where they can."""
        if self.rows % (UNIT * self.warps_down) or self.columns % (UNIT * self.warps_across):
            return f"{self}: a warp's part is no multiple of {UNIT}"
        if self.stages < 2:
            return f"{self}: a pipeline has at least 2 stages"
        if self.rows * (self.columns * 2 + 16) > self.shared_bytes:
            return f"{self}: the result does not fit where the pipeline was"
        for size, along_k in ((self.rows, layout != "TN"), (self.columns, layout == "NT")):
            lines, chunks = (size, DEPTH // 8) if along_k else (DEPTH, size // 8)
            step = self.threads // chunks
            if chunks % 8 or self.threads % chunks or step % 8 or lines % step:
                return f"{self}: {self.threads} threads cannot copy {size} lines evenly in layout {layout}"
        return ""


SMALL, LARGE = Tiles(64, 128, 2, 2, 3, 2), Tiles(128, 256, 2, 4, 3, 1)
"""Those of the library."""
CANDIDATES = {
    "small": SMALL,
    "large": LARGE,
    "64x128, 4 stages": Tiles(64, 128, 2, 2, 4, 2),
    "64x256": Tiles(64, 256, 2, 4, 3, 1),
    "128x128": Tiles(128, 128, 2, 2, 3, 1),
    "128x128, 4 stages": Tiles(128, 128, 2, 2, 4, 1),
    "256x128": Tiles(256, 128, 4, 2, 3, 1),
    "large, 4 stages": Tiles(128, 256, 2, 4, 4, 1),
}


# ---- the argument of the kernel, as matmul.cuh and tiles.h lay it out ----


class Visit(Structure):
    _fields_ = [("begin", c_int64), ("rows", c_int32), ("owner", c_int32)]


class TileSchedule(Structure):
    _fields_ = [
        ("visits", c_int32),
        ("tile_rows", c_int32),
        ("tile_columns", c_int32),
        ("columns", c_int32),
        ("visit", Visit * MOST_RANKS),
    ]


class Matrices(Structure):
    _fields_ = [
        ("a", c_void_p),
        ("b", c_void_p),
        ("bias", c_void_p),
        ("c", c_void_p),
        ("lda", c_int64),
        ("ldb", c_int64),
        ("ldc", c_int64),
    ]


class MatmulJob(Structure):
    _fields_ = [("schedule", TileSchedule), ("k", c_int64), ("matrices", Matrices)]


def matmul_job(
    tiles: Tiles, layout: str, a: Tensor, b: Tensor, bias: Tensor | None, c: Tensor
) -> tuple[MatmulJob, int]:
    """A product of one rank for its kernel, and how many tiles it has."""
    m, n, k = product_sizes(layout, a, b)
    job = MatmulJob(k=k)
    job.schedule.visits = 1
    job.schedule.tile_rows, job.schedule.tile_columns = tiles.rows, tiles.columns
    job.schedule.columns = n
    job.schedule.visit[0] = Visit(0, m, 0)
    job.matrices = Matrices(
        address(a), address(b), address(bias), address(c), pitch(a, "A"), pitch(b, "B"), pitch(c, "C")
    )
    return job, -(-m // tiles.rows) * -(-n // tiles.columns)


# ---- compiling ----


def include_folders() -> list[Path]:
    """Where the kernels' headers lie: beside an installed package, or in the source folder. Raises
    CudaLibraryError."""
    package = Path(__file__).resolve().parent
    for root in (package / "headers", package.parent.parent):
        folders = [root / "csrc", root / "csrc" / "cuda" / "portable", root / "hip"]
        if all(folder.is_dir() for folder in folders):
            return folders
    raise CudaLibraryError(
        f"the kernels' headers are neither in {package / 'headers'} nor in a source folder around the "
        "package; install pyruntime again."
    )


def kernel_name(layout: str, dtype: torch.dtype) -> str:
    """The C++ expression of the kernel in a variant's source."""
    return f"pyruntime::portable::tile_gemm<Config, {_element(dtype)}, {LAYOUTS[layout]}, Job>"


def source(tiles: Tiles, layout: str, dtype: torch.dtype, op: str = "matmul") -> str:
    """The source of a variant. Raises ValueError where the kernels do not take these tiles."""
    if refusal := tiles.refusal(layout):
        raise ValueError(f"{refusal}.")
    job, header = JOBS[op]
    if op == "all_gather_matmul" and layout == "TN":
        raise ValueError("layout 'TN' gathers no rows; use 'NT' or 'NN'.")
    sizes = (tiles.rows, tiles.columns, tiles.warps_down, tiles.warps_across, tiles.stages, tiles.blocks)
    lines = [
        f'#include "{header}"',
        "using namespace pyruntime::portable;",
        f"using Config = Tiles<{', '.join(map(str, sizes))}>;",
        f"using Job = {job}<{_element(dtype)}>;",
        *(
            f'static_assert({fact}, "pyruntime/cuda/variants.py says otherwise");'
            for fact in _facts(tiles, op)
        ),
    ]
    return "\n".join(lines) + "\n"


def options() -> tuple[str, ...]:
    """For NVRTC, without the architecture."""
    # Functions of launchers, which say nothing of where they run, lie in the same headers.
    return ("-std=c++17", "-default-device", *(f"-I{folder}" for folder in include_folders()))


def compile_variant(
    tiles: Tiles, layout: str, dtype: torch.dtype, architecture: str, op: str = "matmul"
) -> Compiled:
    """Compiles a variant for an architecture such as "sm_90a", without a GPU. Raises ValueError where the
    kernels do not take these tiles, NvrtcError where NVRTC is missing or refuses."""
    name = kernel_name(layout, dtype)
    flags = [*options(), f"--gpu-architecture={architecture}", "--ptxas-options=-v"]
    return compile_cubin(source(tiles, layout, dtype, op), flags, [name])


def _element(dtype: torch.dtype) -> str:
    if dtype not in ELEMENTS:
        raise ValueError(f"dtype {dtype} has no products here; use torch.bfloat16 or torch.float16.")
    return ELEMENTS[dtype]


def _facts(tiles: Tiles, op: str) -> Iterator[str]:
    """What Python believes, in C++."""
    yield f"Config::kThreads == {tiles.threads}"
    yield f"Config::kSharedBytes == {tiles.shared_bytes}"
    yield f"Config::kTileRows == {tiles.rows} && Config::kTileColumns == {tiles.columns}"
    if op != "matmul":
        return
    yield f"sizeof(Job) == {sizeof(MatmulJob)}"
    parts: list[tuple[str, Any]] = [
        ("Job", MatmulJob),
        ("TileSchedule", TileSchedule),
        ("Visit", Visit),
        ("decltype(Job::matrices)", Matrices),
    ]
    for name, structure in parts:
        for field, *_ in structure._fields_:
            yield f"offsetof({name}, {field}) == {getattr(structure, field).offset}"


# ---- running ----


class Variant:
    """A product in these tiles on the current GPU, through cupy. Raises CudaLibraryError where cupy or a GPU
    is missing, or these tiles need more shared memory than the GPU has."""

    def __init__(self, tiles: Tiles, layout: str, dtype: torch.dtype) -> None:
        self._cupy = _cupy()
        self.tiles, self.layout, self.dtype = tiles, layout, dtype
        room = self._device_attribute("MaxSharedMemoryPerBlockOptin")
        if tiles.shared_bytes > room:
            raise CudaLibraryError(
                f"{tiles} need {tiles.shared_bytes} bytes of shared memory, and a block has {room} here."
            )
        name = kernel_name(layout, dtype)
        module = self._cupy.RawModule(
            code=source(tiles, layout, dtype), options=options(), name_expressions=(name,)
        )
        self._kernel = module.get_function(name)
        self._kernel.max_dynamic_shared_size_bytes = tiles.shared_bytes
        resident = self._cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor(
            self._kernel.kernel.ptr, tiles.threads, tiles.shared_bytes
        )
        self._resident = resident * self._device_attribute("MultiProcessorCount")

    def matmul(self, a: Tensor, b: Tensor, c: Tensor, bias: Tensor | None = None) -> None:
        """c = A B (+ bias) on torch's current stream; shapes as in Kernels.matmul()."""
        for tensor in (a, b, c) if bias is None else (a, b, c, bias):
            if not tensor.is_cuda or tensor.dtype != self.dtype:
                raise ValueError(
                    f"a tensor is {tensor.dtype} on {tensor.device}; this is for {self.dtype} on GPUs."
                )
        m, n, _ = product_sizes(self.layout, a, b)
        if list(c.shape) != [m, n]:
            raise ValueError(f"c has shape {list(c.shape)}; it must be [{m}, {n}].")
        job, count = matmul_job(self.tiles, self.layout, a, b, bias, c)
        if not count:
            return
        stream = self._cupy.cuda.ExternalStream(torch.cuda.current_stream(a.device).cuda_stream)
        with stream:
            self._kernel(
                (min(count, self._resident),),
                (self.tiles.threads,),
                (by_value(job),),
                shared_mem=self.tiles.shared_bytes,
            )

    def _device_attribute(self, name: str) -> int:
        return self._cupy.cuda.Device().attributes[name]


def by_value(job: Structure) -> Any:
    """cupy passes a numpy array of one element by value; numpy comes with it."""
    import numpy

    return numpy.frombuffer(bytes(job), dtype=numpy.dtype([("bytes", numpy.uint8, sizeof(job))]))


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise CudaLibraryError(
            f"tile variants are compiled and run through cupy, which cannot be imported ({error}); install "
            "pyruntime with the extra `tiles`."
        ) from error
    if not torch.cuda.is_available():
        raise CudaLibraryError("tile variants run on a GPU, and torch sees none.")
    return cupy


def variants(layout: str) -> dict[str, Tiles]:
    """The candidates that the kernels take in a layout."""
    return {name: tiles for name, tiles in CANDIDATES.items() if not tiles.refusal(layout)}
