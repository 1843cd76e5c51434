"""The job script for Slurm (examples/slurm/slurm.sbatch), with a made-up Slurm."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pyruntime.cli import train

ROOT = Path(__file__).resolve().parents[2]
SRUN = f"""#!{sys.executable}
import json, os, sys
print(json.dumps([sys.argv[1:], os.environ["OMP_NUM_THREADS"]]))
"""
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_JOB_NODELIST": "a[1-3]",
    "SLURM_GPUS_ON_NODE": "4",
    "SLURM_CPUS_ON_NODE": "26",
}


def submitted(folder, environment, *arguments):
    for name, text in (("srun", SRUN), ("scontrol", "#!/bin/sh\nprintf 'a%d\\n' $(seq 1 2000)\n")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", str(ROOT / "examples" / "slurm" / "slurm.sbatch"), *arguments],
        env={"PATH": path} | environment,
        capture_output=True,
        text=True,
    )


def test_each_host_starts_one_torchrun_that_finds_the_others(tmp_path):
    done = submitted(tmp_path, SLURM, "--config", "tiny", "--data.paths", "a b")
    assert done.returncode == 0, done.stderr
    words, threads = json.loads(done.stdout)
    assert words[:2] == ["--kill-on-bad-exit=1", "--cpus-per-task=26"] and threads == "6"
    of_torchrun = words[words.index("torch.distributed.run") + 1 : words.index("pyruntime")]
    pairs = dict(zip(of_torchrun[::2], of_torchrun[1::2], strict=False))
    assert pairs["--nnodes"] == "3" and pairs["--nproc-per-node"] == "4" and pairs["--rdzv-id"] == "7"
    assert pairs["--rdzv-endpoint"] == "a1:29500" and int(pairs["--max-restarts"]) > 0

    of_train = words[words.index("train") + 1 :]
    config, name = train.read(of_train)
    assert name == "tiny" and config.data.paths == ("a b",)
    assert (config.output.run_dir, config.checkpoint.resume) == ("runs/7", "auto")
    config, _ = train.read([*of_train, "--output.run_dir", "runs/6"])  # a job that goes on with another
    assert config.output.run_dir == "runs/6"


@pytest.mark.parametrize("missing", sorted(SLURM))
def test_outside_of_slurm_it_says_what_is_missing(tmp_path, missing):
    environment = {name: value for name, value in SLURM.items() if name != missing}
    done = submitted(tmp_path, environment, "--config", "tiny")
    assert done.returncode != 0 and done.stdout == ""
    assert f"{missing}: " in done.stderr


@pytest.mark.parametrize("script", ["slurm.sbatch", "frontier.sbatch"])
def test_job_scripts_ask_for_a_signal_in_time_to_save(script):
    lines = (ROOT / "examples" / "slurm" / script).read_text().splitlines()
    (asked,) = (line for line in lines if line.startswith("#SBATCH --signal="))
    assert asked == "#SBATCH --signal=TERM@240" and lines.index(asked) < lines.index("set -euo pipefail")
