"""What tools/gpu_check.py does, the most telling first: builds, tests, benchmarks, sanitizers."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.gpu import problem as gpu_problem
from tools import build_sm90
from tools.gpu.report import Report
from tools.gpu.runner import Stage

KINDS = ("build", "test", "bench", "sanitize")
SANITIZER_FOUND = 99  # its exit code where it found something
MOST_FAILURES = 6  # of a stage of tests; each may wait for its deadline
NEED_KERNELS = ("core", "portable kernels")
NEED_HOPPER = (*NEED_KERNELS, "hopper kernels")
TESTS = "tests/cuda/gpu/test_gpu.py"
HOPPER_TESTS = "tests/cuda/gpu/test_sm90_gpu.py"
LAYERS_TESTS = "tests/cuda/gpu/test_gpu_layers.py"
VARIANTS_TESTS = "tests/cuda/compiled/test_variants.py"
ALONE = "not fused and not chunked and not graph"


def own_architecture(capability: Sequence[int]) -> str:
    """TORCH_CUDA_ARCH_LIST for one GPU; Hopper's own instructions have a name of their own."""
    number = f"{capability[0]}.{capability[1]}"
    return "9.0a" if number == "9.0" else number


def find_tool(name: str) -> str | None:
    """On PATH, or where CUDA installs it."""
    places = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", ""), "/usr/local/cuda"]
    folders = [str(Path(place, sub)) for place in places if place for sub in ("bin", name)]
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(folders))


@dataclass(frozen=True)
class Plan:
    """All stages there are for a GPU of this compute capability. `logs` takes their output and their facts;
    `mark` stands for what is built."""

    root: Path
    logs: Path
    capability: tuple[int, int]
    mark: str

    def stages(self) -> list[Stage]:
        measured = [part for part in gpu_problem.PARTS if part not in gpu_problem.UNMEASURED]
        return [
            *self.builds(),
            self.part("load"),
            self.part("smoke-portable"),
            *(self.tests(name, TESTS, name, limit) for name, limit in LIMITS.items()),
            self.tests("alone", TESTS, ALONE, 60),
            self.tests("layers", LAYERS_TESTS, "test", 60),
            self.part("smoke-hopper"),
            self.tests("hopper", HOPPER_TESTS, "test", 120, NEED_HOPPER),
            # The same tests once more: a GEMM that Hopper's kernels can take is theirs now.
            *(self.tests(f"{name}, hopper", TESTS, name, LIMITS[name], NEED_HOPPER) for name in SECOND),
            *(self.part(part) for part in measured),
            self.tests("variants", VARIANTS_TESTS, "on_a_gpu", 120, absent=without_cupy()),
            *self.sanitizers(),
        ]

    def builds(self) -> list[Stage]:
        architecture = own_architecture(self.capability)
        environment = self.environment(MAX_JOBS=_cores(), TORCH_CUDA_ARCH_LIST=architecture)

        def stage(name: str, what: str, limit_s: float, **more: Any) -> Stage:
            # Tests come first where both want a processor.
            nice = ("nice", "-n", "10") if what == "hopper" else ()
            command = (*nice, sys.executable, "-m", "tools.gpu.build", what, self.mark)
            return Stage(name, "build", command, limit_s, environment=environment, **more)

        hopper = without_hopper(self.capability)
        return [
            stage("core", "core", 300),
            stage("portable kernels", "portable", 240),
            stage("hopper kernels", "hopper", 300, needs=NEED_KERNELS, absent=hopper),
        ]

    def part(self, part: str) -> Stage:
        """A part of bench/gpu."""
        lines = self.logs / f"{part}.facts"
        return Stage(
            part,
            "test" if part in gpu_problem.UNMEASURED else "bench",
            (sys.executable, "-m", "bench.gpu.run", "--child", part, "--lines", str(lines)),
            gpu_problem.PARTS[part],
            NEED_HOPPER if part.endswith("-hopper") else NEED_KERNELS,
            self.environment(),
            facts=lines,
            library="whole" if part.endswith("-hopper") or not part.startswith("smoke") else "portable",
        )

    def tests(
        self,
        name: str,
        path: str,
        chosen: str,
        limit_s: float,
        needs: tuple[str, ...] = NEED_KERNELS,
        absent: str = "",
    ) -> Stage:
        facts = self.logs / f"tests {name}.facts"
        command = (sys.executable, "-m", "pytest", "-p", "tools.gpu.pytest_facts", "--facts", str(facts))
        command += ("-m", "gpu", "-v", "--tb=short", "-p", "no:cacheprovider", f"--maxfail={MOST_FAILURES}")
        # References are made on the CPU; where ranks are processes each keeps to one thread.
        threads = "1" if path in (TESTS, HOPPER_TESTS) else str(min(8, int(_cores())))
        # Plugins that happen to be installed import what takes seconds.
        alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        return Stage(
            f"tests {name}",
            "test",
            (*command, path, "-k", chosen),
            limit_s,
            needs,
            self.environment(OMP_NUM_THREADS=threads, **alone),
            absent,
            facts,
            tests=True,
            library="whole" if needs == NEED_HOPPER or name == "variants" else "portable",
        )

    def sanitizers(self) -> list[Stage]:
        tool = find_tool("compute-sanitizer")
        absent = "" if tool else "compute-sanitizer was not found"
        stages = []
        for check in ("memcheck", "racecheck"):
            for kernels, needs in (("portable", NEED_KERNELS), ("hopper", NEED_HOPPER)):
                command = (tool or "compute-sanitizer", "--tool", check)
                command += ("--error-exitcode", str(SANITIZER_FOUND))
                command += (sys.executable, "-m", "bench.gpu.run", "--child", f"smoke-{kernels}")
                # Memory that torch hands out again would hide what lies beyond an end.
                alone = self.environment(PYTORCH_NO_CUDA_MEMORY_CACHING="1")
                stages.append(Stage(f"{check} {kernels}", "sanitize", command, 60, needs, alone, absent))
        return stages

    def environment(self, **more: str) -> dict[str, str]:
        """pyruntime is not installed: it is built in place."""
        path = os.pathsep.join([str(self.root), *filter(None, [os.environ.get("PYTHONPATH")])])
        return {"PYTHONUNBUFFERED": "1", "PYTHONPATH": path, **more}


