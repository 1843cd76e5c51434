"""Tile variants of the fused GEMM: Python launches what the sources say, and they compile."""

from __future__ import annotations

import ctypes
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pyruntime.cuda import nvrtc_tiles
from pyruntime.cuda.library import CudaLibraryError, why_not
from pyruntime.cuda.nvrtc_tiles import CANDIDATES, SMALL, Tiles, Variant, argument
from tests.cuda import cases
from tests.cuda.compiled.nvrtc import Compiled, NvrtcError, compile_cubin, find_nvrtc
from tests.cuda.compiled.test_build import needs_nvcc
from tools import build_cuda

LAYOUTS = ("NT", "NN")
ROOT = build_cuda.ROOT
EMULATED = ROOT / "tests/cuda/emulated"
INCLUDES = [f"-I{nvrtc_tiles.include_folder()}", f"-I{EMULATED}"]
FLAGS = ["-std=c++17", "-fno-strict-aliasing", "-w", *INCLUDES]


def compile_variant(tiles: Tiles, layout: str, dtype: torch.dtype, architecture: str) -> Compiled:
    """A variant for an architecture such as "sm_90a", without a GPU: what cupy asks of NVRTC where there is
    one."""
    flags = [*nvrtc_tiles.options(), f"--gpu-architecture={architecture}", "--ptxas-options=-v"]
    return compile_cubin(
        nvrtc_tiles.source(tiles, layout, dtype), flags, [nvrtc_tiles.kernel_name(layout, dtype)]
    )


def needs_nvrtc(test):
    reason = "libnvrtc was not found: pip install nvidia-cuda-nvrtc"
    return pytest.mark.nvcc(pytest.mark.skipif(find_nvrtc() is None, reason=reason)(test))


# ---- in the host dialect ----


