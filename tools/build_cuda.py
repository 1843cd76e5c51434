"""Builds the CUDA kernels: `python tools/build_cuda.py` makes pyruntime/libpyruntime_cuda.so.

nvcc compiles csrc/cuda, which does not use torch, into one library for several GPUs. It links only the CUDA
runtime (statically). TORCH_CUDA_ARCH_LIST chooses the GPUs as for torch's extensions; MAX_JOBS limits how
many files compile at once. ninja recompiles only changed files. Objects and the assembler's reports
(registers, spills) are in build/cuda. docs/how-to/gpus.md says when this is run.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

if __package__:
    from tools import build_left_out, build_ninja, build_sm90
    from tools.build_ninja import ROOT, Source, find_compiler, recipe, run_ninja
else:  # run as a script
    import build_left_out
    import build_ninja
    import build_sm90
    from build_ninja import ROOT, Source, find_compiler, recipe, run_ninja

BUILD = ROOT / "build" / "cuda"
LIBRARY = ROOT / "pyruntime" / "libpyruntime_cuda.so"
PORTABLE = ROOT / "csrc" / "cuda" / "portable"
LAUNCHERS = (ROOT / "csrc" / "cuda" / "launchers.h", ROOT / "csrc" / "cuda" / "sm90" / "launchers.h")

DEFAULT_ARCHITECTURES = "8.0+PTX;9.0a"
"""sm_80, sm_90a, and PTX that the driver compiles for any other GPU from 8.0 on."""
OLDEST_ARCHITECTURE = (8, 0)
NAMED_ARCHITECTURES = {"Ampere": "8.0;8.6", "Ada": "8.9", "Hopper": "9.0", "Blackwell": "10.0;12.0"}

OF_CORE = ("chunk_plan", "rings")
"""Sources of csrc/core that the kernels' launchers share with the core."""
JOBS = ("GatherJob", "ScatterJob")
TILES = ("SmallTiles", "LargeTiles")
TYPES = ("Bf16", "Fp16")


def sources() -> list[Source]:
    """Returns name, source and macros of every object. Each configuration of a fused kernel is one object."""
    found: list[Source] = [(name, ROOT / "csrc" / "core" / f"{name}.cpp", ()) for name in OF_CORE]
    for path in sorted(PORTABLE.rglob("*.cu")):
        if path.stem != "instances":
            found.append((path.stem, path, ()))
    for name, (job, tiles, element) in instances().items():
        macros = (
            f"-DPYRUNTIME_INSTANCE_JOB={job}",
            f"-DPYRUNTIME_INSTANCE_TILES={tiles}",
            f"-DPYRUNTIME_INSTANCE_TYPE={element}",
        )
        found.append((name, PORTABLE / "gemm" / "instances.cu", macros))
    return found


def instances() -> dict[str, tuple[str, str, str]]:
    """Returns job, tiles and element of each fused GEMM's object, by the object's name."""
    every = itertools.product(JOBS, TILES, TYPES)
    return {f"{job}_{tiles}_{element}": (job, tiles, element) for job, tiles, element in every}


def find_nvcc() -> Path | None:
    """Returns nvcc from CUDA_HOME or CUDA_PATH (as torch searches), from PATH, or from /usr/local/cuda."""
    return find_compiler("nvcc", ("CUDA_HOME", "CUDA_PATH"), Path("/usr/local/cuda"))


def architecture_flags(wanted: str | None = None) -> list[str]:
    """Returns -gencode flags for a list in the form of TORCH_CUDA_ARCH_LIST ("8.0;9.0a+PTX", "Hopper").

    Raises ValueError for an unknown architecture, and for GPUs older than 8.0.
    """
    wanted = wanted or DEFAULT_ARCHITECTURES
    for name, numbers in NAMED_ARCHITECTURES.items():
        wanted = wanted.replace(f"{name}+PTX", f"{numbers}+PTX").replace(name, numbers)
    flags = []
    for item in filter(None, re.split(r"[;,\s]+", wanted)):
        match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", item)
        if match is None:
            raise ValueError(
                f"TORCH_CUDA_ARCH_LIST names {item!r}; write numbers such as 8.0 or 9.0a+PTX, with ; between."
            )
        major, minor, suffix, ptx = match.groups()
        if (int(major), int(minor)) < OLDEST_ARCHITECTURE:
            raise ValueError(
                f"TORCH_CUDA_ARCH_LIST names {item}, and these kernels need 8.0 or newer; leave it out."
            )
        number = f"{major}{minor}{suffix}"
        codes = f"[sm_{number},compute_{number}]" if ptx else f"sm_{number}"
        flags.append(f"-gencode=arch=compute_{number},code={codes}")
    return flags


