"""A rank that is killed at any moment of a run is named by every other rank, below torchrun and without.

`make test-kill`: minutes.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.killed import MOMENTS
from tests.comm.test_reopening import free_port

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 60
MESHES = {
    "tp": (2, []),
    "tp and dp": (4, ["--parallel.dp", "2", "--train.batch_size", "8"]),
    "tp and pp": (4, ["--parallel.pp", "2"]),
}
OF_ONE_RANK = {"corpus", "model_folder", "sample"}  # rank 0 alone gets there, or the ranks of the first stage
OF_RESUMING = {"check", "resume", "load"}
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def command(mesh: list[str], folder: Path, more: list[str]) -> list[str]:
    return [
        "train", "--config", "tiny", "--train.steps", "4", "--train.val_every", "2",
        "--checkpoint.every_steps", "2", "--output.sample_tokens", "4", "--output.progress", "off",
        "--comm.deadline_s", "6", "--output.run_dir", str(folder / "run"),
        "--data.cache", str(folder / "tokens"), *mesh, *more,
    ]  # fmt: skip


def below_torchrun(ranks: int, arguments: list[str], folder: Path) -> dict[int, str]:
    """What each rank wrote to stderr; "hung" where the whole did not end."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--redirects", "3"]
    launcher += [
        "--log-dir",
        str(folder / "logs"),
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "127.0.0.1:0",
    ]
    with open(folder / "torchrun", "w") as out:
        started = subprocess.Popen(
            [sys.executable, *launcher, "-m", *arguments],
            cwd=folder, env=ENVIRONMENT, stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip
        try:
            started.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            return dict.fromkeys(range(ranks), "hung")
    found = {}
    for rank in range(ranks):
        (path,) = (folder / "logs").glob(f"*/attempt_0/{rank}/stderr.log")
        found[rank] = path.read_text()
    return found


def alone(ranks: int, arguments: list[str], folder: Path) -> dict[int, str]:
    """The same where rank 0 serves the job's store."""
    port, started = free_port(), []
    for rank in range(ranks):
        own = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        with open(folder / f"{rank}.err", "w") as err:
            environment = ENVIRONMENT | {name: str(value) for name, value in own.items()}
            asked = [sys.executable, "-m", *arguments]
            to = {"stdout": subprocess.DEVNULL, "stderr": err}
            started.append(subprocess.Popen(asked, cwd=folder, env=environment, **to))
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end and sum(process.poll() is None for process in started) > 1:
        time.sleep(0.1)
    hung = [rank for rank, process in enumerate(started) if process.poll() is None]
    for process in started:
        process.kill()
        process.wait()
    found = {rank: (folder / f"{rank}.err").read_text() for rank in range(ranks)}
    return found if len(hung) <= 1 else found | dict.fromkeys(hung, "hung")


@pytest.mark.kill
@pytest.mark.parametrize("launched", [below_torchrun, alone], ids=["torchrun", "alone"])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("moment", MOMENTS)
def test_who_was_killed_is_named_by_every_other_rank(tmp_path, moment, mesh, victim, launched):
    ranks, axes = MESHES[mesh]
    if victim and moment in OF_ONE_RANK:
        pytest.skip("this rank does not get there")
    more = []
    if moment in OF_RESUMING:
        whole = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        whole += ["-m", "pyruntime", *command(axes, tmp_path, [])]
        subprocess.run(whole, cwd=tmp_path, env=ENVIRONMENT, check=True, capture_output=True, timeout=LIMIT_S)
        more = ["--checkpoint.resume", str(tmp_path / "run"), "--train.steps", "6"]
    asked = ["tests.cli.killed", moment, str(victim), "SIGKILL", *command(axes, tmp_path, more)]
    said = launched(ranks, asked, tmp_path)
    for rank, text in said.items():
        if rank == victim:
            continue
        assert text != "hung" and "Traceback" not in text, text
        lines = [line for line in text.splitlines() if line.startswith(f"pyruntime: rank {rank}: PeerLost")]
        assert lines, f"rank {rank} of {mesh} says nothing: {text}"
        said = lines[-1].split("PeerLost", 1)[1]
        assert re.search(rf"\brank {victim}( \([^)]*\))? has ended", said), lines[-1]


@pytest.mark.second_tier
def test_the_sentence_stands_at_the_end_of_torchruns_report(tmp_path):
    ranks, axes = MESHES["tp"]
    said = below_torchrun(
        ranks, ["tests.cli.killed", "trainer", "1", "SIGKILL", *command(axes, tmp_path, [])], tmp_path
    )
    (line,) = [line for line in said[0].splitlines() if line.startswith("pyruntime: rank 0: PeerLost")]
    assert "rank 1" in line and "has ended" in line
    report = (tmp_path / "torchrun").read_text().splitlines()
    (place,) = [number for number, text in enumerate(report) if "PeerLost: " in text]
    assert len(report) - place < 30, "\n".join(report)


def test_a_refusal_stands_in_torchruns_report(tmp_path):
    below_torchrun(2, ["pyruntime", *command([], tmp_path, ["--train.dtype", "fp33"])], tmp_path)
    report = (tmp_path / "torchrun").read_text().splitlines()
    assert any("train.dtype" in text for text in report[-15:]), "\n".join(report)
