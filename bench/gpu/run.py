"""Times the kernels of csrc/cuda on one GPU: fused GEMMs, overlap with a link, support kernels.

    python bench/gpu [--parts gemms,gather-host,...] [--json FILE] [--budget SECONDS] [--quick]

gemms             fused kernels as rank 0 of 8 runs them, all signals set, beside torch.matmul of the same
                  local shape: Llama-3 8B and 70B at tp 8, M = 512 to 16384, bf16
gather-host       all_gather_matmul; the copy engine brings the others' rows from pinned host memory,
                  for T_c / T_g of 0.3 to 3
gather-throttled  the same on the device, throttled to about 380 GB/s
scatter-host      matmul_reduce_scatter whose parts go to the host's pinned memory
baselines         cuBLAS and, with several GPUs, NCCL without torch, through cupy (extra `tiles`)
support           AdamW, layers and reduce beside a copy's bandwidth and torch's own
training          whole training steps of Llama-3.2 1B, bf16, eager and as a CUDA graph, beside plain torch;
                  attention by flash and by cuDNN
load              finds the kernels' library and the device; load and smoke run only on request
smoke             a small run of each fused kernel, for compute-sanitizer

The names of gemms, gather, scatter and smoke end in -portable or -hopper (the fused kernel), those of overlap
also in -chunked (torch.matmul on each chunk). A name without an ending stands for all of them.

Each part is a process with a time limit; if one fails it is reported and the others still run. One process
plays all ranks of a group, with a workspace for each. Data is random. Times are CUDA events: variants take
turns in shuffled order, and the median of the rounds counts. The L2 is overwritten before each timing, and
the device is kept waiting while the host queues the timed work, so that late launches do not count.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from bench.common.measuring import parser_of, write_json
from bench.gpu import problem

ROOT = Path(__file__).resolve().parents[2]

LEFT_OUT = (
    "A fused scatter stores straight into its peers' memory, so there is none against a throttled copy. "
    "Training steps are timed by the wall clock, one variant after the other, launches included."
)


def child(part: str, lines: Path, quick: bool) -> int:
    """Runs one part; each result is written to a file at once, so it survives a crash."""
    import torch

    with lines.open("a", encoding="utf-8") as file:

        def emit(result: dict[str, Any]) -> None:
            file.write(json.dumps({"part": part, **result}) + "\n")
            file.flush()
            print(json.dumps(result)[:400], flush=True)

        try:
            if not torch.cuda.is_available():
                raise RuntimeError("torch sees no GPU.")
            from bench.gpu import parts

            with torch.cuda.stream(torch.cuda.Stream()):
                parts.run(part, emit, quick)
                torch.cuda.synchronize()
        except Exception as error:
            traceback.print_exc()
            emit({"kind": "error", "text": f"{part}: {type(error).__name__}: {str(error)[:2000]}"})
            return 1
    return 0


def run_part(part: str, limit_s: float, quick: bool, arguments: list[str]) -> list[dict[str, Any]]:
    """Runs a part in a process; returns its results, and as the last one how it ended."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder, "lines")
        lines.touch()
        command = [sys.executable, "-m", "bench.gpu.run", "--child", part, "--lines", str(lines)]
        try:
            code = subprocess.run([*command, *arguments], cwd=ROOT, timeout=limit_s).returncode
            how = "passed" if code == 0 else f"failed with exit code {code}"
        except subprocess.TimeoutExpired:
            how = f"took longer than {limit_s:.0f} s"
        results = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines() if line]
    passed = how == "passed" and not any(r.get("kind") == "error" or r.get("wrong") for r in results)
    if how == "passed" and not passed:
        how = "ended, with errors"
    text = f"{part} {how}, {time.monotonic() - start:.0f} s"
    return [*results, {"part": part, "kind": "part", "passed": passed, "text": text}]


def chosen(names: str) -> list[str]:
    """Returns the requested parts; a name stands for all that begin with it. Raises ValueError."""
    if not names:
        return [part for part in problem.PARTS if part not in problem.UNMEASURED]
    wanted: list[str] = []
    for name in filter(None, names.split(",")):
        found = [part for part in problem.PARTS if part == name or part.startswith(f"{name}-")]
        if not found:
            raise ValueError(f"--parts names {name!r}; choose from {', '.join(problem.PARTS)}.")
        wanted += found
    return wanted


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--parts", default="", help="parts, separated by commas; default all that measure")
    parser.add_argument("--json", metavar="FILE", help="write all figures to this file")
    parser.add_argument("--budget", type=float, help="seconds for all parts; default: their limits")
    parser.add_argument("--quick", action="store_true", help="few and small sizes: a trial, no measurement")
    parser.add_argument("--child", help="run this part in this process; for bench/gpu itself")
    parser.add_argument("--lines", type=Path, help="file to which --child writes its results")
    args = parser.parse_args()
    try:
        wanted = chosen(args.parts)
    except ValueError as error:
        parser.error(str(error))
    if args.child:
        return child(args.child, args.lines or Path(os.devnull), args.quick)

    how = " ".join((__doc__ or "").split("\n\n")[-1].split())
    from bench.gpu.machine import here

    where = here()
    if not where.get("gpu", {}).get("is_hopper") and not args.parts:
        wanted = [part for part in wanted if not part.endswith("-hopper")]
    print(how, flush=True)
    end = time.monotonic() + (args.budget or sum(problem.PARTS[part] for part in wanted))
    results: list[dict[str, Any]] = [{"kind": "note", "text": LEFT_OUT}]
    for part in wanted:
        limit_s = min(problem.PARTS[part], end - time.monotonic())
        if limit_s < 5:
            results.append({"part": part, "kind": "part", "passed": False, "text": f"{part}: no time left"})
            continue
        results += run_part(part, limit_s, args.quick, ["--quick"] if args.quick else [])
        if args.json:  # after each part, so that a later crash loses nothing
            write_json(args.json, where, {"how": how, "parts": wanted, "quick": args.quick}, results)
    print(f"\n{problem.summary(results)}", flush=True)
    return 0 if all(r["passed"] for r in results if r["kind"] == "part") else 1


if __name__ == "__main__":
    sys.exit(main())
