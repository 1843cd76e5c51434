"""A run whose processes are killed again and again ends with what it would have ended with, bit by bit.

Minutes: `make test-kill`.
"""

import os
import random
import signal
import threading
import time

import pytest

from pyruntime.cli import main
from pyruntime.train import checkpoint_folder, manifest, metrics

KILLS, LIFE_S = 50, 120.0
CONSTANT = ["--optimizer.warmup_steps", "1", "--optimizer.min_lr_fraction", "1.0"]
"""A learning rate that does not depend on the number of steps: that is known when all kills are over."""
JOB = ["--config", "tiny", *CONSTANT, "--train.dtype", "bf16", "--train.val_every", "0",
       "--output.sample_tokens", "0", "--output.progress", "off", "--comm.deadline_s", "30"]  # fmt: skip


def life(_group, folder, argv):
    """One life of a rank, until it is killed or the run ends."""
    (folder / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
    return main(["train", *argv])


def lines(run_dir):
    path = run_dir / metrics.FILE_NAME
    return len(path.read_bytes().splitlines()) if path.exists() else 0


class Killer(threading.Thread):
    """Kills `victims` some time after all ranks have started, or after the first new step."""

    def __init__(self, folder, run_dir, dice):
        super().__init__(daemon=True)
        self.folder, self.run_dir = folder, run_dir
        self.victims = dice.choice(([0], [1], [0, 1]))
        self.in_training, self.after = dice.random() < 0.8, dice.uniform(0.0, 0.7)
        self.before = lines(run_dir)
        for path in folder.glob("pid-*"):
            path.unlink()

    def run(self):
        end = time.monotonic() + LIFE_S
        paths = [self.folder / f"pid-{rank}" for rank in (0, 1)]
        while not all(path.exists() and path.read_text() for path in paths):
            assert time.monotonic() < end
            time.sleep(0.005)
        # A life begins by dropping the lines past its checkpoint.
        least = lines(self.run_dir)
        while self.in_training and (now := lines(self.run_dir)) <= least and time.monotonic() < end:
            least = min(least, now)
            time.sleep(0.002)
        time.sleep(self.after)
        for rank in self.victims:
            os.kill(int(paths[rank].read_text()), signal.SIGKILL)


@pytest.mark.kill
def test_a_run_killed_fifty_times_is_bitwise_the_one_never_interrupted(ranks, tmp_path):
    seed = random.randrange(10**6)
    dice, run_dir = random.Random(seed), tmp_path / "killed"
    print(f"\nseed {seed}")
    resumable = [*JOB, "--output.run_dir", str(run_dir), "--checkpoint.every_steps", "2"]
    resumable += ["--checkpoint.resume", "auto"]
    reached = [0]
    for number in range(1, KILLS + 1):
        killer = Killer(tmp_path, run_dir, dice)
        killer.start()
        ended = ranks.launch(
            life, 2, tmp_path, [*resumable, "--train.steps", "1000000"], init=False, timeout=LIFE_S
        )
        killer.join(LIFE_S)
        codes = [each.exit_code for each in ended]
        assert all(codes[rank] == -signal.SIGKILL for rank in killer.victims), ended
        assert all(each.exit_code == -signal.SIGKILL or each.value == 1 for each in ended), ended
        found = checkpoint_folder.complete(run_dir / checkpoint_folder.FOLDER)
        for checkpoint in found:  # whatever has its name is whole
            for name, saved in manifest.read(checkpoint).items():
                assert manifest.checksum(checkpoint / name) == saved, (number, checkpoint, name)
        reached.append(checkpoint_folder.step_of(found[-1]) if found else 0)
        print(f"kill {number}, of rank {killer.victims}: step {reached[-1]}", flush=True)
        assert reached[-1] >= reached[-2], f"kill {number} lost a checkpoint: {reached}"
    assert reached[-1] > KILLS
    steps = str(reached[-1] + 3)
    whole = [*JOB, "--output.run_dir", str(tmp_path / "whole"), "--train.steps", steps]
    for argv in ([*resumable, "--train.steps", steps], whole):
        for ended in ranks.launch(life, 2, tmp_path, argv, init=False, timeout=600.0):
            assert (ended.exit_code, ended.value) == (0, 0), ended
    killed, undisturbed = (
        [
            (line["step"], line["loss"], line["grad_norm"], line["lr"])
            for line in metrics.read(folder / metrics.FILE_NAME)
        ]
        for folder in (run_dir, tmp_path / "whole")
    )
    assert len(killed) == int(steps) and killed == undisturbed
    one, other = (folder / "model" / "model.safetensors" for folder in (run_dir, tmp_path / "whole"))
    assert one.read_bytes() == other.read_bytes()
