"""Training is the same at every tp, the same again, and the same when it is interrupted and resumed; bad
steps end it, or are left out."""

import math
import signal
import time

import pytest
import torch

from pyruntime.train import checkpoint_folder
from pyruntime.train.errors import ConfigError, TrainingError
from pyruntime.train.signals import Stopped, StopRequest
from tests.train import jobs


def curve(steps, *names):
    return [[getattr(step, name) for step in steps] for name in names or ("loss",)]


def test_loss_curves_are_equal_at_tp_1_2_and_4(ranks, tmp_path):
    config = jobs.job(tmp_path)
    jobs.prepare(config)
    curves = {}
    for tp in (1, 2, 4):
        steps = ranks.run(jobs.history, tp, config)[0]
        assert [step.step for step in steps] == list(range(1, 21))
        validation = [step.val_loss for step in steps if step.val_loss is not None]
        assert len(validation) == 2
        curves[tp] = torch.tensor([*curve(steps, "loss", "grad_norm"), validation * 10])
    assert curves[1][0, -1] < curves[1][0, 0] - 1  # it learns
    for tp in (2, 4):
        torch.testing.assert_close(curves[tp], curves[1], rtol=0, atol=1e-4)


def test_all_ranks_measure_the_same_and_a_second_run_is_bitwise_the_same(ranks, tmp_path):
    config = jobs.changed(jobs.job(tmp_path, steps=6, dtype="bf16"), "comm", tier="chunked")
    jobs.prepare(config)
    first, second = (ranks.run(jobs.history, 2, config) for _ in range(2))
    names = ("loss", "grad_norm", "val_loss", "memory_bytes")
    assert curve(first[0], *names) == curve(first[1], *names)
    shares = [[step.exposed_comm_s / step.step_time_s for step in steps] for steps in first]
    assert shares[0] == pytest.approx(shares[1])
    assert curve(first[0], *names[:3]) == curve(second[0], *names[:3])
    assert all(step.exposed_comm_s > 0 for step in first[0])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.second_tier("bf16")
def test_a_resumed_run_goes_on_bitwise(ranks, tmp_path, dtype):
    config = jobs.changed(jobs.job(tmp_path, steps=8, dtype=dtype), "comm", tier="chunked")
    config = jobs.changed(config, "checkpoint", every_steps=5)
    folder = jobs.prepare(config)
    whole = ranks.run(jobs.history, 2, config)[0]
    saved = checkpoint_folder.complete(folder / checkpoint_folder.FOLDER)
    assert [path.name for path in saved] == ["step-000005", "step-000008"]
    rest = ranks.run(jobs.history, 2, config, saved[0])[0]
    assert [step.step for step in rest] == [6, 7, 8]
    assert curve(rest, "loss", "grad_norm", "lr", "val_loss") == curve(
        whole[5:], "loss", "grad_norm", "lr", "val_loss"
    )


def test_a_checkpoint_of_tp_2_is_taken_up_at_tp_1_and_4(ranks, tmp_path):
    config = jobs.changed(jobs.job(tmp_path, steps=7), "checkpoint", every_steps=4)
    folder = jobs.prepare(config)
    whole = ranks.run(jobs.history, 2, config)[0]
    saved = checkpoint_folder.complete(folder / checkpoint_folder.FOLDER)[0]
    states = {tp: ranks.run(jobs.full_state, tp, config, saved)[0] for tp in (2, 1, 4)}
    assert any(name.startswith("exp_avg.") for name in states[2])
    for tp in (1, 4):
        assert states[tp].keys() == states[2].keys()
        assert all(torch.equal(states[tp][name], states[2][name]) for name in states[2])
        resumed = ranks.run(jobs.history, tp, config, saved)
        jobs.check_curves(resumed, whole[4:])  # to 1e-4


def logged_slowly(group, config):
    """Rank 0 takes long for the record of each step, as on a slow disk, and the other one waits for it."""
    steps = []
    for step in jobs.trainer(group, config).fit():
        steps.append(step)
        if group.rank() == 0:
            time.sleep(0.2)
    return steps


def test_what_was_exposed_is_a_share_of_the_step(ranks, tmp_path):
    config = jobs.job(tmp_path, steps=5, val_every=0)
    jobs.prepare(config)
    for steps in ranks.run(logged_slowly, 2, config):
        for step in steps[1:]:
            assert 0.5 * step.step_time_s < step.exposed_comm_s < step.step_time_s
            assert sum(step.exposed_by_axis_s.values()) == pytest.approx(step.exposed_comm_s)


