"""Compiles tiles of the fused GEMM at run time by NVRTC, so that tuning can try tiles that the library does
not have, without nvcc.

The kernel is the tile GEMM of csrc/cuda/portable/gemm on the matrices of one rank (one_rank.cuh). Python's
assumptions about a variant (threads, shared memory, the size of the kernel's argument) and the conditions on
tiles go into its source as static_asserts: if the C++ sources disagree, it does not compile.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyruntime.cuda import cards
from pyruntime.cuda.library import CudaLibraryError

DEPTH = 64
"""kDepth (operand_tile.cuh)."""
ELEMENTS = {torch.bfloat16: "Bf16", torch.float16: "Fp16"}
LAYOUTS = {"NT": 0, "NN": 1}
"""Numbers of PyruntimeLayout (launchers.h). NT: A [m, k], B [n, k]; NN: A [m, k], B [k, n]."""
ARGUMENT = np.dtype((np.void, 80))
"""OneRankJob (one_rank.cuh): m, n, k; the addresses of A, B, a bias and C; the pitches of A, B and C."""


@dataclass(frozen=True)
class Tiles:
    """The sizes by which a block computes its part of a GEMM: arguments of the template Tiles in
    tile_gemm.cuh."""

    rows: int
    columns: int
    warps_down: int
    warps_across: int
    stages: int
    """Number of steps of 64 in k that are in shared memory."""
    blocks: int
    """Least number of blocks on a multiprocessor, which bounds the registers of a thread."""

    def __str__(self) -> str:
        warps = f"{self.warps_down}x{self.warps_across}"
        return f"{self.rows}x{self.columns}, {warps} warps, {self.stages} stages"

    @property
    def threads(self) -> int:
        return 32 * self.warps_down * self.warps_across

    @property
    def shared_bytes(self) -> int:
        return self.stages * (self.rows + self.columns) * DEPTH * 2

    def count(self, m: int, n: int) -> int:
        """Returns the number of tiles of a result [m, n]."""
        return -(-m // self.rows) * -(-n // self.columns)


SMALL, LARGE = Tiles(64, 128, 2, 2, 3, 2), Tiles(128, 256, 2, 4, 3, 1)
"""The library's own tiles."""
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


def argument(layout: str, a: Tensor, b: Tensor, c: Tensor) -> np.ndarray:
    """Returns the kernel's argument for C = A B: an array of one element, which cupy passes by value. Raises
    ValueError if the operands do not fit."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r}; use 'NT' or 'NN'.")
    m, k = a.shape
    n, depth = b.shape if layout == "NT" else b.shape[::-1]
    if k != depth:
        raise ValueError(f"in layout {layout}, A {list(a.shape)} and B {list(b.shape)} do not share k.")
    if list(c.shape) != [m, n]:
        raise ValueError(f"c has shape {list(c.shape)}; it must be [{m}, {n}].")
    pitches = pitch(a, "A"), pitch(b, "B"), pitch(c, "C")
    words = [m, n, k, a.data_ptr(), b.data_ptr(), 0, c.data_ptr(), *pitches]
    return np.array(words, dtype=np.int64).view(ARGUMENT)


def pitch(matrix: Tensor, name: str) -> int:
    """Returns the elements from row to row. Raises ValueError if rows are not contiguous."""
    if matrix.dim() != 2 or (matrix.size(1) > 1 and matrix.stride(1) != 1):
        raise ValueError(
            f"{name} has shape {list(matrix.shape)} and strides {list(matrix.stride())}; it must be a matrix "
            "whose rows are contiguous."
        )
    return matrix.stride(0) if matrix.size(0) > 1 else max(matrix.size(1), 1)


# ---- compiling ----


def include_folder() -> Path:
    """Returns the folder of the kernels' headers, in the installation or the source folder. Raises
    CudaLibraryError if there is none."""
    package = Path(__file__).resolve().parent
    for root in (package / "headers", package.parent.parent):
        if (root / "csrc" / "cuda" / "portable").is_dir():
            return root / "csrc"
    raise CudaLibraryError(
        f"the kernels' headers are neither in {package / 'headers'} nor in a source folder around the "
        "package; install pyruntime again."
    )


def kernel_name(layout: str, dtype: torch.dtype) -> str:
    """Returns the C++ expression of the kernel in a variant's source."""
    return f"pyruntime::portable::tile_gemm<Config, {_element(dtype)}, {LAYOUTS[layout]}, Job>"


