"""tools/check_torch.py checks a core against a torch that is not installed, here with toys of both; unchecked
versions are refused."""

import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from tools.check_torch import check
from tools.torch_versions import KNOWN, refuse_unknown

pytestmark = pytest.mark.second_tier

HEADER = """#pragma once
namespace c10 {
int sum(int a, int b);
int gone(int a);
__attribute__((weak)) void at_will();
}
"""
CORE = """#include <c10/toy.h>
int add(int a) {
  if (c10::at_will) c10::at_will();
  return c10::sum(a, 1);
}
"""


def compile_(source: str, made: Path, *flags: str) -> None:
    path = made.with_suffix(".cc")
    path.write_text(source)
    subprocess.run(["c++", *flags, str(path), "-o", str(made)], check=True)


@pytest.fixture
def toys(tmp_path: Path) -> tuple[Path, Path]:
    """A tree with a core, and a wheel with a torch that lacks a function of its header."""
    root, torch = tmp_path / "tree", tmp_path / "torch"
    (root / "csrc" / "cuda").mkdir(parents=True)
    (root / "csrc" / "precompiled.h").write_text("#include <c10/toy.h>\n")
    (root / "csrc" / "core.cpp").write_text(CORE)
    (root / "csrc" / "cuda" / "kernels.cpp").write_text("this is no C++, and not the core's")
    (torch / "include" / "c10").mkdir(parents=True)
    (torch / "include" / "c10" / "toy.h").write_text(HEADER)
    (torch / "lib").mkdir()
    compile_(
        "namespace c10 { int sum(int a, int b) { return a + b; } }",
        torch / "lib" / "libc10.so",
        "-shared",
        "-fPIC",
    )
    (torch / "version.py").write_text("__version__ = '2.11.0+toy'\n")
    wheel = tmp_path / "torch-2.11.0+toy.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in sorted(torch.rglob("*")):
            archive.write(path, path.relative_to(tmp_path))
    shutil.rmtree(torch)
    return root, wheel


def test_a_core_that_fits_lacks_nothing(toys, tmp_path):
    assert check(toys[1], toys[0], tmp_path / "build") == []


def test_a_symbol_that_the_libraries_lack_is_named(toys, tmp_path):
    root, wheel = toys
    (root / "csrc" / "more.cpp").write_text("#include <c10/toy.h>\nint lost() { return c10::gone(2); }\n")
    assert check(wheel, root, tmp_path / "build") == ["c10::gone(int)"]


def test_what_does_not_compile_ends_with_a_sentence(toys, tmp_path):
    root, wheel = toys
    (root / "csrc" / "more.cpp").write_text("#include <c10/toy.h>\nint lost() { return c10::other(2); }\n")
    with pytest.raises(SystemExit, match=r"does not compile against torch 2\.11\.0\+toy"):
        check(wheel, root, tmp_path / "build")


def test_what_is_no_torch_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="has no torch/include"):
        check(tmp_path)
    (tmp_path / "torch.whl").write_text("no archive")
    with pytest.raises(SystemExit, match="is not a wheel"):
        check(tmp_path / "torch.whl")


def test_a_torch_that_nobody_has_checked_is_refused_with_those_that_are_known():
    for known in ("2.11.0+cu130", "2.13.0", f"{KNOWN[-1]}.0a0+git1234567"):
        refuse_unknown(known)
    for unknown in ("2.10.1", "2.1.1", "2.111.0", "3.0.0", "2.16.0.dev20261101", "unknown"):
        with pytest.raises(SystemExit) as caught:
            refuse_unknown(unknown)
        assert "with torch 2.11, 2.12, 2.13, 2.14 and 2.15, and this is torch" in str(caught.value)
        assert unknown in str(caught.value)
