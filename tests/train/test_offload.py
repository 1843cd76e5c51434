"""Training with optimizer states in a file: the steps and the checkpoints of resident states."""

from __future__ import annotations

import errno
import os

import pytest

from pyruntime.comm import PeerLost
from pyruntime.data_parallel import offload
from pyruntime.overlap.files import read
from pyruntime.train import checkpoint_folder
from pyruntime.train.config import DataParallel, Optimizer, RunConfig
from pyruntime.train.errors import ConfigError, TrainingError
from pyruntime.train.validate import check
from tests.overlap.test_run import whole_run
from tests.train import jobs


def job(folder, **train):
    config = jobs.job(folder, dtype="bf16", val_every=0, **train)
    return jobs.changed(config, "model", hidden_size=256, intermediate_size=512)


def away(config: RunConfig) -> RunConfig:
    return jobs.changed(config, "optimizer", offload="states")


MESHES = [{}, {"dp": 4, "zero": 3}, {"tp": 2, "dp": 2, "zero": 1}, {"pp": 2, "dp": 2, "zero": 2}]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.second_tier(but=["{}", "{'tp': 2, 'dp': 2, 'zero': 1}"])
def test_a_run_is_that_of_resident_states_and_goes_on_at_either(ranks, tmp_path, mesh):
    """Bit by bit, also from a checkpoint that the other has saved."""
    config = job(tmp_path, steps=6, batch_size=8)
    config = jobs.changed(config, "parallel", **{"tp": None, **mesh})
    config = jobs.changed(config, "checkpoint", every_steps=3)
    folder = jobs.prepare(config)
    size = 4 if mesh else 1
    expected = ranks.run(jobs.history, size, config)[0]
    files = {path.name: path.read_bytes() for path in folder.glob("checkpoints/step-000006/*.safetensors")}
    found = ranks.run(jobs.history, size, away(config))[0]
    saved = {path.name: path.read_bytes() for path in folder.glob("checkpoints/step-000006/*.safetensors")}
    assert saved == files
    (third,) = [each for each in checkpoint_folder.complete(folder / "checkpoints") if "03" in each.name]
    rest = ranks.run(jobs.history, size, away(config), third)[0]  # resumes what the offloaded run saved
    back = ranks.run(jobs.history, size, config, third)[0]
    for name in ("loss", "grad_norm"):
        assert jobs.curve(found, name) == jobs.curve(expected, name)
        assert jobs.curve(rest, name) == jobs.curve(expected, name)[3:]
        assert jobs.curve(back, name) == jobs.curve(expected, name)[3:]


def test_the_ledger_of_a_run_has_its_bytes(ranks, tmp_path):
    config = away(job(tmp_path, steps=4, ledger=True))
    folder = jobs.prepare(config)
    ranks.run(whole_run, 4, jobs.changed(config, "parallel", dp=2, zero=1, tp=None))
    for ledger in read(folder):
        axis = ledger.account.axes["offload"]
        assert axis.bytes_read > 0 and axis.bytes_sent > 0
        assert axis.bytes_read % (3 * 12) == 0  # three steps, 12 bytes a parameter


def fails(group, config):
    """The error of a run whose first rank's disk fails in its third step."""
    made, steps = jobs.trainer(group, config), 0
    write = offload._File.write

    def broken(*arguments):
        if steps == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return write(*arguments)

    if group.rank() == 0:
        offload._File.write = broken
    try:
        for _ in made.fit():
            steps += 1
    finally:
        offload._File.write = write


def test_a_failing_disk_ends_the_run_on_all_ranks_with_its_reason(ranks, tmp_path):
    config = away(job(tmp_path, steps=8))
    jobs.prepare(config)
    config = jobs.changed(config, "parallel", dp=2, zero=1, tp=None)
    first, *others = ranks.run(fails, 4, config, expect_errors=True)
    assert isinstance(first, TrainingError) and all(isinstance(error, PeerLost) for error in others)
    for error in (first, *others):
        assert "could not be" in str(error) and "Input/output error; name a folder" in str(error)


def test_a_folder_without_room_is_refused(ranks, tmp_path):
    (tmp_path / "file").write_text("")
    config = jobs.changed(away(job(tmp_path)), "optimizer", offload_dir=str(tmp_path / "file" / "states"))
    jobs.prepare(config)
    for error in ranks.run(jobs.history, 2, config, expect_errors=True):
        assert isinstance(error, ConfigError)
        assert "optimizer.offload: Optimizer states" in str(error) and "Not a directory" in str(error)


@pytest.mark.parametrize(
    ("optimizer", "data_parallel", "words"),
    [
        (Optimizer(offload="states", name="muon"), DataParallel(), "optimizer.name=muon reads whole momenta"),
        (
            Optimizer(offload="states"),
            DataParallel(method="diloco"),
            "method=diloco reads all master weights",
        ),
        (Optimizer(offload_dir="/tmp"), DataParallel(), "has no use without optimizer.offload=states"),
    ],
)
def test_what_does_not_go_together_is_refused(optimizer, data_parallel, words):
    with pytest.raises(ConfigError, match=words):
        check(RunConfig(optimizer=optimizer, data_parallel=data_parallel), 1)
