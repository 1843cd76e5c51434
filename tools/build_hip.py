"""Builds the kernels for GPUs of AMD: `python tools/build_hip.py` makes pyruntime/libpyruntime_hip.so.

hipcc compiles csrc/cuda/portable in the HIP dialect (hip/dialect_hip.h) into one library. PYTORCH_ROCM_ARCH
chooses the GPUs as it does for torch's extensions, MAX_JOBS how many files are compiled at once. ninja
compiles what changed; each object lies in a folder of its own in build/hip, with its assembly and the
compiler's report of registers and memory.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

if __package__:
    from tools import build_ninja
    from tools.build_cuda import sources
    from tools.build_ninja import ROOT, find_compiler, recipe, run_ninja
else:  # run as a script
    import build_ninja
    from build_cuda import sources
    from build_ninja import ROOT, find_compiler, recipe, run_ninja

BUILD = ROOT / "build" / "hip"
LIBRARY = ROOT / "pyruntime" / "libpyruntime_hip.so"

ARCHITECTURES = ("gfx90a", "gfx942", "gfx950")
"""MI200, which Frontier has; MI300; MI350. Without PYTORCH_ROCM_ARCH, those of them that hipcc knows."""
DEBIAN_PACKAGES = ("hipcc", "libamdhip64-dev", "rocm-device-libs")


class Resources(NamedTuple):
    """What a kernel needs of a compute unit, as the compiler reports it."""

    kernel: str
    architecture: str
    sgprs: int
    vgprs: int
    agprs: int
    scratch_bytes: int  # a lane
    spilled_vgprs: int
    shared_bytes: int  # static; what a launch asks for comes on top


def find_hipcc() -> Path | None:
    """hipcc of ROCM_HOME, ROCM_PATH or HIP_PATH, of PATH, or where ROCm installs itself."""
    return find_compiler("hipcc", ("ROCM_HOME", "ROCM_PATH", "HIP_PATH"), Path("/opt/rocm"))


def architectures() -> list[str]:
    """The GPUs to compile for: of those that PYTORCH_ROCM_ARCH names, which may be torch's own list, those
    with the matrix instructions of these kernels. Raises RuntimeError where there is none among them."""
    named = os.environ.get("PYTORCH_ROCM_ARCH")
    if not named:
        hipcc = find_hipcc()
        return known_architectures(hipcc) if hipcc is not None else list(ARCHITECTURES)
    # What follows a colon says which features a process has on or off, and kernels without it serve both.
    names = [name.partition(":")[0] for name in re.split(r"[;,\s]+", named) if name]
    fit = [name for name in dict.fromkeys(names) if re.fullmatch(r"gfx9(0a|4\w|5\w)", name)]
    if not fit:
        raise RuntimeError(
            f"PYTORCH_ROCM_ARCH names {named!r}, and these kernels need gfx90a, gfx942 or newer of that "
            "family; add one, or leave it out."
        )
    return fit


@functools.cache
def known_architectures(hipcc: Path) -> list[str]:
    """Those of ARCHITECTURES that this compiler, with its device libraries, compiles for."""

    def compiles(name: str) -> bool:
        command = [hipcc, "-x", "hip", f"--offload-arch={name}", "--cuda-device-only", "-E", os.devnull]
        environment = os.environ | {"HIP_PLATFORM": "amd"}
        return subprocess.run(command, capture_output=True, env=environment).returncode == 0

    # Where it compiles for none, it says why when it is asked to.
    return [name for name in ARCHITECTURES if compiles(name)] or [ARCHITECTURES[0]]


def ninja_file(hipcc: Path, library: Path) -> str:
    """The whole build as ninja reads it."""
    flags = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
    flags += ["-Rpass-analysis=kernel-resource-usage", "-save-temps=obj", f"-I{ROOT}/csrc", f"-I{ROOT}/hip"]
    flags += [f"--offload-arch={name}" for name in architectures()]
    named = ((str(BUILD / name / f"{name}.o"), source, macros) for name, source, macros in sources())
    compiler = f"HIP_PLATFORM=amd {hipcc}"  # it takes nvcc where it finds it
    lines, objects = recipe(compiler, flags, named, link_flags="-Wl,-z,defs", language="-x hip ")
    lines.append(f"build {library}: link {' '.join(objects)}")
    return "\n".join(lines) + "\n"


def build(library: Path = LIBRARY, *, strict: bool = True) -> Path:
    """Builds what changed and returns the library.

    strict: warnings are errors, as fits one's own compiler.
    Raises RuntimeError with a sentence where it cannot.
    """
    hipcc = find_hipcc()
    if hipcc is None:
        raise RuntimeError(
            "the kernels for GPUs of AMD are compiled by hipcc, which is not on PATH, in ROCM_HOME, "
            f"in ROCM_PATH or in /opt/rocm; on Debian: apt-get install {' '.join(DEBIAN_PACKAGES)}."
        )
    library.parent.mkdir(parents=True, exist_ok=True)
    ran = run_ninja(BUILD, ninja_file(hipcc, library))
    if ran.returncode != 0:
        said = ran.stdout + ran.stderr
        raise RuntimeError(
            what_is_missing(hipcc, said) or f"the kernels do not build for GPUs of AMD:\n{said}"
        )
    if strict and (warned := warnings_of_the_build()):
        raise RuntimeError("hipcc warns of the kernels for GPUs of AMD:\n" + "\n".join(warned))
    return library


def warnings_of_the_build() -> list[str]:
    """What the compiler warned of in the last build. Not by -Werror, so that one build serves who is strict
    and who is not."""
    logs = (BUILD / name / f"{name}.o.log" for name, *_ in sources())
    return [line for log in logs for line in log.read_text().splitlines() if ": warning: " in line]


def what_is_missing(hipcc: Path, said: str) -> str:
    """A sentence for what a compiler lacks that said this; empty where it is something else."""
    names = ";".join(architectures())
    if found := re.search(r"invalid target ID '(\w+)'|unsupported HIP gpu architecture: (\w+)", said):
        return (
            f"PYTORCH_ROCM_ARCH asks for {names}, and {hipcc} does not know {found[1] or found[2]}; set it "
            "to the architecture of your GPUs alone, or use a newer ROCm."
        )
    if found := re.search(r"cannot find ROCm device library( for \w+)?", said):
        return (
            f"the kernels are to be compiled for {names}, and {hipcc} finds no ROCm device library"
            f"{found[1] or ''}; install rocm-device-libs of the same ROCm, or name its folder in "
            "HIP_DEVICE_LIB_PATH."
        )
    return ""


def resource_reports() -> Iterator[Resources]:
    """What the compiler said of each kernel of the last build."""
    fields = {
        "SGPRs": "sgprs",
        "VGPRs": "vgprs",
        "AGPRs": "agprs",
        "ScratchSize [bytes/lane]": "scratch_bytes",
        "VGPRs Spill": "spilled_vgprs",
        "LDS Size [bytes/block]": "shared_bytes",
    }
    for name, *_ in sources():
        found: dict[str, int] = {}
        kernel = ""
        for line in (BUILD / name / f"{name}.o.log").read_text().splitlines():
            match = re.search(r"remark: .*?: +([\w /\[\]]+): (\S+) \[-Rpass-analysis=kernel-resource", line)
            if match is None:
                continue
            what, value = match.groups()
            if what == "Function Name":
                kernel, found = value, {}
            elif what in fields:
                found[fields[what]] = int(value)
            if len(found) == len(fields):
                yield Resources(f"{name}:{kernel}", architectures()[0], **found)
                found = {}


def assembly(name: str, architecture: str | None = None) -> str:
    """The instructions of one object of the last build, for the first architecture unless one is named."""
    wanted = architecture or architectures()[0]
    found = sorted((BUILD / name).glob(f"*-hip-amdgcn-amd-amdhsa-{wanted}.s"))
    if not found:
        raise FileNotFoundError(f"{name} has not been compiled for {wanted}; run tools/build_hip.py.")
    return found[0].read_text()


if __name__ == "__main__":
    build_ninja.main(__doc__, build)
