"""What keeps the kernels for GPUs of AMD from being built is said in a sentence; compilers are made up."""

from __future__ import annotations

import pytest

from tests.cuda.compiled import rocm_torch
from tools import build_hip

UNKNOWN = "clang: error: invalid target ID 'gfx950'; format is a processor name followed by"
UNSUPPORTED = "clang: error: unsupported HIP gpu architecture: gfx950"
NO_LIBRARY = "clang: error: cannot find ROCm device library; provide its path via '--rocm-path'"
NO_LIBRARY_FOR = "clang: error: cannot find ROCm device library for gfx950; provide its path via"
WARNING = "chunks.cu:1:2: warning: unused variable 'x' [-Wunused-variable]"


@pytest.fixture
def hipcc(monkeypatch, tmp_path):
    """Makes a hipcc that says something and ends with that code; one that ends with 0 makes what it is asked
    for."""

    def make(said: str, code: int) -> None:
        compiler = tmp_path / "bin" / "hipcc"
        compiler.parent.mkdir()
        lines = [
            "#!/bin/sh",
            'for argument; do case "$last" in -o|-MF) : > "$argument";; esac; last=$argument; done',
            f'echo "{said}"',
            f"exit {code}",
        ]
        compiler.write_text("\n".join(lines))
        compiler.chmod(0o755)
        monkeypatch.delenv("ROCM_HOME", raising=False)
        monkeypatch.setenv("ROCM_PATH", str(tmp_path))
        monkeypatch.setenv("PYTORCH_ROCM_ARCH", "gfx90a;gfx950")
        monkeypatch.setattr(build_hip, "BUILD", tmp_path / "build")

    return make


@pytest.mark.parametrize("said", [UNKNOWN, UNSUPPORTED])
def test_an_architecture_that_the_compiler_does_not_know(hipcc, tmp_path, said):
    hipcc(said, 1)
    with pytest.raises(RuntimeError) as raised:
        build_hip.build(tmp_path / "lib.so")
    assert str(raised.value) == (
        f"PYTORCH_ROCM_ARCH asks for gfx90a;gfx950, and {tmp_path}/bin/hipcc does not know gfx950; set it "
        "to only the architecture of your GPUs, or use a newer ROCm."
    )


@pytest.mark.parametrize(("said", "of"), [(NO_LIBRARY, ""), (NO_LIBRARY_FOR, " for gfx950")])
def test_a_compiler_without_its_device_library(hipcc, tmp_path, said, of):
    hipcc(said, 1)
    with pytest.raises(RuntimeError) as raised:
        build_hip.build(tmp_path / "lib.so")
    assert str(raised.value) == (
        f"the kernels need a ROCm device library for gfx90a;gfx950, and {tmp_path}/bin/hipcc finds no ROCm "
        f"device library{of}; install rocm-device-libs of the same ROCm, or name its folder in "
        "HIP_DEVICE_LIB_PATH."
    )


def test_what_else_it_says_is_shown(hipcc, tmp_path):
    hipcc("error: the moon is full", 1)
    with pytest.raises(RuntimeError, match=r"(?s)do not build for AMD GPUs:.*the moon is full"):
        build_hip.build(tmp_path / "lib.so")


def test_warnings_are_errors_where_it_is_strict_alone(hipcc, tmp_path):
    hipcc(WARNING, 0)
    assert build_hip.build(tmp_path / "lib.so", strict=False) == tmp_path / "lib.so"
    with pytest.raises(RuntimeError, match=r"hipcc warns .*\n.*unused variable 'x'"):
        build_hip.build(tmp_path / "lib.so")


def test_a_torch_for_rocm_without_hipcc(tmp_path):
    package, said = rocm_torch.run_setup(tmp_path, ROCM_HOME=str(tmp_path))
    assert not list(package.glob("libpyruntime_*.so"))
    assert (
        f"is for ROCm {rocm_torch.HIP} and hipcc was not found, so this build is for CPUs: put the hipcc "
        "of that ROCm on PATH, or name its folder in ROCM_PATH, and build again."
    ) in said


def test_an_installation_goes_on_without_kernels_that_cannot_be_built(hipcc, tmp_path):
    hipcc("", 1)
    package, said = rocm_torch.run_setup(tmp_path, PYTORCH_ROCM_ARCH="gfx1100")
    assert not list(package.glob("libpyruntime_*.so"))
    assert "pyruntime is installed without HIP kernels: PYTORCH_ROCM_ARCH names 'gfx1100'" in said