def source(tiles: Tiles, layout: str, dtype: torch.dtype) -> str:
    facts = (
        f"Config::kThreads == {tiles.threads}",
        f"Config::kSharedBytes == {tiles.shared_bytes}",
        f"Config::kTileRows == {tiles.warps_down} * 16 * Config::kUnitsDown",
        f"Config::kTileColumns == {tiles.warps_across} * 16 * Config::kUnitsAcross",
        "Config::kStages >= 2",
        f"sizeof(Job) == {ARGUMENT.itemsize}",
    )
    lines = [
        '#include "cuda/portable/gemm/one_rank.cuh"',
        "using namespace pyruntime::portable;",
        f"using Config = Tiles<{', '.join(map(str, astuple(tiles)))}>;",
        f"using Job = OneRankJob<Config, {_element(dtype)}>;",
        *(f'static_assert({fact}, "pyruntime/cuda/nvrtc_tiles.py says otherwise");' for fact in facts),
    ]
    return "\n".join(lines) + "\n"


def options() -> tuple[str, ...]:
    """Returns the options of NVRTC, without the architecture."""
    # -default-device: the same headers have launchers' functions without an execution space.
    return ("-std=c++17", "-default-device", f"-I{include_folder()}")


def _element(dtype: torch.dtype) -> str:
    if dtype not in ELEMENTS:
        raise ValueError(f"dtype {dtype} has no fused GEMM; use torch.bfloat16 or torch.float16.")
    return ELEMENTS[dtype]


# ---- running ----


class Variant:
    """A GEMM with the given tiles on the current GPU, through cupy. Raises CudaLibraryError if cupy or a GPU
    is missing, or if the tiles do not compile or need more shared memory than the GPU has."""

    def __init__(self, tiles: Tiles, layout: str, dtype: torch.dtype) -> None:
        self._cupy = _cupy()
        self.tiles, self.layout, self.dtype = tiles, layout, dtype
        room = self._device_attribute("MaxSharedMemoryPerBlockOptin")
        if tiles.shared_bytes > room:
            raise CudaLibraryError(
                f"{tiles} need {tiles.shared_bytes} bytes of shared memory, but a block has only {room} here."
            )
        name = kernel_name(layout, dtype)
        module = self._cupy.RawModule(
            code=source(tiles, layout, dtype), options=options(), name_expressions=(name,)
        )
        try:
            self._kernel = module.get_function(name)
        except self._cupy.cuda.compiler.CompileException as error:
            raise CudaLibraryError(f"NVRTC does not compile {tiles}: {error}") from error
        self._kernel.max_dynamic_shared_size_bytes = tiles.shared_bytes
        resident = self._cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor(
            self._kernel.kernel.ptr, tiles.threads, tiles.shared_bytes
        )
        self._resident = resident * self._device_attribute("MultiProcessorCount")

    def matmul(self, a: Tensor, b: Tensor, c: Tensor) -> None:
        """c [m, n] = A B on torch's current stream; shapes as in LAYOUTS."""
        for tensor in (a, b, c):
            if not tensor.is_cuda or tensor.dtype != self.dtype:
                raise ValueError(
                    f"a tensor is {tensor.dtype} on {tensor.device}; it must be {self.dtype} on a GPU."
                )
        job = argument(self.layout, a, b, c)
        count = self.tiles.count(*c.shape)
        if not count:
            return
        stream = self._cupy.cuda.ExternalStream(cards.native_stream(a.device))
        with stream:
            self._kernel(
                (min(count, self._resident),),
                (self.tiles.threads,),
                (job,),
                shared_mem=self.tiles.shared_bytes,
            )

    def _device_attribute(self, name: str) -> int:
        return self._cupy.cuda.Device().attributes[name]


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise CudaLibraryError(
            f"tile variants are compiled and run through cupy, which cannot be imported ({error}); install "
            "pyruntime with the extra `tiles`."
        ) from error
    if not cards.count():
        raise CudaLibraryError("tile variants run on a GPU, but torch sees none.")
    return cupy
