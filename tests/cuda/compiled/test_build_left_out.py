"""One kernel that does not compile costs no other: it is left out, and says so when it is called."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from tests.cuda.compiled.test_build import needs_nvcc
from tools import build_cuda, build_left_out

FEW = {"chunk_plan", "checks", "workspace", "reduce"}


def test_ninja_says_what_failed_old_and_new():
    said = "[1/2] nvcc /b/a.o\nFAILED: [code=1] /b/a.o \nnvcc ... -o /b/a.o\nFAILED: /b/c.o\n/b/d.o: error"
    assert build_left_out.failed_objects(said) == [Path("/b/a.o"), Path("/b/c.o")]


@needs_nvcc
def test_what_does_not_compile_is_left_out_and_says_so(tmp_path, monkeypatch, capfd):
    broken = tmp_path / "reduce.cu"
    broken.write_text(
        '#include "cuda/launchers.h"\nint pyruntime_reduce() { return nothing_of_that_name; }\n'
    )
    few = [
        (name, broken if name == "reduce" else source, macros)
        for name, source, macros in build_cuda.sources()
        if name in FEW
    ]
    assert len(few) == len(FEW)
    monkeypatch.setattr(build_cuda, "sources", lambda: few)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    options = {"strict": False, "hopper": False, "folder": tmp_path / "objects"}
    library = tmp_path / "lib" / "libpyruntime_cuda.so"
    with pytest.raises(RuntimeError, match="nothing_of_that_name"):
        build_cuda.build(library, **options)
    build_cuda.build(library, keep_going=True, **options)
    said = capfd.readouterr().out
    assert "nothing_of_that_name" in said and "built without reduce, because" in said
    loaded = ctypes.CDLL(str(library))
    loaded.pyruntime_error.restype = ctypes.c_char_p
    assert loaded.pyruntime_finish(None, None) == 1
    assert loaded.pyruntime_error() == b"finish: the group is a null pointer."
    for name in ("reduce", "adamw"):  # the second was not even asked for
        assert getattr(loaded, f"pyruntime_{name}")() == 2
        assert loaded.pyruntime_error().endswith(b"left out of the library, because reduce did not compile.")