def stopped_by_rank_1(group, config, after=2):
    """Rank 1 alone is sent SIGTERM once it has shown step `after`."""
    stop = StopRequest()
    made = jobs.trainer(group, config, stop)
    steps = []
    try:
        for step in made.fit():
            steps.append(step.step)
            if step.step == after and group.rank() == 1:
                stop.signum = signal.SIGTERM
    except Stopped as stopped:
        return steps, stopped.signum, str(stopped)
    return steps, None, ""


@pytest.mark.parametrize("save", [True, False])
def test_a_signal_to_one_rank_stops_all_after_the_same_step(ranks, tmp_path, save):
    config = jobs.changed(jobs.job(tmp_path), "checkpoint", save_on_stop=save)
    folder = jobs.prepare(config)
    outcomes = ranks.run(stopped_by_rank_1, 2, config)
    assert outcomes[0] == outcomes[1]
    steps, signum, sentence = outcomes[0]
    assert (steps, signum) == ([1, 2, 3], signal.SIGTERM)
    assert sentence.startswith("Stopped by SIGTERM after step 3 of 20; ")
    found = [path.name for path in checkpoint_folder.complete(folder / checkpoint_folder.FOLDER)]
    assert found == (["step-000003"] if save else [])
    assert ("--checkpoint.resume" in sentence) == save


def test_a_signal_to_one_rank_behind_the_last_exchange_stops_all(ranks, tmp_path):
    config = jobs.job(tmp_path, steps=3)
    folder = jobs.prepare(config)
    outcomes = ranks.run(stopped_by_rank_1, 2, config, 3)
    sentence = (
        f"Stopped by SIGTERM after step 3 of 3; go on with --checkpoint.resume {folder} (it holds step 3)."
    )
    assert outcomes == [([1, 2, 3], signal.SIGTERM, sentence)] * 2


def what_is_saved(group, config, saved):
    made = jobs.trainer(group, config)
    before = made.what_is_saved()
    made.resume(saved)
    return before, made.what_is_saved()


def test_a_run_that_has_saved_nothing_yet_names_the_checkpoint_it_was_taken_up_from(ranks, tmp_path):
    config = jobs.job(tmp_path, steps=1)
    folder = jobs.prepare(config)
    ranks.run(jobs.history, 1, config)
    saved = checkpoint_folder.find(folder)
    other = jobs.changed(jobs.changed(config, "train", steps=2), "output", run_dir=str(tmp_path / "other"))
    ((before, after),) = ranks.run(what_is_saved, 1, other, saved)
    assert before == f"nothing was saved but the metrics in {tmp_path / 'other'}"
    assert after == f"go on with --checkpoint.resume {saved} (it holds step 1)"


def diverges(group, config):
    try:
        jobs.history(group, config)
    except TrainingError as error:
        return str(error)
    return ""


def test_a_loss_that_is_not_finite_ends_all_ranks_with_one_sentence(ranks, tmp_path):
    config = jobs.changed(jobs.job(tmp_path), "optimizer", lr=1e30, clip_grad_norm=0.0)
    jobs.prepare(config)
    first, second = ranks.run(diverges, 2, config)
    assert first == second
    assert first.startswith("Step ") and "so training stopped with the weights of step" in first
    assert "lower optimizer.lr=1e+30" in first


def with_bad_steps(group, config, factors, resume=None):
    """Trains with the gradient of some steps times `factors`, by step. Returns what the steps measured, and
    how many updates each parameter has had, or the sentence that ended the run."""
    made, steps = jobs.trainer(group, config), []
    if resume:
        made.resume(resume)
    made.model.norm.weight.register_hook(lambda grad: grad * factors.get(made.step + 1, 1.0))
    try:
        for each in made.fit():
            steps.append((each.step, each.loss, each.grad_norm, each.val_loss, each.skipped))
    except TrainingError as error:
        return steps, str(error)
    state = made.optimizer.state_dict()
    return steps, {int(count) for name, count in state.items() if name.startswith("steps.")}


