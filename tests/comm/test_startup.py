"""Before the first op: who is missing is named within the deadline, on every rank that is there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time

import pytest
import torch
import torch.distributed as dist

import pyruntime
from pyruntime.comm.launcher import check_launcher
from pyruntime.train.errors import ConfigError
from pyruntime.train.ranks import on_every_rank, on_rank_0
from tests.comm.test_reopening import free_port

DEADLINE_S = 2.0
OTHERS_S = 5.0
"""After the deadline, for finding out who it is, on a machine that does other things too."""


def stop_me(seconds: float) -> None:
    """This process is stopped now, and goes on after so long."""
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def error_of(work):
    """What it raised, and after how long."""
    start = time.monotonic()
    try:
        work()
    except (pyruntime.CommError, ConfigError) as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "nothing", "", time.monotonic() - start


def never_there_case(_):
    if os.environ["RANK"] == "1":
        time.sleep(DEADLINE_S + 1)
        return None
    return error_of(lambda: pyruntime.Runtime.start(deadline_s=DEADLINE_S))


def test_a_rank_that_is_not_started_is_named(ranks):
    kind, message, seconds = ranks.launch(never_there_case, 2, init=False)[0].value
    assert kind == "CommTimeout", message
    assert "Start-up, rank 0 waiting for rank 1" in message and "it has not started" in message
    assert seconds < DEADLINE_S + 1


def no_store_case(_, port):
    os.environ["MASTER_PORT"] = str(port)
    return error_of(lambda: pyruntime.Runtime.start(deadline_s=1.0))


def test_a_store_that_nobody_serves_is_named_by_its_address(ranks):
    port = free_port()
    kind, message, seconds = ranks.launch(no_store_case, 1, port, init=False)[0].value
    assert kind == "CommTimeout" and f"127.0.0.1:{port} (MASTER_ADDR:MASTER_PORT)" in message
    assert seconds < 2.5


def lost_case(_, how):
    """Rank 1 is gone, or stopped, between its first word and its process group."""
    real = dist.init_process_group

    def broken(*arguments, **options):
        if os.environ["RANK"] == "1" and how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if os.environ["RANK"] == "1":
            stop_me(DEADLINE_S + OTHERS_S + 1)
        real(*arguments, **options)

    dist.init_process_group = broken
    return error_of(lambda: pyruntime.Runtime.start(deadline_s=DEADLINE_S))


@pytest.mark.parametrize(
    ("how", "expected", "words"),
    [("killed", "PeerLost", "has ended"), ("stopped", "CommTimeout", "shows no sign of life")],
)
@pytest.mark.second_tier(but=["killed-PeerLost-has ended"])
def test_a_rank_lost_while_process_groups_are_made_is_named(ranks, how, expected, words):
    outcome = ranks.launch(lost_case, 2, how, init=False)[0]
    kind, message, seconds = outcome.value
    assert kind == expected and re.search(rf"rank 1 \(process \d+ on \S+\) {words}", message), message
    assert "Start-up, rank 0" in message
    assert seconds < DEADLINE_S + OTHERS_S


def work_case(_, how):
    """Rank 0 is stopped or killed while it works for all, or works for long. All have started by then."""

    def work():
        store.wait(["started/1", "started/2"])
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "stopped":
            stop_me(DEADLINE_S + OTHERS_S)
        else:
            time.sleep(2 * DEADLINE_S)
        return "done"

    with pyruntime.Runtime.start(deadline_s=DEADLINE_S) as runtime:
        group = pyruntime.comm.process_group(runtime.tp)
        store = dist.distributed_c10d._get_default_store()
        store.set(f"started/{dist.get_rank()}", "")
        return error_of(lambda: on_rank_0(group, "Building the corpus", work, str))


@pytest.mark.parametrize(
    ("how", "expected", "words", "at_most_s"),
    [
        ("killed", "PeerLost", "has ended", 2.0),
        ("stopped", "CommTimeout", "no sign of life for 2", DEADLINE_S + OTHERS_S),
        ("long", "nothing", "", 60.0),
    ],
)
@pytest.mark.second_tier(but=["killed-PeerLost-has ended-2.0"])
def test_others_wait_for_a_rank_that_works_and_for_no_other(ranks, how, expected, words, at_most_s):
    outcomes = ranks.launch(work_case, 3, how, init=False)
    for rank in (1, 2):
        kind, message, seconds = outcomes[rank].value
        assert kind == expected and words in message, message
        assert how == "long" or "waiting for rank 0" in message
        assert seconds < at_most_s
    # The same cause on both.
    assert len({outcomes[rank].value[1].split(" reports: ")[-1] for rank in (1, 2)}) == 1


def twice_case(group):
    try:
        pyruntime.Runtime.start(deadline_s=1.0)
    except ValueError as error:
        return str(error), dist.is_initialized()


def test_process_groups_that_are_there_are_left_alone(ranks):
    message, still_there = ranks.launch(twice_case, 1)[0].value
    assert "torch.distributed is initialized already" in message and still_there


def refusals_case(_):
    def work():
        if os.environ["RANK"] == "2":
            raise ConfigError("rank 2 does not see the folder.")
        return os.environ["RANK"]

    with pyruntime.Runtime.start(deadline_s=20.0) as runtime:
        group = pyruntime.comm.process_group(runtime.tp)
        assert on_every_rank(group, "Counting", lambda: group.rank()) == group.rank()
        return error_of(lambda: on_every_rank(group, "Opening the corpus", work))


def test_what_one_rank_refuses_all_refuse(ranks):
    for rank in ranks.launch(refusals_case, 3, init=False):
        assert rank.value[:2] == ("ConfigError", "rank 2 does not see the folder.")


@pytest.mark.parametrize(
    ("environment", "launcher"),
    [
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1"}, "srun has started 4 tasks"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "mpirun has started 2 tasks"),
        ({"PMI_SIZE": "3"}, "mpirun has started 3 tasks"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR, MASTER_PORT is not"),
    ],
)
def test_tasks_that_do_not_know_of_each_other_are_refused(environment, launcher):
    with pytest.raises(ValueError, match=launcher):
        check_launcher(environment)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},  # the script of a batch job, which is one process
        {"SLURM_STEP_NUM_TASKS": "1"},
        {"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "1", "PMI_SIZE": "2"},
    ],
)
def test_one_task_and_torchruns_ranks_are_taken(environment):
    check_launcher(environment)


def test_a_runtime_of_such_a_task_is_refused(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="would be a run of its own"):
        pyruntime.Runtime.start()


def serve_by_rank_0(port):
    """As without a launcher: in other tests the store outlives all ranks."""
    os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}


def late_first_op_case(_, port):
    """Rank 0, which serves the store, is killed before the first op of rank 1, which opens the group."""
    serve_by_rank_0(port)
    with pyruntime.Runtime.start(deadline_s=DEADLINE_S + OTHERS_S) as runtime:
        store = dist.distributed_c10d._get_default_store()
        if runtime.rank == 0:
            store.wait(["started"])
            os.kill(os.getpid(), signal.SIGKILL)
        store.set("started", "")
        time.sleep(1.0)  # the connections to rank 0 are closed by then
        return error_of(lambda: pyruntime.all_gather(torch.ones(2, 2), runtime.tp))


def test_a_store_that_is_gone_at_the_first_op_is_named(ranks):
    kind, message, seconds = ranks.launch(late_first_op_case, 2, free_port(), init=False)[1].value
    assert kind == "PeerLost" and re.search(r"rank 0\b[^:]* has ended", message), message
    assert seconds < OTHERS_S


def stopped_server_case(_, port):
    """Rank 0, which serves the store, is stopped between ops over dp and tp."""
    serve_by_rank_0(port)
    with pyruntime.Runtime.start(tp=2, dp=2, deadline_s=DEADLINE_S + OTHERS_S) as runtime:
        x = torch.ones(2, 2)
        for number in range(100):
            if runtime.rank == 0 and number == 3:
                stop_me(DEADLINE_S + 4 * OTHERS_S)
            # Ranks 1 and 2 wait for rank 0, and rank 3 for them.
            outcome = error_of(lambda: [pyruntime.all_gather(x, axis) for axis in (runtime.dp, runtime.tp)])
            if outcome[0] != "nothing":
                return outcome
    return None


@pytest.mark.second_tier
def test_a_stopped_rank_that_serves_the_store_is_named_by_all(ranks):
    for outcome in ranks.launch(stopped_server_case, 4, free_port(), init=False)[1:]:
        kind, message, _ = outcome.value
        assert kind == "CommTimeout" and re.match(
            r"(rank \d [^:]*reports: )?rank 0 \(.*\) is stopped", message
        )


def other_mesh_case(_):
    axes = {"dp": 2} if os.environ["RANK"] == "1" else {"tp": 2}
    try:
        pyruntime.Runtime.start(**axes, deadline_s=DEADLINE_S + OTHERS_S)
    except ValueError as error:
        return str(error)
    return None


def test_ranks_that_ask_for_different_meshes_are_named(ranks):
    for outcome in ranks.launch(other_mesh_case, 2, init=False):
        assert "Rank 0 was started for tp=2 by gloo, and rank 1" in outcome.value
        assert "for dp=2, tp=1 by gloo; start all ranks alike." in outcome.value