def compiles(source: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = folder / "variant.cpp"
    path.write_text(source)
    return subprocess.run(["c++", *FLAGS, "-fsyntax-only", str(path)], capture_output=True, text=True)


def test_the_sources_agree_with_what_python_believes(tmp_path):
    everything = ""
    for number, (layout, tiles) in enumerate(
        (layout, tiles) for layout in LAYOUTS for tiles in CANDIDATES.values()
    ):
        lines = nvrtc_tiles.source(tiles, layout, torch.bfloat16).splitlines()
        include, body = lines[0], "\n".join(lines[1:])
        everything += f"{include}\nnamespace variant{number} {{\n{body}\n}}\n"
    ran = compiles(everything, tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert everything.count("namespace variant") >= 2 * len(CANDIDATES)


@pytest.mark.parametrize("what", ["threads", "shared_bytes"])
def test_a_variant_that_python_misjudges_does_not_compile(tmp_path, monkeypatch, what):
    right = getattr(SMALL, what)
    monkeypatch.setattr(Tiles, what, property(lambda tiles: 2 * right))
    ran = compiles(nvrtc_tiles.source(SMALL, "NT", torch.bfloat16), tmp_path)
    assert ran.returncode != 0 and "nvrtc_tiles.py says otherwise" in ran.stderr


@pytest.mark.parametrize(
    ("tiles", "layout", "sentence"),
    [
        (Tiles(72, 128, 2, 2, 3, 2), "NT", "Config::kTileRows == 2 * 16 * Config::kUnitsDown"),
        (Tiles(64, 128, 2, 2, 1, 2), "NT", "Config::kStages >= 2"),
        (Tiles(64, 96, 2, 2, 3, 2), "NN", "kChunks % 8 == 0"),
        (Tiles(256, 512, 4, 4, 2, 1), "NT", "Config::kSharedBytes == "),
    ],
)
def test_tiles_that_the_kernels_do_not_take_do_not_compile(tmp_path, tiles, layout, sentence):
    kernel = nvrtc_tiles.kernel_name(layout, torch.bfloat16)
    used = f"const void* kernel() {{ return reinterpret_cast<const void*>(&{kernel}); }}\n"
    ran = compiles(nvrtc_tiles.source(tiles, layout, torch.bfloat16) + used, tmp_path)
    assert ran.returncode != 0 and sentence in ran.stderr


def runner(tiles: Tiles, layout: str, folder: Path) -> ctypes.CDLL:
    """A variant in the host dialect, as a library with one function that takes the kernel's argument."""
    text = nvrtc_tiles.source(tiles, layout, torch.bfloat16) + (
        'extern "C" void launch(const Job* job, int blocks, int threads, int shared_bytes) {\n'
        f"  const auto kernel = {nvrtc_tiles.kernel_name(layout, torch.bfloat16)};\n"
        "  PYRUNTIME_LAUNCH(kernel, blocks, threads, shared_bytes, nullptr, *job);\n}\n"
    )
    source, library = folder / "variant.cpp", folder / "variant.so"
    source.write_text(text)
    command = ["c++", *FLAGS, "-O1", "-fPIC", "-shared", str(source), str(EMULATED / "grid.cpp")]
    ran = subprocess.run([*command, "-o", str(library)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ctypes.CDLL(str(library))


@pytest.mark.parametrize(("name", "layout"), [("128x128", "NT"), ("64x256", "NN")])
def test_the_argument_that_python_makes_gives_the_gemm(tmp_path, name, layout):
    tiles = CANDIDATES[name]
    library = runner(tiles, layout, tmp_path)
    for m, n, k in ((130, 300, 70), (5, 9, 3), (256, 256, 64)):
        a = torch.randn(m, k).bfloat16()
        b = torch.randn((n, k) if layout == "NT" else (k, n)).bfloat16()
        c = torch.full((m, n), float("nan")).bfloat16()
        job, blocks = argument(layout, a, b, c), min(tiles.count(m, n), 3)
        library.launch(ctypes.c_void_p(job.ctypes.data), blocks, tiles.threads, tiles.shared_bytes)
        whole = a.double() @ (b.t() if layout == "NT" else b).double()
        assert cases.error_in_roundings(c, whole, torch.bfloat16) < 1


# ---- compiled for GPUs ----


def spills(report: str) -> list[tuple[str, ...]]:
    found = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert found, report
    return [line for line in found if line != ("0", "0", "0")]


@needs_nvcc
@pytest.mark.parametrize("name", ["128x128", "256x128"])
def test_nvcc_compiles_variants_without_spills(tmp_path, name):
    kernel = nvrtc_tiles.kernel_name("NT", torch.bfloat16)
    source = tmp_path / "variant.cu"
    source.write_text(
        nvrtc_tiles.source(CANDIDATES[name], "NT", torch.bfloat16)
        + f"const void* kernel() {{ return reinterpret_cast<const void*>(&{kernel}); }}\n"
    )
    command = [str(build_cuda.find_nvcc()), "-std=c++17", "-O3", "-Xptxas", "-v", INCLUDES[0]]
    command += [
        *build_cuda.architecture_flags("8.0;9.0a"),
        "-c",
        str(source),
        "-o",
        str(tmp_path / "variant.o"),
    ]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert {"sm_80", "sm_90a"} <= set(re.findall(r"for '(sm_\w+)'", ran.stderr))
    assert not spills(ran.stderr)


@needs_nvrtc
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", CANDIDATES)
def test_nvrtc_compiles_every_candidate_without_spills(name, architecture):
    for layout in LAYOUTS:
        made = compile_variant(CANDIDATES[name], layout, torch.bfloat16, architecture)
        assert made.cubin.startswith(b"\x7fELF")
        (mangled,) = made.names.values()
        assert mangled.encode() in made.cubin and "tile_gemm" in mangled
        assert not spills(made.log), f"{name}, {layout}: {made.log}"


@needs_nvrtc
def test_nvrtc_says_what_is_wrong(monkeypatch):
    with pytest.raises(NvrtcError, match=r"does not compile(?s:.*)identifier \"nothing\" is undefined"):
        compile_cubin("__global__ void kernel() { nothing(); }", ["--gpu-architecture=sm_80"], ["kernel"])
    monkeypatch.setattr(Tiles, "threads", 256)
    with pytest.raises(NvrtcError, match=r"nvrtc_tiles\.py says otherwise"):
        compile_variant(SMALL, "NT", torch.bfloat16, "sm_80")


# ---- where something is missing ----


def test_without_cupy_or_a_gpu_there_is_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(CudaLibraryError, match="install pyruntime with the extra `tiles`"):
        Variant(SMALL, "NT", torch.bfloat16)
    monkeypatch.setitem(sys.modules, "cupy", sys)  # any module: it is not asked for anything
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(CudaLibraryError, match="torch sees none"):
        Variant(SMALL, "NT", torch.bfloat16)


def test_cupy_is_given_one_element():
    a, b, c = (torch.randn(4, 8).bfloat16(), torch.randn(6, 8).bfloat16(), torch.empty(4, 6).bfloat16())
    job = argument("NT", a, b, c)
    assert (job.size, job.tobytes()[:24]) == (1, struct.pack("3q", 4, 6, 8))


OF_OTHERS = (
    "core/chunk_plan.h",
    "dialect_hip.h",
    "dialect_host.h",
    "mma_mfma.cuh",
    "pipeline_registers.cuh",
)
"""What only hosts and other dialects read."""


def test_the_headers_are_installed_and_are_all_that_a_variant_needs(tmp_path):
    """What `pip install` copies, without the source folder."""
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    headers = tmp_path / "pyruntime" / "cuda" / "headers"
    used: set[str] = set()
    waiting = [headers / "csrc/cuda/portable/gemm/one_rank.cuh"]
    while waiting:
        path = waiting.pop()
        if path.name in used:
            continue
        used.add(path.name)
        for name in re.findall(r'#include "([^"]+)"', path.read_text()):
            found = [folder / name for folder in (headers / "csrc", path.parent) if (folder / name).is_file()]
            assert found or name in OF_OTHERS, name
            waiting += found[:1]
    assert {"tile_gemm.cuh", "dialect_cuda.h", "rtc.h", "launchers.h"} <= used


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is a GPU")
@pytest.mark.parametrize("name", CANDIDATES)
def test_a_variant_gives_the_gemm_on_a_gpu(name):
    pytest.importorskip("cupy")
    for layout in LAYOUTS:
        tiles = CANDIDATES[name]
        try:
            variant = Variant(tiles, layout, torch.bfloat16)
        except CudaLibraryError as error:
            if "bytes of shared memory" not in str(error):
                raise
            # Larger tiles than a block of this GPU can hold: its kernel cannot exist here, in any layout.
            pytest.skip(str(error))
        for m, n, k in ((1000, 777, 333), (2048, 1024, 512)):
            a = torch.randn(m, k, device="cuda").bfloat16()
            b = torch.randn((n, k) if layout == "NT" else (k, n), device="cuda").bfloat16()
            c = torch.full((m, n), float("nan"), device="cuda").bfloat16()
            variant.matmul(a, b, c)
            whole = a.double() @ (b.t() if layout == "NT" else b).double()
            assert cases.error_in_roundings(c, whole, torch.bfloat16) < 1
