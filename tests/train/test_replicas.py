"""Replicas of the trainer that come and go: killed and started again, alone and below torchrun, and from
checkpoints; and what is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from pyruntime.cli import main
from pyruntime.train import run_folder, validate
from pyruntime.train.config import DataParallel, Parallel, RunConfig, Train
from pyruntime.train.errors import ConfigError
from pyruntime.train.replicas import job_of
from tests.cli.test_processes import finish, start, wait_for_steps
from tests.train import jobs

TAU = 4
SETTINGS = [
    "--data_parallel.tau",
    str(TAU),
    "--output.sample_tokens",
    "0",
]
SIZES = [
    "--config",
    "tiny",
    "--train.val_every",
    "0",
    "--train.val_sequences",
    "8",
    "--comm.deadline_s",
    "30",
]


@pytest.fixture
def service(tmp_path):
    """Starts the service of so many replicas; its address."""
    started = []

    def run(replicas: int, *options) -> str:
        command = ["members", "--replicas", replicas, "--port", 0, "--record", tmp_path / "record", *options]
        process = start(0, *command, cwd=tmp_path)
        started.append(process)
        line = process.stdout.readline()
        found = re.fullmatch(r"members of a run of \d+ replicas, quorum \d+, on port (\d+)\n", line)
        assert found, line + process.communicate()[1]
        return f"127.0.0.1:{found[1]}"

    run.processes = started
    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def replica(address, run_dir, steps, cwd, method="diloco", ranks=0, launcher_options=(), more=()):
    arguments = ["train", *SIZES, *SETTINGS, "--data_parallel.members", address, "--train.steps", steps]
    arguments += ["--data_parallel.method", method, "--output.run_dir", run_dir]
    return start(ranks, *arguments, *more, cwd=cwd, launcher_options=launcher_options)


def events(folder: Path) -> list[dict]:
    text = (folder / "record").read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def rounds(folder: Path) -> list[dict]:
    return [each for each in events(folder) if each["event"] == "round"]


def wait_for_rounds(folder: Path, count: int, process) -> None:
    end = time.monotonic() + 100
    while len(rounds(folder)) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)


def last_weights(run_dir: Path) -> bytes:
    return (run_dir / "model" / "model.safetensors").read_bytes()


def check_counted_once(folder: Path, of_rounds: int, without: int = 0) -> None:
    """without: rounds that counted without one of the two."""
    found = rounds(folder)
    assert [each["round"] for each in found] == list(range(of_rounds))
    counted = [block for each in found for block in each["blocks"].values()]
    assert len(counted) == len(set(counted))
    assert set(counted) == set(range(2 * of_rounds - without))


def check_came_back(folder: Path) -> None:
    """One was lost in the midst of the run, and another one entered: the quorum is 2."""
    kinds = [each["event"] for each in events(folder)]
    lost = kinds.index("lost")
    assert "enter" in kinds[lost:] and "round" in kinds[lost:]


@pytest.mark.second_tier
def test_a_replica_that_is_killed_and_started_again_goes_on_with_the_others(tmp_path, service):
    address, steps = service(2), 60
    folders = [tmp_path / "a", tmp_path / "b"]
    processes = [replica(address, folder, steps, tmp_path) for folder in folders]
    wait_for_steps(processes[1], folders[1], TAU + 1)
    os.killpg(processes[1].pid, signal.SIGKILL)
    processes[1].communicate()
    again = replica(address, folders[1], steps, tmp_path)
    for process in (processes[0], again):
        code, _, err = finish(process)
        assert code == 0, err
    assert service.processes[0].wait(20) == 0
    check_counted_once(tmp_path, steps // TAU)
    check_came_back(tmp_path)
    assert last_weights(folders[0]) == last_weights(folders[1])
    lines = [json.loads(line) for line in (folders[0] / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, steps + 1)), "no step of the other is lost"
    assert lines[-1]["loss"] < lines[0]["loss"] - 1


@pytest.mark.second_tier
def test_torchrun_starts_a_replica_of_two_ranks_anew(tmp_path, service):
    """A rank of it dies: the replica ends as strictly as ever, comes back, and the others go on. The first
    sum that it takes part in has nothing of its own."""
    address, steps = service(2), 60
    folders = [tmp_path / "a", tmp_path / "b"]
    processes = [
        replica(address, folder, steps, tmp_path, "co2", 2, launcher_options=["--max-restarts", "2"])
        for folder in folders
    ]
    wait_for_steps(processes[1], folders[1], TAU + 1)
    pid = processes[1].pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    for process in processes:
        code, _, err = finish(process)
        assert code == 0, err
    check_counted_once(tmp_path, steps // TAU, without=1)
    check_came_back(tmp_path)
    assert last_weights(folders[0]) == last_weights(folders[1])


def test_a_service_that_is_interrupted_says_what_follows(service):
    service(2)
    (process,) = service.processes
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 128 + signal.SIGINT
    assert err.startswith("pyruntime: Stopped by SIGINT before the run was over; its replicas end too")


@pytest.mark.parametrize("method", ["diloco", "co2"])
@pytest.mark.second_tier("co2")
def test_a_run_goes_on_from_the_checkpoints_of_its_replicas(tmp_path, service, method):
    """All of it is ended, service and replica; what that saved, and what had been dealt, is taken up."""
    more, run_dir = ["--checkpoint.every_steps", "8", "--checkpoint.resume", "auto"], tmp_path / "a"
    for _ in range(2):
        process = replica(service(1), run_dir, 4000, tmp_path, method, more=more)
        before = len(rounds(tmp_path))
        wait_for_rounds(tmp_path, before + 5, process)
        os.killpg(process.pid, signal.SIGKILL)
        service.processes[-1].kill()
        process.communicate()
    again = rounds(tmp_path)[before:]
    assert again[0]["round"] >= 2 and again[0]["round"] * TAU % 8 == 0
    assert [list(each["blocks"].values()) for each in again] == [[each["round"]] for each in again]
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"members": "host"}, r"data_parallel\.members: 'host' is no address; write HOST:PORT"),
        ({"method": "co2", "tau": "auto"}, r'members: tau="auto" is measured in a first round'),
        (
            {"method": "streaming_diloco"},
            "streaming_diloco uses averages within it; use one of co2, local_sgd",
        ),
        ({"tau": 7}, r"train\.steps=40 ends in the middle of a round of data_parallel\.tau=7 steps.* use 42"),
        (
            {"method": "every_step", "tau": "auto"},
            r"data_parallel\.members=h:1 needs replicas that do not synchronize",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(settings, sentence):
    chosen = dataclasses.replace(DataParallel(method="diloco", tau=4, members="h:1"), **settings)
    config = RunConfig(train=Train(steps=40), data_parallel=chosen)
    with pytest.raises(ConfigError, match=sentence):
        validate.check(config, 1)


def test_replicas_of_other_data_are_of_another_job(tmp_path):
    """As many tokens of another text, the same text in another order, other shares, other masks."""
    texts = [tmp_path / name for name in ("one.txt", "two.txt", "other.txt")]
    for path, letter in zip(texts, "abc", strict=True):
        path.write_text(letter * 5000)
    chosen = DataParallel(method="diloco", tau=4, members="h:1")
    base = jobs.changed(dataclasses.replace(jobs.job(tmp_path), data_parallel=chosen), "data", paths=())

    def job(*paths, **data):
        config = jobs.changed(base, "data", paths=tuple(map(str, paths)), **data)
        return json.loads(json.dumps(job_of(jobs.resolved(config), jobs.opened(config))))

    one, two, other = texts
    mine = job(one, two, weights=(1.0, 2.0))
    moved = tmp_path / "moved.txt"
    two.rename(moved)
    assert job(one, moved, weights=(1.0, 2.0)) == mine, "wherever the files lie"
    assert (mine["data_parallel.outer_lr"], mine["data_parallel.outer_momentum"]) == (0.7, 0.9)
    for what, key in (
        (job(one, other, weights=(1.0, 2.0)), "data.paths of"),
        (job(moved, one, weights=(1.0, 2.0)), "data.paths of"),
        (job(one, moved, weights=(2.0, 1.0)), "data.weights"),
        (job(one, moved, weights=(1.0, 2.0), document_masks=False), "data.document_masks"),
    ):
        assert [each for each in mine if what[each] != mine[each]] == [key]


@pytest.mark.parametrize("resume", ["", "elsewhere"])
def test_checkpoints_that_a_replica_does_not_go_on_with_are_not_in_its_way(tmp_path, resume):
    """It would remove them."""
    chosen = DataParallel(method="diloco", tau=4, members="h:1")
    config = jobs.changed(jobs.job(tmp_path), "output", run_dir=str(tmp_path / "run"))
    config = dataclasses.replace(config, data_parallel=chosen)
    start_at = tmp_path / "other" / "checkpoints" / "step-000004" if resume else None
    saved = tmp_path / "run" / "checkpoints" / "step-000008"
    saved.mkdir(parents=True)
    (tmp_path / "run" / "metrics.jsonl").write_text("")

    def make(config, start_at):
        with contextlib.ExitStack() as held:
            return run_folder.make(config, "tiny", start_at, held)

    assert make(config, start_at) == tmp_path / "run", "it died before it had saved anything"
    (saved / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"holds a run already; .* by --checkpoint.resume auto"):
        make(config, start_at)
    assert make(jobs.changed(config, "checkpoint", resume="auto"), saved) == tmp_path / "run"


def test_replicas_inside_a_replica_are_refused():
    chosen = DataParallel(method="diloco", tau=4, members="h:1")
    config = RunConfig(
        train=Train(steps=40, micro_batch_size=1),
        data_parallel=chosen,
        parallel=Parallel(dp=4, dp_replicate=2),
    )
    with pytest.raises(ConfigError, match=r"parallel\.dp_replicate=2 makes some in one job"):
        validate.check(config, 4)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--replicas", "2", "--quorum", "3"], "--quorum=3 is more than --replicas=2"),
        (["--replicas", "0"], "--replicas must be at least 1"),
        (["--replicas", "1", "--port", "99999"], "--port=99999 is not a TCP port; use one up to 65535"),
        (["--replicas", "1", "--port", "0", "--host", "nosuch.invalid"], "--host=nosuch.invalid cannot be"),
        (["--replicas", "1", "--port", "0", "--host", "192.0.2.1"], "--host=192.0.2.1 cannot be used"),
    ],
)
def test_a_service_that_makes_no_sense_is_refused(capsys, arguments, sentence):
    assert main(["members", *arguments]) == 2
    assert sentence in capsys.readouterr().err


def saved_in_fragments(group, config):
    made = jobs.trainer(group, config)
    list(made.fit())
    made.close()


def resumed_in_fragments(group, config, saved):
    try:
        jobs.trainer(group, config).resume(saved)
    except ConfigError as error:
        return str(error)
    return ""


def test_another_number_of_fragments_is_refused_by_its_name(ranks, tmp_path):
    config = jobs.job(tmp_path, steps=4, val_every=0, micro_batch_size=1)
    config = jobs.changed(config, "model", num_hidden_layers=3)
    config = jobs.changed(config, "parallel", dp=2)
    config = jobs.changed(config, "data_parallel", method="streaming_diloco", tau=4, fragments=2)
    folder = jobs.prepare(config)
    ranks.run(saved_in_fragments, 4, config)
    saved = folder / "checkpoints" / "step-000004"
    other = jobs.changed(config, "data_parallel", fragments=3)
    for sentence in ranks.run(resumed_in_fragments, 4, other, saved):
        assert sentence == (
            f"checkpoint.resume: {saved} was saved with data_parallel.fragments=2, but the configuration "
            "asks for data_parallel.fragments=3."
        )
