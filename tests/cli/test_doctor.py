"""The doctor says what it cannot find out and goes on."""

import subprocess
import sys

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


def test_the_cuda_kernels_are_said_to_be_missing_and_how_to_get_them(monkeypatch, tmp_path):
    monkeypatch.setattr(cuda, "library_path", lambda: tmp_path / "libpyruntime_cuda.so")
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert doctor.cuda_kernels() == "none (CPU-only build: no nvcc on PATH)"
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/usr/local/bin/{name}")
    assert doctor.cuda_kernels() == "not built: `make cuda` builds them with /usr/local/bin/nvcc"


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
    ("program", "sentence"),
    [
        ("import time; time.sleep(60)", "timed out after"),
        (
            "import sys; sys.exit('pyruntime: Nothing works.')",
            "the 2 ranks ended with 1: pyruntime: Nothing works.",
        ),
    ],
)
def test_ranks_that_fail_are_reported(capsys, monkeypatch, program, sentence):
    run = subprocess.run
    monkeypatch.setattr(
        doctor.subprocess, "run", lambda command, **options: run([sys.executable, "-c", program], **options)
    )
    doctor.start_tiers(doctor.Options(timeout_s=1.0), [])
    shown = capsys.readouterr().out
    assert shown.startswith("Tiers\n  not found out  ") and sentence in shown
