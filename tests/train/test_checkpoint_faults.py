"""What is left and what is said when writing a checkpoint is cut short: a lost rank, a full disk, a crash."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import time
from pathlib import Path

import pytest

import pyruntime
from pyruntime.train import checkpoint_folder, disk
from pyruntime.train.disk import publish_folder
from pyruntime.train.errors import TrainingError
from pyruntime.train.saving import saver
from pyruntime.train.saving.saver import Saver
from pyruntime.train.saving.staging import Staging
from pyruntime.train.saving.storage import Reader
from tests.comm.test_startup import stop_me
from tests.ranks import without_processes
from tests.train import jobs

DEADLINE_S, OTHERS_S = 2.0, 5.0


def last_words(config):
    """What the job ends with on this rank, and how long after its last step."""
    with pyruntime.Runtime.start(deadline_s=DEADLINE_S) as runtime:
        made, at = jobs.trainer_over(runtime, config), time.monotonic()
        try:
            for _ in made.fit():
                at = time.monotonic()
        except (pyruntime.CommError, TrainingError) as error:
            return type(error).__name__, str(error), time.monotonic() - at
    return "nothing", "", 0.0


def lost_case(_, config, lost, how):
    """Rank `lost` is killed or stopped when the second and last checkpoint is written."""
    real, saves = Staging.write, [0]

    def broken(staging, path):
        saves[0] += 1
        if os.environ["RANK"] == lost and saves[0] == 2:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            stop_me(DEADLINE_S + OTHERS_S + 1)
        return real(staging, path)

    Staging.write = broken
    return last_words(config)


@pytest.mark.parametrize(
    ("how", "lost", "expected", "words"),
    [
        ("killed", "0", "PeerLost", "waiting for rank 0: its process "),
        ("killed", "1", "PeerLost", "waiting for rank 1: its process "),
        ("stopped", "1", "CommTimeout", "waiting for rank 1: no sign of life for "),
    ],
)
@pytest.mark.second_tier(but=["killed-0-PeerLost-waiting for rank 0: its process "])
def test_a_rank_lost_while_a_checkpoint_is_written_is_named_on_all_others(
    ranks, tmp_path, how, lost, expected, words
):
    config = jobs.changed(jobs.job(tmp_path, steps=2), "checkpoint", every_steps=1)
    folder = jobs.prepare(config)
    outcomes = ranks.launch(lost_case, 4, config, lost, how, init=False)
    told = [outcome.value for rank, outcome in enumerate(outcomes) if str(rank) != lost]
    for kind, message, seconds in told:
        assert (kind, words in without_processes(message)) == (expected, True), message
        assert "Writing the checkpoint" in message and "step-000002" in message
        assert seconds < DEADLINE_S + OTHERS_S
    assert len({message.split(" reports: ")[-1] for _, message, _ in told}) == 1, told
    assert checkpoint_folder.newest(folder).name == "step-000001"


def slow_case(_, config, how):
    """The disk of rank 1 takes longer than the deadline."""

    def slow(self, *arguments):
        if os.environ["RANK"] == "1":
            time.sleep(DEADLINE_S + 1.5)
        return real(self, *arguments)

    storage = {"write": Staging, "read_data": Reader}[how]
    real = getattr(storage, how)
    setattr(storage, how, slow)
    with pyruntime.Runtime.start(deadline_s=DEADLINE_S) as runtime:
        made = jobs.trainer_over(runtime, config)
        for _ in made.fit():
            pass
        made.resume(made.saved)
        return made.step


@pytest.mark.parametrize("how", ["write", "read_data"])
@pytest.mark.second_tier("write")
def test_a_rank_with_a_slow_disk_is_waited_for_past_the_deadline(ranks, tmp_path, how):
    config = jobs.job(tmp_path, steps=1)
    jobs.prepare(config)
    outcomes = ranks.launch(slow_case, 2, config, how, init=False)
    assert [outcome.value for outcome in outcomes] == [1, 1], outcomes


def full_case(_, config):
    """The disk takes no more after the first checkpoint."""
    real, saves = Saver.begin, [0]

    def filling(saver, facts):
        saver.finish()
        saves[0] += 1
        if saves[0] == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
        real(saver, facts)

    Saver.begin = filling
    return last_words(config)


def test_a_full_disk_is_named_and_leaves_the_checkpoint_before(ranks, tmp_path):
    config = jobs.changed(jobs.job(tmp_path, steps=3), "checkpoint", every_steps=1)
    folder = jobs.prepare(config)
    for outcome in ranks.launch(full_case, 2, config, init=False):
        kind, message, _ = outcome.value
        assert kind == "TrainingError", message
        assert f"{folder}/checkpoints/step-000002 cannot be written: " in message
        assert "cannot be written: File too large (" in message
        assert "MB are free there)" in message
        assert f"go on with --checkpoint.resume {folder}, which holds step-000001." in message
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-000001"]


def unwritable_case(_, config):
    """Rank 1 cannot write its file."""
    real = Staging.write

    def broken(staging, path):
        if os.environ["RANK"] == "1":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(staging, path)

    Staging.write = broken
    return last_words(config)


def test_what_another_rank_cannot_write_is_said_on_all(ranks, tmp_path):
    config = jobs.changed(jobs.job(tmp_path, steps=1), "checkpoint", every_steps=1)
    folder = jobs.prepare(config)
    for outcome in ranks.launch(unwritable_case, 2, config, init=False):
        kind, message, _ = outcome.value
        assert kind == "TrainingError", message
        assert f"{folder}/checkpoints/step-000001 cannot be written: " in message
        assert "Input/output error" in message and "ConfigError" not in message
        assert "nothing is saved" in message


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_cannot_flush_folders_takes_checkpoints(tmp_path, monkeypatch, number):
    real = os.fsync

    def fsync(descriptor):
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_dir():
            raise OSError(number, os.strerror(number))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    disk.flush(tmp_path)
    (tmp_path / "file").write_text("x")
    disk.flush(tmp_path / "file")


@pytest.mark.parametrize(("number", "folder"), [(errno.EIO, True), (errno.EINVAL, False)])
def test_what_does_not_reach_the_disk_is_refused(tmp_path, monkeypatch, number, folder):
    def fsync(_):
        raise OSError(number, os.strerror(number))

    (tmp_path / "file").write_text("x")
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match=os.strerror(number)):
        disk.flush(tmp_path if folder else tmp_path / "file")


def test_a_checkpoint_reaches_the_disk_before_its_name(tmp_path, monkeypatch):
    calls = []

    def record(name, function):
        def recorded(*arguments, **options):
            first = arguments[0]
            path = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else os.fspath(first)
            calls.append((name, Path(path).name))
            return function(*arguments, **options)

        return recorded

    partial, final = tmp_path / "step-000002.partial", tmp_path / "step-000002"
    partial.mkdir()
    for name in ("a.safetensors", "run.json"):
        (partial / name).write_text("x")
    monkeypatch.setattr(os, "fsync", record("fsync", os.fsync))
    monkeypatch.setattr(os, "rename", record("rename", os.rename))
    publish_folder(partial, final)
    assert calls == [
        ("fsync", "a.safetensors"),
        ("fsync", "run.json"),
        ("fsync", "step-000002.partial"),
        ("rename", "step-000002.partial"),
        ("fsync", tmp_path.name),
    ]
    partial.mkdir()
    publish_folder(partial, final)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"] and not any(final.iterdir())


def test_a_checkpoint_that_cannot_be_removed_is_told_and_is_not_left_in_part(tmp_path, monkeypatch, caplog):
    saved = tmp_path / "step-000002"

    def killed(path, **_):
        assert path != saved
        if path.exists():
            (path / "run.json").unlink()

    saved.mkdir()
    for name in ("run.json", "rank-00000.safetensors"):
        (saved / name).write_text("x")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        disk.remove_folder(saved)
    (left,) = tmp_path.iterdir()
    assert left.name == "step-000002.removed.partial"
    assert f"{left} stays: not all of its files can be removed" in caplog.text
    assert checkpoint_folder.complete(tmp_path) == []
    disk.remove_folder(left)
    assert not any(tmp_path.iterdir())
    saved.mkdir()
    monkeypatch.setattr(os, "rename", lambda *_: (_ for _ in ()).throw(OSError(errno.EACCES, "No access")))
    disk.remove_folder(saved)
    assert f"{saved} stays: No access" in caplog.text and saved.is_dir()


def hung_case(_, config, where):
    """The disk of rank 0 takes nothing more in the midst of what `where` names."""
    setattr(saver, where, lambda *_: time.sleep(30))
    saver.DISK_MAY_TAKE_S = 1.5
    return last_words(config)


@pytest.mark.parametrize("where", ["publish_folder", "remove_folder"])
@pytest.mark.second_tier("publish_folder")
def test_a_disk_that_hangs_after_the_files_are_written_is_told(ranks, tmp_path, where):
    config = jobs.changed(jobs.job(tmp_path, steps=2), "checkpoint", every_steps=1, keep=1)
    jobs.prepare(config)
    first, second = (outcome.value for outcome in ranks.launch(hung_case, 2, config, where, init=False))
    assert first[0] == "TrainingError" and "the disk has taken nothing for 2 s" in first[1], first
    assert second[0] == "PeerLost" and "the disk has taken nothing for 2 s" in second[1], second
