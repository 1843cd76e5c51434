"""NVRTC, CUDA's compiler as a library, through ctypes: it compiles without nvcc and without a GPU."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
from collections.abc import Iterator, Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path


class NvrtcError(RuntimeError):
    """Raised if there is no NVRTC, or if it does not compile a source."""


@dataclass(frozen=True)
class Compiled:
    """A compiled source."""

    cubin: bytes
    names: dict[str, str]
    """The names of the requested kernels in the cubin, by their expressions."""
    log: str
    """The compiler's log; with --ptxas-options=-v it has registers and spills of every kernel."""


def compile_cubin(source: str, options: Sequence[str], names: Sequence[str]) -> Compiled:
    """Compiles CUDA C++. names: C++ expressions of the wanted kernels, such as "space::kernel<int>". Raises
    NvrtcError with the compiler's messages."""
    nvrtc = _library()
    program = c_void_p()
    _check(nvrtc, nvrtc.nvrtcCreateProgram(byref(program), source.encode(), b"variant.cu", 0, None, None))
    try:
        for name in names:
            _check(nvrtc, nvrtc.nvrtcAddNameExpression(program, name.encode()))
        arguments = (c_char_p * len(options))(*(option.encode() for option in options))
        code = nvrtc.nvrtcCompileProgram(program, len(options), arguments)
        log = _text(nvrtc, program, "ProgramLog")
        if code:
            raise NvrtcError(f"NVRTC does not compile a variant:\n{log}")
        return Compiled(
            cubin=_bytes(nvrtc, program, "CUBIN"),
            names={name: _lowered(nvrtc, program, name) for name in names},
            log=log,
        )
    finally:
        nvrtc.nvrtcDestroyProgram(byref(program))


def find_nvrtc() -> Path | None:
    """Finds the library in the packages of torch or cupy, in CUDA_HOME or CUDA_PATH, or on the system."""
    for folder in _folders():
        for path in sorted(folder.glob("libnvrtc.so*"), reverse=True):
            return path
    system = ctypes.util.find_library("nvrtc")
    return Path(system) if system else None


def _folders() -> Iterator[Path]:
    spec = find_spec("nvidia")  # NVIDIA's wheels share this namespace
    for place in (spec.submodule_search_locations or ()) if spec else ():
        yield from sorted(Path(place).glob("*/lib"))
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield Path(os.environ[variable]) / "lib64"
    yield Path("/usr/local/cuda/lib64")


def _library() -> ctypes.CDLL:
    path = find_nvrtc()
    if path is None:
        raise NvrtcError(
            "no libnvrtc was found, neither among Python's packages nor in CUDA_HOME: run `pip install "
            "nvidia-cuda-nvrtc`."
        )
    try:
        for builtins in sorted(path.parent.glob("libnvrtc-builtins.so*")):
            ctypes.CDLL(str(builtins))  # NVRTC loads it by name and does not look in its own folder
        nvrtc = ctypes.CDLL(str(path))
    except OSError as error:
        raise NvrtcError(f"NVRTC cannot be loaded: {error}.") from error
    nvrtc.nvrtcGetErrorString.restype = c_char_p
    program = c_void_p
    nvrtc.nvrtcCreateProgram.argtypes = [c_void_p, c_char_p, c_char_p, c_int, c_void_p, c_void_p]
    nvrtc.nvrtcAddNameExpression.argtypes = [program, c_char_p]
    nvrtc.nvrtcCompileProgram.argtypes = [program, c_int, c_void_p]
    nvrtc.nvrtcGetLoweredName.argtypes = [program, c_char_p, c_void_p]
    nvrtc.nvrtcDestroyProgram.argtypes = [c_void_p]
    for what in ("ProgramLog", "CUBIN"):
        getattr(nvrtc, f"nvrtcGet{what}Size").argtypes = [program, c_void_p]
        getattr(nvrtc, f"nvrtcGet{what}").argtypes = [program, c_void_p]
    return nvrtc


def _check(nvrtc: ctypes.CDLL, code: int) -> None:
    if code:
        raise NvrtcError(f"NVRTC says {nvrtc.nvrtcGetErrorString(code).decode()}.")


def _bytes(nvrtc: ctypes.CDLL, program: c_void_p, what: str) -> bytes:
    size = c_size_t()
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}Size")(program, byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}")(program, buffer))
    return buffer.raw


def _text(nvrtc: ctypes.CDLL, program: c_void_p, what: str) -> str:
    return _bytes(nvrtc, program, what).rstrip(b"\0").decode(errors="replace")


def _lowered(nvrtc: ctypes.CDLL, program: c_void_p, name: str) -> str:
    found = c_char_p()
    _check(nvrtc, nvrtc.nvrtcGetLoweredName(program, name.encode(), byref(found)))
    return (found.value or b"").decode()
