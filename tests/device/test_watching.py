"""Watching a run on simulated devices by the times of events: slow ranks are named and layers leave them, and
the ledger accounts for all of a step."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import pyruntime
from pyruntime import comm
from pyruntime.comm import Runtime
from pyruntime.overlap import EntryKind
from pyruntime.overlap.files import read
from pyruntime.train import checkpoint_folder
from pyruntime.train import run as run_module
from pyruntime.train.loop import Trainer
from pyruntime.train.run import run
from pyruntime.train.signals import StopRequest
from pyruntime.train.slow.own_clock import OwnClock
from pyruntime.train.slow.windows import SlowReport
from pyruntime.train.validate import check
from tests.cuda import build as kernels
from tests.device import sim
from tests.device.test_training import ONCE_A_STEP, waits_of_steps
from tests.train import jobs

pytestmark = [pytest.mark.usefixtures("simulated"), pytest.mark.alone]

BUSY_S = 0.2
"""For each step or layer of a rank that is slowed: far more than it takes on a busy machine."""


def looks(group):
    """Takes steps in which rank 1's stream is busy for BUSY_S. Returns the findings, the last window, how
    long this rank waited for each other one, and how often the host waited beside the looks."""
    rank, _ = sim.begin_rank(delays=1)
    sim.use_kernels(kernels.LIBRARY)
    found, waits = [], 0
    with Runtime.start(tp=2, device="sim") as runtime:
        report = SlowReport(runtime, 6, OwnClock(runtime.device))
        x = torch.ones(64, 64, device=runtime.device)
        pyruntime.all_reduce(x, runtime.tp)  # makes the workspace
        for step in range(1, 19):
            sim.reset_counts()
            with report.step():
                if rank == 1:
                    sim.block_streams(BUSY_S)
                x = pyruntime.all_reduce(x, runtime.tp) / 2
            waits += sum(sim.host_waits().values())
            if step % 6 == 0:
                found += report.look()
        waited = {peer: each.waiting_s for (_, peer), each in comm.peers().items()}
        report.close()
        return found, report.windows[-1], waited, waits


def test_a_stream_that_waits_does_not_work_and_one_that_is_busy_is_slow(ranks):
    outcomes = ranks.launch(looks, 2, init=False, timeout=120.0)
    for rank in outcomes:
        assert rank.error is None, rank.error
        ((found,), (fast, slow), _, waits) = rank.value
        assert (found.rank, found.is_slow, waits) == (1, True, 0)
        assert fast.layer_s < BUSY_S < slow.layer_s
        assert (fast.waited_for, slow.waited_for) == (1, 0)
    waited = outcomes[0].value[2]
    # In each of 18 steps, less what the host took to come to the next one before the stream did.
    assert waited[1] > 9 * BUSY_S


class Watched(Trainer):
    """Whose rank 1 is slow: its stream is busy with nothing before each layer."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self._runtime.rank == 1:
            for block in self.model.layers:
                block.register_forward_pre_hook(lambda *_: sim.block_streams(BUSY_S))


def watched(group, config):
    """Trains on a device. Returns the findings about slow ranks by step."""
    sim.begin_rank()
    sim.use_kernels(kernels.LIBRARY)
    parallel, found = config.parallel, []
    axes = {name: getattr(parallel, name) for name in ("tp", "cp", "pp", "dp")}

    class Kept(Watched):
        def fit(self, *args, **kwargs):
            for step in super().fit(*args, **kwargs):
                found.extend((step.step, *each) for each in [step.slow or ()] if each)
                yield step

    check(config, parallel.tp * parallel.cp * parallel.pp * parallel.dp)
    with patch.object(run_module, "Trainer", Kept), Runtime.start(**axes, device="sim") as runtime:
        run(config, "job", runtime, StopRequest())
    return found


def job(folder: Path, layers: int, **parallel):
    config = jobs.job(
        folder, steps=20, batch_size=2, micro_batch_size=1, seq_len=32, val_every=0, slow_every=6
    )
    config = jobs.changed(config, "model", num_hidden_layers=layers)
    return jobs.changed(config, "parallel", **{"tp": 1} | parallel)


def found_by_all(ranks, config):
    outcomes = ranks.launch(watched, 2, config, init=False, timeout=240.0)
    for rank in outcomes:
        assert rank.error is None, rank.error
    found = [rank.value for rank in outcomes]
    assert all(each == found[0] for each in found)
    return found[0]


