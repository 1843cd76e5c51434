"""Starts benchmarks from other benchmarks: on one host by torchrun, on several by bench.netlab."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 600.0  # of one run; on a quiet machine it takes 40 to 150 s
MOST_LOAD = 4.0  # at the start of a run; the run before it leaves about 2


def on_one_host(module: str, arguments: Sequence[str]) -> list[str]:
    """Returns the command of a benchmark on two ranks of this host, with this Python."""
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    return [sys.executable, *launch, "-m", module, *arguments]


def between_hosts(module: str, arguments: Sequence[str], rate: str, hosts: int = 2) -> list[str]:
    """Returns the command of a benchmark with one rank on each host, with links of `rate`."""
    as_root = [] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user"]
    network = ["-m", "bench.netlab", "--hosts", str(hosts), "--ranks-per-host", "1", "--rate", rate]
    return [*as_root, sys.executable, *network, "--", sys.executable, "-m", module, *arguments]


def shown(command: Sequence[str]) -> str:
    """Returns a command as a reader would type it."""
    return shlex.join(["python" if part == sys.executable else part for part in command])


def run(command: Sequence[str]) -> dict[str, Any]:
    """Runs a benchmark and returns its JSON with the command. If it fails, prints its output and exits."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "result.json")
        try:
            done = subprocess.run(
                [*command, "--json", str(path)],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=TIMEOUT_S,
            )
        except subprocess.TimeoutExpired as error:
            output = (error.stdout or b"").decode(errors="replace")
            sys.exit(f"{output}\n{shown(command)} did not end within {TIMEOUT_S:.0f} s; see above.")
        if done.returncode != 0:
            sys.exit(f"{done.stdout}\n{shown(command)} ended with {done.returncode}; see above.")
        wrote = json.loads(path.read_text())
    print(f"{time.monotonic() - begin:4.0f} s  {shown(command)}", file=sys.stderr, flush=True)
    return {"command": shown(command), **wrote}


def warning(runs: Sequence[dict[str, Any]]) -> str:
    """Returns a warning if the machine was too busy for these runs to be relied on; else an empty string."""
    load = max(run["facts"]["load_average_at_start"] for run in runs)
    if load <= MOST_LOAD:
        return ""
    return f"\n\n**Not to be relied on**: other programs ran beside it (load average {load:.0f})."
