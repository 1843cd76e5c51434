"""The kernels for Hopper, without one: what nvcc has made of them, and what their launchers refuse."""

from __future__ import annotations

import ctypes
import os
import re
from collections import Counter
from pathlib import Path

import pytest

from bench.gpu import library as abi
from bench.gpu.machine_code import kernels_in
from pyruntime.cuda import why_not
from tests.cuda.compiled.test_build import library  # noqa: F401  (a fixture)
from tools import build_cuda, build_sm90

pytestmark = [
    pytest.mark.nvcc,
    pytest.mark.skipif(
        build_cuda.find_nvcc() is None, reason="nvcc was not found: the CUDA kernels are compiled where it is"
    ),
    pytest.mark.skipif(
        not build_sm90.is_wanted(build_cuda.architecture_flags(os.environ.get("TORCH_CUDA_ARCH_LIST"))),
        reason="TORCH_CUDA_ARCH_LIST names no Hopper",
    ),
]
KERNELS = [name for name, *_ in build_sm90.kernels()]


@pytest.fixture(autouse=True, scope="module")
def headers():
    # Not a mark: looking for them may mean a download, which collecting the tests must not. Without a network
    # there is nothing to compile; on a machine that has them, or PyPI, as CI does, nothing is skipped.
    if build_sm90.find_cutlass() is None:
        pytest.skip("CUTLASS's headers are not installed and cannot be downloaded")


def opcodes(compiled: Path) -> Counter[str]:
    return sum((kernel.opcodes for kernel in kernels_in(compiled)), Counter())


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_multiplies_by_wgmma_and_moves_by_tma(library: Path, kernel: str) -> None:  # noqa: F811
    found = opcodes(build_cuda.BUILD / f"{kernel}.o")
    assert found["HGMMA"] >= 8  # two steps of the loop, 16 elements of k each
    assert found["HMMA"] == 0
    assert found["UTMASTG"] >= 1 and found["STSM"] >= 4
    assert found["USETMAXREG"] == 2  # both kinds of warpgroups have their share of registers
    assert found["FENCE.VIEW.ASYNC"] >= 4  # barriers are made; before loads, before stores, before signals
    assert found["UTMALDG"] >= 1 and found["UTMALDG.MULTICAST"] >= 1  # for one block, and for both


def test_kernels_use_registers_alone_and_no_warning_was_given(library: Path) -> None:  # noqa: F811
    reports = [report for report in build_cuda.resource_reports() if report[0].split(":")[0] in KERNELS]
    assert len(reports) == len(KERNELS)
    for kernel, architecture, registers, stack, spills in reports:
        assert architecture == "sm_90a" and registers <= 168, kernel
        assert stack == 0 and spills == 0, kernel
    for kernel in KERNELS:
        log = (build_cuda.BUILD / f"{kernel}.o.log").read_text()
        # C7510: wgmma is serialised. C7508: setmaxnreg is ignored.
        assert not re.search(r"C75\d\d|serializ|warning|Potential", log), log


AT = 1 << 20  # an address; nothing is read there


def matmul(**changes: int | None) -> abi.Matmul:
    """A GEMM of 512 x 384 x 256 in NT, with some fields changed."""
    fields = {"dtype": 0, "layout": 0, "tiles": 0, "m": 512, "n": 384, "k": 256, "a": AT, "b": AT, "c": AT}
    fields |= {"lda": 256, "ldb": 256, "ldc": 384}
    return abi.Matmul(**(fields | changes))


@pytest.fixture(scope="module")
def launchers(library: Path) -> ctypes.CDLL:  # noqa: F811
    loaded = ctypes.CDLL(str(library))
    loaded.pyruntime_error.restype = ctypes.c_char_p
    return loaded


