"""Under a torch that says it is for ROCm, setup.py builds kernels that load as far as the missing driver."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pyruntime import ops
from pyruntime.comm.core import _C
from pyruntime.cuda import architectures_in
from tests.cuda.compiled import rocm_torch
from tests.transports import take
from tools import build_hip
from tools.build_cuda import ROOT

pytestmark = [
    pytest.mark.hipcc,
    pytest.mark.skipif(
        build_hip.find_hipcc() is None,
        reason="hipcc was not found; `tools/get_tool.sh hipcc` installs it",
    ),
]


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    """A package of this core and of the kernels that setup.py has built."""
    folder = tmp_path_factory.mktemp("rocm")
    built, _ = rocm_torch.run_setup(folder)
    package = folder / "site" / "pyruntime"
    ignored = shutil.ignore_patterns("__pycache__", "libpyruntime_*.so")
    shutil.copytree(ROOT / "pyruntime", package, ignore=ignored)
    shutil.copy(built / build_hip.LIBRARY.name, package)
    return package


def python(package: Path, *arguments: str) -> str:
    folder = package.parent
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=rocm_torch.environment(folder),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_core_takes_the_library_that_setup_py_has_built(package):
    program = "from pyruntime.comm.core import _C; print(_C.__file__, _C.why_no_device_library('cuda'), '.')"
    extension, rest = python(package, "-c", program).split(maxsplit=1)
    assert Path(extension).parent == package and rest == ".\n"


def test_without_it_the_core_says_how_to_get_it(package, tmp_path):
    program = "from pyruntime.comm.core import _C; print(_C.why_no_device_library('cuda'))"
    bare = tmp_path / "pyruntime"
    shutil.copytree(package, bare, ignore=shutil.ignore_patterns("libpyruntime_*.so"))
    said = python(bare, "-c", program)
    assert said.startswith("the HIP kernels are not built (") and said.endswith("); run `make hip`\n")


def test_the_doctor_says_what_it_found(package):
    said = python(package, "-m", "pyruntime", "doctor", "--ranks", "0")
    assert f"for ROCm {rocm_torch.HIP}" in said
    assert re.search(
        r"HIP kernels +libpyruntime_hip\.so for gfx90a, \d+ MB; not used here: torch sees no GPU\.", said
    )
    assert architectures_in(package / "libpyruntime_hip.so") == ["gfx90a"]


def first_op(group, library):
    _C.use_device_library("cpu", library)
    take(group, "device")
    with pytest.raises(RuntimeError) as raised:
        ops.all_gather(torch.ones(2, 3), group)
    return str(raised.value)


def test_a_group_gets_as_far_as_the_missing_driver(package, ranks):
    """In processes of their own: a HIP runtime is loaded for good."""
    for outcome in ranks.launch(first_op, 2, str(package / "libpyruntime_hip.so")):
        assert outcome.error is None, outcome
        assert re.search(r"the device said 'hipError(No|Invalid)Device'", outcome.value), outcome.value


MEMORY = """
import ctypes, sys
hip = ctypes.CDLL(sys.argv[1])
hip.hipGetErrorName.restype = ctypes.c_char_p
for name in sys.argv[2:]:
    hip[name]
memory = ctypes.c_void_p()
error = hip.hipExtMallocWithFlags(ctypes.byref(memory), ctypes.c_size_t(4096), 3)
print(hip.hipGetErrorName(error).decode())
"""


def test_the_hip_runtime_of_the_kernels_has_what_the_core_asks_for(package):
    """And answers that there is no device."""
    header = (ROOT / "csrc/transport/device/hip_runtime.h").read_text()
    names = re.findall(r"\(\*(hip\w+)\)\(", header)
    assert len(names) == 7
    said = python(package, "-c", MEMORY, str(package / "libpyruntime_hip.so"), *names)
    assert said in ("hipErrorNoDevice\n", "hipErrorInvalidDevice\n")  # the latter: 5.2.3
