"""Checks the C++ core against a torch that is not installed: `python tools/check_torch.py torch-*.whl`.

It compiles every source of the core with the headers of the wheel (or of a folder with an unpacked wheel);
warnings are errors. It then searches the wheel's libraries for every symbol that the objects leave undefined.
So it can check a torch for CUDA without a GPU, and another version than the installed one. It runs nothing
and does not need the wheel's dependencies.

The Python headers are those of the running Python, whichever Python the wheel is for. Objects are in
build/check_torch and recompiled only after a change. MAX_JOBS limits how many compile at once.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterable
from pathlib import Path

if __package__:
    from tools.build_cuda import find_nvcc
    from tools.build_ninja import ROOT, find_ninja
else:  # run as a script
    from build_cuda import find_nvcc
    from build_ninja import ROOT, find_ninja

BUILD = ROOT / "build" / "check_torch"
NEEDED = ("torch/include/", "torch/lib/", "torch/version.py")
FLAGS = ["-std=c++20", "-O1", "-g0", "-fPIC", "-fopenmp-simd", "-Wall", "-Wextra", "-Werror", "-Winvalid-pch"]
MACROS = [
    "-DTORCH_API_INCLUDE_EXTENSION_H",
    "-DTORCH_EXTENSION_NAME=_C",
    '-DPYRUNTIME_TORCH_VERSION="checked"',
]
OURS = re.compile(r"\b(c10|c10d|at|torch|caffe2)::")
"""Matches a symbol of torch in nm's demangled output."""


def sources(root: Path) -> list[Path]:
    """Returns the core's sources, those that setup.py compiles."""
    found = sorted((root / "csrc").rglob("*.cpp"))
    return [path for path in found if path.relative_to(root / "csrc").parts[0] not in ("cuda", "sim")]


def unpacked(torch: Path, build: Path) -> Path:
    """Returns the folder with torch/include and torch/lib: `torch` itself, or its wheel unpacked in `build`.

    Raises SystemExit if `torch` is neither.
    """
    if torch.is_dir():
        if not (torch / "torch" / "include").is_dir():
            raise SystemExit(f"{torch} has no torch/include; name a wheel, or the folder it was unpacked in.")
        return torch
    if not zipfile.is_zipfile(torch):
        raise SystemExit(f"{torch} is not a wheel; `pip download --no-deps torch==2.11.0` gets one.")
    folder = build / torch.stem
    if not (folder / "unpacked").exists():
        with zipfile.ZipFile(torch) as wheel:
            wheel.extractall(folder, [name for name in wheel.namelist() if name.startswith(NEEDED)])
        (folder / "unpacked").touch()
    return folder


def version(folder: Path) -> str:
    """Returns the version of the torch unpacked there, as torch spells it: "2.11.0+cu130"."""
    found = re.search(r"^__version__ = '(.+)'", (folder / "torch" / "version.py").read_text(), re.MULTILINE)
    return found.group(1) if found else "of no version"


def ninja_file(folder: Path, build: Path, core: Iterable[Path], root: Path) -> str:
    """Returns the ninja file that compiles the sources."""
    include = folder / "torch" / "include"
    system = [include, include / "torch" / "csrc" / "api" / "include", Path(sysconfig.get_paths()["include"])]
    nvcc = find_nvcc()
    if nvcc is not None:
        system.append(nvcc.resolve().parent.parent / "include")
    flags = [*FLAGS, *MACROS, f"-I{root / 'csrc'}", *(f"-isystem{path}" for path in system)]
    compiler = os.environ.get("CXX", "c++")
    header = build / "precompiled.h"
    lines = ["ninja_required_version = 1.3", f"flags = {' '.join(flags)}"]
    for rule, extra in (("precompile", "-x c++-header"), ("compile", f"-include {header} -c")):
        lines += [
            f"rule {rule}",
            f"  command = {compiler} -MMD -MF $out.d $flags {extra} $in -o $out",
            "  depfile = $out.d",
            "  deps = gcc",
            "  description = compile $out",
        ]
    lines.append(f"build {header}.gch: precompile {root / 'csrc' / 'precompiled.h'}")
    for source in core:
        made = build / source.relative_to(root).with_suffix(".o")
        lines.append(f"build {made}: compile {source} | {header}.gch")
    return "\n".join(lines) + "\n"


def symbols(files: Iterable[Path], *which: str) -> set[tuple[str, str]]:
    """Returns nm's symbols of the files: each one's type, a letter, and its demangled name."""
    command = ["nm", "-C", *which, *map(str, files)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {(kind, name) for kind, name in re.findall(r"^[0-9a-f ]{16} (\S) (.+)$", said, re.MULTILINE)}


def missing(objects: Iterable[Path], libraries: Iterable[Path]) -> list[str]:
    """Returns torch's symbols that the objects need and neither they nor the libraries define."""
    objects = list(objects)
    # A weak symbol ("w") may be missing.
    wanted = {
        name for kind, name in symbols(objects, "--undefined-only") if kind == "U" and OURS.search(name)
    }
    wanted -= {name for _, name in symbols(objects, "--defined-only")}
    return sorted(wanted - {name for _, name in symbols(libraries, "-D", "--defined-only")})


def check(torch: Path, root: Path = ROOT, build: Path = BUILD) -> list[str]:
    """Compiles the core below `root` against that torch and returns the symbols that torch lacks. Raises
    SystemExit, after the compiler's message, if something does not compile."""
    folder = unpacked(torch, build)
    named = version(folder)
    made = build / f"objects-{named}-{sys.implementation.cache_tag}"
    made.mkdir(parents=True, exist_ok=True)
    core = sources(root)
    (made / "build.ninja").write_text(ninja_file(folder, made, core, root))
    jobs = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
    print(f"compiling {len(core)} sources against torch {named}", flush=True)
    if subprocess.run([find_ninja(), "-C", str(made), "-j", jobs, "-k", "0"]).returncode != 0:
        raise SystemExit(
            f"the core does not compile against torch {named}; see the compiler's message above."
        )
    objects = [made / path.relative_to(root).with_suffix(".o") for path in core]
    return missing(objects, sorted((folder / "torch" / "lib").glob("*.so")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "torch", nargs="+", type=Path, help="a wheel of torch, or a folder with an unpacked one"
    )
    lacking = False
    for torch in parser.parse_args().torch:
        found = check(torch)
        lacking |= bool(found)
        for name in found:
            print(f"not in the libraries of {torch.name}: {name}")
        if not found:
            print(f"{torch.name} has all symbols that the core needs", flush=True)
    if lacking:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
