"""Checkpoints are written while training goes on: what is written is what was copied, and what fails is
said."""

import contextlib
import errno
import hashlib
import itertools
import json
import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pyruntime.comm.launcher import grace_s
from pyruntime.train import checkpoint_folder, disk, manifest, metrics
from pyruntime.train import run as train_run
from pyruntime.train.config import Checkpoint
from pyruntime.train.errors import ConfigError, TrainingError
from pyruntime.train.progress import Progress
from pyruntime.train.run import run
from pyruntime.train.saving import staging
from pyruntime.train.saving.staging import Piece, Staging
from pyruntime.train.signals import StopRequest, why_cut_off
from tests.train import jobs


def pieces_of(tensors):
    return [Piece(name, each.dtype, tuple(each.shape), (0,) * each.dim()) for name, each in tensors.items()]


def random_tensors():
    return {
        "u8": torch.randint(256, (7,), dtype=torch.uint8),
        "bf16": torch.randn(3, 5).bfloat16(),
        "a scalar": torch.randn(()),
        "f64": torch.randn(1, 2, 3).double(),
        "i64": torch.randint(10**12, (3,)),
        "columns": torch.randn(6, 4).t(),
    }


@pytest.mark.parametrize("at_once", [13, 2**24])
def test_what_was_copied_is_written_and_safetensors_reads_it(tmp_path, monkeypatch, at_once):
    monkeypatch.setattr(staging, "AT_ONCE", at_once)
    first, second = random_tensors(), random_tensors()
    kept = Staging(pieces_of(first), torch.device("cpu"))
    for tensors in (first, second):
        expected = {name: each.clone() for name, each in tensors.items()}
        kept.copy(tensors)
        for each in tensors.values():
            each.zero_()  # the next step
        found = kept.write(tmp_path / "a.safetensors")
        content = (tmp_path / "a.safetensors").read_bytes()
        assert found == manifest.Checksum(len(content), hashlib.sha256(content).hexdigest())
        assert kept.written == len(content)
        read = load_file(tmp_path / "a.safetensors")
        assert read.keys() == expected.keys()
        for name, each in expected.items():
            assert read[name].dtype == each.dtype and torch.equal(read[name], each), name


def test_a_file_is_brought_to_the_disk_piece_by_piece(tmp_path, monkeypatch):
    kept, at = Staging([Piece("a", torch.uint8, (2000,), (0,))], torch.device("cpu")), []
    monkeypatch.setattr(staging, "AT_ONCE", 100)
    monkeypatch.setattr(staging, "FLUSH_EVERY", 500)
    monkeypatch.setattr(os, "fsync", lambda _: at.append(kept.written))
    kept.write(tmp_path / "a.safetensors")
    assert at[-1] == kept.written == (tmp_path / "a.safetensors").stat().st_size
    assert all(after - before <= 600 for before, after in itertools.pairwise([0, *at]))


def test_a_tensor_that_has_changed_its_shape_is_not_taken_for_the_one_that_was_planned():
    kept = Staging([Piece("a", torch.float32, (3, 4), (0, 0))], torch.device("cpu"))
    with pytest.raises(RuntimeError, match=r"a was to be saved as \[3, 4\] .* but it is \[4\]"):
        kept.copy({"a": torch.randn(4)})


def while_it_is_written(group, config, until):
    """The first checkpoint's file is not begun before step `until` has been taken. Steps that had been taken
    when it was."""
    real, may_write, taken, begun = Staging.write, threading.Event(), [0], []

    def late(kept, path):
        assert may_write.wait(60)
        begun.append(taken[0])
        return real(kept, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Staging, "write", late)
        made = jobs.trainer(group, config)
        losses = []
        for step in made.fit():
            losses.append(step.loss)
            taken[0] = step.step
            if step.step == until:
                may_write.set()
    return losses, begun


def test_steps_are_taken_while_a_checkpoint_is_written_and_it_holds_the_step_it_was_begun_after(
    ranks, tmp_path
):
    config = jobs.changed(jobs.job(tmp_path, steps=8, dtype="bf16"), "checkpoint", every_steps=3)
    folder = jobs.prepare(config)
    outcomes = ranks.run(while_it_is_written, 2, config, 5)
    for _, begun in outcomes:
        assert begun[0] == 5 and len(begun) == 3  # after steps 3, 6 and 8
    saved = checkpoint_folder.complete(folder / checkpoint_folder.FOLDER)
    assert [path.name for path in saved] == ["step-000003", "step-000006", "step-000008"]
    rest = ranks.run(jobs.history, 2, config, saved[0])[0]
    assert jobs.curve(rest, "loss") == outcomes[0][0][3:]


