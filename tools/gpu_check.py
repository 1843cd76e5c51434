"""Runs everything that needs a GPU: `make gpu-check`, or `python3 tools/gpu_check.py --help`.

It builds the C++ core and the CUDA kernels in place, runs the tests marked `gpu`, measures with bench/gpu,
and runs small cases of the fused kernels under compute-sanitizer; the most informative stages come first. It
downloads and installs nothing: it uses the Python that runs it, whose torch must have CUDA, and nvcc.
docs/how-to/gpus.md says how to use it on a machine without a network.

bench/results/<gpu>-<date>.json and .txt are rewritten after every test and every figure. A call ends after
--budget seconds. The next call continues with the missing stages if the sources are the same, and keeps what
was built. Every stage is a process with a time limit. A stage that cannot run here (no compute-sanitizer, a
GPU other than Hopper) is recorded as absent, which is no failure. Exit code 0: everything requested passed;
1: something failed; 2: there is no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools import build_sm90  # noqa: E402
from tools.gpu import build, report  # noqa: E402
from tools.gpu.runner import Stage, run_stages  # noqa: E402
from tools.gpu.stages import KINDS, Plan, left_to_do  # noqa: E402

RESULTS = ROOT / "bench" / "results"
BUDGET_S = 560.0
COLD_IMPORT_S = 150.0  # of torch, from a cold disk
BUILDS = {"core": "core", "portable kernels": "portable", "hopper kernels": "hopper"}
WANTED_PACKAGES = ("torch", "pytest", "ninja", "setuptools", "numpy", "tokenizers", "safetensors")


def device() -> dict[str, Any]:
    """Returns the GPU as torch sees it, from another process: a context here would outlive all stages."""
    program = (
        "import json, torch; p = torch.cuda.get_device_properties(0); "
        "print(json.dumps({'name': p.name, 'capability': [p.major, p.minor], 'torch': torch.__version__, "
        "'cuda': torch.version.cuda, 'count': torch.cuda.device_count()}))"
    )
    try:
        ran = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=COLD_IMPORT_S
        )
    except subprocess.TimeoutExpired:
        return {"error": f"torch did not find the GPU within {COLD_IMPORT_S:.0f} s."}
    if ran.returncode != 0:
        return {"error": ran.stderr.strip().splitlines()[-1] if ran.stderr.strip() else "torch sees no GPU."}
    return json.loads(ran.stdout.splitlines()[-1])


def unpack_cutlass(wheel: Path, folder: Path = build_sm90.DOWNLOADED) -> Path:
    """Unpacks the headers of nvidia-cutlass's wheel to the folder where tools/build_sm90.py looks. Raises
    ValueError unless it is the pinned version."""
    version = wheel.name.partition("-")[2].partition("-")[0]
    pinned = build_sm90.pinned_version()
    if version != pinned or not wheel.is_file():
        raise ValueError(
            f"--cutlass {wheel} is not a wheel of the pinned version; give the path of "
            f"nvidia_cutlass-{pinned}-*.whl."
        )
    target = folder / version
    if not target.exists():
        partial = folder / f"{version}.partial"
        with zipfile.ZipFile(wheel) as file:
            inside = [
                name for name in file.namelist() if name.startswith(f"{build_sm90.HEADERS.as_posix()}/")
            ]
            file.extractall(partial, inside)
        partial.rename(target)
    return target


def placed(logs: Path) -> Callable[[Stage], None]:
    """Returns a function that copies the kernels that a stage needs to where pyruntime loads them."""
    where = ROOT / "pyruntime" / build.library("portable").name

    def put(stage: Stage) -> None:
        whole = build.library("hopper")
        wanted = whole if stage.library == "whole" and whole.exists() else build.library("portable")
        if stage.builds or not wanted.exists():
            return
        partial = logs / "partial.so"
        shutil.copyfile(wanted, partial)
        os.replace(partial, where)  # processes that loaded the old one keep it

    return put


def parser_of() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--only",
        default=",".join(KINDS),
        help=f"some of {', '.join(KINDS)}, with commas; default all. Their builds run in any case",
    )
    parser.add_argument("--out", type=Path, help="folder for copies of the report and all output")
    parser.add_argument("--cutlass", type=Path, metavar="WHEEL", help="nvidia-cutlass's wheel, for Hopper")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds in all; default %(default)s")
    return parser


def main() -> int:
    start = time.monotonic()
    parser = parser_of()
    args = parser.parse_args()
    only = set(filter(None, args.only.split(",")))
    if not only or only - set(KINDS):
        parser.error(f"--only {args.only}: choose from {', '.join(KINDS)}.")
    if args.cutlass is not None:
        try:
            print(f"CUTLASS: {unpack_cutlass(args.cutlass)}")
        except ValueError as error:
            parser.error(str(error))

    missing = [name for name in WANTED_PACKAGES if importlib.util.find_spec(name) is None]
    print(f"{sys.executable}; missing packages: {', '.join(missing) or 'none'}", flush=True)
    found = {**device(), "python": sys.version.split()[0], "missing_packages": missing}
    print(json.dumps(found), flush=True)
    if "error" in found:
        print(f"gpu-check needs a GPU: {found['error']}", file=sys.stderr)
        return 2
    return check(found, only, args.out, args.budget - (time.monotonic() - start))


def check(found: dict[str, Any], only: set[str], out: Path | None, budget_s: float) -> int:
    """Runs all requested stages whose outcome is not known yet, and returns the exit code."""
    logs = build.FOLDER
    source = report.fingerprint(ROOT)
    mark = f"{report.fingerprint(ROOT, build.SOURCES)} {found['torch']} {found['capability']}"
    plan = Plan(ROOT, logs, tuple(found["capability"]), mark)
    today = datetime.datetime.now(datetime.UTC).date()
    kept = report.Report(found, source, RESULTS, out, logs=logs, today=today)
    stages = plan.stages()
    built = {name for name, what in BUILDS.items() if build.is_built(what, mark)}
    todo = left_to_do(stages, kept, only, built)
    run_stages(todo, kept, root=ROOT, logs=logs, budget_s=budget_s, put_in_place=placed(logs))
    print(f"\n{kept.text()}\n", flush=True)
    known = {stage.name for stage in todo}
    bad = kept.bad([s.name for s in stages if s.kind in only and (s.name in known or not s.builds)])
    print(f"not passed: {', '.join(bad)}" if bad else "all passed", flush=True)
    print(f"the report: {RESULTS / kept.name}.json", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
