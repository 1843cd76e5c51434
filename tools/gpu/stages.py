"""The stages of tools/gpu_check.py, most informative first: builds, tests, benchmarks, sanitizers."""

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
SANITIZER_FOUND = 99  # compute-sanitizer's exit code when it found an error
MOST_FAILURES = 6  # of a stage of tests, as each may wait for its deadline
NEED_KERNELS = ("core", "portable kernels")
NEED_HOPPER = (*NEED_KERNELS, "hopper kernels")
TESTS = "tests/cuda/gpu/test_gpu.py"
HOPPER_TESTS = "tests/cuda/gpu/test_sm90_gpu.py"
LAYERS_TESTS = "tests/cuda/gpu/test_gpu_layers.py"
ON_DEVICES = "(training or muon or adamw or wires or compression) and (learn or bits_of_the_cpu)"
VARIANTS_TESTS = "tests/cuda/compiled/test_variants.py"
ALONE = "not fused and not chunked and not graph"


def own_architecture(capability: Sequence[int]) -> str:
    """Returns TORCH_CUDA_ARCH_LIST for one GPU; Hopper's own instructions need 9.0a."""
    number = f"{capability[0]}.{capability[1]}"
    return "9.0a" if number == "9.0" else number


def find_tool(name: str) -> str | None:
    """Returns the path of a tool on PATH or in CUDA's folders."""
    places = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", ""), "/usr/local/cuda"]
    folders = [str(Path(place, sub)) for place in places if place for sub in ("bin", name)]
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(folders))


@dataclass(frozen=True)
class Plan:
    """All stages for a GPU of this compute capability. `logs` is the folder of their output and facts; `mark`
    identifies the sources of the builds."""

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
            self.devices(),
            self.part("smoke-hopper"),
            self.tests("hopper", HOPPER_TESTS, "test", 120, NEED_HOPPER),
            # The same tests again: now Hopper's kernels run every GEMM that they can.
            *(self.tests(f"{name}, hopper", TESTS, name, LIMITS[name], NEED_HOPPER) for name in SECOND),
            *(self.part(part) for part in measured),
            self.tests("variants", VARIANTS_TESTS, "on_a_gpu", 120, absent=without_cupy()),
            *self.sanitizers(),
        ]

    def builds(self) -> list[Stage]:
        architecture = own_architecture(self.capability)
        environment = self.environment(MAX_JOBS=_cores(), TORCH_CUDA_ARCH_LIST=architecture)

        def stage(name: str, what: str, limit_s: float, **more: Any) -> Stage:
            # Tests have priority over this build.
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
        """Returns the stage of a part of bench/gpu."""
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

    def devices(self) -> Stage:
        """Returns the stage of tests of simulated devices, with the GPU in their place."""
        made = self.tests("trainer", "tests/device", ON_DEVICES, 150, marked=())
        return replace(made, environment={**made.environment, "PYRUNTIME_TEST_DEVICE": "cuda"})

    def tests(
        self,
        name: str,
        path: str,
        chosen: str,
        limit_s: float,
        needs: tuple[str, ...] = NEED_KERNELS,
        absent: str = "",
        marked: tuple[str, ...] = ("-m", "gpu"),
    ) -> Stage:
        facts = self.logs / f"tests {name}.facts"
        command = (sys.executable, "-m", "pytest", "-p", "tools.gpu.pytest_facts", "--facts", str(facts))
        command += (*marked, "-v", "--tb=short", "-p", "no:cacheprovider", f"--maxfail={MOST_FAILURES}")
        # References are computed on the CPU; ranks that are processes use one thread each.
        threads = "1" if path in (TESTS, HOPPER_TESTS) else str(min(8, int(_cores())))
        # Other installed plugins would take seconds to import.
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
                # Memory that torch caches would hide accesses past an end.
                alone = self.environment(PYTORCH_NO_CUDA_MEMORY_CACHING="1")
                stages.append(Stage(f"{check} {kernels}", "sanitize", command, 60, needs, alone, absent))
        return stages

    def environment(self, **more: str) -> dict[str, str]:
        """Returns variables for a stage; PYTHONPATH finds pyruntime, which is built in place, not
        installed."""
        path = os.pathsep.join([str(self.root), *filter(None, [os.environ.get("PYTHONPATH")])])
        return {"PYTHONUNBUFFERED": "1", "PYTHONPATH": path, **more}


LIMITS = {"chunked": 90.0, "fused": 90.0, "graph": 60.0}
"""Seconds for the tests on several ranks, the most important first."""
SECOND = ("fused", "graph")


def left_to_do(stages: Sequence[Stage], report: Report, only: set[str], built: set[str]) -> list[Stage]:
    """Returns the requested stages whose outcome is not known, after the builds that they need.

    A stage of tests that was cut off runs only its remaining tests. `built`: names of finished builds.
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
    """Returns why tile variants cannot run; empty if they can."""
    found = importlib.util.find_spec("cupy")
    return "" if found else "cupy, which runs tile variants, is not installed: pip install pyruntime[tiles]"


def without_hopper(capability: Sequence[int]) -> str:
    """Returns why the kernels for Hopper cannot be built for this GPU; empty if they can."""
    if tuple(capability) != (9, 0):
        return "this GPU is not a Hopper"
    if build_sm90.local_cutlass() is not None:
        return ""
    pin = f"nvidia-cutlass=={build_sm90.pinned_version()}"
    return f"no headers of CUTLASS: `pip download --no-deps {pin}` where a network is, then --cutlass"


def _cores() -> str:
    return str(len(os.sched_getaffinity(0)))
