"""A whole run leaves what it promises, and its model is a Hugging Face checkpoint for any tp."""

import dataclasses
import errno
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch

from pyruntime.llama import load_hf
from pyruntime.train import config_file, samples
from pyruntime.train.config import Model
from pyruntime.train.data.tokenizer import ByteTokenizer, load_beside
from pyruntime.train.errors import ConfigError, TrainingError
from pyruntime.train.metrics import read
from pyruntime.train.run import run
from pyruntime.train.signals import StopRequest
from tests.train import jobs

REQUIRED = {
    "step", "loss", "grad_norm", "lr", "tokens_per_second", "step_time_s", "exposed_comm_s", "memory_bytes",
}  # fmt: skip
# The process is named once the ranks have met in a transport, which depends on the tests before.
NAMED = r"rank {}(?: \([^()]*process \d+ on [^()]+\))?"
RUN_DIR_UNSEEN = rf"output\.run_dir: {NAMED.format(1)} does not see run, which {NAMED.format(0)} has made;"


def whole_run(group, config):
    return run(config, "job", jobs.runtime(group, config), StopRequest())


def logits(group, folder, ids):
    with torch.no_grad():
        return load_hf(folder, group)(ids)


def refusal(group, config):
    try:
        whole_run(group, config)
    except ConfigError as error:
        return str(error)
    return ""


def on_a_full_disk(group, config, what):
    """What is said where `what` cannot be written."""

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    name = {"metrics.jsonl": "MetricsFile", "samples.jsonl": "_close"}[what]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(TrainingError) as refused:
        patch.setattr(f"pyruntime.train.run.{name}", full)
        whole_run(group, config)
    return str(refused.value)


@pytest.fixture(scope="module")
def finished(request, tmp_path_factory):
    """The folder and configuration of a run at tp=2, which was told its tokens in place of its steps."""
    ranks = request.getfixturevalue("ranks")
    config = jobs.job(tmp_path_factory.mktemp("job"), steps=4, val_every=2)
    of_tokens = jobs.changed(config, "train", steps=200, tokens=3 * 6 * 33 + 1)
    (folder, _) = ranks.run(whole_run, 2, of_tokens)
    return folder, config


@pytest.mark.parametrize("what", ["metrics.jsonl", "samples.jsonl"])
@pytest.mark.second_tier("samples.jsonl")
def test_a_disk_that_is_full_at_either_end_of_a_run_is_named(ranks, tmp_path, what):
    (outcome,) = ranks.launch(on_a_full_disk, 1, jobs.job(tmp_path, steps=1), what)
    message = outcome.value
    saved = "go on with" if what == "samples.jsonl" else "nothing was saved"
    assert f"{what} cannot be written: No space left on device (" in message and saved in message


def test_what_the_run_was_is_in_its_folder(finished):
    said = json.loads((finished[0] / "resolved.json").read_text())
    assert said["mesh"]["tp"] == 2 and said["config"]["train"]["steps"] == 4


def test_metrics_hold_every_step_with_the_promised_keys(finished):
    lines = read(finished[0] / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line.keys() >= REQUIRED for line in lines)
    assert ["val_loss" in line for line in lines] == [False, True, False, True]
    for line in lines:
        assert line["tokens_per_second"] == pytest.approx(6 * 33 / line["step_time_s"])
        assert 0 < line["exposed_comm_s"] < line["step_time_s"]
        assert line["memory_bytes"] > 50e6


def test_everything_that_was_promised_is_there(finished):
    folder, config = finished
    assert config_file.load(folder / "config.toml") == config
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [each["prompt"] for each in samples.read(folder)] == ["def "]
    card = json.loads((folder / "scorecard.json").read_text())
    assert card["ranks"] == 2 and card["bytes_per_step"] > 0 and 0 < card["exposed_share"] < 1
    assert {use["op"] for use in card["tiers"]} >= {"all_gather_matmul", "matmul_reduce_scatter"}
    assert "Overlap scorecard" in (folder / "scorecard.txt").read_text()


