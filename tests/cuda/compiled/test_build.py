"""nvcc compiles the CUDA kernels into one library without a GPU, and no kernel needs local memory."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from pyruntime import comm, ops
from pyruntime.comm.core import _C
from tests.ranks import without_processes
from tools import build_cuda


def needs_nvcc(test):
    """Compiles the kernels, where that is possible."""
    reason = "nvcc was not found: the CUDA kernels are compiled where it is"
    return pytest.mark.nvcc(pytest.mark.skipif(build_cuda.find_nvcc() is None, reason=reason)(test))


FUSED_INSTANCES = 2 * len(build_cuda.JOBS) * len(build_cuda.TYPES) * len(build_cuda.TILES) * 2
"""Kernels in two architectures: (job, tiles, dtype) times two layouts."""


@pytest.fixture(scope="session")
def library() -> Path:
    # Beside the objects, not in the package: testing must not change which tiers a run may take.
    return build_cuda.build(build_cuda.BUILD / "libpyruntime_cuda.so")


@needs_nvcc
def test_fused_kernels_use_registers_alone_on_every_architecture(library: Path) -> None:
    fused = [report for report in build_cuda.resource_reports() if "tile_gemm" in report[0]]
    if not os.environ.get("TORCH_CUDA_ARCH_LIST"):
        assert {architecture for _, architecture, *_ in fused} == {"sm_80", "sm_90a"}
        assert len(fused) == FUSED_INSTANCES
    assert fused
    spilling = [report for report in fused if report[3] or report[4]]
    assert not spilling, f"local memory in (kernel, architecture, registers, stack, spills): {spilling}"


@needs_nvcc
def test_support_kernels_use_registers_alone(library: Path) -> None:
    spilling = [report for report in build_cuda.resource_reports() if report[3] or report[4]]
    assert not spilling


@needs_nvcc
def test_the_library_exports_what_the_header_declares_and_links_no_cuda_library(library: Path) -> None:
    header = (build_cuda.ROOT / "csrc/cuda/launchers.h").read_text()
    declared = set(re.findall(r"PYRUNTIME_API [\w* ]*?\b(pyruntime_\w+)\(", header))
    assert len(declared) > 15
    loaded = ctypes.CDLL(str(library))
    assert all(hasattr(loaded, name) for name in declared)
    linked = subprocess.run(["ldd", str(library)], capture_output=True, text=True, check=True).stdout
    assert "cuda" not in linked.replace(str(library), "") and "torch" not in linked


@needs_nvcc
def test_a_launcher_says_what_is_wrong_where_there_is_no_gpu(library: Path) -> None:
    loaded = ctypes.CDLL(str(library))
    loaded.pyruntime_error.restype = ctypes.c_char_p
    assert loaded.pyruntime_all_gather_matmul(None, None, None) == 1
    assert loaded.pyruntime_error() == b"all_gather_matmul: the group is a null pointer."


def ptx(source: str, architecture: str, folder: Path) -> str:
    """What nvcc makes of a file of csrc/cuda/portable, before its assembler."""
    root, made = build_cuda.ROOT, folder / f"{architecture}.ptx"
    command = [str(build_cuda.find_nvcc()), "-std=c++17", "-O3", f"-arch={architecture}", "--ptx"]
    command += [f"-I{root}/csrc", str(build_cuda.PORTABLE / source), "-o", str(made)]
    subprocess.run(command, check=True)
    return made.read_text()


@needs_nvcc
def test_multicast_is_one_store_and_one_load_between_alias_fences_and_left_out_elsewhere(tmp_path) -> None:
    hopper, ampere = (ptx("multicast.cu", of, tmp_path) for of in ("compute_90a", "compute_80"))
    used = set(re.findall(r"multimem\.[\w.:]+", hopper))
    add = "multimem.ld_reduce.relaxed.sys.global.add"
    assert used == {
        "multimem.st.relaxed.sys.global.v4.f32",
        f"{add}.acc::f32.v4.bf16x2",
        f"{add}.acc::f32.v4.f16x2",
        f"{add}.v4.f32",
    }
    for kernel in re.findall(r"\.entry .*?\n}", hopper, re.S):
        if "multimem" in kernel:
            order = re.findall(r"fence\.proxy\.alias|multimem", kernel)
            assert order[0] == order[-1] == "fence.proxy.alias"
    assert "multimem" not in ampere and "trap;" in ampere


@needs_nvcc
@pytest.mark.parametrize("source", ["swiglu", "weighted_gating", "rope", "cross_entropy", "rms_norm"])
def test_layers_move_16_bytes_at_a_time(source, tmp_path) -> None:
    kernels = re.findall(r"\.entry (\w+)(.*?\n})", ptx(f"layers/{source}.cu", "compute_80", tmp_path), re.S)
    # Those for rows that are not aligned, and the sums of a norm's parts, take element by element.
    by_element = {"rope": "Li1E", "rms_norm": "Lb0E|sum_parts"}.get(source, "none")
    vectorised = [(name, body) for name, body in kernels if not re.search(by_element, name)]
    assert len(vectorised) == {"rms_norm": 18, "weighted_gating": 12}.get(source, 6)
    for name, body in vectorised:
        assert "ld.global.v4" in body, name
        assert "st.global.v4" in body or "row_statistics" in name, name  # which stores three floats a row


def asks_for_multicast(group, path: str) -> str:
    _C.use_device_library("cpu", path)
    comm.configure(group, transport="device", multicast="gather")
    with pytest.raises(ValueError) as error:
        ops.all_gather(torch.ones(2, 2), group)
    return str(error.value)


# With a GPU the refusal may be wrong; tests/cuda/gpu/test_gpu.py asks that GPU.
@needs_nvcc
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which may have it")
def test_multicast_is_refused_where_there_is_no_gpu_for_it(library: Path, ranks) -> None:
    for outcome in ranks.launch(asks_for_multicast, 2, str(library)):
        said = without_processes(outcome.value)
        assert "rank 0 cannot: multicast: it needs a GPU of compute capability 9.0 or newer." in said


@needs_nvcc
def test_nothing_is_compiled_anew_without_a_change(library: Path) -> None:
    before = library.stat().st_mtime_ns
    build_cuda.build(library)
    assert library.stat().st_mtime_ns == before


def test_architectures_are_read_as_torch_reads_them() -> None:
    assert build_cuda.architecture_flags() == [
        "-gencode=arch=compute_80,code=[sm_80,compute_80]",
        "-gencode=arch=compute_90a,code=sm_90a",
    ]
    assert build_cuda.architecture_flags("8.6 9.0+PTX, 12.0") == [
        "-gencode=arch=compute_86,code=sm_86",
        "-gencode=arch=compute_90,code=[sm_90,compute_90]",
        "-gencode=arch=compute_120,code=sm_120",
    ]
    assert build_cuda.architecture_flags("Hopper+PTX") == ["-gencode=arch=compute_90,code=[sm_90,compute_90]"]
    with pytest.raises(ValueError, match=r"names 7\.5, and these kernels need 8\.0 or newer"):
        build_cuda.architecture_flags("7.5;8.0")
    with pytest.raises(ValueError, match="names 'Grapefruit'"):
        build_cuda.architecture_flags("Grapefruit")
