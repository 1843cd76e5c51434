"""A run ends where the validation loss no longer falls, and its best checkpoint becomes its model."""

from __future__ import annotations

import math
from unittest.mock import patch

import pytest
from safetensors.torch import load_file

from pyruntime.cli import main
from pyruntime.train import checkpoint_folder
from pyruntime.train.loop import Trainer
from pyruntime.train.run import run as train
from pyruntime.train.signals import StopRequest
from pyruntime.train.watching.lowest import LowestLoss
from tests.train import jobs


def test_equal_losses_and_those_that_are_not_finite_are_not_lower():
    lowest = LowestLoss(patience=3)
    seen = [lowest.saw(loss) for loss in (3.0, 2.0, 2.0, math.nan)]
    assert seen == [True, True, False, False] and not lowest.has_ended and lowest.loss == 2.0
    assert not lowest.saw(math.inf) and lowest.has_ended
    assert lowest.saw(1.0) and not lowest.has_ended
    never = LowestLoss(patience=0)
    assert not any(never.has_ended or never.saw(loss) for loss in [math.nan] * 9)


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """Runs `train` on one rank with given validation losses, one a step; returns its output."""
    text = tmp_path / "text.txt"
    text.write_text("one two three four five six seven\n" * 400)

    def train(losses, *flags):
        given = iter(losses)

        def validate(self):
            return {each.name: (next(given), 10) for each in self._corpus.sets}

        monkeypatch.setattr(Trainer, "validate", validate)
        sizes = "num_hidden_layers=1 hidden_size=32 num_attention_heads=2 num_key_value_heads=2"
        small = [f"--model.{each}" for each in [*sizes.split(), "intermediate_size=64"]]
        job = "batch_size=2 micro_batch_size=2 seq_len=32 steps=8 val_every=1 device=cpu"
        small += [f"--train.{each}" for each in job.split()]
        small += [f"--data.paths={text}", f"--output.run_dir={tmp_path / 'run'}", "--output.sample_tokens=0"]
        assert main(["train", *small, *flags]) == 0
        return capsys.readouterr().out

    return train


def steps_in(folder) -> list[int]:
    return [checkpoint_folder.step_of(path) for path in checkpoint_folder.complete(folder / "checkpoints")]


def test_a_run_ends_early_and_its_model_is_the_best(run, tmp_path):
    flags = ["--train.patience=2", "--checkpoint.keep_best=true", "--checkpoint.keep=1"]
    said = run([3.0, 2.0, 2.5, 2.25, 1.0], *flags)
    assert "Ended after step 4 of 8: the validation loss was not lower in 2 validations" in said
    assert "the lowest was 2.0000" in said and "the weights of step-000002" in said
    folder = tmp_path / "run"
    assert steps_in(folder) == [2, 4]
    written = load_file(folder / "model" / "model.safetensors")
    source = ["--source", str(folder / "checkpoints" / "step-000002"), "--target", str(tmp_path / "best")]
    assert main(["convert", *source]) == 0
    best = load_file(tmp_path / "best" / "model.safetensors")
    assert written.keys() == best.keys()
    assert all(written[name].equal(best[name].to(written[name].dtype)) for name in best)


def test_convert_says_that_another_checkpoint_is_better_than_the_newest(run, tmp_path, capsys):
    run([3.0, 2.0, 2.5], "--checkpoint.keep_best=true", "--train.steps=3")
    folder = tmp_path / "run"
    assert main(["convert", "--source", str(folder), "--target", str(tmp_path / "newest")]) == 0
    said = capsys.readouterr().out
    assert f"{folder}/checkpoints/step-000002 has a lower validation loss than step-000003; give it" in said
    assert "weights of step 3" in said
    best = str(folder / "checkpoints" / "step-000002")
    assert main(["convert", "--source", best, "--target", str(tmp_path / "best")]) == 0
    assert "lower validation loss" not in capsys.readouterr().out


def test_patience_goes_on_in_a_resumed_run(run, tmp_path):
    run([3.0, 2.0, 2.5], "--train.patience=3", "--train.steps=3")
    again = f"--checkpoint.resume={tmp_path / 'run'}"
    said = run([2.0, 2.25, 1.0], "--train.patience=3", again)
    assert "Ended after step 5 of 8" in said


def test_losses_that_are_not_finite_count_over_resumes_too(run, tmp_path):
    run([math.nan, math.nan], "--train.patience=3", "--train.steps=2")
    said = run([math.nan] * 4, "--train.patience=3", f"--checkpoint.resume={tmp_path / 'run'}")
    assert "Ended after step 3 of 8: the validation loss was not lower in 3 validations" in said
    assert "(train.patience); none was finite." in said


