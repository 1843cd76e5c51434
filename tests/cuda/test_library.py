"""Why the library of kernels cannot be used here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pyruntime.comm.core import _C
from pyruntime.cuda import architectures_in, library, library_path, why_not
from tests.cuda import build


def test_a_missing_library_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "library_path", lambda: tmp_path / "libmissing.so")
    assert why_not() == "libmissing.so was not built: run `make cuda` where nvcc is."


def test_one_that_cannot_be_loaded_says_why(monkeypatch, tmp_path):
    path = tmp_path / "libbroken.so"
    path.write_bytes(b"no library")
    monkeypatch.setattr(library, "library_path", lambda: path)
    said = why_not()
    assert said.startswith("the CUDA kernels could not be loaded: ") and said.endswith("; run `make cuda`.")


@pytest.fixture
def rocm(monkeypatch):
    """A torch for ROCm, as far as Python sees."""
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")


def test_a_torch_for_rocm_takes_the_kernels_for_its_gpus(rocm, monkeypatch, tmp_path):
    assert library_path().name == "libpyruntime_hip.so"
    monkeypatch.setattr(library, "library_path", lambda: tmp_path / "libpyruntime_hip.so")
    assert why_not() == "libpyruntime_hip.so was not built: run `make hip` where hipcc is."
    (tmp_path / "libpyruntime_hip.so").write_bytes(b"no library")
    said = why_not()
    assert said.startswith("the HIP kernels could not be loaded: ") and said.endswith("; run `make hip`.")


def test_kernels_for_other_gpus_say_what_to_build(rocm, monkeypatch, tmp_path):
    path = tmp_path / "libpyruntime_hip.so"
    path.write_bytes(b"..hipv4-amdgcn-amd-amdhsa--gfx942\0..hipv4-amdgcn-amd-amdhsa--gfx90a\0..")
    assert architectures_in(path) == ["gfx90a", "gfx942"]
    monkeypatch.setattr(library, "library_path", lambda: path)
    monkeypatch.setattr(library.ctypes, "CDLL", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, said in (
        ("gfx90a:sramecc+:xnack-", ""),
        (
            "gfx950:sramecc+:xnack-",
            "the GPU is gfx950, but the kernels were built for gfx90a, gfx942; run "
            "`PYTORCH_ROCM_ARCH=gfx950 make hip`.",
        ),
    ):
        device = SimpleNamespace(gcnArchName=name)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda found=device: found)
        assert why_not() == said


@pytest.mark.parametrize(("rocm", "kind", "target"), [(False, "CUDA", "cuda"), (True, "HIP", "hip")])
def test_the_core_names_the_kernels_that_torch_asks_for(rocm, kind, target):
    if library_path().parent.joinpath(f"libpyruntime_{target}.so").exists():
        pytest.skip(f"the {kind} kernels are built here")
    try:
        _C.set_torch_is_for_rocm(rocm)
        said = _C.why_no_device_library("cuda")
    finally:
        _C.set_torch_is_for_rocm(torch.version.hip is not None)
    assert said.startswith(f"the {kind} kernels are not built (")
    assert f"libpyruntime_{target}.so" in said and said.endswith(f"; run `make {target}`")


def test_one_of_another_version_is_to_be_built_anew(host_kernels, tmp_path):
    path = build.stand_before_library("another_interface", tmp_path)
    with pytest.raises(RuntimeError, match=r"of another version; build it anew"):
        _C.use_device_library("cpu", path)
