"""libpyruntime_cuda through ctypes: its structures and codes, as csrc/cuda/launchers.h declares them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, Structure, c_double, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from pyruntime.comm.errors import CommTimeout

INVALID, REFUSED = 1, 3
SLOTS = 4
BF16, FP16, FP32 = 0, 1, 2
NT, NN, TN = 0, 1, 2
SMALL, LARGE = 0, 1
NO_FAILURE = 0


class CudaLibraryError(RuntimeError):
    """The kernels are not there, or the device refused a launch."""


class Workspace(Structure):
    _fields_ = [("world_size", c_int32), ("flags", c_int32), ("slot_bytes", c_int64)]


class Group(Structure):
    _fields_ = [
        ("shape", Workspace),
        ("rank", c_int32),
        ("slot", c_int32),
        ("deadline_ns", c_int64),
        ("workspaces", POINTER(c_void_p)),
    ]


class Failure(Structure):
    _fields_ = [
        ("state", c_uint32),
        ("op", c_int32),
        ("rank", c_int32),
        ("peer", c_int32),
        ("chunk", c_int32),
        ("slot", c_int32),
        ("expected", c_uint64),
        ("seen", c_uint64),
    ]


class Matmul(Structure):
    _fields_ = [
        ("dtype", c_int32),
        ("layout", c_int32),
        ("tiles", c_int32),
        ("m", c_int64),
        ("n", c_int64),
        ("k", c_int64),
        ("a", c_void_p),
        ("b", c_void_p),
        ("bias", c_void_p),
        ("c", c_void_p),
        ("lda", c_int64),
        ("ldb", c_int64),
        ("ldc", c_int64),
        ("most_blocks", c_int32),
        ("spare_blocks", c_int32),
    ]


class AdamwTensor(Structure):
    _fields_ = [
        ("param", c_void_p),
        ("master", c_void_p),
        ("grad", c_void_p),
        ("exp_avg", c_void_p),
        ("exp_avg_sq", c_void_p),
        ("count", c_int64),
        ("weight_decay", c_double),
    ]


class AdamwOptions(Structure):
    _fields_ = [
        ("lr", c_double),
        ("beta1", c_double),
        ("beta2", c_double),
        ("eps", c_double),
        ("step", c_int64),
    ]


SIGNATURES: dict[str, list[Any]] = {
    "pyruntime_prepare_workspace": [POINTER(Workspace), c_void_p, c_void_p],
    "pyruntime_failure": [POINTER(Group), POINTER(Failure), c_void_p],
    "pyruntime_describe_failure": [POINTER(Failure), ctypes.c_char_p, c_int64],
    "pyruntime_choose_tiles": [c_int64, c_int64, c_int64],
    "pyruntime_matmul": [POINTER(Matmul), c_void_p],
    "pyruntime_gather_workspace": [c_int32, c_int64, c_int64, c_int32, c_int32, POINTER(Workspace)],
    "pyruntime_scatter_workspace": [c_int32, c_int64, c_int64, c_int32, c_int32, POINTER(Workspace)],
    "pyruntime_push_chunk": [POINTER(Group), POINTER(Matmul), c_int32, c_int32, c_void_p],
    "pyruntime_all_gather_matmul": [POINTER(Group), POINTER(Matmul), c_int32, c_void_p],
    "pyruntime_matmul_reduce_scatter": [POINTER(Group), POINTER(Matmul), c_void_p],
    "pyruntime_copy": [c_void_p, c_void_p, c_int64, c_int32, c_void_p],
    "pyruntime_reduce": [
        c_void_p,
        POINTER(c_void_p),
        c_int32,
        c_int64,
        c_int32,
        c_void_p,
        c_int64,
        c_void_p,
    ],
    "pyruntime_adamw": [
        POINTER(AdamwTensor),
        c_int32,
        c_int32,
        c_int32,
        POINTER(AdamwOptions),
        c_void_p,
        c_void_p,
        c_void_p,
    ],
    "pyruntime_lse_merge": [c_void_p] * 4 + [c_int64] * 4 + [c_int32, c_void_p],
}
"""Those that return a code, or a plain int."""


PRODUCTS = ("matmul", "all_gather_matmul", "matmul_reduce_scatter")
"""Those for which csrc/cuda/sm90/launchers.h declares a pyruntime_sm90_... of the same arguments."""


def library_path() -> Path:
    """Where the build puts the kernels."""
    return Path(__file__).resolve().parent.parent / "libpyruntime_cuda.so"


def why_not() -> str:
    """A sentence that says why the kernels cannot be used here; empty where they can."""
    import torch

    path = library_path()
    if not path.exists():
        return f"{path.name} was not built: run `make cuda` where nvcc is."
    try:
        Library(path)
    except CudaLibraryError as error:
        return str(error)
    if not torch.version.cuda:
        return "this torch is built without CUDA."
    if not torch.cuda.is_available():
        return "torch sees no GPU."
    if torch.cuda.get_device_capability() < (8, 0):
        return "the GPU's compute capability is below 8.0."
    return ""


class Library:
    """The loaded library. Its functions raise: ValueError for arguments, CudaLibraryError for the device.

    `hopper`: products go to the kernels for Hopper, unless those refuse; else to the portable ones. `refusal`
    is the sentence with which the last product was refused, empty where it was not.
    """

    def __init__(self, path: Path | None = None, *, hopper: bool = True) -> None:
        self.path = path or library_path()
        try:
            self._library = ctypes.CDLL(str(self.path))
        except OSError as error:
            raise CudaLibraryError(
                f"the CUDA kernels could not be loaded: {error}; run `make cuda`."
            ) from error
        self._library.pyruntime_error.restype = ctypes.c_char_p
        self._library.pyruntime_dialect.restype = ctypes.c_char_p
        self._library.pyruntime_workspace_bytes.restype = c_int64
        self._library.pyruntime_workspace_bytes.argtypes = [POINTER(Workspace)]
        for name, arguments in SIGNATURES.items():
            getattr(self._library, name).argtypes = arguments
        # The host dialect has none.
        self._hopper = hopper and hasattr(self._library, "pyruntime_sm90_matmul")
        for name in PRODUCTS if self._hopper else ():
            getattr(self._library, f"pyruntime_sm90_{name}").argtypes = SIGNATURES[f"pyruntime_{name}"]
        self.refusal = ""

    @property
    def dialect(self) -> str:
        """ "cuda", "hip", or "host", which takes tensors in the CPU's memory and exists for tests."""
        return self._library.pyruntime_dialect().decode()

    def call(self, name: str, *arguments: Any) -> None:
        """Calls pyruntime_`name`; a product's namesake for Hopper first."""
        if self._hopper and name in PRODUCTS:
            code = self._function(f"sm90_{name}")(*arguments)
            self.refusal = self._library.pyruntime_error().decode() if code == REFUSED else ""
            if code != REFUSED:
                return self._raise_for(code)
        self._raise_for(self._function(name)(*arguments))

    def choose_tiles(self, chunk_rows: int, m: int, n: int) -> int:
        return self._function("choose_tiles")(chunk_rows, m, n)

    def workspace_bytes(self, shape: Workspace) -> int:
        size = self._library.pyruntime_workspace_bytes(ctypes.byref(shape))
        if size < 0:
            self._raise_for(-size)
        return size

    def raise_failure(self, group: Group, stream: int | None) -> None:
        """Waits for the stream; raises CommTimeout where a wait of this rank, or of one that told it to stop,
        took longer than its deadline."""
        failure = Failure()
        self.call("failure", ctypes.byref(group), ctypes.byref(failure), stream)
        if failure.state == NO_FAILURE:
            return
        text = ctypes.create_string_buffer(512)
        self.call("describe_failure", ctypes.byref(failure), text, len(text))
        reported = "" if failure.rank == group.rank else f"rank {failure.rank} reports: "
        raise CommTimeout(reported + text.value.decode())

    def _function(self, name: str) -> Callable[..., int]:
        return getattr(self._library, f"pyruntime_{name}")

    def _raise_for(self, code: int) -> None:
        if code == 0:
            return
        sentence = self._library.pyruntime_error().decode()
        raise ValueError(sentence) if code == INVALID else CudaLibraryError(sentence)
