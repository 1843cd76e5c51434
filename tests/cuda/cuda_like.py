"""Symmetric memory for CPU tensors with the rendezvous of torch's on CUDA (cuda_like_memory.cpp)."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths

from tests.builds import Recipe
from tools.build_cuda import ROOT

BUILD = ROOT / "build" / "cuda_like"
LIBRARY = BUILD / "libcuda_like.so"
SOURCE = Path(__file__).with_name("cuda_like_memory.cpp")


@functools.cache
def recipe() -> Recipe:
    """Returns the build of the library."""
    flags = ["-std=c++20", "-O0", "-g1", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    flags += [f"-isystem{path}" for path in include_paths()]
    flags.append(f"-DTORCH_OF_THE_BUILD={torch.__version__}")  # ninja does not watch system headers
    libraries = [f"-L{path}" for path in library_paths()]
    lines = [
        "ninja_required_version = 1.3",
        "rule library",
        f"  command = {os.environ.get('CXX', 'c++')} -MMD -MF $out.d {' '.join(flags)} -shared $in -o $out "
        f"{' '.join(libraries)} -ltorch_cpu -lc10",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = compile $out",
        f"build {LIBRARY}: library {SOURCE}",
    ]
    return Recipe("symmetric memory as on CUDA", BUILD, "\n".join(lines) + "\n")


@contextlib.contextmanager
def cuda_like(so_far: int = 0) -> Iterator[ctypes.CDLL]:
    """Makes this process's symmetric memory on the CPU such memory, within the context. so_far: the exchanges
    that the process pretends to have had before."""
    library = ctypes.CDLL(str(LIBRARY))
    library.cuda_like_begin(ctypes.c_size_t(so_far))
    try:
        yield library
    finally:
        library.cuda_like_end()
