"""Everything that needs a GPU, in one command: `make gpu-check`, or `python3 tools/gpu_check.py --help`.

Builds the C++ core and the CUDA kernels in place, runs the tests marked `gpu` and bench/gpu.py, and lets
compute-sanitizer watch small runs of the fused kernels. It downloads and installs nothing: it uses the Python
that runs it, whose torch must have CUDA, and nvcc.

Every stage is a process with a time limit. One that fails is recorded with the end of its output, and the
next run all the same; the exit code says at the end whether all passed. What cannot run here (no
compute-sanitizer, another GPU than Hopper) is recorded as absent, which is no failure.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "build" / "gpu_check"
RESULTS = ROOT / "bench" / "results"
BUDGET_S = 560.0
LAST_LINES = 25
LONGEST_LOG = 1_000_000  # bytes of a stage's output that are kept
PYTHON_ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    # pyruntime is not installed: it is built in place.
    "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
}
SANITIZER_FOUND = 99  # its exit code where it found something
WANTED_PACKAGES = (
    "torch",
    "pytest",
    "ninja",
    "setuptools",
    "numpy",
    "hypothesis",
    "transformers",
    "safetensors",
)


@dataclass(frozen=True)
class Stage:
    """A command with a limit. Those of one `group` run at the same time."""

    name: str
    group: str
    command: tuple[str, ...]
    limit_s: float
    environment: Mapping[str, str] = field(default_factory=dict)
    absent: str = ""  # why it cannot run here; then it is no failure
    fallback: tuple[str, ...] = ()  # runs where the command failed before its limit
    says: str = ""  # what its last lines contain where it did its work: tests that are all skipped did not


@dataclass
class Outcome:
    """`verdict`: passed, failed, timed out, absent or not run (no time was left)."""

    name: str
    verdict: str
    seconds: float = 0.0
    text: str = ""
    last_lines: list[str] = field(default_factory=list)

    @property
    def is_fine(self) -> bool:
        return self.verdict in ("passed", "absent")


def last_lines(log: Path, count: int = LAST_LINES) -> list[str]:
    """Of a file that may be long and not all text."""
    if not log.exists():
        return []
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 200 * 400))
        return file.read().decode(errors="replace").splitlines()[-count:]


class Running:
    """A stage that has been started; its output goes to a file."""

    def __init__(self, stage: Stage, logs: Path, limit_s: float) -> None:
        self.stage, self.limit_s = stage, limit_s
        self.log = logs / f"{stage.name}.txt"
        self._file = self.log.open("wb")
        self.start = time.monotonic()
        self.process: subprocess.Popen[bytes] | None = None
        self.error = ""
        self._launch(stage.command)

    def _launch(self, command: Sequence[str]) -> None:
        self._file.write(f"$ {' '.join(command)}\n".encode())
        self._file.flush()
        try:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | PYTHON_ENVIRONMENT | dict(self.stage.environment),
                stdin=subprocess.DEVNULL,
                stdout=self._file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            self.process, self.error = None, str(error)

    def _code(self) -> int | None:
        """Of the process; None at the limit, when it has been killed with all that it started."""
        if self.process is None:
            return 127
        left = self.limit_s - (time.monotonic() - self.start)
        try:
            return self.process.wait(timeout=max(0.1, left))
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=10)

    def outcome(self) -> Outcome:
        """Waits for its end, or for its limit."""
        code = self._code()
        note = ""
        if code not in (0, None) and self.stage.fallback:
            note = f"the command ended with exit code {code}, its fallback with "
            self._launch(self.stage.fallback)
            code = self._code()
        self._file.close()
        seconds = time.monotonic() - self.start
        if code is None:
            verdict, text = "timed out", f"{note}no end within {self.limit_s:.0f} s"
        else:
            verdict = "passed" if code == 0 else "failed"
            text = f"{note}exit code {code}{': ' + self.error if self.error else ''}"
        lines = last_lines(self.log)
        if verdict == "passed" and self.stage.says not in "\n".join(lines):
            verdict, text = "failed", f"{text}, but nowhere {self.stage.says.strip()!r}"
        return Outcome(self.stage.name, verdict, seconds, text, lines)


def run_stages(
    stages: Sequence[Stage],
    logs: Path,
    budget_s: float = BUDGET_S,
    record: Callable[[list[Outcome]], object] = lambda outcomes: None,
) -> list[Outcome]:
    """All stages in order, those of one group together; none outlives `budget_s` seconds in all. `record` is
    called with what there is after each group."""
    logs.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + budget_s
    outcomes: list[Outcome] = []
    groups = list(dict.fromkeys(stage.group for stage in stages))
    for group in groups:
        running: list[Running] = []
        for stage in (stage for stage in stages if stage.group == group):
            left = end - time.monotonic()
            if stage.absent:
                outcomes.append(Outcome(stage.name, "absent", text=stage.absent))
            elif left < 1:
                outcomes.append(Outcome(stage.name, "not run", text="no time was left"))
            else:
                running.append(Running(stage, logs, min(stage.limit_s, left)))
            if outcomes and outcomes[-1].name == stage.name:
                show(outcomes[-1])
        for one in running:
            outcomes.append(one.outcome())
            show(outcomes[-1])
        record(outcomes)
    return outcomes


def show(outcome: Outcome) -> None:
    print(f"{outcome.name:20} {outcome.verdict:10} {outcome.seconds:6.1f} s  {outcome.text}", flush=True)
    if not outcome.is_fine:
        print("\n".join(f"    | {line}" for line in outcome.last_lines), flush=True)


def device() -> dict[str, Any]:
    """The GPU as torch sees it, asked in another process: a context here would outlast every stage."""
    program = (
        "import json, torch; p = torch.cuda.get_device_properties(0); "
        "print(json.dumps({'name': p.name, 'capability': [p.major, p.minor], 'torch': torch.__version__, "
        "'cuda': torch.version.cuda, 'count': torch.cuda.device_count()}))"
    )
    try:
        ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return {"error": "torch did not find the GPU within 60 s."}
    if ran.returncode != 0:
        return {"error": ran.stderr.strip().splitlines()[-1] if ran.stderr.strip() else "torch sees no GPU."}
    return json.loads(ran.stdout.splitlines()[-1])


def own_architecture(capability: Sequence[int]) -> str:
    """TORCH_CUDA_ARCH_LIST for one GPU; Hopper's own instructions have a name of their own."""
    number = f"{capability[0]}.{capability[1]}"
    return "9.0a" if number == "9.0" else number