def ninja_file(
    nvcc: Path,
    architectures: Iterable[str],
    library: Path,
    strict: bool,
    *,
    hopper: bool = True,
    folder: Path = BUILD,
    left_out: Iterable[Path] = (),
) -> str:
    """Returns the ninja file of the whole build in `folder`. Objects in `left_out` are replaced by the stub
    of tools/build_left_out.py."""
    flags = ["-std=c++17", "-O3", "-lineinfo", "-Xptxas", "-v", f"-I{ROOT}/csrc"]
    flags += ["-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall,-Wextra"]
    if strict:
        flags += ["-Xcompiler", "-Werror", "-Werror", "all-warnings"]
    named = ((str(folder / f"{name}.o"), source, macros) for name, source, macros in sources())
    link = "-cudart static -Xlinker --exclude-libs,ALL"
    lines, objects = recipe(str(nvcc), flags, named, link_flags=link)
    lines.insert(1, f"architectures = {' '.join(architectures)}")
    hopper_lines, hopper_objects = build_sm90.ninja_lines(folder, architectures, nvcc, hopper)
    lines += hopper_lines
    objects += hopper_objects
    if left_out := {str(path) for path in left_out}:
        objects = [name for name in objects if name not in left_out]
        objects.append(str(folder / f"{build_left_out.NAME}.o"))
        lines.append(f"build {objects[-1]}: compile {folder / build_left_out.NAME}.cu")
    lines.append(f"build {library}: link {' '.join(objects)}")
    return "\n".join(lines) + "\n"


def build(
    library: Path = LIBRARY,
    *,
    strict: bool = True,
    keep_going: bool = False,
    hopper: bool = True,
    folder: Path = BUILD,
) -> Path:
    """Builds changed files and returns the library's path; objects and ninja file are in `folder`.

    strict: treats warnings as errors, for the project's own compiler.
    keep_going: leaves out kernels that do not compile and prints their names; calling one is refused.
    hopper: includes the kernels of csrc/cuda/sm90 if the architectures ask for them.
    Raises RuntimeError with a sentence if the build fails.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise RuntimeError(
            "the CUDA kernels need nvcc, which was not found on PATH, in CUDA_HOME or in /usr/local/cuda."
        )
    try:
        architectures = architecture_flags(os.environ.get("TORCH_CUDA_ARCH_LIST"))
    except ValueError as error:
        raise RuntimeError(str(error)) from error
    library.parent.mkdir(parents=True, exist_ok=True)

    def run(left_out: Iterable[Path] = ()) -> subprocess.CompletedProcess[str]:
        text = ninja_file(
            nvcc, architectures, library, strict, hopper=hopper, folder=folder, left_out=left_out
        )
        going = ("-k", "0") if keep_going and not left_out else ()
        return run_ninja(folder, text, *going, str(library))

    ran, failed = run(), []
    if ran.returncode != 0 and keep_going and (failed := build_left_out.failed_objects(ran.stdout)):
        print(ran.stdout)
        linked = re.findall(
            rf"^build {library}: link (.*)$", (folder / "build.ninja").read_text(), re.MULTILINE
        )
        kept = [path for path in map(Path, linked[0].split()) if path not in failed]
        build_left_out.write(folder, kept, failed, headers=LAUNCHERS)
        ran = run(failed)
    if ran.returncode != 0:
        raise RuntimeError(f"the CUDA kernels do not build:\n{ran.stdout}{ran.stderr}")
    if failed:
        names = ", ".join(sorted(path.stem for path in failed))
        print(f"{library.name} is built without {names}, because these do not compile")
    return library


def resource_reports() -> Iterator[tuple[str, str, int, int, int]]:
    """Yields ptxas's report of each kernel of the last build: (kernel, architecture, registers, bytes of
    stack, bytes of spills)."""
    entry = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
    frame = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
    registers = re.compile(r"Used (\d+) registers")
    hopper = [name for name, *_ in build_sm90.kernels() if (BUILD / f"{name}.o.log").exists()]
    for name in [*(name for name, *_ in sources()), *hopper]:
        kernel = architecture = ""
        stack = spills = 0
        for line in (BUILD / f"{name}.o.log").read_text().splitlines():
            if match := entry.search(line):
                kernel, architecture = match.groups()
            elif match := frame.search(line):
                stack, spills = int(match[1]), int(match[2]) + int(match[3])
            elif match := registers.search(line):
                yield f"{name}:{kernel}", architecture, int(match[1]), stack, spills


if __name__ == "__main__":
    build_ninja.main(__doc__, build)