@pytest.mark.parametrize("losses, whose", [([2.5], "3"), ([2.5, 1.5], "5")], ids=["older", "last"])
def test_a_best_checkpoint_that_is_damaged_is_not_the_model(run, tmp_path, losses, whose):
    flags = ["--checkpoint.keep_best=true", "--checkpoint.keep=3", "--optimizer.lr=0.01"]
    run([3.0, 1.0, 2.0], *flags, "--train.steps=3", "--train.val_every=1")
    (file,) = (tmp_path / "run/checkpoints/step-000002").glob("rank-*.safetensors")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x40
    file.write_bytes(content)
    again, steps = f"--checkpoint.resume={tmp_path / 'run'}", f"--train.steps={3 + len(losses)}"
    said = run(losses, *flags, steps, again)
    assert f"{file} is damaged: its content is not what was saved" in said
    assert f"The model has the weights of step-00000{whose}, whose validation loss is" in said
    assert f"the checkpoint with the lowest, 1.0000, is damaged or not in {tmp_path / 'run'}." in said
    source = ["--source", str(tmp_path / f"run/checkpoints/step-00000{whose}")]
    assert main(["convert", *source, "--target", str(tmp_path / "same")]) == 0
    found, same = (load_file(tmp_path / name / "model.safetensors") for name in ("run/model", "same"))
    assert all(found[name].equal(same[name]) for name in same)


@pytest.mark.parametrize("keep", [1, 9])
def test_the_best_of_an_abandoned_branch_is_not_the_model(run, tmp_path, keep):
    flags = ["--checkpoint.keep_best=true", "--optimizer.lr=0.01"]
    run([3.0, 2.5, 0.5], *flags, "--train.steps=3", "--checkpoint.keep=9")
    again = f"--checkpoint.resume={tmp_path / 'run' / 'checkpoints' / 'step-000002'}"
    said = run([2.75, 2.0, 2.25], *flags, "--train.steps=5", f"--checkpoint.keep={keep}", again)
    assert "The model has the weights of step-000004, whose validation loss was the lowest." in said
    assert steps_in(tmp_path / "run") == ([4, 5] if keep == 1 else [1, 2, 3, 4, 5])


def test_a_run_whose_last_step_is_the_best_keeps_its_weights(run, tmp_path):
    said = run([3.0, 2.0, 1.0], "--checkpoint.keep_best=true", "--train.steps=3", "--train.patience=2")
    assert "Ended" not in said and "has the weights of" not in said and steps_in(tmp_path / "run") == [2, 3]


@pytest.mark.parametrize("mesh", [{"tp": 4}, {"tp": 2, "pp": 2}, {"tp": 2, "dp": 2}])
@pytest.mark.second_tier(but=["mesh1"])
def test_all_ranks_end_at_one_step(ranks, tmp_path, mesh):
    """A rate so small that no weight changes: no loss is lower than the first."""
    config = jobs.job(tmp_path, val_every=2, patience=2, batch_size=4, micro_batch_size=1)
    config = jobs.changed(config, "optimizer", lr=1e-12)
    config = jobs.changed(config, "parallel", **mesh)
    jobs.prepare(config)
    for steps in ranks.run(jobs.history, 4, config):
        assert [each.step for each in steps] == [1, 2, 3, 4, 5, 6]
        assert len({each.val_loss for each in steps[1::2]}) == 1


def run_of(group, config, losses):
    given = iter(losses)
    with patch.object(Trainer, "validate", lambda self: {self._corpus.sets[0].name: (next(given), 10)}):
        return train(config, "best", jobs.runtime(group, config), StopRequest())


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("mesh", [{"dp": 4, "zero": 3}, {"tp": 2, "pp": 2}, {"tp": 2, "cp": 2}], ids=str)
@pytest.mark.second_tier(but=["{'dp': 4, 'zero': 3}-0"])
def test_the_best_weights_of_all_ranks_become_the_model(ranks, tmp_path, mesh, rank):
    config = jobs.job(tmp_path, steps=4, seq_len=32, val_every=1, batch_size=8, dtype="bf16")
    config = jobs.changed(config, "parallel", **{"tp": 1} | mesh)
    config = jobs.changed(config, "checkpoint", keep_best=True, keep=1)
    if rank:
        config = jobs.changed(config, "lora", rank=rank)
    folder = ranks.run(run_of, 4, config, [3.0, 1.0, 2.0, 2.5])[0]
    assert steps_in(folder) == [2, 4]
    (written,) = (folder / ("adapter" if rank else "model")).glob("*.safetensors")
    saved = {}
    for step in (2, 4):
        source = ["--source", str(folder / "checkpoints" / f"step-{step:06d}")]
        assert main(["convert", *source, "--target", str(tmp_path / f"{step}")]) == 0
        saved[step] = load_file(tmp_path / f"{step}" / written.name)
    found = load_file(written)
    assert all(found[name].equal(tensor) for name, tensor in saved[2].items())
    assert not all(found[name].equal(tensor) for name, tensor in saved[4].items())


def test_replicas_that_are_apart_are_refused(tmp_path, capsys):
    method = ["--data_parallel.method=local_sgd", "--parallel.dp=2", "--parallel.tp=1", "--dry-run=2"]
    method += ["--train.batch_size=16", "--data_parallel.tau=4"]
    for asked in ("--train.patience=2", "--checkpoint.keep_best=true"):
        assert main(["train", *method, asked]) == 2
        assert "which no checkpoint holds; leave them out." in capsys.readouterr().err