def find_tool(name: str) -> str | None:
    """On PATH, or where CUDA installs it."""
    places = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", ""), "/usr/local/cuda"]
    folders = [str(Path(place, sub)) for place in places if place for sub in ("bin", name)]
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(folders))


def unpack_cutlass(wheel: Path, build: Path = ROOT / "build" / "cutlass") -> Path:
    """The headers of nvidia-cutlass's wheel, where tools/build_sm90.py looks for them."""
    version = wheel.name.split("-")[1]
    target = build / version
    if not target.exists():
        partial = build / f"{version}.partial"
        with zipfile.ZipFile(wheel) as file:
            inside = [name for name in file.namelist() if name.startswith("cutlass_library/source/include/")]
            file.extractall(partial, inside)
        partial.rename(target)
    return target


def stages_of(capability: Sequence[int], budget_s: float) -> list[Stage]:
    """Everything there is to do on a GPU of this compute capability, the most telling first."""
    python = sys.executable
    architecture = os.environ.get("TORCH_CUDA_ARCH_LIST") or own_architecture(capability)
    jobs = {"MAX_JOBS": str(len(os.sched_getaffinity(0))), "TORCH_CUDA_ARCH_LIST": architecture}
    # No nvcc for setup.py: the kernels are built beside it, and one may fail without the other.
    core = {**jobs, "CUDA_HOME": "/nonexistent"}
    in_place = (python, "setup.py", "build_ext", "--inplace")
    stages = [
        # A compiler that is not ours may warn of more: then not in place, where warnings are no errors.
        Stage("core", "build", in_place, 240, core, fallback=(python, __file__, "--build-core-leniently")),
        Stage("kernels", "build", (python, "tools/build_cuda.py"), 240, jobs),
    ]
    pytest = (python, "-m", "pytest", "-m", "gpu", "-v", "--tb=short", "-p", "no:cacheprovider")
    hopper = "" if tuple(capability) == (9, 0) else "this GPU is no Hopper"
    portable = "tests/cuda/test_gpu.py"
    # References are made on the CPU; where ranks are processes each keeps to one thread.
    threads = {"OMP_NUM_THREADS": str(min(8, len(os.sched_getaffinity(0))))}

    def tests(name: str, path: str, chosen: str, limit_s: float, **more: Any) -> Stage:
        command = (*pytest, path, "-k", chosen)
        return Stage(f"tests {name}", f"tests {name}", command, limit_s, says=" passed", **more)

    bench = (python, "bench/gpu.py", "--json", str(LOGS / "bench.json"))
    most = min(240.0, budget_s)
    # Ranks in processes may hang, at first: each kind by itself, and after what is measured.
    stages += [
        tests("alone", portable, "not fused and not chunked and not graph", 60, environment=threads),
        tests("hopper", "tests/cuda/test_sm90_gpu.py", "test", 120, environment=threads, absent=hopper),
        Stage("bench", "bench", (*bench, "--budget", str(most - 15)), most),
        tests("fused", portable, "fused", 100),
        tests("chunked", portable, "chunked", 75),
        tests("graph", portable, "graph", 100),
        tests("variants", "tests/cuda/test_variants.py", "on_a_gpu", 120, absent=without_cupy()),
    ]
    tool = find_tool("compute-sanitizer")
    for check in ("memcheck", "racecheck"):
        for kernels, missing in (("portable", ""), ("hopper", hopper)):
            command = (tool or "compute-sanitizer", "--tool", check, "--error-exitcode", str(SANITIZER_FOUND))
            stages.append(
                Stage(
                    f"{check} {kernels}",
                    f"{check} {kernels}",
                    (*command, python, "bench/gpu.py", "--child", f"smoke-{kernels}"),
                    60,
                    # Memory that torch hands out again would hide what lies beyond an end.
                    {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
                    absent=missing if tool else "compute-sanitizer was not found",
                )
            )
    return stages


def without_cupy() -> str:
    """Why tile variants cannot be run; empty where they can."""
    found = importlib.util.find_spec("cupy")
    return "" if found else "cupy, which runs tile variants, is not installed: pip install pyruntime[tiles]"


def kind_of(stage: Stage) -> str:
    """What --only calls it."""
    if stage.group == "build":
        return "build"
    if stage.name.startswith("tests"):
        return "test"
    return "bench" if stage.name == "bench" else "sanitizer"


def build_core_leniently() -> int:
    """The core as an installation builds it, then copied to where a build in place has it."""
    folder = ROOT / "build" / "gpu_check_lib"
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", str(folder)]
    command += ["--build-temp", str(ROOT / "build" / "gpu_check_temp")]
    code = subprocess.run(command, cwd=ROOT).returncode
    if code == 0:
        for made in (folder / "pyruntime").glob("_C*.so"):
            shutil.copy2(made, ROOT / "pyruntime" / made.name)
    return code


def report_name(gpu: str, day: datetime.date) -> str:
    """nvidia_h200-2026-11-21 for NVIDIA H200."""
    return f"{re.sub(r'[^a-z0-9]+', '_', gpu.lower()).strip('_')}-{day.isoformat()}"


def document_of(outcomes: Sequence[Outcome], found: Mapping[str, Any], bench: Path) -> dict[str, Any]:
    """bench/gpu.py's report with what the stages came to; the stages alone where it wrote none."""
    made: dict[str, Any] = {"facts": dict(found), "settings": {}, "results": []}
    if bench.exists():
        made = json.loads(bench.read_text(encoding="utf-8"))
    made["device"] = dict(found)
    # Of what passed only its sum is kept.
    made["stages"] = [
        asdict(outcome) | {"last_lines": outcome.last_lines[-1:] if outcome.is_fine else outcome.last_lines}
        for outcome in outcomes
    ]
    return made


def table_of(outcomes: Sequence[Outcome]) -> str:
    return "\n".join(
        f"{o.name:20} {o.verdict:10} {o.seconds:6.1f} s  {(o.last_lines or [o.text])[-1][:80]}"
        for o in outcomes
    )


def whole_log(outcomes: Sequence[Outcome], logs: Path) -> str:
    """The output of all stages in one text; of a long one its beginning and its end."""
    texts = []
    for outcome in outcomes:
        log = logs / f"{outcome.name}.txt"
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else outcome.text
        if len(text) > LONGEST_LOG:
            half = LONGEST_LOG // 2
            text = f"{text[:half]}\n[...]\n{text[-half:]}"
        texts.append(f"==== {outcome.name}: {outcome.verdict}, {outcome.seconds:.1f} s\n{text}")
    return "\n\n".join(texts)


@dataclass(frozen=True)
class Report:
    """The files that say what was found. They are written anew after each stage, so that whatever ends this
    program leaves what there is."""

    name: str
    device: Mapping[str, Any]
    with_bench: bool
    out: Path | None

    def text(self, outcomes: Sequence[Outcome]) -> str:
        measured = self.with_bench and any(outcome.name == "bench" for outcome in outcomes)
        lines = last_lines(LOGS / "bench.txt", 300) if measured else []
        return "\n".join([table_of(outcomes), "", *lines])

    def write(self, outcomes: Sequence[Outcome]) -> None:
        bench = LOGS / ("bench.json" if self.with_bench else "none")
        document = json.dumps(document_of(outcomes, self.device, bench), indent=2)
        folders = [RESULTS] if self.with_bench else []
        if self.out is not None:
            self.out.mkdir(parents=True, exist_ok=True)
            (self.out / "gpu-check.log").write_text(whole_log(outcomes, LOGS), encoding="utf-8")
            folders.append(self.out)
        for folder in folders:
            (folder / f"{self.name}.json").write_text(document + "\n", encoding="utf-8")
            (folder / f"{self.name}.txt").write_text(self.text(outcomes) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    kinds = ("build", "test", "bench", "sanitizer")
    parser.add_argument("--only", default=",".join(kinds), help=f"which of {', '.join(kinds)}; default all")
    parser.add_argument("--out", type=Path, help="a folder for copies of the report, the table and all logs")
    parser.add_argument("--cutlass", type=Path, metavar="WHEEL", help="nvidia-cutlass's wheel, for Hopper")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds in all; default %(default)s")
    parser.add_argument("--build-core-leniently", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.build_core_leniently:
        return build_core_leniently()
    only = set(filter(None, args.only.split(",")))
    if not only or only - set(kinds):
        parser.error(f"--only {args.only}: choose from {', '.join(kinds)}.")
    if args.cutlass is not None:
        if not args.cutlass.is_file():
            parser.error(f"--cutlass {args.cutlass} is no file; give the path of nvidia_cutlass-*.whl.")
        print(f"CUTLASS: {unpack_cutlass(args.cutlass)}")

    start = time.monotonic()
    missing = [name for name in WANTED_PACKAGES if importlib.util.find_spec(name) is None]
    print(f"{sys.executable}; without: {', '.join(missing) or 'nothing that is wanted'}", flush=True)
    found = {**device(), "python": sys.version.split()[0], "missing_packages": missing}
    print(json.dumps(found), flush=True)
    if "error" in found:
        print(f"gpu-check needs a GPU: {found['error']}", file=sys.stderr)
        return 2
    LOGS.mkdir(parents=True, exist_ok=True)
    bench = LOGS / "bench.json"
    if "bench" in only:
        bench.unlink(missing_ok=True)
    wanted = [stage for stage in stages_of(found["capability"], args.budget) if kind_of(stage) in only]
    name = report_name(found["name"], datetime.datetime.now(datetime.UTC).date())
    report = Report(name, found, "bench" in only, args.out)
    outcomes = run_stages(wanted, LOGS, args.budget - (time.monotonic() - start), report.write)
    print(f"\n{report.text(outcomes)}\n", flush=True)
    bad = [outcome.name for outcome in outcomes if not outcome.is_fine]
    print(f"not passed: {', '.join(bad)}" if bad else "all passed", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
