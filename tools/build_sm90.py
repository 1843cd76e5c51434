"""Builds the kernels for Hopper, csrc/cuda/sm90, with the headers of CUTLASS.

The headers come from the package nvidia-cutlass in the version that pyproject.toml pins: the installed one,
or else the wheel, downloaded once into build/ (without its dependencies, which only CUTLASS's Python needs).
Without headers, or with a too old CUDA toolkit, the library is built without these kernels and its launchers
refuse.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "csrc" / "cuda" / "sm90"
DOWNLOADED = ROOT / "build" / "cutlass"
HEADERS = Path("cutlass_library", "source", "include")

TILES = ("SmallTiles", "LargeTiles")
TYPES = ("Bf16", "Fp16")
LAYOUTS = ("NT", "NN")

ARCHITECTURE = "-gencode=arch=compute_90a,code=sm_90a"
FLAGS = (
    "-DNDEBUG",
    "-DCUTLASS_ENABLE_DIRECT_CUDA_DRIVER_CALL",
    "--expt-relaxed-constexpr",
    ARCHITECTURE,
)
"""Flags of the kernels. Without NDEBUG, CUTLASS's checks keep ptxas from running wgmma asynchronously. The
driver calls go to csrc/cuda/sm90/tensor_map.cu, which checks the driver's answers."""

OLDEST_TOOLKIT = (12, 5)
"""The first with cudaGetDriverEntryPointByVersion, which tensor_map.cu uses to find the driver's function."""


def is_wanted(architectures: Iterable[str]) -> bool:
    """Whether one of nvcc's -gencode flags is for Hopper (sm_90 and sm_90a are the same devices)."""
    return any(re.search(r"\bsm_90a?\b", flag) for flag in architectures)


def pinned_version() -> str:
    """Returns the version of nvidia-cutlass in pyproject.toml."""
    pin = re.search(r"nvidia-cutlass==([\d.]+)", (ROOT / "pyproject.toml").read_text())
    if pin is None:
        raise RuntimeError("pyproject.toml does not pin nvidia-cutlass; its extra 'cuda' must.")
    return pin[1]


def _version_of(headers: Path) -> str:
    text = (headers / "cutlass/version.h").read_text()
    number = dict(re.findall(r"#define CUTLASS_(MAJOR|MINOR|PATCH) (\d+)", text))
    return f"{number['MAJOR']}.{number['MINOR']}.{number['PATCH']}"


def _installed() -> Path | None:
    package = importlib.util.find_spec("cutlass_library")
    if package is None or not package.submodule_search_locations:
        return None
    headers = Path(package.submodule_search_locations[0]).parent / HEADERS
    # Another version may lack something that is used here, or warn.
    fits = (headers / "cutlass/version.h").exists() and pinned_version().startswith(_version_of(headers))
    return headers if fits else None


def _download() -> Path | None:
    wheels = DOWNLOADED / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--retries", "1"]
    command += ["--dest", str(wheels), f"nvidia-cutlass=={pinned_version()}"]
    ran = subprocess.run(command, capture_output=True, text=True)
    found = sorted(wheels.glob(f"nvidia_cutlass-{pinned_version()}-*.whl"))
    if ran.returncode != 0 or not found:
        return None
    with zipfile.ZipFile(found[0]) as wheel:
        inside = [name for name in wheel.namelist() if name.startswith(f"{HEADERS.as_posix()}/")]
        # Renamed at the end, so a folder with the final name is complete.
        partial = DOWNLOADED / f"{pinned_version()}.partial"
        wheel.extractall(partial, inside)
    partial.rename(DOWNLOADED / pinned_version())
    return DOWNLOADED / pinned_version() / HEADERS


def local_cutlass() -> Path | None:
    """Returns the folder of CUTLASS's headers if it is on this machine, else None."""
    downloaded = DOWNLOADED / pinned_version() / HEADERS
    return _installed() or (downloaded if downloaded.exists() else None)


@cache
def find_cutlass() -> Path | None:
    """Returns the folder of CUTLASS's headers; None if they are not installed and cannot be downloaded."""
    return local_cutlass() or _download()


def toolkit_version(nvcc: Path) -> tuple[int, int]:
    """Returns the CUDA toolkit's version, such as (12, 5). Raises RuntimeError if nvcc prints none."""
    said = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True).stdout
    release = re.search(r"release (\d+)\.(\d+)", said)
    if release is None:
        raise RuntimeError(f"{nvcc} --version names no release of CUDA; it said: {said.strip()!r}.")
    return int(release[1]), int(release[2])


def why_not(nvcc: Path) -> str:
    """Returns why the kernels for Hopper cannot be built with `nvcc`; empty if they can."""
    found = toolkit_version(nvcc)
    if found < OLDEST_TOOLKIT:
        return (
            f"{nvcc} is of CUDA {found[0]}.{found[1]}, and the kernels for Hopper need CUDA "
            f"{OLDEST_TOOLKIT[0]}.{OLDEST_TOOLKIT[1]} or newer"
        )
    if find_cutlass() is None:
        headers = f"CUTLASS's headers (nvidia-cutlass=={pinned_version()})"
        return f"{headers} are not installed and cannot be downloaded"
    return ""


def kernels() -> list[tuple[str, Path, tuple[str, ...]]]:
    """Returns name, source and macros of every object. Each configuration of the kernel is one object."""
    return [
        (
            f"sm90_{tiles}_{element}_{layout}",
            FOLDER / "instances.cu",
            (
                f"-DPYRUNTIME_INSTANCE_TILES={tiles}",
                f"-DPYRUNTIME_INSTANCE_TYPE={element}",
                f"-DPYRUNTIME_INSTANCE_LAYOUT=PYRUNTIME_{layout}",
            ),
        )
        for tiles in TILES
        for element in TYPES
        for layout in LAYOUTS
    ]


def ninja_lines(
    build: Path, architectures: Iterable[str], nvcc: Path, with_kernels: bool = True
) -> tuple[list[str], list[str]]:
    """Returns the ninja lines that build the objects of this folder in `build`, and their names; without
    kernels only the launchers.

    Uses the rule "compile" and its variables "architectures" and "macros".
    """
    launchers = build / "sm90_launchers.o"
    lines = [f"build {launchers}: compile {FOLDER / 'launchers.cu'}"]
    wanted = with_kernels and is_wanted(architectures)
    if not wanted:
        return lines, [str(launchers)]
    if why := why_not(nvcc):
        print(
            f"{why}: the library is built without the kernels for Hopper; portable ones replace them.",
            file=sys.stderr,
        )
        return lines, [str(launchers)]
    lines.append("  macros = -DPYRUNTIME_WITH_SM90")
    objects = [str(launchers), str(build / "sm90_tensor_map.o")]
    lines.append(f"build {objects[-1]}: compile {FOLDER / 'tensor_map.cu'}")
    for name, source, macros in kernels():
        objects.append(str(build / f"{name}.o"))
        lines += [
            f"build {objects[-1]}: compile {source}",
            f"  macros = {' '.join([f'-isystem {find_cutlass()}', *macros])}",
            f"  architectures = {' '.join(FLAGS)}",
        ]
    return lines, objects