@pytest.mark.parametrize(("zero", "dp"), [(0, 1), (1, 2), (3, 2)])
@pytest.mark.second_tier("1-2", "3-2")
def test_a_step_that_is_skipped_changes_nothing_and_is_counted(ranks, tmp_path, zero, dp):
    config = jobs.changed(jobs.job(tmp_path, steps=7, val_every=1), "optimizer", on_bad_step="skip")
    config = jobs.changed(jobs.changed(config, "parallel", dp=dp, zero=zero), "train", micro_batch_size=3)
    config = jobs.changed(config, "checkpoint", every_steps=4)
    folder, world = jobs.prepare(config), 2 * dp
    found = ranks.run(with_bad_steps, world, config, {3: math.nan, 6: math.nan})
    steps, counts = found[0]
    assert repr(found) == repr(found[:1] * world)
    assert [each[4] for each in steps] == [None, None, 1, None, None, 2, None] and counts == {5}
    assert math.isnan(steps[2][2]) and math.isfinite(steps[3][2])
    assert steps[2][3] == steps[1][3] != steps[3][3]  # validated with the weights of before
    saved = checkpoint_folder.complete(folder / checkpoint_folder.FOLDER)[0]
    assert checkpoint_folder.step_of(saved) == 4
    rest = ranks.run(with_bad_steps, world, config, {3: math.nan, 6: math.nan}, saved)[0]
    assert repr(rest) == repr((steps[4:], counts))


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.second_tier("False")
def test_a_spike_is_told_by_the_norms_of_the_steps_before(ranks, tmp_path, resumed):
    # Norms of so small a model vary by 5 from step to step.
    config = jobs.changed(jobs.job(tmp_path, steps=24, val_every=0), "optimizer", spike_factor=50.0)
    config = jobs.changed(config, "checkpoint", every_steps=21)
    folder, saved = jobs.prepare(config), None
    if resumed:  # behind the first spike, which is looked for when 20 steps have counted
        ranks.run(with_bad_steps, 2, jobs.changed(config, "train", steps=21), {})
        saved = checkpoint_folder.find(folder)
    early = {} if resumed else {5: 1e4}
    (_, said), other = ranks.run(with_bad_steps, 2, config, {**early, 22: 1e7}, saved)
    assert (_, said) == other
    assert (
        said.startswith("Step 22: the gradient norm ")
        and "training stopped with the weights of step 21" in said
    )
    assert "is above optimizer.spike_factor=50 times the " in said and "not finite" not in said
    skipping = jobs.changed(config, "optimizer", on_bad_step="skip")
    steps, counts = ranks.run(with_bad_steps, 2, skipping, {22: 1e7}, saved)[0]
    assert [each[0] for each in steps if each[4]] == [22] and counts == {23}


def test_a_run_that_skips_step_after_step_ends(ranks, tmp_path):
    config = jobs.changed(jobs.job(tmp_path), "optimizer", on_bad_step="skip")
    jobs.prepare(config)
    (steps, said), other = ranks.run(with_bad_steps, 2, config, dict.fromkeys(range(4, 99), math.inf))
    assert said == other[1] and len(steps) == 12
    assert (
        said.startswith("Step 13: the loss is ") and "and 10 steps in a row were skipped, so training" in said
    )
    assert "stopped with the weights of step 3; lower optimizer.lr" in said


def refused(group, config, checkpoint):
    try:
        jobs.history(group, config, checkpoint)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_foreign_checkpoint_is_refused_in_one_sentence(ranks, tmp_path):
    config = jobs.job(tmp_path, steps=1)
    folder = jobs.prepare(config)
    ranks.run(jobs.history, 2, config)
    saved = checkpoint_folder.find(folder)
    longer = jobs.changed(config, "train", steps=2)

    other = jobs.changed(longer, "model", hidden_size=32)
    assert ranks.run(refused, 2, other, saved)[0].endswith(
        "was saved with hidden_size=64, but the configuration asks for hidden_size=32; resume with what was "
        "saved, or start a new run."
    )
    lower = jobs.changed(longer, "train", dtype="bf16")
    assert "was saved with train.dtype=fp32" in ranks.run(refused, 2, lower, saved)[1]


def test_old_checkpoints_are_removed(ranks, tmp_path):
    config = jobs.changed(jobs.job(tmp_path, steps=5), "checkpoint", every_steps=1, keep=2)
    folder = jobs.prepare(config)
    ranks.run(jobs.history, 1, config)
    found = sorted(path.name for path in (folder / checkpoint_folder.FOLDER).iterdir())
    assert found == ["step-000004", "step-000005"]
