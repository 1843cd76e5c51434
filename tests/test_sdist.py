"""The source distribution, and the files that images copy, suffice for an installation; a wheel has the core,
its torch's version, and the kernels."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

import pyruntime
from tools.build_cuda import ROOT

pytestmark = pytest.mark.second_tier

COMPILER = """#!/bin/sh
# Compiles nothing: looks whether its sources are there, and makes what it is asked for.
for argument; do
  case "$last" in -o) made=$argument;; -c) source=$argument;; -MF) needed=$argument;; esac
  last=$argument
done
test -n "$made" || exec c++ "$@"
test -z "$source" || test -f "$source" || exit 1
test -z "$needed" || echo "$made: $source" > "$needed"
: > "$made"
"""


def run(*command: str | Path, **more) -> str:
    done = subprocess.run(
        [str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **more
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    # A list of files from an earlier build in the source folder would hide what MANIFEST.in lacks.
    run(sys.executable, "setup.py", "-q", "egg_info", "--egg-base", folder, "sdist", "-d", folder, cwd=ROOT)
    (made,) = folder.glob("*.tar.gz")
    return made


@pytest.fixture(scope="module")
def unpacked(sdist) -> Path:
    with tarfile.open(sdist) as file:
        file.extractall(sdist.parent, filter="data")
    return sdist.parent / sdist.name.removesuffix(".tar.gz")


def test_its_version_is_the_package_s(sdist):
    assert sdist.name == f"pyruntime-{pyruntime.__version__}.tar.gz"


def test_it_has_every_source_of_the_core_and_of_the_kernels(unpacked):
    for top in ("csrc", "hip"):
        wanted = {path.relative_to(ROOT) for path in (ROOT / top).rglob("*") if path.is_file()}
        assert wanted == {
            path.relative_to(unpacked) for path in (unpacked / top).rglob("*") if path.is_file()
        }
    for name in ("build_cuda", "build_hip"):
        program = f"from tools import {name}; assert all(path.is_file() for _, path, _ in {name}.sources())"
        run(sys.executable, "-c", program, cwd=unpacked)


def pip(command: str, *arguments: str | Path, cwd: Path, **environment: str) -> None:
    # Not in the source folder, whose package would be imported instead.
    options = ("-q", "--no-index", "--no-deps", "--no-build-isolation")
    run(sys.executable, "-m", "pip", command, *options, *arguments, cwd=cwd, env=os.environ | environment)


def install(sdist: Path, target: Path, **environment: str) -> None:
    pip("install", "--no-compile", "--target", target, sdist, cwd=sdist.parent, **environment)


@pytest.fixture
def compilers(tmp_path) -> dict[str, str]:
    """Environment variables that name a compiler which compiles nothing."""
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    named = dict.fromkeys(("CC", "CXX", "LDSHARED", "LDCXXSHARED"), str(compiler))
    return {**named, "CUDA_HOME": str(tmp_path), "CCACHE_DISABLE": "1"}


def test_pip_installs_from_it(sdist, tmp_path, compilers):
    install(sdist, tmp_path / "site", **compilers)
    installed, package = tmp_path / "site" / "pyruntime", ROOT / "pyruntime"
    for ending in ("*.py", "*.pyi", "*.toml", "py.typed"):
        wanted = {path.relative_to(package) for path in package.rglob(ending)}
        assert wanted <= {path.relative_to(installed) for path in installed.rglob(ending)}
    assert list(installed.glob("_C*.so"))
    headers = installed / "cuda" / "headers"  # the sources of tile variants
    assert (headers / "csrc/cuda/portable/gemm/tile_gemm.cuh").exists() and (
        headers / "csrc/cuda/compat.h"
    ).exists()
    sources = installed / "clock" / "sources" / "csrc"  # of the simulated device
    wanted = {path.relative_to(ROOT / "csrc") for path in (ROOT / "csrc" / "sim").rglob("*.*")}
    assert wanted <= {path.relative_to(sources) for path in sources.rglob("*.*")}
    assert (sources / "cuda/sm90/launchers.h").exists()


def test_a_wheel_has_the_core_and_beside_it_the_kernels_and_the_torch_that_it_is_for(
    unpacked, tmp_path, compilers
):
    tree = shutil.copytree(unpacked, tmp_path / "tree")
    kernels = ("libpyruntime_cuda.so", "libpyruntime_hip.so")
    for name in kernels:
        (tree / "pyruntime" / name).write_text("what `make cuda` and `make hip` have built")
    pip("wheel", "--wheel-dir", tmp_path, tree, cwd=tmp_path, **compilers)
    (made,) = tmp_path.glob(f"pyruntime-{pyruntime.__version__}-cp*.whl")
    with zipfile.ZipFile(made) as wheel:
        names = {name.removeprefix("pyruntime/") for name in wheel.namelist()}
        assert wheel.read("pyruntime/torch_version.txt").decode().strip() == str(torch.__version__)
    assert names.issuperset(kernels) and any(re.fullmatch(r"_C\..*so", name) for name in names)


def test_another_torch_is_refused_in_a_sentence(tmp_path):
    program = "import torch; torch.__version__ = '2.12.9+other'; import pyruntime"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: pyruntime was built with torch {torch.__version__} and found torch 2.12.9+other: "
        "install that one, or build pyruntime again with this one."
    )


def test_pip_installs_what_images_copy(tmp_path, compilers):
    """.dockerignore excludes everything except its lines with "!"."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == "*"
    context = tmp_path / "src"
    left_out = shutil.ignore_patterns("__pycache__", "*.so", "torch_version.txt")
    for name in (line[1:] for line in lines if line.startswith("!")):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, context / name, ignore=left_out)
        else:
            context.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, context)
    pip("install", "--no-compile", "--target", tmp_path / "site", context, cwd=tmp_path, **compilers)
    assert list((tmp_path / "site" / "pyruntime").glob("_C*.so"))


def test_a_build_in_place_can_be_lenient_to_warnings(unpacked, compilers):
    build = (sys.executable, "setup.py", "build_ext", "--inplace", "--lenient")
    run(*build, cwd=unpacked, env=os.environ | compilers)
    (recipe,) = unpacked.glob("build/inplace-*-lenient/build.ninja")
    assert "-Wextra" in recipe.read_text() and "-Werror" not in recipe.read_text()
    assert list((unpacked / "pyruntime").glob("_C*.so"))


@pytest.mark.install
def test_what_pip_has_compiled_from_it_computes(sdist, tmp_path):
    install(sdist, tmp_path / "site")
    program = (
        "import pyruntime, torch; assert 'site' in pyruntime.__file__; import pyruntime.ops.layers as layers;"
    )
    program += "x = torch.randn(3, 8); print(layers.rms_norm(x, torch.ones(8), 1e-6).shape)"
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    assert "[3, 8]" in run(sys.executable, "-c", program, cwd=tmp_path, env=environment)