def when_a_write_fails(group, config, rank):
    """The second checkpoint cannot be written by that rank. Steps that were taken, and what ended them."""
    real, saves, steps = Staging.write, [0], []

    def broken(kept, path):
        saves[0] += 1
        if saves[0] == 2 and group.rank() == rank:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(kept, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Staging, "write", broken)
        made = jobs.trainer(group, config)
        try:
            steps += [step.step for step in made.fit()]
        except TrainingError as error:
            return steps, str(error), made.saved
    return steps, "", made.saved


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.second_tier("0")
def test_a_checkpoint_that_could_not_be_written_ends_all_ranks_before_the_next_one(ranks, tmp_path, rank):
    config = jobs.changed(jobs.job(tmp_path, steps=60, val_every=0), "checkpoint", every_steps=20)
    folder = jobs.prepare(config)
    first, second = ranks.run(when_a_write_fails, 2, config, rank)
    assert first == second
    _, message, saved = first
    assert message.startswith(
        f"The checkpoint {folder}/checkpoints/step-000040 cannot be written: No space left"
    )
    assert message.endswith(f"go on with --checkpoint.resume {folder}, which holds step-000020.")
    assert saved.name == "step-000020"
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-000020"]


def when_it_is_told(group, config):
    """Steps that were taken where a checkpoint after step 2 fails, known before the end of step 4."""

    def broken(_kept, _path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    made, steps = jobs.trainer(group, config), []
    due = made._is_due
    made._is_due = lambda every, step=None: due(every, step) or (every == 50 and made.step == 2)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(TrainingError, match="No space left"):
        patch.setattr(Staging, "write", broken)
        for step in made.fit():
            steps.append(step.step)
            if step.step == 3:
                made._saver._write._thread.join(30)
    return steps


def test_it_is_told_after_the_step_in_which_it_became_known(ranks, tmp_path):
    config = jobs.changed(jobs.job(tmp_path, steps=60, val_every=0), "checkpoint", every_steps=50)
    jobs.prepare(config)
    for steps in ranks.run(when_it_is_told, 2, config):
        assert steps in ([1, 2, 3], [1, 2, 3, 4])  # 3, where it was known within that step


def damaged_run(group, config):
    try:
        return run(config, "job", jobs.runtime(group, config), StopRequest())
    except ConfigError as error:
        return str(error)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_run_goes_on_by_itself_with_the_newest_checkpoint_that_is_whole(ranks, tmp_path, capfd):
    config = jobs.changed(jobs.job(tmp_path, steps=6), "checkpoint", resume="auto", every_steps=2, keep=3)
    (folder, _) = ranks.run(damaged_run, 2, config)
    whole = [(line["step"], line["loss"]) for line in metrics.read(folder / metrics.FILE_NAME)]
    flip(folder / "checkpoints" / "step-000006" / "rank-00001.safetensors")
    (folder / "checkpoints" / "step-000004" / "run.json").write_text("{")
    assert ranks.run(damaged_run, 2, config) == [folder, folder]
    assert [(line["step"], line["loss"]) for line in metrics.read(folder / metrics.FILE_NAME)] == whole
    for step in (2, 4, 6):  # saved anew, and whole
        checkpoint = folder / "checkpoints" / f"step-{step:06d}"
        for name, saved in manifest.read(checkpoint).items():
            assert manifest.checksum(checkpoint / name) == saved
    for path in folder.glob("checkpoints/*/rank-00000.safetensors"):
        flip(path)
    messages = ranks.run(damaged_run, 2, config)
    assert messages[0] == messages[1]
    assert "step-000002/rank-00000.safetensors is damaged: its content is not what was saved" in messages[0]
    named = jobs.changed(config, "checkpoint", resume=str(folder))
    assert "step-000006/rank-00000.safetensors is damaged" in ranks.run(damaged_run, 2, named)[0]


def resumed_where_a_rank_sees_damage(group, config, rank):
    """Rank `rank` alone finds the newest checkpoint damaged, as on a disk of its own. Where the run went
    on."""
    real, made = checkpoint_folder.read, jobs.trainer(group, config)
    saved = checkpoint_folder.complete(Path(config.output.run_dir) / "checkpoints")[::-1]

    def read(path):
        if path == saved[0] and group.rank() == rank:
            raise manifest.refusal(path, "run.json", "it is cut off")
        return real(path)

    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_folder, "read", read)
        found = train_run._resume(made, saved, said.append)
    made.close()
    return found.name, made.step, said


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.second_tier("0")
def test_what_one_rank_finds_damaged_is_passed_over_on_all(ranks, tmp_path, rank):
    config = jobs.changed(jobs.job(tmp_path, steps=4), "checkpoint", every_steps=2)
    jobs.prepare(config)
    ranks.run(jobs.history, 2, config)
    first, second = ranks.run(resumed_where_a_rank_sees_damage, 2, config, rank)
    assert first == second and first[:2] == ("step-000002", 2)
    assert "step-000004/run.json is damaged: it is cut off" in first[2][0]


def test_a_run_folder_is_of_one_run_at_a_time(ranks, tmp_path):
    config = jobs.job(tmp_path, steps=1)
    folder = jobs.prepare(config)
    with contextlib.ExitStack() as held:
        disk.in_use(folder, held, "output.run_dir")
        messages = ranks.run(damaged_run, 2, config)
        assert messages[0] == messages[1]
        assert f"output.run_dir: {folder} is in use by process {os.getpid()} on host " in messages[0]
        assert messages[0].endswith("; wait until it has ended, or name another folder.")
        assert {path.name for path in folder.iterdir()} == {"lock"}
    assert ranks.run(damaged_run, 2, config) == [folder, folder]


