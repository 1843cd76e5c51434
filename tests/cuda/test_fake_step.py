"""A Llama's training step has an implementation for CUDA of everything that it does, and never leaves the
device. Without a GPU: on fake tensors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tools.build_cuda import ROOT

pytestmark = pytest.mark.second_tier

SOURCE = ROOT / "tests" / "cuda" / "pretended_cuda.cpp"
EXPECTED = {"rms_norm", "add_rms_norm", "rms_norm_backward", "swiglu", "swiglu_backward", "rotate_qkv_"}
EXPECTED |= {
    "apply_rope_qkv_backward",
    "cross_entropy_stats",
    "cross_entropy_loss",
    "cross_entropy_backward_",
}
EXPECTED |= {"adamw_", "sum_of_squares"}


@pytest.fixture(scope="module")
def pretended(tmp_path_factory) -> Path:
    if torch.cuda.is_available() or torch.version.cuda:
        pytest.skip("a torch for CUDA has hooks of its own; there the step itself runs")
    made = tmp_path_factory.mktemp("pretended") / "libpretended_cuda.so"
    folder = Path(torch.__file__).parent
    command = [os.environ.get("CXX", "c++"), "-std=c++20", "-O0", "-shared", "-fPIC", str(SOURCE)]
    command += [
        f"-isystem{folder / 'include'}",
        f"-L{folder / 'lib'}",
        "-ltorch_cpu",
        "-lc10",
        "-o",
        str(made),
    ]
    subprocess.run(command, check=True)
    return made


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_training_step_stays_on_cuda(pretended, dtype):
    libraries = str(Path(torch.__file__).parent / "lib")
    environment = {**os.environ, "LD_PRELOAD": str(pretended), "LD_LIBRARY_PATH": libraries}
    done = subprocess.run(
        [sys.executable, "-m", "tests.cuda.fake_step", dtype],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    with_kernels, without = done.stdout.splitlines()
    assert set(with_kernels.split()) >= EXPECTED and set(without.split()) >= EXPECTED