def test_the_model_loads_at_any_tp(ranks, finished):
    ids = torch.randint(256, (2, 17))
    found = {tp: ranks.run(logits, tp, finished[0] / "model", ids)[0] for tp in (1, 2, 4)}
    torch.testing.assert_close(found[2], found[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[4], found[1], rtol=1e-5, atol=1e-5)


def test_a_run_starts_from_a_model_and_keeps_what_it_knows(ranks, finished, tmp_path):
    folder, config = finished
    last = read(folder / "metrics.jsonl")[-1]["loss"]
    config = dataclasses.replace(config, model=Model(init_from=str(folder / "model")))
    config = jobs.changed(config, "output", run_dir=str(tmp_path / "run"))
    (again, _) = ranks.run(whole_run, 2, jobs.changed(config, "train", steps=4))
    first = read(again / "metrics.jsonl")[0]["loss"]
    fresh = read(folder / "metrics.jsonl")[0]["loss"]
    assert first < (fresh + last) / 2


def test_a_finished_run_is_not_overwritten(ranks, finished):
    messages = ranks.run(refusal, 2, finished[1])
    assert messages[0] == messages[1]
    assert "holds a run already; name another folder, or go on with it by" in messages[0]


def test_a_finished_run_is_lengthened(ranks, finished, tmp_path):
    config = finished[1]
    folder = shutil.copytree(finished[0], tmp_path / "copy")  # other tests read the run as it ended
    longer = dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, steps=6),
        checkpoint=dataclasses.replace(config.checkpoint, resume=str(folder)),
        output=dataclasses.replace(config.output, run_dir=""),
    )
    assert ranks.run(whole_run, 2, longer) == [folder, folder]
    assert [line["step"] for line in read(folder / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_a_run_is_lengthened_in_its_folder_whatever_its_path(ranks, finished, tmp_path):
    config = jobs.job(tmp_path, steps=2)
    (folder, _) = ranks.run(whole_run, 2, config)
    (tmp_path / "link").symlink_to(folder)
    longer = jobs.changed(jobs.changed(config, "train", steps=3), "checkpoint", resume=str(folder))
    again = tmp_path / "link"
    assert ranks.run(whole_run, 2, jobs.changed(longer, "output", run_dir=str(again))) == [again, again]
    assert [line["step"] for line in read(folder / "metrics.jsonl")] == [1, 2, 3]


def test_a_vocabulary_larger_than_the_bytes_is_sampled_and_loaded(ranks, tmp_path):
    config = jobs.changed(jobs.job(tmp_path, steps=1), "model", vocab_size=2048)
    (folder, _) = ranks.run(whole_run, 2, jobs.changed(config, "output", sample_tokens=32))
    assert [each["prompt"] for each in samples.read(folder)] == ["def "]
    assert isinstance(load_beside(folder / "model", 2048), ByteTokenizer)


def no_sample(group, config):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pyruntime.train.samples.generate_steps", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            whole_run(group, config)


def test_plot_and_scorecard_are_there_though_sampling_fails(ranks, tmp_path):
    config = jobs.job(tmp_path, steps=1)
    ranks.run(no_sample, 2, config)
    there = {path.name for path in Path(config.output.run_dir).iterdir()}
    assert there >= {"loss.png", "scorecard.json", "scorecard.txt", "model"} and "samples.jsonl" not in there


def test_runs_are_numbered(tmp_path, monkeypatch):
    from pyruntime.train.run_folder import first_free

    monkeypatch.chdir(tmp_path)
    assert [first_free(Path("runs"), "main") for _ in range(2)] == [Path("runs/main-1"), Path("runs/main-2")]


def test_a_pipe_in_the_run_folder_is_refused_and_not_waited_for(ranks, tmp_path):
    config = jobs.changed(jobs.job(tmp_path), "checkpoint", resume="auto")
    Path(config.output.run_dir).mkdir()
    os.mkfifo(Path(config.output.run_dir) / "metrics.jsonl")
    for message in ranks.run(refusal, 2, config):
        assert "metrics.jsonl is neither a file nor a folder; remove it" in message


def test_too_little_text_is_refused_on_every_rank(ranks, tmp_path):
    config = jobs.job(tmp_path)
    Path(config.data.paths[0]).write_text("short")
    messages = ranks.run(refusal, 2, config)
    assert messages[0] == messages[1]
    assert "train.seq_len=33 needs at least 34 tokens on both sides" in messages[0]


def refusal_elsewhere(group, config, folders):
    """Each rank in a folder of its own, as on hosts that share none."""
    before = os.getcwd()
    os.chdir(folders[group.rank()])
    try:
        return refusal(group, config)
    finally:
        os.chdir(before)


def test_hosts_without_a_common_run_folder_are_refused_on_every_rank(ranks, tmp_path):
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        folder.mkdir()
    config = jobs.changed(jobs.job(tmp_path), "output", run_dir="run")
    messages = ranks.run(refusal_elsewhere, 2, config, folders)
    assert messages[0] == messages[1]
    assert re.search(RUN_DIR_UNSEEN, messages[0])
    assert "name one on shared storage" in messages[0]


def test_a_run_goes_on_by_itself_and_starts_where_there_is_nothing_to_go_on_with(ranks, tmp_path):
    config = jobs.changed(jobs.job(tmp_path, steps=2), "checkpoint", resume="auto")
    (folder, _) = ranks.run(whole_run, 2, config)
    first = [(line["step"], line["loss"]) for line in read(folder / "metrics.jsonl")]
    shutil.rmtree(folder / "checkpoints")  # killed before the first one
    ranks.run(whole_run, 2, config)
    assert [(line["step"], line["loss"]) for line in read(folder / "metrics.jsonl")] == first
    (folder / "checkpoints" / "step-000003.partial").mkdir()  # and while one was written
    ranks.run(whole_run, 2, jobs.changed(config, "train", steps=3))
    assert [line["step"] for line in read(folder / "metrics.jsonl")] == [1, 2, 3]
    assert [path.name for path in (folder / "checkpoints").glob("*.partial")] == []


@pytest.mark.parametrize("damage", ["config.json", "model.safetensors"])
def test_a_damaged_model_to_start_from_is_refused(ranks, finished, tmp_path, damage):
    folder = tmp_path / "model"
    folder.mkdir()
    for path in (finished[0] / "model").iterdir():
        content = path.read_bytes()
        (folder / path.name).write_bytes(content[: len(content) // 2] if path.name == damage else content)
    config = dataclasses.replace(jobs.job(tmp_path), model=Model(init_from=str(folder)))
    messages = ranks.run(refusal, 2, config)
    assert messages[0] == messages[1]
    assert damage in messages[0] and "\n" not in messages[0]
