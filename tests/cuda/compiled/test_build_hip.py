"""hipcc compiles the portable kernels for GPUs of AMD without one: registers alone, and the waits that other
ranks rely on. What holds of all kernels' instructions is in test_isa.py."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import pytest

from tools import build_cuda, build_hip

pytestmark = [
    pytest.mark.hipcc,
    pytest.mark.skipif(
        build_hip.find_hipcc() is None,
        reason="hipcc was not found; `tools/get_tool.sh hipcc` installs it",
    ),
]

FUSED_INSTANCES = len(build_cuda.JOBS) * len(build_cuda.TILES) * len(build_cuda.TYPES) * 2


@pytest.fixture(scope="module")
def library() -> Path:
    # Beside the objects, not in the package: testing must not change which tiers a run may take.
    return build_hip.build(build_hip.BUILD / "libpyruntime_hip.so")


def instructions(name: str, kernel: str) -> list[str]:
    """What the one kernel of an object whose name contains `kernel` is made of."""
    found = re.findall(rf"^_Z\w*{kernel}\w*:.*?^\.Lfunc_end", build_hip.assembly(name), re.M | re.S)
    assert len(found) == 1
    lines = (line.split(";")[0].strip() for line in found[0].splitlines())
    return [line for line in lines if line and not line.startswith(".") and not line.endswith(":")]


def test_kernels_use_registers_alone(library: Path) -> None:
    reports = list(build_hip.resource_reports())
    fused = sum("tile_gemm" in report.kernel for report in reports)
    assert fused == FUSED_INSTANCES * len(build_hip.architectures())
    spilling = [report for report in reports if report.scratch_bytes or report.spilled_vgprs]
    assert not spilling


def test_multicast_is_refused_by_name(library: Path) -> None:
    loaded = ctypes.CDLL(str(library))
    loaded.pyruntime_error.restype = ctypes.c_char_p
    assert loaded.pyruntime_can_multicast() == 1
    assert loaded.pyruntime_error() == b"multicast: AMD GPUs have no multicast addresses."


def test_shared_memory_beside_what_a_launch_asks_for_is_that_of_the_barrier(library: Path) -> None:
    # tile_gemm.cuh leaves room for so much below 64 KB.
    assert max(report.shared_bytes for report in build_hip.resource_reports()) <= 256


def test_a_wait_looks_twice_naps_and_reads_the_clock(library: Path) -> None:
    lines = instructions("chunks", "await_flag")
    assert sum(bool(re.match(r"(flat|global)_load_dwordx2 .* glc", line)) for line in lines) >= 2
    assert any(line.startswith("s_sleep") for line in lines)
    assert any(line.startswith("s_memrealtime") for line in lines)


def test_the_library_exports_what_the_header_declares_and_needs_hips_alone(library: Path) -> None:
    header = (build_cuda.ROOT / "csrc/cuda/launchers.h").read_text()
    declared = set(re.findall(r"PYRUNTIME_API [\w* ]*?\b(pyruntime_\w+)\(", header))
    loaded = ctypes.CDLL(str(library))
    assert all(hasattr(loaded, name) for name in declared)
    shown = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"NEEDED.*\[(\w+)", shown)
    assert "libamdhip64" in needed and not any("torch" in name or "cuda" in name for name in needed)


def test_a_launcher_says_what_is_wrong_where_there_is_no_gpu(library: Path) -> None:
    loaded = ctypes.CDLL(str(library))
    loaded.pyruntime_error.restype = ctypes.c_char_p
    assert loaded.pyruntime_all_gather_matmul(None, None, None) == 1
    assert loaded.pyruntime_error() == b"all_gather_matmul: the group is a null pointer."


def test_nothing_is_compiled_anew_without_a_change(library: Path) -> None:
    before = library.stat().st_mtime_ns
    build_hip.build(library)
    assert library.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    "named", ["gfx90a;gfx942", "gfx1100 gfx90a:xnack-,gfx942;", "gfx90a;gfx90a:xnack+;gfx942"]
)
def test_of_torchs_gpus_those_with_these_matrix_instructions(
    monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    monkeypatch.setenv("PYTORCH_ROCM_ARCH", named)
    assert build_hip.architectures() == ["gfx90a", "gfx942"]


@pytest.mark.parametrize("named", ["gfx1100", "gfx908;gfx1100", ";"])
def test_gpus_without_these_matrix_instructions_are_refused(
    monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    monkeypatch.setenv("PYTORCH_ROCM_ARCH", named)
    with pytest.raises(RuntimeError, match=f"names '{named}', and these kernels need gfx90a"):
        build_hip.architectures()
