"""Builds the kernels for AMD GPUs: `python tools/build_hip.py` makes pyruntime/libpyruntime_hip.so.

hipcc compiles csrc/cuda/portable in the HIP dialect (hip/dialect_hip.h) into one library. PYTORCH_ROCM_ARCH
chooses the GPUs as for torch's extensions; MAX_JOBS limits how many files compile at once. ninja recompiles
only changed files. Each object has its own folder in build/hip, with its assembly and the compiler's report
of registers and memory.
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
"""MI200 (in Frontier), MI300 and MI350. Without PYTORCH_ROCM_ARCH, those of them that hipcc knows."""
DEBIAN_PACKAGES = ("hipcc", "libamdhip64-dev", "rocm-device-libs")


class Resources(NamedTuple):
    """The resources that a kernel needs on a compute unit, from the compiler's report."""

    kernel: str
    architecture: str
    sgprs: int
    vgprs: int
    agprs: int
    scratch_bytes: int  # per lane
    spilled_vgprs: int
    shared_bytes: int  # static; a launch may add more


def find_hipcc() -> Path | None:
    """Returns hipcc from ROCM_HOME, ROCM_PATH or HIP_PATH, from PATH, or from /opt/rocm."""
    return find_compiler("hipcc", ("ROCM_HOME", "ROCM_PATH", "HIP_PATH"), Path("/opt/rocm"))


def architectures() -> list[str]:
    """Returns the GPUs to compile for: those in PYTORCH_ROCM_ARCH, which may be torch's own list, that have
    the matrix instructions of these kernels. Raises RuntimeError if none has."""
    named = os.environ.get("PYTORCH_ROCM_ARCH")
    if not named:
        hipcc = find_hipcc()
        return known_architectures(hipcc) if hipcc is not None else list(ARCHITECTURES)
    # After a colon stand features that a process switches on or off; kernels built without them serve both.
    names = [name.partition(":")[0] for name in re.split(r"[;,\s]+", named) if name]
    fit = [name for name in dict.fromkeys(names) if re.fullmatch(r"gfx9(0a|4\w|5\w)", name)]
    if not fit:
        raise RuntimeError(
            f"PYTORCH_ROCM_ARCH names {named!r}, and these kernels need gfx90a, gfx942 or newer of that "
            "family; add one, or unset PYTORCH_ROCM_ARCH."
        )
    return fit


@functools.cache
def known_architectures(hipcc: Path) -> list[str]:
    """Returns those of ARCHITECTURES that this compiler, with its device libraries, compiles for."""

    def compiles(name: str) -> bool:
        command = [hipcc, "-x", "hip", f"--offload-arch={name}", "--cuda-device-only", "-E", os.devnull]
        environment = os.environ | {"HIP_PLATFORM": "amd"}
        return subprocess.run(command, capture_output=True, env=environment).returncode == 0

    # If it compiles for none, the build with the first one shows why.
    return [name for name in ARCHITECTURES if compiles(name)] or [ARCHITECTURES[0]]


def ninja_file(hipcc: Path, library: Path) -> str:
    """Returns the ninja file of the whole build."""
    flags = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
    flags += ["-Rpass-analysis=kernel-resource-usage", "-save-temps=obj", f"-I{ROOT}/csrc", f"-I{ROOT}/hip"]
    flags += [f"--offload-arch={name}" for name in architectures()]
    named = ((str(BUILD / name / f"{name}.o"), source, macros) for name, source, macros in sources())
    compiler = f"HIP_PLATFORM=amd {hipcc}"  # otherwise it uses nvcc if it finds it
    lines, objects = recipe(compiler, flags, named, link_flags="-Wl,-z,defs", language="-x hip ")
    lines.append(f"build {library}: link {' '.join(objects)}")
    return "\n".join(lines) + "\n"


def build(library: Path = LIBRARY, *, strict: bool = True) -> Path:
    """Builds changed files and returns the library's path.

    strict: treats warnings as errors, for the project's own compiler.
    Raises RuntimeError with a sentence if the build fails.
    """
    hipcc = find_hipcc()
    if hipcc is None:
        raise RuntimeError(
            "the kernels for AMD GPUs need hipcc, which was not found on PATH, in ROCM_HOME, "
            f"in ROCM_PATH or in /opt/rocm; on Debian: apt-get install {' '.join(DEBIAN_PACKAGES)}."
        )
    library.parent.mkdir(parents=True, exist_ok=True)
    ran = run_ninja(BUILD, ninja_file(hipcc, library))
    if ran.returncode != 0:
        said = ran.stdout + ran.stderr
        raise RuntimeError(what_is_missing(hipcc, said) or f"the kernels do not build for AMD GPUs:\n{said}")
    if strict and (warned := warnings_of_the_build()):
        raise RuntimeError("hipcc warns about the kernels for AMD GPUs:\n" + "\n".join(warned))
    return library


def warnings_of_the_build() -> list[str]:
    """Returns the last build's warnings. Without -Werror one build serves strict and lenient callers."""
    logs = (BUILD / name / f"{name}.o.log" for name, *_ in sources())
    return [line for log in logs for line in log.read_text().splitlines() if ": warning: " in line]


def what_is_missing(hipcc: Path, said: str) -> str:
    """Returns a sentence on what the compiler with the output `said` lacks; empty if it failed otherwise."""
    names = ";".join(architectures())
    if found := re.search(r"invalid target ID '(\w+)'|unsupported HIP gpu architecture: (\w+)", said):
        return (
            f"PYTORCH_ROCM_ARCH asks for {names}, and {hipcc} does not know {found[1] or found[2]}; set it "
            "to only the architecture of your GPUs, or use a newer ROCm."
        )
    if found := re.search(r"cannot find ROCm device library( for \w+)?", said):
        return (
            f"the kernels need a ROCm device library for {names}, and {hipcc} finds no ROCm device library"
            f"{found[1] or ''}; install rocm-device-libs of the same ROCm, or name its folder in "
            "HIP_DEVICE_LIB_PATH."
        )
    return ""


def resource_reports() -> Iterator[Resources]:
    """Yields the compiler's report of each kernel of the last build."""
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
    """Returns the assembly of one object of the last build, for `architecture` or else the first one."""
    wanted = architecture or architectures()[0]
    found = sorted((BUILD / name).glob(f"*-hip-amdgcn-amd-amdhsa-{wanted}.s"))
    if not found:
        raise FileNotFoundError(f"{name} has not been compiled for {wanted}; run tools/build_hip.py.")
    return found[0].read_text()


if __name__ == "__main__":
    build_ninja.main(__doc__, build)
