"""The build of the simulated devices: csrc/sim as a module of Python, compiled where it is first used."""

from __future__ import annotations

import fcntl
import functools
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths

from pyruntime.tuning.cache import user_folder

PACKAGE = Path(__file__).resolve().parent
ROOT = PACKAGE.parent.parent
"""The source folder, if the package is in one."""
IS_INSTALLED = not (ROOT / "csrc" / "sim").is_dir()
SOURCES = PACKAGE / "sources" / "csrc" if IS_INSTALLED else ROOT / "csrc"
"""An installation has its own copy (setup.py)."""
PRECOMPILED = "precompiled.h"


def build_folder() -> Path:
    """Returns where it is built: the source folder's build, or the user's cache. Raises RuntimeError without
    a home folder."""
    if not IS_INSTALLED:
        return ROOT / "build" / "sim"
    return user_folder() / f"sim-cp{sys.version_info[0]}{sys.version_info[1]}-torch{torch.__version__}"


def library() -> Path:
    """Returns the path of the compiled module."""
    return build_folder() / "_sim.so"


def recipe() -> str:
    """Returns ninja's file: one object for each source. In the source folder warnings are errors."""
    build, sim = build_folder(), SOURCES / "sim"
    # Compilers find the precompiled header in the build's folder, and else the header beside the sources.
    flags = ["-std=c++20", f"-I{build}", f"-I{sim}", f"-I{SOURCES}", "-O0", "-fPIC"]
    flags += ["-Wall", "-Wextra", "-Wno-unused-parameter", *([] if IS_INSTALLED else ["-Werror"])]
    flags += [f"-isystem{path}" for path in (*include_paths(), sysconfig.get_paths()["include"])]
    flags += ["-DTORCH_EXTENSION_NAME=_sim"]
    flags.append(f"-DTORCH_OF_THE_BUILD={torch.__version__}")  # ninja does not watch system headers
    libraries = [f"-L{path}" for path in library_paths()]
    libraries += ["-ltorch_python", "-ltorch_cpu", "-ltorch", "-lc10"]
    cxx = _compiler()
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
    precompiled = f"{build}/{PRECOMPILED}.gch"
    lines.append(f"build {precompiled}: precompile {sim / PRECOMPILED}")
    objects = []
    for source in sorted(sim.rglob("*.cpp")):
        objects.append(f"{build}/{source.stem}.o")
        lines.append(f"build {objects[-1]}: compile {source} | {precompiled}")
    lines.append(f"build {library()}: link {' '.join(objects)}")
    return "\n".join(lines) + "\n"


def build() -> None:
    """Compiles the module if it is not there or its sources have changed, and says so. Raises ValueError if
    sources, ninja or a compiler are missing, or with the compiler's output."""
    needed = "`python -m pyruntime simulate` compiles its device where it first runs"
    if not (SOURCES / "sim").is_dir():
        raise ValueError(f"{needed}, and {SOURCES / 'sim'} is not there; install pyruntime again.")
    ninja = shutil.which(
        "ninja", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )
    if ninja is None:
        raise ValueError(f"{needed}, and ninja was not found; run `pip install ninja`.")
    if shutil.which(shlex.split(_compiler())[0]) is None:
        raise ValueError(
            f"{needed}, and no compiler {_compiler()!r} was found; install g++, or name one in CXX."
        )
    folder = build_folder()
    folder.mkdir(parents=True, exist_ok=True)
    locked = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(locked, fcntl.LOCK_EX)  # others compile into it too
        (folder / "build.ninja").write_text(recipe())
        jobs = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
        run = functools.partial(subprocess.run, cwd=folder, capture_output=True, text=True)
        if "no work to do" in run([ninja, "-n"]).stdout:
            return
        print("Compiling the simulated device, once: this takes minutes.", file=sys.stderr, flush=True)
        done = run([ninja, "-j", jobs])
    finally:
        os.close(locked)
    if done.returncode != 0:
        raise ValueError(f"The simulated device does not compile:\n{done.stdout}{done.stderr}")


def _compiler() -> str:
    return os.environ.get("CXX", "c++")
