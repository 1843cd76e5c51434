"""A job whose rank is killed comes back by itself, and ends with what it would have ended with."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from pyruntime.cli import main
from tests.cli.test_processes import LIMIT_S, finish, start, wait_for_steps

SIZES = ["--config", "tiny", "--train.steps", "40", "--train.val_every", "20", "--output.sample_tokens", "0"]
AGAIN = "again  its launcher has started this job anew, which "


def kill_rank_1(process):
    """Of the launcher's workers of now."""
    for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        if b"\0RANK=1\0" in b"\0" + Path(f"/proc/{child}/environ").read_bytes():
            os.kill(int(child), signal.SIGKILL)
            return
    raise AssertionError("there is no rank 1")


def wait_for(process, there):
    end = time.monotonic() + LIMIT_S
    while not there():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)


def run_command(_group, *argv):
    return main(list(argv))


@pytest.mark.second_tier
def test_a_killed_job_restarts_and_ends_as_if_nothing_had_been(tmp_path, ranks):
    arguments = [*SIZES, "--checkpoint.every_steps", "15"]
    undisturbed = ["train", *arguments, "--output.run_dir", str(tmp_path / "undisturbed")]
    for ended in ranks.launch(run_command, 2, *undisturbed, init=False, timeout=LIMIT_S):
        assert (ended.exit_code, ended.value) == (0, 0), ended

    run_dir = tmp_path / "runs" / "tiny-1"
    process = start(
        2,
        "train",
        *arguments,
        "--comm.deadline_s",
        "60",
        cwd=tmp_path,
        launcher_options=["--max-restarts", "2"],
    )
    wait_for_steps(process, run_dir, 2)
    kill_rank_1(process)  # before the first checkpoint
    wait_for(process, lambda: (run_dir / "checkpoints" / "step-000015").exists())
    kill_rank_1(process)  # behind it
    code, out, err = finish(process)
    assert code == 0, err
    assert re.findall(f"^{AGAIN}(.*)$", out, re.MULTILINE) == [
        "begins anew in runs/tiny-1",
        "goes on with runs/tiny-1/checkpoints/step-000015",
    ]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["tiny-1"]
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 41))
    whole = [
        json.loads(line) for line in (tmp_path / "undisturbed" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["loss"] for line in lines] == [line["loss"] for line in whole]
    weights = [folder / "model" / "model.safetensors" for folder in (run_dir, tmp_path / "undisturbed")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def live(_group, port, *argv):
    """One life of the only rank of a job, whose launcher serves its store on that port."""
    os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="none")
    return main(list(argv))


def lives(ranks, *argv):
    """How two lives of a job end, and what they print."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = [ranks.launch(live, 1, store.port, *argv, init=False, timeout=LIMIT_S)[0] for _ in range(2)]
    return [(life.value, life.output) for life in found]


def test_a_job_that_is_started_anew_goes_on_with_nothing_but_its_own(ranks, tmp_path):
    run_dir = str(tmp_path / "run")
    short = ["train", *SIZES, "--data.paths", str(Path(__file__).parent), "--train.val_every", "0"]
    new = [*short, "--train.steps", "2", "--output.run_dir", run_dir, "--checkpoint.every_steps", "1"]
    (first, _), (second, said) = lives(ranks, *new)
    assert (first, second) == (0, 0), said
    assert f"{AGAIN}goes on with {run_dir}/checkpoints/step-000002\n" in said
    for code, said in lives(ranks, *new):  # another job, in its folder by mistake
        assert code == 2 and "holds a run already" in said
    branch = ["--checkpoint.resume", f"{run_dir}/checkpoints/step-000001", "--train.steps", "1"]
    (first, _), (second, said) = lives(ranks, *short, *branch)
    assert (first, second) == (0, 0), said
    assert f"{AGAIN}goes on with {run_dir}/checkpoints/step-000001\n" in said


def test_a_newest_checkpoint_that_does_not_say_what_it_is_is_left_with_a_word(ranks, tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    sizes = [*SIZES, "--data.paths", str(Path(__file__).parent), "--train.val_every", "0"]
    command = ["train", *sizes, "--output.run_dir", str(tmp_path / "run"), "--checkpoint.every_steps", "1"]
    command += ["--checkpoint.resume", "auto", "--train.steps", "2"]
    for damaged in (False, True):
        if damaged:
            (folder / "step-000002" / "run.json").write_text("{")
        (ended,) = ranks.launch(run_command, 1, *command, init=False, timeout=LIMIT_S)
        assert (ended.exit_code, ended.value) == (0, 0), ended
        words = f"{folder}/step-000002/run.json is damaged: "
        assert (words in ended.output) is damaged
        assert (f"The run goes on with {folder}/step-000001.\n" in ended.output) is damaged
