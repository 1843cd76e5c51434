"""A folder that tools/gpu_check.py takes for a machine with a GPU: the project's own tools, and stand-ins for
everything else. torch is a module that names a GPU, nvcc a script, and tests and benchmark only print.

Every program writes its name into `ran`. The one that the variable GATE names then waits, for ten minutes,
and writes its pid into `at_gate`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tools.build_cuda import ROOT

GPU = "NVIDIA H100 80GB HBM3"

PASS = """
import json, os, sys, time
from pathlib import Path

MACHINE = Path(__file__).resolve().parents[{up}]

def passed(name):
    with (MACHINE / "ran").open("a") as file:
        file.write(name + "\\n")
    if os.environ.get("GATE") == name:
        (MACHINE / "at_gate").write_text(str(os.getpid()))
        time.sleep(600)
"""

TORCH = f"""
from types import SimpleNamespace
__version__ = "2.11.0+cu130"
version = SimpleNamespace(cuda="13.0")
cuda = SimpleNamespace(
    get_device_properties=lambda index: SimpleNamespace(name={GPU!r}, major=9, minor=0),
    device_count=lambda: 1,
)
"""

SETUP = """
passed("core")
assert sys.argv[1:] == ["build_ext", "--inplace", "--lenient"]
assert not Path(os.environ["CUDA_HOME"]).exists()
(MACHINE / "pyruntime" / "_C.so").touch()
"""

TESTS = """
import pytest

@pytest.mark.gpu
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("kind", {kinds!r})
def test(kind, number):
    whole = (MACHINE / "pyruntime" / "libpyruntime_cuda.so").read_text().count("sm90_") > 1
    passed(f"{{kind}} {{number}}{{' whole' if whole else ''}}")
    assert not (kind == "fused" and number == 1), "rank 0 waits for rank 1"
    if (kind, number) == ("graph", 2):
        pytest.skip("one GPU")
"""

BENCH = """
part = sys.argv[sys.argv.index("--child") + 1]
lines = Path(sys.argv[sys.argv.index("--lines") + 1] if "--lines" in sys.argv else os.devnull)
for number in range(2):
    passed(f"{part} {number}")
    row = {"part": part, "kind": "note", "text": f"{part}: figure {number}"}
    with lines.open("a") as file:
        file.write(json.dumps({"kind": "machine", "system": "pretended"} if part == "load" else row) + "\\n")
sys.exit(part == "support")
"""

SANITIZER = """#!{python} -S
passed(f"{{sys.argv[2]}} {{sys.argv[-1]}}")
"""

# Does not compile one file. A library is the list of its objects.
NVCC = """#!{python} -S
arguments = sys.argv[1:]
if arguments == ["--version"]:
    sys.exit(print("Cuda compilation tools, release 13.0, V13.0.88"))
target = Path(arguments[arguments.index("-o") + 1])
if "-shared" in arguments:
    passed(f"link {{target.parent.name}}")
    target.write_text("\\n".join(argument for argument in arguments if argument.endswith(".o")))
else:
    source = Path(arguments[arguments.index("-c") + 1])
    if source.name == "cross_entropy.cu":
        sys.exit("cross_entropy.cu: error")
    target.write_text("")
    Path(f"{{target}}.d").write_text(f"{{target}}: {{source}}")
"""


class Machine:
    """Makes `folder` such a machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for top in ("tools", "csrc/cuda", "hip"):
            shutil.copytree(ROOT / top, folder / top, ignore=shutil.ignore_patterns("__pycache__"))
        for name in (
            "pyproject.toml",
            "csrc/core/chunk_plan.cpp",
            "csrc/core/rings.cpp",
            "bench/gpu/problem.py",
            "bench/common/records.py",
            "bench/common/tables.py",
        ):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        (folder / "pyruntime").mkdir()
        self._program("packages/torch/__init__.py", TORCH)
        self._program("setup.py", PASS.format(up=0) + SETUP)
        self._program("bench/gpu/run.py", PASS.format(up=2) + BENCH)
        kinds = {
            "gpu/test_gpu": ("chunked", "fused", "graph", "alone"),
            "gpu/test_sm90_gpu": ("sm90",),
            "gpu/test_gpu_layers": ("swiglu",),
            "compiled/test_variants": ("on_a_gpu",),
        }
        for name, of in kinds.items():
            self._program(f"tests/cuda/{name}.py", PASS.format(up=3) + TESTS.format(kinds=of))
        kinds = ("learn",)  # of the tests of simulated devices
        self._program("tests/device/test_training.py", PASS.format(up=2) + TESTS.format(kinds=kinds))
        for name, text in (("nvcc", NVCC), ("compute-sanitizer", SANITIZER)):
            first, _, rest = text.format(python=sys.executable).partition("\n")
            self._program(f"cuda/bin/{name}", first + PASS.format(up=2) + rest)
            (folder / "cuda" / "bin" / name).chmod(0o755)
        self._program("packages/cupy.py", "")
        headers = folder / "build/cutlass/4.2.0.0/cutlass_library/source/include"
        headers.mkdir(parents=True)

    def _program(self, name: str, text: str) -> None:
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_text(text)

    def start(self, *arguments: str, gate: str = "") -> subprocess.Popen[str]:
        """Starts the command, which waits at `gate`."""
        (self.folder / "at_gate").unlink(missing_ok=True)
        environment = os.environ | {
            "PYTHONPATH": str(self.folder / "packages"),
            "CUDA_HOME": str(self.folder / "cuda"),
            "GATE": gate,
        }
        command = [sys.executable, str(self.folder / "tools" / "gpu_check.py"), *arguments]
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def run(self, *arguments: str) -> tuple[int, str]:
        process = self.start(*arguments)
        said, _ = process.communicate(timeout=120)
        return process.returncode, said

    def kill_at(self, gate: str, last: str) -> int:
        """Kills the command when it has reached `gate` and the report contains `last`; returns the pid of the
        program that waited there. With a `last`, no kernel build is interrupted: if nothing needs it any
        more, the report would show it unfinished for good."""
        process = self.start(gate=gate)
        waits = self.folder / "at_gate"
        until = time.monotonic() + 120
        while not (waits.exists() and waits.read_text() and self._says(last)):
            assert process.poll() is None and time.monotonic() < until, process.communicate()[0]
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        return int(waits.read_text())

    def _says(self, last: str) -> bool:
        report = self.report()
        building = any(
            stage["verdict"] == "under way" and stage["name"].endswith("kernels")
            for stage in report["stages"]
        )
        return last in json.dumps(report) and not (last and building)

    @property
    def ran(self) -> list[str]:
        return (self.folder / "ran").read_text().splitlines()

    def report(self) -> dict[str, Any]:
        (path,) = (self.folder / "bench" / "results").glob("*.json")
        assert path.name.startswith("nvidia_h100_80gb_hbm3-")
        return json.loads(path.read_text())

    def text(self) -> str:
        (path,) = (self.folder / "bench" / "results").glob("*.txt")
        return path.read_text()
