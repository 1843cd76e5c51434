"""Builds the kernels for GPUs of AMD: `python tools/build_hip.py` makes pyruntime/libpyruntime_hip.so.

hipcc compiles csrc/cuda/portable in the HIP dialect (hip/compat.h) into one library. PYTORCH_ROCM_ARCH
chooses the GPUs as it does for torch's extensions, MAX_JOBS how many files are compiled at once. ninja
compiles what changed; each object lies in a folder of its own in build/hip, with its assembly and the
compiler's report of registers and memory.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

if __package__:
    from tools.build_cuda import ROOT, find_compiler, find_ninja, sources
else:  # run as a script
    from build_cuda import ROOT, find_compiler, find_ninja, sources

BUILD = ROOT / "build" / "hip"
LIBRARY = ROOT / "pyruntime" / "libpyruntime_hip.so"

DEFAULT_ARCHITECTURES = "gfx90a"
"""MI200, which Frontier has."""
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
    """hipcc of ROCM_PATH or HIP_PATH, of PATH, or where ROCm installs itself."""
    return find_compiler("hipcc", ("ROCM_PATH", "HIP_PATH"), Path("/opt/rocm"))


def architectures() -> list[str]:
    """The GPUs to compile for. Raises RuntimeError for what has no matrix instructions of these kernels."""
    names = re.split(r"[;,\s]+", os.environ.get("PYTORCH_ROCM_ARCH") or DEFAULT_ARCHITECTURES)
    for name in names:
        if not re.fullmatch(r"gfx9(0a|4\w|5\w)", name):
            raise RuntimeError(
                f"PYTORCH_ROCM_ARCH names {name!r}, and these kernels need gfx90a, gfx942 or newer of "
                "that family; leave it out."
            )
    return names


def ninja_file(hipcc: Path, library: Path) -> str:
    """The whole build as ninja reads it."""
    flags = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]
    flags += ["-Rpass-analysis=kernel-resource-usage", "-save-temps=obj", f"-I{ROOT}/csrc", f"-I{ROOT}/hip"]
    flags += [f"--offload-arch={name}" for name in architectures()]
    lines = [
        "ninja_required_version = 1.3",
        f"hipcc = HIP_PLATFORM=amd {hipcc}",  # it takes nvcc where it finds it
        f"flags = {' '.join(flags)}",
        "rule compile",
        "  command = $hipcc -MD -MF $out.d $flags $macros -x hip -c $in -o $out > $out.log 2>&1 "
        "|| (cat $out.log; exit 1)",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = hipcc $out",
        "rule link",
        "  command = $hipcc -shared -Wl,-z,defs $in -o $out",
        "  description = link $out",
    ]
    objects = []
    for name, source, macros in sources():
        objects.append(str(BUILD / name / f"{name}.o"))
        lines += [f"build {objects[-1]}: compile {source}", f"  macros = {' '.join(macros)}"]
    lines.append(f"build {library}: link {' '.join(objects)}")
    return "\n".join(lines) + "\n"


def build(library: Path = LIBRARY) -> Path:
    """Builds what changed and returns the library. Raises RuntimeError with a sentence where it cannot."""
    hipcc = find_hipcc()
    if hipcc is None:
        raise RuntimeError(
            "the kernels for GPUs of AMD are compiled by hipcc, which is not on PATH, in ROCM_PATH or in "
            f"/opt/rocm; on Debian: apt-get install {' '.join(DEBIAN_PACKAGES)}."
        )
    BUILD.mkdir(parents=True, exist_ok=True)
    (BUILD / "build.ninja").write_text(ninja_file(hipcc, library))
    jobs = os.environ.get("MAX_JOBS", str(len(os.sched_getaffinity(0))))
    ran = subprocess.run([find_ninja(), "-C", str(BUILD), "-j", jobs], capture_output=True, text=True)
    if ran.returncode != 0:
        raise RuntimeError(f"the kernels do not build for GPUs of AMD:\n{ran.stdout}{ran.stderr}")
    return library


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


def assembly(name: str) -> str:
    """The instructions of one object of the last build, for the first architecture."""
    found = sorted((BUILD / name).glob(f"*-hip-amdgcn-amd-amdhsa-{architectures()[0]}.s"))
    return found[0].read_text()


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    try:
        print(build())
    except RuntimeError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
