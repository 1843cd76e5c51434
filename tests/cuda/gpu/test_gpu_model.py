"""The model of a kernel from its machine code: how code is read, and what follows from it."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.cuda.compiled.test_build import library, needs_nvcc  # noqa: F401  (a fixture)

ROOT = Path(__file__).resolve().parents[3]


def instruction(opcode: int, *, width: int = 0, distance: int = 0, architecture: int = 80) -> bytes:
    """128 bits with the fields that are read; `distance` of a branch, in instructions from the next one."""
    word = opcode | width << 73
    quarters = distance * 4
    if architecture >= 90:
        word |= (quarters & 0xFF) << 16 | (quarters >> 8 & (1 << 48) - 1) << 34
    else:
        word |= (quarters & (1 << 48) - 1) << 34
    return struct.pack("<QQ", word & (1 << 64) - 1, word >> 64)


@pytest.mark.parametrize("architecture", [80, 90])
def test_a_loop_is_what_a_backward_branch_spans(architecture):
    from bench.gpu.machine_code import OPCODES, read_kernel

    other = instruction(0x812)
    load = instruction(OPCODES["LDG"], width=6)
    store = instruction(OPCODES["STG"], width=4)
    forward = instruction(OPCODES["BRA"], distance=200, architecture=architecture)
    back = instruction(OPCODES["BRA"], distance=-305, architecture=architecture)
    itself = instruction(OPCODES["BRA"], distance=-1, architecture=architecture)
    code = other * 7 + load * 2 + store + forward + other * 300 + back + itself
    kernel = read_kernel("k", architecture, 32, code)
    (loop,) = kernel.loops
    assert (loop.begin, loop.end, loop.instructions) == (7, 311, 305)
    assert (loop.loaded_bytes, loop.stored_bytes) == (32, 4)
    assert kernel.instructions == 313 and kernel.opcodes["BRA"] == 3


def test_names_are_those_of_cpp():
    from bench.gpu.machine_code import demangled

    sm90 = "_ZN9pyruntime4sm908multiplyINS0_4GemmINS0_5TilesILi128ELi1ELi5EEENS_8portable4Bf16ELi0EEEEEvT_"
    assert demangled(sm90) == "multiply<Gemm<Tiles<128, 1, 5>, Bf16, 0>>"
    hidden = "_ZN12_GLOBAL__N_110adamw_stepIN9pyruntime8portable4Fp16EfEEvNS_5BatchE"
    assert demangled(hidden) == "adamw_step<Fp16, float>"
    assert demangled("plain_c") == "plain_c"


def test_a_file_without_kernels_is_refused(tmp_path):
    from bench.gpu.machine_code import kernels_in

    (tmp_path / "empty.so").write_bytes(b"\x7fELF nothing")
    with pytest.raises(ValueError, match=r"empty\.so holds no kernel for a GPU; build it with"):
        kernels_in(tmp_path / "empty.so")


def kernel(name: str, instructions: int, **opcodes: int):
    """A kernel whose only loop has these instructions."""
    from bench.gpu.machine_code import Kernel, Loop

    loop = Loop(0, instructions - 1, Counter(opcodes), instructions, 0, 0)
    return Kernel(name, 90, 168, Counter(opcodes), instructions, (loop,))


def test_clocks_of_a_step_follow_from_tiles_and_instructions():
    from bench.gpu.model import fused_kernel
    from pyruntime.plan.gpus import GPUS

    large = fused_kernel(kernel("multiply<Gemm<Tiles<256, 2, 1, 4>, Bf16, 0>>", 45, HGMMA=4))
    assert (large.family, large.layout, large.rows, large.columns) == ("hopper", "NT", 128, 256)
    assert (large.down, large.across, large.stages) == (2, 1, 4)
    clocks = large.clocks(GPUS["H100"])
    assert clocks.tensor == 128 * 256 * 64 * 2 / 4096
    assert clocks.issue == 45 * 8 / 4
    # Two warpgroups read 64 rows of A and 256 of B each, and TMA writes 128 and 256.
    assert clocks.shared == (2 * (64 + 256) + 128 + 256) * 128 / 128
    assert clocks.l2 == pytest.approx((128 + 256 / 2) * 128 * 132 / 5120)

    small = fused_kernel(kernel("multiply<Gemm<Tiles<128, 1, 2, 6>, Bf16, 0>>", 45, HGMMA=4))
    assert small.clocks(GPUS["H100"]).l2 == pytest.approx((128 / 2 + 128) * 128 * 132 / 5120)

    portable = fused_kernel(
        kernel("tile_gemm<Tiles<128, 256, 2, 4, 3, 1>, Bf16, 1, GatherJob<Bf16>>", 500, HMMA=128, LDSM=32)
    )
    assert (portable.job, portable.layout, portable.warps, portable.steps_a_turn) == ("GatherJob", "NN", 8, 1)
    assert portable.clocks(GPUS["A100"]).issue == 500 * 8 / 4
    assert portable.clocks(GPUS["H100"]).tensor == pytest.approx(
        portable.clocks(GPUS["A100"]).tensor / 2 / 0.63
    )
    unrolled = fused_kernel(kernel("multiply<Gemm<Tiles<256, 2, 1, 4>, Bf16, 0>>", 90, HGMMA=8))
    assert unrolled.steps_a_turn == 2 and unrolled.clocks(GPUS["H100"]).issue == clocks.issue
    assert fused_kernel(kernel("adamw_step<Bf16, float>", 10)) is None


def test_an_estimate_counts_waves_and_never_beats_memory_or_the_peak():
    from bench.gpu.model import estimate, fused_kernel
    from bench.gpu.problem import Shape
    from pyruntime.plan.gpus import GPUS

    h100 = GPUS["H100"]
    large = fused_kernel(kernel("multiply<Gemm<Tiles<256, 2, 1, 4>, Bf16, 0>>", 45, HGMMA=4))
    assert estimate(large, h100, Shape("", "gather", 256 * 8, 256, 4096)).waves == 1
    # 66 clusters at once; eight chunks of 9 units are 72.
    assert estimate(large, h100, Shape("", "gather", 256 * 8 * 9, 256, 4096)).waves == 2
    # A chunk of 300 rows is two units of 256.
    assert estimate(large, h100, Shape("", "gather", 300 * 8, 256 * 5, 4096)).waves == 2
    big = estimate(large, h100, Shape("", "gather", 16384, 16384, 8192))
    assert 0.8 < big.of_peak < 1.0 and big.bound_by in ("tensor", "shared")
    thin = Shape("", "gather", 8, 1 << 20, 128)
    found = estimate(large, h100, thin)
    assert found.seconds >= 2 * (thin.n * thin.k + thin.m * thin.n) / 3.35e12


def test_a_measured_gemm_stands_beside_the_model():
    from bench.gpu.problem import gemms_table, llama_shapes

    (shape, *_) = llama_shapes([512])
    measured = {"kind": "gemm", **vars(shape), "tflops": 300.0, "ratio": {"hopper": 0.5}}
    measured["seconds"] = {"torch.matmul": 1e-5, "hopper": 2e-5}
    text = gemms_table([measured | {"model": {"hopper": (1.6e-5, "l2")}}])
    assert "hopper / model" in text and "1.25 l2" in text
    assert "model" not in gemms_table([measured])


def test_a_wrong_library_is_one_sentence():
    ran = subprocess.run(
        [sys.executable, "-m", "bench.gpu.model", "--library", __file__],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 2 and len(ran.stderr.splitlines()) == 1, ran.stderr
    assert "holds no kernel for a GPU" in ran.stderr


@needs_nvcc
def test_every_fused_kernel_of_the_library_has_a_main_loop_of_whole_steps(library: Path, tmp_path):  # noqa: F811
    from bench.gpu.model import Model
    from bench.gpu.problem import Shape
    from pyruntime.plan.gpus import GPUS

    model = Model(library, GPUS["H100"])
    assert len(model.fused) > 12
    for fused in model.fused:
        clocks = fused.clocks(model.gpu)
        assert 0 < clocks.issue < 2 * clocks.tensor, fused.code.name
        assert 100 < fused.code.registers <= 255
        if fused.family == "portable":
            gemms = fused.rows * fused.columns * 64 // (16 * 8 * 16 * fused.warps)
            assert fused.main_loop.opcodes["HMMA"] % gemms == 0, fused.code.name
    adamw = [kernel for kernel in model.kernels if kernel.name.startswith("adamw_step")]
    assert len(adamw) == 6
    for kernel in adamw:
        storing = [loop for loop in kernel.loops if loop.opcodes["STG"]]
        # Three states of fp32 and the parameter, four elements of each as one access.
        widest = max(loop.stored_bytes / loop.opcodes["STG"] for loop in storing)
        assert widest == (3 * 16 + 8) / 4, kernel.name
    shape = Shape("8B qkv", "gather", 4096, 768, 4096)
    found = model.of("portable", "gather", "large", shape)
    assert found is not None

    results = tmp_path / "bench.json"
    row = {"kind": "gemm", **vars(shape), "tiles": "large", "seconds": {"portable": 2 * found.seconds}}
    results.write_text(json.dumps({"results": [row]}))
    ran = subprocess.run(
        [sys.executable, "-m", "bench.gpu.model", "--library", str(library), "--results", str(results)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = [line for line in ran.stdout.splitlines() if line.endswith(" 2.00")]
    assert line.startswith("8B qkv gather") and "portable large" in line
    assert "adamw_step<Bf16, float>" in ran.stdout
