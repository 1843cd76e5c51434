"""The pool of ranks (tests/ranks.py): its results, and its errors when a rank raises, dies or hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pyruntime.comm.exchange import barrier
from tests.ranks import ROOT, RankError


def summed(group, x):
    x = x + group.rank()
    dist.all_reduce(x, group=group)
    return x


def process_id(group):
    return os.getpid()


def fails_on_one(group, guilty):
    if group.rank() == guilty:
        raise ValueError(f"no luck on {group.rank()}")
    dist.barrier(group=group)  # never completes: the others wait for the guilty rank


def fails_late(group):
    time.sleep(0.0 if group.rank() == 1 else 1.0)
    raise ValueError(f"rank {group.rank()}")


def meets(group, of_all):
    return barrier(dist.group.WORLD if of_all else group, "Meeting", f"of rank {group.rank()}")


def hangs_on_one(group):
    if group.rank() == 1:
        sleeps_for_ever()
    return group.rank()


def sleeps_for_ever():
    while True:
        time.sleep(1)


def dies_on_one(group, number):
    store = dist.distributed_c10d._get_default_store()
    store.add("under way", 1)  # a rank that has not met the others yet would fail, too
    if group.rank() == 0:
        while store.add("under way", 0) < group.size():
            time.sleep(0.01)
        print("last words", flush=True)
        os.kill(os.getpid(), number)
    return group.rank()


def unpicklable(group):
    return lambda: None


class PickyError(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


def raises_unpicklable(group):
    raise PickyError("this", "that")


def environment(group):
    return group, os.environ["RANK"], os.environ["WORLD_SIZE"], dist.is_initialized()


def initialises_itself(group):
    dist.init_process_group("gloo")
    x = torch.ones(1)
    dist.all_reduce(x)
    dist.destroy_process_group()
    return x.item()


def is_gone(pid: int) -> bool:
    """Whether no process has this pid, or only a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.second_tier("8")
def test_results_come_in_rank_order_and_groups_have_the_size_asked_for(ranks, world_size):
    x = torch.randn(5, dtype=torch.float64)
    for result in ranks.run(summed, world_size, x):
        torch.testing.assert_close(result, world_size * x + sum(range(world_size)))


def test_processes_live_on_from_call_to_call(ranks):
    first = ranks.run(process_id, 4)
    assert len(set(first)) == 4
    assert ranks.run(process_id, 3) == first[:3]


def test_an_exception_names_its_rank_and_carries_the_traceback(ranks):
    began = time.monotonic()
    with pytest.raises(RankError, match=r"rank 2 of 3 raised in tests\.test_ranks\.fails_on_one") as caught:
        ranks.run(fails_on_one, 3, 2)
    assert time.monotonic() - began < 20  # the ranks that wait for rank 2 are not waited for
    assert caught.value.rank == 2
    assert isinstance(caught.value.__cause__, ValueError)
    assert "ValueError: no luck on 2" in str(caught.value)
    assert 'raise ValueError(f"no luck' in str(caught.value)
    assert "--- rank 0: still running" in str(caught.value)
    assert "in fails_on_one" in str(caught.value).partition("--- rank 0")[2]


def test_the_rank_that_failed_first_is_blamed(ranks):
    with pytest.raises(RankError) as caught:
        ranks.run(fails_late, 2)
    assert caught.value.rank == 1


def test_expected_errors_are_returned(ranks):
    first, second = ranks.run(fails_late, 2, expect_errors=True)
    assert isinstance(first, ValueError) and isinstance(second, ValueError)
    assert str(first) == "rank 0" and str(second) == "rank 1"


def test_ranks_of_which_some_have_met_before_hear_of_each_other(ranks):
    ranks.run(fails_late, 2, expect_errors=True)  # so the next ranks are new
    assert ranks.run(meets, 2, False) == ["of rank 0"] * 2
    assert ranks.run(meets, 4, True, timeout=20.0) == ["of rank 0"] * 4


def test_a_hang_shows_the_stack_and_the_next_call_has_new_ranks(ranks):
    before = ranks.run(process_id, 4)
    with pytest.raises(RankError, match=r"rank 1 of 2 was still running after 0.5 s") as caught:
        ranks.run(hangs_on_one, 2, timeout=0.5)
    assert "in sleeps_for_ever" in str(caught.value)
    assert "--- rank 0: finished" in str(caught.value)
    assert all(is_gone(pid) for pid in before)
    assert not set(before) & set(ranks.run(process_id, 4))


@pytest.mark.parametrize("expect_errors", [False, True])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
@pytest.mark.second_tier("9-False", "11-True")
def test_a_death_is_named_and_the_next_call_has_new_ranks(ranks, number, expect_errors):
    with pytest.raises(RankError, match="rank 0 of 2 died") as caught:
        ranks.run(dies_on_one, 2, number, expect_errors=expect_errors)
    assert f"killed by {number.name}" in str(caught.value)
    assert "last words" in str(caught.value)
    assert len(ranks.run(process_id, 2)) == 2


def test_a_result_that_cannot_be_pickled_is_an_error(ranks):
    with pytest.raises(RankError, match="pickle"):
        ranks.run(unpicklable, 1)


def test_an_exception_that_cannot_be_pickled_keeps_its_message(ranks):
    (error,) = ranks.run(raises_unpicklable, 1, expect_errors=True)
    assert isinstance(error, RankError)
    assert "PickyError: this and that" in str(error)


def test_a_function_without_a_name_is_refused(ranks):
    with pytest.raises(ValueError, match="top level of a module"):
        ranks.run(lambda group: None, 1)


def test_a_world_size_beyond_the_pool_is_refused(ranks):
    with pytest.raises(ValueError, match="world_size=9"):
        ranks.run(process_id, 9)


def test_launched_ranks_exit_and_tell_how(ranks):
    killed, survivor = ranks.launch(dies_on_one, 2, signal.SIGKILL)
    assert killed.exit_code == -signal.SIGKILL
    assert killed.output == "last words"
    assert killed.value is None and killed.error is None
    assert (survivor.exit_code, survivor.value) == (0, 1)


def test_launched_ranks_that_raise_exit_with_one(ranks):
    (result,) = ranks.launch(fails_late, 1)
    assert result.exit_code == 1
    assert isinstance(result.error, ValueError)
    assert "ValueError: rank 0" in result.output


def test_launched_ranks_can_initialise_torch_distributed_themselves(ranks):
    assert [r.value for r in ranks.launch(environment, 2, init=False)] == [
        (None, "0", "2", False),
        (None, "1", "2", False),
    ]
    results = ranks.launch(initialises_itself, 3, init=False)
    assert [(r.exit_code, r.value) for r in results] == [(0, 3.0)] * 3


def test_a_launched_rank_that_hangs_is_killed(ranks):
    with pytest.raises(RankError, match="rank 1 of 2 was still running"):
        ranks.launch(hangs_on_one, 2, timeout=5.0)


def test_ranks_die_with_pytest(tmp_path):
    program = """
import time
from tests.ranks import Ranks
from tests.test_ranks import process_id
print(*Ranks(0).run(process_id, 2), flush=True)
time.sleep(60)
"""
    command = [sys.executable, "-c", program]
    environment = os.environ | {"TMPDIR": str(tmp_path)}  # a killed process cannot remove its files
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2 and not any(is_gone(pid) for pid in pids)
        parent.kill()
    end = time.monotonic() + 10
    while not all(is_gone(pid) for pid in pids):
        assert time.monotonic() < end, f"ranks {pids} outlived the process that started them"
        time.sleep(0.05)