@pytest.mark.second_tier
def test_layers_leave_the_slow_rank_that_all_name(ranks, tmp_path):
    config = job(tmp_path, 4, pp=2, rebalance="on")
    config = jobs.changed(config, "optimizer", lr=3e-4, clip_grad_norm=0.0)
    config = jobs.changed(config, "checkpoint", every_steps=18)
    ((step, found),) = found_by_all(ranks, config)
    assert (step, found["rank"], found["is_slow"]) == (18, 1, True)
    assert "waited" in found["sentence"]
    run_dir = Path(config.output.run_dir)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert lines[17]["moved"]["after"] == [3, 1]
    assert checkpoint_folder.read(run_dir / "checkpoints" / "step-000020").layers == [3, 1]
    alone = jobs.changed(jobs.changed(config, "parallel", pp=1, rebalance="off"), "train", slow_every=0)
    alone = jobs.changed(alone, "output", run_dir=str(tmp_path / "alone"))
    jobs.prepare(alone)
    (expected,) = ranks.run(jobs.history, 1, alone)
    losses = torch.tensor([line["loss"] for line in lines])
    torch.testing.assert_close(losses, torch.tensor([each.loss for each in expected]), rtol=2e-5, atol=0)


@pytest.mark.second_tier
@pytest.mark.parametrize("parallel", [{"tp": 2}, {"dp": 2, "zero": 3}])
def test_all_ranks_name_the_one_whose_stream_is_busy(ranks, tmp_path, parallel):
    ((step, found),) = found_by_all(ranks, job(tmp_path, 2, **parallel))
    assert (step, found["rank"], found["is_slow"]) == (18, 1, True)
    assert found["times"] > 1.3


def trained(group, config, delays):
    sim.begin_rank(delays=delays)
    sim.use_kernels(kernels.LIBRARY)
    parallel = config.parallel
    axes = {name: getattr(parallel, name) for name in ("tp", "cp", "pp", "dp")}
    with Runtime.start(**axes, device="sim") as runtime:
        run(config, "job", runtime, StopRequest())


def ledgers_of(ranks, config, delays):
    outcomes = ranks.launch(trained, 2, config, delays, init=False, timeout=240.0)
    for rank in outcomes:
        assert rank.error is None, rank.error
    return read(Path(config.output.run_dir))


ALONE = {"tp": {"tp": 2}, "zero 3": {"dp": 2, "zero": 3}, "pp": {"pp": 2}}


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.second_tier(but=["tp"])
def test_the_seconds_of_a_step_on_a_device_are_all_accounted_for(ranks, tmp_path, name):
    """In the format of the CPU's, with operations that start late."""
    config = jobs.changed(job(tmp_path, 2, **ALONE[name]), "train", steps=4, ledger=True)
    ledgers = ledgers_of(ranks, config, delays=len(name))
    (axis,) = {"tp": ["tp"], "zero 3": ["dp"], "pp": ["pp"]}[name]
    lines = (Path(config.output.run_dir) / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    for ledger in ledgers:
        account = ledger.account
        assert (ledger.steps, ledger.step, account.lost) == (3, 4, 0)
        parts = (account.computing_s, account.copying_s, account.summing_s, account.rest_s)
        assert all(part >= 0 for part in parts)
        # Equal up to the rounding of some thousand sums of doubles.
        assert sum(parts) + account.exposed_s == pytest.approx(account.seconds, rel=1e-9)
        assert account.axes[axis].exposed_s > 0
        assert any(entry.kind is EntryKind.OP and entry.layer for entry in ledger.entries)
        own = [e for e in ledger.entries if e.kind <= EntryKind.SUM and e.thread == ledger.thread]
        in_step = [
            entry for entry in own if entry.begin < ledger.end
        ]  # others are of the checkpoint after it
        assert all(ledger.begin <= entry.begin <= entry.end <= ledger.end for entry in in_step)
    assert sum(ledger.account.axes[axis].bytes_read for ledger in ledgers) > 0
    assert all(step["exposed_comm_s"] > 0 for step in steps)


@pytest.mark.second_tier
@pytest.mark.parametrize("name", ALONE)
def test_a_ledger_makes_the_host_wait_no_more_often(ranks, tmp_path, name):
    """Nor does looking for slow ranks until there is a look."""
    config = jobs.changed(job(tmp_path, 2, **ALONE[name]), "train", ledger=True, slow_every=9)
    found = waits_of_steps(ranks, config, tmp_path)
    # Its clock waits at the end of a run, for points of the stream that are not there yet.
    assert found.pop("event.synchronize", 0) < 4
    assert found == ONCE_A_STEP
