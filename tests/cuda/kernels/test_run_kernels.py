"""tests/hip/run_kernels.cpp, the program that runs the kernels on GPUs of AMD, runs all its cases in the host
dialect, and finds what is broken; and on a GPU where HIP finds one."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.cuda.build import RUN_KERNELS, stand_before_library
from tools import build_hip

FOLDER = build_hip.ROOT / "tests" / "hip"
TIMEOUT_S = 600
NO_DEVICE = 2
"""The exit code of the program where HIP finds no device."""


def run(program: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The cases whose names have all these words."""
    return subprocess.run(
        [program, *words], capture_output=True, text=True, timeout=TIMEOUT_S, env=os.environ | environment
    )


def test_all_cases_run_in_the_host_dialect(host_programs: None) -> None:
    ran = run(RUN_KERNELS)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    *cases, last = ran.stdout.splitlines()[1:]
    assert all(re.match(r"ok +\d+\.\d\d s  \S", line) for line in cases)
    assert last == f"{len(cases)} cases, 0 failed" and len(cases) > 60


@pytest.fixture(scope="module")
def breaks(host_programs: None, tmp_path_factory: pytest.TempPathFactory) -> str:
    return stand_before_library("broken_kernels", tmp_path_factory.mktemp("broken"))


@pytest.mark.parametrize(
    ("function", "words", "said"),
    [
        ("reduce", ["reduce bf16"], r"byte \d+ of \d+ was written, which is outside"),
        ("all_gather_matmul", ["gemm NT bf16 small 128"], r"c\[0, 255\] is .*, expected"),
        ("all_gather_matmul", ["gather NN", "threads"], r"rank \d: round 0\[0, 69\] is .*, expected"),
        ("all_gather_matmul", ["scatter, ragged", "threads"], r"is not the sum in rank order"),
        ("put", ["gather NT", "processes"], r"rank \d: round 0\["),
        ("pass_on", ["gather around", "4 ranks", "threads"], r"rank \d: round \d\["),
        ("put", ["put, await", "2 ranks", "threads"], r"round 0: element 0 of rank \d is another"),
        ("failure", ["absent", "gather", "threads"], r"nothing failed, though rank 2 did not come"),
        ("rope", ["RoPE bf16"], r"the operand was written"),
        ("rms_norm", ["RMSNorm bf16, heads"], r"dx\[69, 0\] is"),
        ("swiglu", ["SwiGLU bf16"], r"was ended by signal 6"),
        ("adamw", ["AdamW fp16"], r"a parameter is not its master, rounded"),
        ("cross_entropy", ["cross-entropy bf16"], r"dlogits\[0, 0\] is"),
    ],
)
def test_what_is_broken_is_a_line_that_says_so(
    breaks: str, function: str, words: list[str], said: str
) -> None:
    ran = run(RUN_KERNELS, *words, BREAK=function, LD_PRELOAD=breaks)
    cases = ran.stdout.splitlines()[1:-1]
    assert ran.returncode == 1 and cases, ran.stdout + ran.stderr
    assert all(line.startswith("FAILED") and re.search(said, line) for line in cases), ran.stdout


def test_words_that_no_case_has_are_no_success(host_programs: None) -> None:
    assert run(RUN_KERNELS, "no such case").returncode == 1


@pytest.fixture(scope="module")
def on_hip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program as it runs on a GPU."""
    hipcc = build_hip.find_hipcc()
    if hipcc is None:
        pytest.skip("hipcc was not found; `tools/get_tool.sh hipcc` installs it")
    library = build_hip.build(build_hip.BUILD / "libpyruntime_hip.so")
    made = tmp_path_factory.mktemp("hip") / "run_kernels"
    command = [hipcc, "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{build_hip.ROOT}/csrc"]
    command += [f"--offload-arch={build_hip.architectures()[0]}"]  # it has no code for a GPU itself
    command += [*sorted(FOLDER.glob("*.cpp")), f"-L{library.parent}", "-lpyruntime_hip"]
    command += [f"-Wl,-rpath,{library.parent}", "-o", made]
    ran = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env=os.environ | {"HIP_PLATFORM": "amd"}
    )
    assert ran.returncode == 0, ran.stderr
    return made


@pytest.mark.hipcc
def test_it_needs_the_library_and_hip_alone(on_hip: Path) -> None:
    shown = subprocess.run(["readelf", "-d", on_hip], capture_output=True, text=True, check=True).stdout
    needed = set(re.findall(r"NEEDED.*\[(\w+)", shown))
    assert {"libpyruntime_hip", "libamdhip64"} <= needed
    assert needed <= {"libpyruntime_hip", "libamdhip64", "libstdc", "libm", "libgcc_s", "libc", "libpthread"}


@pytest.mark.hipcc
def test_on_a_gpu_all_cases_run(on_hip: Path) -> None:
    ran = run(on_hip)
    if ran.returncode == NO_DEVICE:
        pytest.skip(ran.stdout.strip())
    print(ran.stdout)
    assert ran.returncode == 0, ran.stdout + ran.stderr
