"""Ranks that die and memory that ends on simulated devices are named; runs go on from checkpoints."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from pyruntime.cli.train import failures_told_to_all
from pyruntime.comm import CommError, Runtime
from pyruntime.llama import Llama
from pyruntime.train.loop import Trainer
from pyruntime.train.metrics import read
from pyruntime.train.run import run
from pyruntime.train.signals import StopRequest
from tests.cuda import build as kernels
from tests.device import sim
from tests.train import jobs

pytestmark = pytest.mark.usefixtures("simulated")
DEADLINE_S = 20.0
LAUNCH = {"init": False, "timeout": 180.0}
MESHES = {
    "tp": {"tp": 2},
    "zero 3": {"tp": 1, "dp": 2, "zero": 3},
    "cp": {"tp": 1, "cp": 2},
    "pp": {"tp": 1, "pp": 2},
}


def job(folder: Path, mesh: str, **train):
    config = jobs.job(folder, **{"steps": 4, "val_every": 0, "batch_size": 4, "seq_len": 32} | train)
    return jobs.changed(config, "parallel", **MESHES[mesh])


def train(config, device="sim", delays=3, gigabytes=4.0, ended=None, deadline_s=DEADLINE_S):
    """Runs a job as the command line does; returns the metrics of each step. ended: gets the time it ends."""
    if device == "sim":
        sim.begin_rank(delays=delays, gigabytes=gigabytes)
        sim.use_kernels(kernels.LIBRARY)
    axes = {name: getattr(config.parallel, name) for name in ("tp", "cp", "pp", "dp")}
    with Runtime.start(**axes, device=device, deadline_s=deadline_s) as runtime:
        try:
            with failures_told_to_all(runtime.rank):
                folder = run(config, "job", runtime, StopRequest())
        finally:
            if ended is not None:
                ended.append(time.monotonic())
    return list(read(folder / "metrics.jsonl"))


def call_in_third_step(work) -> None:
    """Makes this process call work(activations) in the midst of its third step, before a layer."""
    take, through, step_now = Trainer._train_step, Llama._through, []

    def taking(self, step):
        step_now[:] = [step]
        return take(self, step)

    def passing(self, number, arguments):
        if step_now == [3]:
            step_now.clear()
            work(arguments[1])
        return through(self, number, arguments)

    Trainer._train_step, Llama._through = taking, passing


def note_time(folder: Path) -> None:
    (folder / "failed at").write_text(str(time.monotonic()))


def die(folder, activations) -> None:
    note_time(folder)
    os.kill(os.getpid(), signal.SIGKILL)


def sleep_long(folder, activations) -> None:
    note_time(folder)
    time.sleep(2 * DEADLINE_S)


def outcome(group, folder, config, work):
    """This rank's error: its type, message, and the seconds since rank 1 failed."""
    if os.environ["LOCAL_RANK"] == "1":
        call_in_third_step(partial(work, folder))
    ended = []
    with pytest.raises((CommError, RuntimeError)) as caught:
        train(config, ended=ended)
    return caught.type.__name__, str(caught.value), ended[0] - float((folder / "failed at").read_text())


@pytest.mark.second_tier
@pytest.mark.parametrize("mesh", MESHES)
def test_a_rank_that_is_killed_in_the_midst_of_a_step_is_named(ranks, tmp_path, mesh):
    outcomes = ranks.launch(outcome, 2, tmp_path, job(tmp_path, mesh), die, **LAUNCH)
    assert outcomes[1].exit_code == -signal.SIGKILL
    kind, message, seconds = outcomes[0].value
    # The host ends what kernels wait for in vain.
    assert kind == "PeerLost" and "rank 1" in message and seconds < DEADLINE_S / 2, outcomes[0]


@pytest.mark.second_tier
def test_a_rank_that_is_late_costs_one_deadline_however_many_groups_wait_for_it(ranks, tmp_path):
    outcomes = ranks.launch(outcome, 2, tmp_path, job(tmp_path, "cp"), sleep_long, **LAUNCH)
    kind, message, seconds = outcomes[0].value
    assert kind == "CommTimeout" and "rank 1" in message, outcomes[0]
    assert DEADLINE_S <= seconds < 1.5 * DEADLINE_S


def fill_memory(group, config, gigabytes):
    """The message of this rank's error."""
    with pytest.raises((CommError, torch.OutOfMemoryError)) as caught:
        train(config, gigabytes=gigabytes)
    return caught.type.__name__, str(caught.value)


def test_a_run_whose_memory_ends_says_which_options_need_less(ranks, tmp_path):
    config = job(tmp_path, "zero 3", batch_size=64, micro_batch_size=32)
    sound, _ = ranks.launch(partial_train, 2, config, **LAUNCH)
    most = max(step["memory_bytes"] for step in sound.value)
    config = jobs.changed(config, "output", run_dir=str(tmp_path / "small"))
    told = [each.value for each in ranks.launch(fill_memory, 2, config, 0.7 * most / 2**30, **LAUNCH)]
    (message,) = [message for kind, message in told if kind == "OutOfMemoryError"][:1]
    assert "The run needs more memory than its device has: lower train.micro_batch_size=32" in message
    assert "sim:" in message and "is out of memory" in message
    for kind, message in told:
        assert kind == "OutOfMemoryError" or "OutOfMemoryError: The run needs more memory" in message


def partial_train(group, *arguments):
    """With more time than a rank is late on a busy machine: nothing fails here."""
    return train(*arguments, deadline_s=LAUNCH["timeout"])


def losses(outcomes) -> torch.Tensor:
    for rank in outcomes:
        assert rank.error is None, rank.error
    steps = [(step["step"], step["loss"], step["grad_norm"]) for step in outcomes[0].value]
    return torch.tensor(steps, dtype=torch.float64)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.second_tier("tp", "cp", "pp")
def test_a_checkpoint_of_devices_is_taken_up_there_and_on_cpus(ranks, tmp_path, mesh):
    config = jobs.changed(job(tmp_path, mesh), "checkpoint", every_steps=2)
    whole = losses(ranks.launch(partial_train, 2, config, **LAUNCH))
    saved = str(Path(config.output.run_dir) / "checkpoints" / "step-000002")
    for device in ("sim", "cpu"):
        again = jobs.changed(config, "output", run_dir=str(tmp_path / device))
        again = jobs.changed(again, "checkpoint", resume=saved, every_steps=0)
        found = losses(ranks.launch(partial_train, 2, again, device, 5, **LAUNCH))
        assert found[:, 0].tolist() == [3, 4]
        if device == "sim":
            assert torch.equal(found, whole[2:])
        torch.testing.assert_close(found, whole[2:], rtol=2e-5, atol=0)
