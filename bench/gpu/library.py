"""Calls the functions of csrc/cuda/launchers.h through ctypes: for benchmarks that play every rank of a group
in one process, and for tests of what launchers refuse."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from pyruntime.comm.errors import CommTimeout
from pyruntime.cuda import library_path

OK, INVALID, DEVICE_ERROR, REFUSED = range(4)
SLOTS = 4
BF16, NT = 0, 0
SMALL, LARGE = 0, 1
NO_FAILURE = 0


class Workspace(Structure):
    _fields_ = [("world_size", c_int32), ("flags", c_int32), ("slot_bytes", c_int64)]


class Group(Structure):
    _fields_ = [
        ("shape", Workspace),
        ("rank", c_int32),
        ("slot", c_int32),
        ("deadline_ns", c_int64),
        ("workspaces", POINTER(c_void_p)),
        ("pieces", c_int32),
        ("rings", c_int32),
        ("ring_orders", c_void_p),
    ]


class Failure(Structure):
    _fields_ = [("state", c_uint32)] + [(name, c_int32) for name in ("op", "rank", "peer", "chunk", "slot")]
    _fields_ += [("expected", c_uint64), ("seen", c_uint64)]


class Matmul(Structure):
    _fields_ = [(name, c_int32) for name in ("dtype", "layout", "tiles")]
    _fields_ += [(name, c_int64) for name in ("m", "n", "k")]
    _fields_ += [(name, c_void_p) for name in ("a", "b", "bias", "c")]
    _fields_ += [(name, c_int64) for name in ("lda", "ldb", "ldc")]
    _fields_ += [(name, c_int32) for name in ("most_blocks", "spare_blocks")]


_GROUP, _MATMUL = POINTER(Group), POINTER(Matmul)
SIGNATURES: dict[str, list[Any]] = {
    "failure": [_GROUP, POINTER(Failure), c_void_p],
    "describe_failure": [POINTER(Failure), ctypes.c_char_p, c_int64],
    "put": [_GROUP, c_void_p, c_int64, c_int32, c_int64, c_int32, c_int32, c_void_p],
    "end_puts": [_GROUP, c_void_p],
    "await": [_GROUP, c_int32, c_int32, c_int32, c_void_p],
    "finish": [_GROUP, c_void_p],
    "slot_data": [_GROUP, POINTER(c_void_p)],
    "choose_tiles": [c_int64] * 3,
    "all_gather_matmul": [_GROUP, _MATMUL, c_void_p],
    "matmul_reduce_scatter": [_GROUP, _MATMUL, c_void_p],
    "sm90_is_on_device": [],
    "sm90_choose_tiles": [c_int64] * 4 + [c_int32],
    "sm90_all_gather_matmul": [_GROUP, _MATMUL, c_void_p],
    "sm90_matmul_reduce_scatter": [_GROUP, _MATMUL, c_void_p],
    "reduce": [c_void_p, POINTER(c_void_p), c_int32, c_int64, c_int32, c_void_p, c_int64, c_int32, c_void_p],
}
"""Functions that return a code or an int. The host dialect has none of those for Hopper."""


class Library:
    """The loaded library. `hopper` chooses the fused GEMMs for Hopper, else the portable ones. Raises OSError
    if it cannot be loaded."""

    def __init__(self, path: Path | None = None, *, hopper: bool = False) -> None:
        self.path, self.hopper = path or library_path(), hopper
        self.functions = ctypes.CDLL(str(self.path))
        self.functions.pyruntime_error.restype = ctypes.c_char_p
        self.functions.pyruntime_workspace_bytes.restype = c_int64
        self.functions.pyruntime_workspace_bytes.argtypes = [POINTER(Workspace)]
        for name, arguments in SIGNATURES.items():
            if hasattr(self.functions, f"pyruntime_{name}"):
                getattr(self.functions, f"pyruntime_{name}").argtypes = arguments

    def call(self, name: str, *arguments: Any) -> None:
        """Calls pyruntime_`name`. Raises ValueError with its sentence for wrong arguments, RuntimeError for
        errors of the device and for a GEMM that Hopper's kernels do not support."""
        self._raise_for(getattr(self.functions, f"pyruntime_{name}")(*arguments))

    def fused(self, name: str, *arguments: Any) -> None:
        """Calls the fused GEMM of this name, for Hopper or portable as chosen."""
        self.call(f"sm90_{name}" if self.hopper else name, *arguments)

    def choose_tiles(self, chunk_rows: int, m: int, n: int, k: int) -> int:
        """Chooses tiles as csrc/transport/device/fused_gemm.cpp does."""
        if self.hopper:
            return self.functions.pyruntime_sm90_choose_tiles(chunk_rows, m, n, k, 0)
        return self.functions.pyruntime_choose_tiles(chunk_rows, m, n)

    def workspace_bytes(self, shape: Workspace) -> int:
        size = self.functions.pyruntime_workspace_bytes(ctypes.byref(shape))
        self._raise_for(-size if size < 0 else OK)
        return size

    def raise_failure(self, group: Group, stream: int | None) -> None:
        """Waits for the stream. Raises CommTimeout if a wait of this rank, or of one that told it to stop,
        exceeded its deadline."""
        failure = Failure()
        self.call("failure", ctypes.byref(group), ctypes.byref(failure), stream)
        if failure.state == NO_FAILURE:
            return
        text = ctypes.create_string_buffer(512)
        self.call("describe_failure", ctypes.byref(failure), text, len(text))
        raise CommTimeout(text.value.decode())

    def _raise_for(self, code: int) -> None:
        if code != OK:
            sentence = self.functions.pyruntime_error().decode()
            raise ValueError(sentence) if code == INVALID else RuntimeError(sentence)