@pytest.mark.parametrize("name", ["vocab_size", "num_hidden_layers"])
@pytest.mark.second_tier("vocab_size")
def test_a_checkpoint_of_another_model_is_no_damage(ranks, tmp_path, name):
    config = jobs.job(tmp_path, steps=1)
    ranks.run(damaged_run, 2, config)
    other = jobs.changed(jobs.changed(config, "model", **{name: 384}), "checkpoint", resume="auto")
    for message in ranks.run(damaged_run, 2, other):
        assert (
            f"was saved with {name}=" in message and f"but the configuration asks for {name}=384;" in message
        )


def test_every_part_of_a_checkpoint_is_a_number_or_json(ranks, tmp_path):
    config = jobs.job(tmp_path, steps=1)
    (folder, _) = ranks.run(damaged_run, 2, config)
    (checkpoint,) = folder.glob("checkpoints/step-*")
    assert {path.suffix for path in checkpoint.iterdir()} == {".json", ".safetensors"}
    for path in checkpoint.glob("*.json"):
        json.loads(path.read_text())
    named = [load_file(path).keys() for path in checkpoint.glob("*.safetensors")]
    assert all(one & other for one, other in itertools.combinations(named, 2))  # blocks of the same tensors


def saved(folder: Path, step: int) -> Path:
    """A checkpoint without tensors."""
    path = folder / checkpoint_folder.FOLDER / checkpoint_folder.name_of(step)
    path.mkdir(parents=True)
    facts = path / checkpoint_folder.FACTS_FILE
    facts.write_text(
        checkpoint_folder.to_json(checkpoint_folder.CheckpointFacts(step, "fp32", {"hidden_size": 8}))
    )
    manifest.write(path, {facts.name: manifest.checksum(facts)})
    return path


@pytest.mark.parametrize("gone", [checkpoint_folder.FACTS_FILE, manifest.MANIFEST, "all of it"])
def test_a_checkpoint_that_lost_a_file_is_told_and_not_passed_over(tmp_path, gone):
    older, newest = saved(tmp_path, 1), saved(tmp_path, 2)
    wanted = checkpoint_folder.read(older)
    for path in newest.iterdir():
        if gone in (path.name, "all of it"):
            path.unlink()
    for asked in (tmp_path, newest):
        found = checkpoint_folder.find(asked)
        assert found == newest
        with pytest.raises(manifest.DamagedError, match=str(newest)):
            checkpoint_folder.read_matching(found, wanted)
    found, why = checkpoint_folder.to_go_on_with(tmp_path, wanted)
    assert found == [older] and str(newest) in why


def test_a_damaged_checkpoint_past_the_saved_step_does_not_stay_the_newest(tmp_path):
    for step, is_whole in ((2, False), (4, True), (6, True), (8, True), (9, False), (12, True)):
        folder = tmp_path / checkpoint_folder.name_of(step)
        folder.mkdir()
        if is_whole:
            (folder / checkpoint_folder.FACTS_FILE).write_text("{}")
    left = checkpoint_folder.left_over(tmp_path, 8, Checkpoint(keep=2))
    assert [checkpoint_folder.step_of(path) for path in left] == [9, 12, 4]


def slowly_saved(group, config):
    """What is said of it by a run below torchrun, which leaves ranks no second, and whose disk is slow."""
    real, said = Staging.write, []

    def slow(kept, path):
        threading.Event().wait(0.2)
        return real(kept, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Staging, "write", slow)
        patch.setenv("TORCHELASTIC_RUN_ID", "any")
        patch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "0")
        patch.setattr(Progress, "say", lambda _, line: said.append(line))
        run(config, "job", jobs.runtime(group, config), StopRequest())
    return [line for line in said if "would be cut off" in line]


@pytest.mark.parametrize("save_on_stop", [True, False])
@pytest.mark.second_tier("True")
def test_a_save_that_takes_longer_than_torchrun_waits_is_told_once(ranks, tmp_path, save_on_stop):
    config = jobs.changed(jobs.job(tmp_path, steps=8), "checkpoint", every_steps=2, save_on_stop=save_on_stop)
    told, none = ranks.run(slowly_saved, 2, config)
    assert not none and len(told) == save_on_stop, told
    for line in told:
        assert "saving step 2 took 0." in line and "torchrun kills ranks 0 s after SIGTERM" in line, line


def test_the_sentence_about_a_slow_save_has_the_numbers():
    assert why_cut_off((100, 41.0), 30.0).endswith(
        "set TORCH_ELASTIC_SHUTDOWN_TIMEOUT=90 for torchrun, and have SIGTERM sent 110 s before a time limit."
    )
    assert [why_cut_off(*each) for each in (((100, 29.0), 30.0), (None, 30.0), ((100, 41.0), None))] == [
        ""
    ] * 3
    found = [{}, {"TORCHELASTIC_RUN_ID": "a"}]
    found.append(found[1] | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "220"})
    assert [grace_s(each) for each in found] == [None, 30.0, 220.0]