LIMITS = {"chunked": 90.0, "fused": 90.0, "graph": 60.0}
"""Of the tests on several ranks, in the order of their worth."""
SECOND = ("fused", "graph")


def left_to_do(stages: Sequence[Stage], report: Report, only: set[str], built: set[str]) -> list[Stage]:
    """Of all stages those that are asked for and not known already, and the builds that they need.

    Of tests that were cut off those are left that have not run. `built`: names of the builds that are there.
    """
    wanted = [stage for stage in stages if stage.kind in only and not stage.builds and not report.has(stage)]
    needed = {name for stage in wanted if not stage.absent for name in stage.needs}
    if "build" in only:
        needed |= {stage.name for stage in stages if stage.builds}
    builds = [stage for stage in stages if stage.builds and stage.name in needed - built]
    return builds + [without_known(stage, report) for stage in wanted]


def without_known(stage: Stage, report: Report) -> Stage:
    known = report.tests_of(stage) if stage.tests else []
    return replace(stage, command=(*stage.command, *(f"--deselect={name}" for name in known)))


def without_cupy() -> str:
    """Why tile variants cannot be run; empty where they can."""
    found = importlib.util.find_spec("cupy")
    return "" if found else "cupy, which runs tile variants, is not installed: pip install pyruntime[tiles]"


def without_hopper(capability: Sequence[int]) -> str:
    """Why the kernels for Hopper cannot be built for this GPU; empty where they can."""
    if tuple(capability) != (9, 0):
        return "this GPU is no Hopper"
    if build_sm90.local_cutlass() is not None:
        return ""
    pin = f"nvidia-cutlass=={build_sm90.pinned_version()}"
    return f"no headers of CUTLASS: `pip download --no-deps {pin}` where there is a network, then --cutlass"


def _cores() -> str:
    return str(len(os.sched_getaffinity(0)))