@pytest.mark.parametrize(
    ("changes", "code", "sentence"),
    [
        ({"layout": 5}, abi.INVALID, "layout=5; use 0 (NT) or 1 (NN)."),
        ({"dtype": 2}, abi.INVALID, "dtype=2; use 0 (bf16) or 1 (fp16)."),
        ({"lda": 255}, abi.INVALID, "lda=255, but a row has 256 elements."),
        ({"c": None}, abi.INVALID, "c is a null pointer."),
        ({"lda": 260}, abi.REFUSED, "lda=260; TMA needs rows that lie multiples of 8 elements apart."),
        ({"ldb": 257}, abi.REFUSED, "ldb=257; TMA needs rows that lie multiples of 8 elements apart."),
        ({"ldc": 385}, abi.REFUSED, "ldc=385; TMA needs rows that lie multiples of 8 elements apart."),
        (
            {"a": AT + 2},
            abi.REFUSED,
            "a lies at 0x100002; TMA reads and writes from multiples of 16 bytes on.",
        ),
        (
            {"c": AT + 8},
            abi.REFUSED,
            "c lies at 0x100008; TMA reads and writes from multiples of 16 bytes on.",
        ),
        ({"k": 0}, abi.REFUSED, "the GEMM is empty; TMA has no maps of nothing."),
        ({"m": 0, "a": None}, abi.REFUSED, "the GEMM is empty; TMA has no maps of nothing."),
    ],
)
def test_what_is_wrong_and_what_is_left_to_the_portable_kernel(
    launchers: ctypes.CDLL, changes: dict[str, int | None], code: int, sentence: str
) -> None:
    group = alone()
    request = matmul(**changes)
    code_found = launchers.pyruntime_sm90_all_gather_matmul(ctypes.byref(group), ctypes.byref(request), None)
    assert code_found == code
    said = launchers.pyruntime_error().decode()
    assert said == (
        f"all_gather_matmul: {sentence}"
        if code == abi.INVALID
        else f"all_gather_matmul is left to the portable kernel: {sentence}"
    )


def alone() -> abi.Group:
    """A group of one rank, so that all rows are its own."""
    return abi.Group(abi.Workspace(1, 1, 1 << 20), 0, 0, 10**9, (ctypes.c_void_p * 1)(AT))


def group_of_two(flags: int, slot_bytes: int) -> abi.Group:
    workspaces = (ctypes.c_void_p * 2)(AT, 2 * AT)
    return abi.Group(abi.Workspace(2, flags, slot_bytes), 0, 0, 10**9, workspaces)


def test_a_gather_needs_an_alignment_of_c(launchers: ctypes.CDLL) -> None:
    group, product = group_of_two(64, 1 << 20), matmul(ldc=385)
    assert (
        launchers.pyruntime_sm90_all_gather_matmul(ctypes.byref(group), ctypes.byref(product), None)
        == abi.REFUSED
    )
    assert b"ldc=385; TMA needs rows" in launchers.pyruntime_error()


# With a device tests/cuda/gpu/test_sm90_gpu.py runs the kernels for real; these addresses are not of any.
@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="a device is here")
def test_a_scatter_that_needs_no_alignment_asks_for_the_device(launchers: ctypes.CDLL) -> None:
    group, product = group_of_two(64, 1 << 20), matmul(ldc=385)
    assert (
        launchers.pyruntime_sm90_matmul_reduce_scatter(ctypes.byref(group), ctypes.byref(product), None)
        == abi.REFUSED
    )
    assert b"is left to the portable kernel: there is no device" in launchers.pyruntime_error()


def test_workspaces_are_checked_as_the_portable_launchers_check_them(launchers: ctypes.CDLL) -> None:
    group, product = group_of_two(1, 1024), matmul()
    assert (
        launchers.pyruntime_sm90_all_gather_matmul(ctypes.byref(group), ctypes.byref(product), None)
        == abi.INVALID
    )
    assert b"make a larger workspace" in launchers.pyruntime_error()
    assert (
        launchers.pyruntime_sm90_matmul_reduce_scatter(ctypes.byref(group), ctypes.byref(product), None)
        == abi.INVALID
    )
    assert b"make a larger workspace" in launchers.pyruntime_error()


def test_tiles_are_chosen_without_a_device(launchers: ctypes.CDLL) -> None:
    choose = launchers.pyruntime_sm90_choose_tiles
    choose.argtypes = [ctypes.c_int64] * 4 + [ctypes.c_int32]
    assert choose(1024, 8192, 7168, 8192, 131) == 1
    assert choose(64, 512, 768, 4096, 131) == 0


@pytest.mark.skipif(not why_not(), reason="the kernels can be used here")
def test_without_a_device_they_are_on_none(launchers: ctypes.CDLL) -> None:
    assert launchers.pyruntime_sm90_is_on_device() == abi.REFUSED
    assert b"is left to the portable kernel: there is no device" in launchers.pyruntime_error()


def test_the_header_names_what_the_library_exports(launchers: ctypes.CDLL) -> None:
    header = (build_sm90.FOLDER / "launchers.h").read_text()
    declared = re.findall(r"PYRUNTIME_API [\w* ]*?\b(pyruntime_\w+)\(", header)
    assert len(declared) == 4
    assert all(hasattr(launchers, name) for name in declared)
