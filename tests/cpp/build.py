"""Builds the C++ tests: a program for each, under the sanitizers.

A program is tests/cpp/AREA/test_NAME.cpp, check.cpp and the files of csrc that it tests, linked with torch.
All are built for the address and undefined-behaviour sanitizers; those in which several threads meet for the
thread sanitizer too. torch's headers are compiled once a variant (prelude.h). ninja compiles what changed;
everything it makes lies in build/cpp_tests.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths

from tests.builds import Recipe

ROOT = Path(__file__).resolve().parent.parent.parent
BUILD = ROOT / "build" / "cpp_tests"

CORE = sorted(str(path.relative_to(ROOT / "csrc")) for path in (ROOT / "csrc/core").rglob("*.cpp"))
RING = [
    *CORE,
    "cpu/reduce.cpp",
    "transport/account.cpp",
    "transport/descriptor.cpp",
    "transport/flights.cpp",
    "transport/group_context.cpp",
    "transport/host/private_workspace.cpp",
    *sorted(f"transport/ring/{path.name}" for path in (ROOT / "csrc/transport/ring").glob("*.cpp")),
]
# What each test is built with, from csrc.
PROGRAMS = {
    "core/test_arbiter": CORE,
    "core/test_chunk_plan": ["core/chunk_plan.cpp"],
    "core/test_deadline": ["core/deadline.cpp", "core/error.cpp"],
    "core/test_host_process": ["core/host_process.cpp"],
    "core/test_rings": ["core/chunk_plan.cpp", "core/rings.cpp"],
    "cpu/test_fp8": [],
    "cpu/test_reduce": ["cpu/reduce.cpp"],
    "cpu/test_sift": [],
    "cpu/test_symmetric_memory": [*CORE, "cpu/symmetric_memory.cpp"],
    "cpu/test_tile_order": [],
    "device/test_streams": [f"sim/{each}.cpp" for each in ("clock/clock", "memory", "places", "streams")],
    "transport/device/test_block_budget": ["transport/device/block_budget.cpp"],
    "transport/ring/test_control_line": RING,
    "transport/ring/test_ring": RING,
    "transport/ring/test_failures": RING,
    "transport/ring/test_schedule": RING,
    "transport/ring/test_cost": RING,
}
# In these several threads meet.
OF_THREADS = {
    "core/test_arbiter",
    "device/test_streams",
    "transport/ring/test_ring",
    "transport/ring/test_failures",
}
VARIANTS = {
    "sanitized": [
        "-O1",
        "-g1",
        "-fno-omit-frame-pointer",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
        "-fno-sanitize=vptr",  # it needs type information that torch's libraries do not all export
    ],
    "threads": [
        "-O1",
        "-g1",
        "-fno-omit-frame-pointer",
        "-fsanitize=thread",
    ],
}


def builds() -> list[tuple[str, str]]:
    """All (program, variant) that there are."""
    return [
        (name, variant)
        for variant in VARIANTS
        for name in PROGRAMS
        if variant != "threads" or name in OF_THREADS
    ]


def program(name: str, variant: str) -> Path:
    """Where a built program lies."""
    return BUILD / variant / name


@functools.cache
def recipe(variant: str) -> Recipe:
    """The build of all programs of a variant."""
    flags = ["-std=c++20", "-fopenmp-simd", "-Wall", "-Wextra", "-Winvalid-pch", "-Werror"]
    flags += [*VARIANTS[variant], f"-I{ROOT}/csrc", f"-I{ROOT}/tests/cpp"]
    flags += [f"-isystem{path}" for path in include_paths()]
    # ninja does not watch system headers; another torch is another command, which compiles everything anew.
    flags.append(f"-DTORCH_OF_THE_BUILD={torch.__version__}")
    libraries = [flag for path in library_paths() for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
    libraries += ["-Wl,--no-as-needed", "-ltorch_cpu", "-ltorch", "-lc10", "-pthread"]
    folder = BUILD / variant
    prelude = folder / "prelude.h"
    lines = [
        "ninja_required_version = 1.3",
        f"cxx = {os.environ.get('CXX', 'c++')}",
        f"flags = {' '.join(flags)}",
        f"libraries = {' '.join(libraries)}",
        "rule precompile",
        "  command = $cxx -MMD -MF $out.d $flags -x c++-header $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = compile $out",
        f"build {prelude}.gch: precompile {ROOT}/tests/cpp/prelude.h",
        "rule compile",
        f"  command = $cxx -MMD -MF $out.d $flags -include {prelude} -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = compile $out",
        "rule link",
        f"  command = $cxx {' '.join(VARIANTS[variant])} $in -o $out $libraries",
        "  description = link $out",
    ]
    objects: dict[Path, Path] = {}
    for name in (name for name, built in builds() if built == variant):
        sources = [ROOT / "tests/cpp" / f"{name}.cpp", ROOT / "tests/cpp/check.cpp"]
        sources += [ROOT / "csrc" / source for source in PROGRAMS[name]]
        for source in sources:
            if source not in objects:
                objects[source] = folder / source.relative_to(ROOT).with_suffix(".o")
                lines.append(f"build {objects[source]}: compile {source} | {prelude}.gch")
        linked = " ".join(str(objects[source]) for source in sources)
        lines.append(f"build {program(name, variant)}: link {linked}")
    return Recipe(f"the C++ tests ({variant})", folder, "\n".join(lines) + "\n")
