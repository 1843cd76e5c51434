"""Builds the tests that execute the CUDA kernels without a GPU: csrc/cuda compiled by the C++ compiler in the
host dialect (tests/cuda/emulated), and a program for each tests/cuda/kernels/test_NAME.cpp.

They do not use torch. There are two variants: warps of 32 lanes with the instructions of NVIDIA's GPUs, under
the address and undefined-behaviour sanitizers, which find accesses past an end; and warps of 64 with those of
AMD's GPUs. ninja compiles what changed, into build/cuda_tests.
"""

from __future__ import annotations

import functools
import os
import subprocess
from dataclasses import replace
from pathlib import Path

from tests.builds import Recipe
from tools.build_cuda import ROOT, sources

BUILD = ROOT / "build" / "cuda_tests"
FOLDER = ROOT / "tests" / "cuda"
KERNELS = FOLDER / "kernels"

# No strict aliasing: kernels access 16-bit values as 16 bytes, as CUDA allows.
INCLUDES = ("csrc", "hip", "tests/cuda/emulated", "tests/cpp")
FLAGS = ["-std=c++17", "-fno-strict-aliasing", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Werror"]
SANITIZED = ["-g1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
VARIANTS = {"warp32": ["-O1", *SANITIZED], "warp64": ["-O1", "-fPIC", "-DPYRUNTIME_HOST_WARP=64"]}
LIBRARY = BUILD / "libpyruntime_host.so"
"""The kernels as a library for Python, with tensors in the CPU's memory."""
RUN_KERNELS = BUILD / "run_kernels"
"""tests/hip/run_kernels.cpp, which is made for AMD's GPUs, linked with this library."""
PROGRAMS = sorted(path.stem for path in KERNELS.glob("test_*.cpp"))
NVIDIA_ONLY = {"test_multicast", "test_sm90_units"}
OF_VARIANT = {"warp32": PROGRAMS, "warp64": [name for name in PROGRAMS if name not in NVIDIA_ONLY]}


def builds() -> list[tuple[str, str]]:
    """Returns all (program, variant)."""
    return [(name, variant) for variant, names in OF_VARIANT.items() for name in names]


def program(name: str, variant: str) -> Path:
    """Returns the path of a built program."""
    return BUILD / variant / name


def stand_before_library(name: str, folder: Path) -> str:
    """Compiles tests/cuda/`name`.cpp into a library in `folder` that overrides functions of LIBRARY; dlsym()
    finds all others there."""
    path = folder / f"lib{name}.so"
    command = ["c++", "-std=c++17", "-shared", "-fPIC", f"-I{ROOT / 'csrc'}"]
    # Keeps the library linked, although no function of it is called by name.
    command += ["-Wl,--no-as-needed", str(FOLDER / f"{name}.cpp"), str(LIBRARY), "-ldl", "-o", str(path)]
    command += [f"-Wl,-rpath,{LIBRARY.parent}"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return str(path)


def run_kernels_lines() -> list[str]:
    """Returns the build of RUN_KERNELS, which uses only the library's C interface, as on a GPU."""
    lines, objects = [], []
    for source in sorted((ROOT / "tests" / "hip").glob("*.cpp")):
        objects.append(f"{BUILD}/run_kernels.{source.stem}.o")
        lines.append(f"build {objects[-1]}: compile_warp64 {source}")
        lines.append("  macros = -DPYRUNTIME_RUN_ON_HOST")
    lines.append(f"build {RUN_KERNELS}: link_warp64 {' '.join(objects)} {LIBRARY}")
    lines.append(f"  shared = -pthread -Wl,-rpath,{LIBRARY.parent}")
    return lines


def on_pretended_hip(folder: Path = BUILD / "pretended_hip", version: int = 0) -> str:
    """Compiles tests/cuda/pretended_hip.cpp into libamdhip64.so.`version` in `folder`, unless it is there,
    and an empty library that needs it and LIBRARY: the host dialect then looks like kernels for AMD."""
    runtime, kernels = folder / f"libamdhip64.so.{version}", folder / "libpyruntime_hip.so"
    source = FOLDER / "pretended_hip.cpp"
    if kernels.exists() and kernels.stat().st_mtime > source.stat().st_mtime:
        return str(kernels)
    folder.mkdir(parents=True, exist_ok=True)
    shared = ["c++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    linked = ["-Wl,--no-as-needed", str(runtime), str(LIBRARY)]
    found = [f"-Wl,-rpath,{folder}", f"-Wl,-rpath,{LIBRARY.parent}"]
    for command in (
        [*shared, str(source), f"-Wl,-soname,{runtime.name}", "-o", str(runtime)],
        [*shared, "-x", "c++", os.devnull, "-x", "none", *linked, *found, "-o", str(kernels)],
    ):
        ran = subprocess.run(command, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
    return str(kernels)


def library_recipe() -> Recipe:
    """Returns the build of LIBRARY alone."""
    return replace(recipe(), what="the kernels' library in the host dialect", target=str(LIBRARY))


@functools.cache
def recipe() -> Recipe:
    """Returns the build of all programs and LIBRARY."""
    includes = [f"-I{ROOT / folder}" for folder in INCLUDES]
    lines = [
        "ninja_required_version = 1.3",
        f"cxx = {os.environ.get('CXX', 'c++')}",
        f"flags = {' '.join([*FLAGS, *includes])}",
    ]
    for variant, extra in VARIANTS.items():
        lines += [
            f"rule compile_{variant}",
            f"  command = $cxx -MMD -MF $out.d $flags {' '.join(extra)} $macros -x c++ -c $in -o $out",
            "  depfile = $out.d",
            "  deps = gcc",
            "  description = compile $out",
            f"rule link_{variant}",
            f"  command = $cxx {' '.join(extra)} $shared $in -o $out",
            "  description = link $out",
        ]
        common = [("grid", FOLDER / "emulated/grid.cpp", ()), ("check", ROOT / "tests/cpp/check.cpp", ())]
        objects = []
        for name, source, macros in [*sources(), *common]:
            objects.append(str(BUILD / variant / f"{name}.o"))
            lines += [f"build {objects[-1]}: compile_{variant} {source}", f"  macros = {' '.join(macros)}"]
        if variant == "warp64":
            kernels = [made for made in objects if not made.endswith("/check.o")]
            lines.append(f"build {LIBRARY}: link_{variant} {' '.join(kernels)}")
            lines.append("  shared = -shared")
            lines += run_kernels_lines()
        for name in OF_VARIANT[variant]:
            made = program(name, variant)
            lines.append(f"build {made}.o: compile_{variant} {KERNELS / name}.cpp")
            lines.append(f"build {made}: link_{variant} {made}.o {' '.join(objects)}")
    return Recipe("the kernels in the host dialect", BUILD, "\n".join(lines) + "\n")
