"""The doctor says what it cannot find out and goes on."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch._C import _distributed_c10d

from pyruntime import cuda, machine
from pyruntime.cli import doctor


def test_a_part_that_fails_says_so(capsys):
    def fails():
        raise OSError("no such tool")

    doctor.show("Part", fails)
    assert capsys.readouterr().out == "Part\n  not found out  OSError: no such tool\n\n"


def test_the_compiler_is_read_from_the_library(tmp_path):
    library = tmp_path / "lib.so"
    library.write_bytes(b"\x7fELF\0\0GCC: (Debian 12.2.0-14) 12.2.0\0\0clang version 17.0.1 (x)\0")
    assert doctor.compiler(library) == "compiled by GCC: (Debian 12.2.0-14) 12.2.0, clang version 17.0.1 (x)"
    library.write_bytes(b"\x7fELF")
    assert doctor.compiler(library) == "compiler unknown"


@pytest.mark.parametrize(
    ("hip", "compiler", "target", "home"),
    [(None, "nvcc", "cuda", "CUDA_HOME"), ("6.4.43482", "hipcc", "hip", "ROCM_PATH")],
)
def test_missing_kernels_are_said_to_be_missing_and_how_to_get_them(
    monkeypatch, tmp_path, hip, compiler, target, home
):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(cuda, "library_path", lambda: tmp_path / "libpyruntime_none.so")
    with monkeypatch.context() as nowhere:
        nowhere.setattr(doctor.shutil, "which", lambda name, path: None)
        assert doctor.kernels() == f"none (CPU-only build: {compiler} was not found)"
    found = tmp_path / "bin" / compiler  # where the build looks first
    found.parent.mkdir()
    found.write_text("#!/bin/sh\n")
    found.chmod(0o755)
    monkeypatch.setenv(home, str(tmp_path))
    for name in ("ROCM_HOME", "HIP_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert doctor.kernels() == f"not built: `make {target}` builds them with {found}"


def test_kernels_for_gpus_of_amd_say_for_which(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    library = tmp_path / "libpyruntime_hip.so"
    library.write_bytes(b"hipv4-amdgcn-amd-amdhsa--gfx942\0" + bytes(3_000_000))
    monkeypatch.setattr(cuda, "library_path", lambda: library)
    for reason, used in (
        ("torch sees no GPU.", "not used here: torch sees no GPU."),
        ("", "used by ops on GPUs"),
    ):
        monkeypatch.setattr(cuda, "why_not", lambda reason=reason: reason)
        assert doctor.kernels() == f"libpyruntime_hip.so for gfx942, 3 MB; {used}"


def test_gpus_of_amd_are_named_with_their_architecture(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    device = SimpleNamespace(
        name="AMD Instinct MI250X", total_memory=64e9, gcnArchName="gfx90a:sramecc+:xnack-"
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    assert machine.accelerators() == [("GPU 0", "AMD Instinct MI250X, 64 GB, gfx90a:sramecc+:xnack-")]


def test_it_says_whether_profilers_hear_ranges(monkeypatch):
    monkeypatch.setattr(doctor.importlib.metadata, "version", lambda name: f"1.2 of {name}")
    assert doctor.nvtx_ranges() == "by nvtx 1.2 of nvtx; no tool listens (`nsys profile ..` does)"
    monkeypatch.setattr(doctor.importlib.metadata, "version", missing_package)
    assert doctor.nvtx_ranges() == "none: `pip install nvtx` gives them, for Nsight Systems"


def missing_package(name):
    raise doctor.importlib.metadata.PackageNotFoundError(name)


@pytest.mark.parametrize(
    ("able", "sentence"),
    [
        ({0, 1}, "2 of 2 GPUs can; comm.configure(multicast=...) uses it"),
        ({1}, "1 of 2 GPUs can; comm.configure(multicast=...) uses it"),
        (set(), "none of 2 GPUs"),
    ],
)
def test_multicast_is_asked_of_every_gpu(monkeypatch, able, sentence):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    asked = staticmethod(lambda kind, index: index in able)
    monkeypatch.setattr(_distributed_c10d._SymmetricMemory, "has_multicast_support", asked)
    assert doctor.multicast() == sentence


def test_multicast_needs_a_torch_for_cuda(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    assert doctor.multicast() == "none: this torch is CPU only"


def test_missing_files_are_unknown(monkeypatch, tmp_path):
    missing = tmp_path / "missing"
    monkeypatch.setattr(machine, "Path", lambda path: missing)
    assert dict(machine.processor())["SIMD"] == "unknown"
    assert dict(machine.memory())["memory"] == "unknown"
    assert dict(machine.network()) == {"RDMA devices": "none", "network": "loopback only"}


def test_nvlink_is_read_from_nvidia_smi(monkeypatch):
    text = "GPU 0: NVIDIA H100\n\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s\n"
    monkeypatch.setattr(machine.shutil, "which", lambda tool: "/usr/bin/nvidia-smi")
    for output, expected in ((text, "2 links, 53 GB/s over all GPUs"), ("", "none")):
        done = subprocess.CompletedProcess([], 0, stdout=output, stderr="")
        monkeypatch.setattr(machine.subprocess, "run", lambda *_, answer=done, **__: answer)
        assert machine._nvlink() == expected


@pytest.mark.parametrize(
    ("program", "limit_s", "sentence"),
    [
        ("import time; time.sleep(60)", 1.0, "timed out after"),
        (
            "import sys; sys.exit('pyruntime: Nothing works.')",
            60.0,
            "the 2 ranks ended with 1: pyruntime: Nothing works.",
        ),
    ],
)
@pytest.mark.second_tier("import time; time.sleep(60)-1.0-timed out after")
def test_ranks_that_fail_are_reported(capsys, monkeypatch, program, limit_s, sentence):
    run = subprocess.run
    monkeypatch.setattr(
        doctor.subprocess, "run", lambda command, **options: run([sys.executable, "-c", program], **options)
    )
    doctor.start_tiers(doctor.DoctorOptions(timeout_s=limit_s), [])
    shown = capsys.readouterr().out
    assert shown.startswith("Tiers\n  not found out  ") and sentence in shown
