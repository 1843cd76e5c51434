"""The build of the simulated devices: backend/*.cpp as a module of Python."""

from __future__ import annotations

import functools
import os
import sysconfig
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths

from tests.builds import Recipe
from tools.build_cuda import ROOT

BUILD = ROOT / "build" / "sim"
LIBRARY = BUILD / "_sim.so"
BACKEND = Path(__file__).with_name("backend")
SOURCES = sorted(BACKEND.glob("*.cpp"))
PRECOMPILED = "precompiled.h"


@functools.cache
def recipe() -> Recipe:
    """One object for each source."""
    # Compilers find the precompiled header in the build's folder, and else the header beside the sources.
    flags = ["-std=c++20", f"-I{BUILD}", f"-I{BACKEND}", f"-I{ROOT}/csrc", "-O0", "-fPIC"]
    flags += ["-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter"]
    flags += [f"-isystem{path}" for path in (*include_paths(), sysconfig.get_paths()["include"])]
    flags += ["-DTORCH_EXTENSION_NAME=_sim"]
    flags.append(f"-DTORCH_OF_THE_BUILD={torch.__version__}")  # ninja does not watch system headers
    libraries = [f"-L{path}" for path in library_paths()]
    libraries += ["-ltorch_python", "-ltorch_cpu", "-ltorch", "-lc10"]
    cxx = os.environ.get("CXX", "c++")
    lines = [
        "ninja_required_version = 1.3",
        "rule precompile",
        f"  command = {cxx} {' '.join(flags)} -x c++-header $in -o $out",
        "  description = precompile $in",
        "rule compile",
        f"  command = {cxx} -MMD -MF $out.d {' '.join(flags)} -include {PRECOMPILED} -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = compile $out",
        "rule link",
        f"  command = {cxx} -shared $in -o $out {' '.join(libraries)}",
        "  description = link $out",
    ]
    precompiled = f"{BUILD}/{PRECOMPILED}.gch"
    lines.append(f"build {precompiled}: precompile {BACKEND / PRECOMPILED}")
    objects = []
    for source in SOURCES:
        objects.append(f"{BUILD}/{source.stem}.o")
        lines.append(f"build {objects[-1]}: compile {source} | {precompiled}")
    lines.append(f"build {LIBRARY}: link {' '.join(objects)}")
    return Recipe("the simulated devices", BUILD, "\n".join(lines) + "\n")
