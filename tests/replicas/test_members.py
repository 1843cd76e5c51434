"""Processes that are killed at every moment of a round, and others that come: what is left of them computes
what its definition says of the rounds that counted."""

from __future__ import annotations

import concurrent.futures
import signal

import numpy as np
import pytest
import torch

from pyruntime.comm import PeerLost
from pyruntime.replicas import co2, diloco, local_sgd, overlapped_local_sgd, slowmo, streaming_diloco
from pyruntime.replicas.donated import OuterState
from pyruntime.replicas.member import Expelled, Member
from pyruntime.replicas.outer_optimizer import OuterOptimizer
from tests.replicas import processes
from tests.replicas.processes import TAU

ROUNDS = 8


def check(tmp_path, outcomes, method, survivors) -> list[list[int]]:
    shares = processes.shares(tmp_path)
    assert len(shares) == ROUNDS
    of_rounds = [sorted(blocks.values()) for blocks in shares]
    exact = processes.expected(shares, method)
    for rank in survivors:
        assert outcomes[rank].error is None, outcomes[rank].output
        found, _ = outcomes[rank].value
        np.testing.assert_allclose(found, exact, rtol=0, atol=1e-12)
        np.testing.assert_array_equal(found, outcomes[survivors[0]].value[0])
    counted = [block for blocks in of_rounds for block in blocks]
    assert sorted(counted) == list(range(len(counted))), "each block counts once, also of those that died"
    return of_rounds


def in_words(each) -> str:
    return getattr(each, "name", str(each))


UNDISTURBED = [diloco(TAU), slowmo(TAU), co2(TAU, lr=0.9, momentum=0.4)]


@pytest.mark.parametrize("method", UNDISTURBED, ids=in_words)
@pytest.mark.second_tier(but=["co2"])
def test_undisturbed_replicas_are_the_method_by_its_definition(ranks, tmp_path, method):
    with processes.service(tmp_path, 3) as address:
        outcomes = ranks.launch(processes.replica, 3, tmp_path, address, method, ROUNDS, {}, (), init=False)
    of_rounds = check(tmp_path, outcomes, method, [0, 1, 2])
    assert of_rounds == [[3 * number, 3 * number + 1, 3 * number + 2] for number in range(ROUNDS)]


MOMENTS = [
    ("steps", 4),  # the first of a round
    ("steps", 5),  # in its midst
    ("tells arrived", 2),
    ("sums", 9),  # some of it has gone
    ("tells done", 2),  # all of it has
]


@pytest.mark.parametrize(("moment", "number"), MOMENTS, ids=str)
@pytest.mark.second_tier(but=["tells arrived-2"])
def test_one_that_is_killed_leaves_and_one_comes_in_its_place(ranks, tmp_path, moment, number):
    """No step of the others is lost: the round in which it died counts, with theirs."""
    deaths = {1: (moment, number)}
    with processes.service(tmp_path, 3) as address:
        outcomes = ranks.launch(
            processes.replica, 4, tmp_path, address, diloco(TAU), ROUNDS, deaths, (3,), init=False
        )
    assert outcomes[1].exit_code == -signal.SIGKILL
    of_rounds = check(tmp_path, outcomes, diloco(TAU), [0, 2, 3])
    sizes = [len(blocks) for blocks in of_rounds]
    assert min(sizes) == 2 and sizes[-1] == 3, sizes
    assert outcomes[3].value[1] < ROUNDS


LATE = [
    (co2(TAU, lr=0.9, momentum=0.4), "steps", 4),  # beside the first sum
    (co2(TAU, lr=0.9, momentum=0.4), "sums", 9),
    (co2(TAU, lr=0.9, momentum=0.4), "tells done", 2),
    (overlapped_local_sgd(TAU, momentum=0.5), "steps", 5),
]


@pytest.mark.parametrize(("method", "moment", "number"), LATE, ids=in_words)
@pytest.mark.second_tier(but=["co2-tells done-2"])
def test_one_that_is_killed_beside_a_sum_that_is_on_its_way(ranks, tmp_path, method, moment, number):
    """The others take it again, from the snapshots that they keep, while they take their steps; one that
    comes adds nothing to the first sum that it takes."""
    deaths = {1: (moment, number)}
    with processes.service(tmp_path, 3) as address:
        outcomes = ranks.launch(
            processes.replica, 4, tmp_path, address, method, ROUNDS, deaths, (3,), init=False
        )
    assert outcomes[1].exit_code == -signal.SIGKILL
    of_rounds = check(tmp_path, outcomes, method, [0, 2, 3])
    sizes = [len(blocks) for blocks in of_rounds]
    assert min(sizes) == 2 and sizes[-1] == 3, sizes


@pytest.mark.parametrize("method", [diloco(TAU), co2(TAU)], ids=in_words)
@pytest.mark.second_tier("co2")
def test_donor_and_one_that_comes_are_killed_on_the_way(ranks, tmp_path, method):
    """The first dies in its steps, its successor takes the state from one that dies while it sends, and
    another one dies while it takes it."""
    gives = ("gives", 2)  # the first of these that is asked
    deaths = {0: ("steps", 2), 1: gives, 2: gives, 3: gives, 4: ("takes", 1)}
    with processes.service(tmp_path, 4) as address:
        outcomes = ranks.launch(
            processes.replica, 6, tmp_path, address, method, ROUNDS, deaths, (4, 5), init=False
        )
    killed = [rank for rank, outcome in enumerate(outcomes) if outcome.exit_code == -signal.SIGKILL]
    assert len(killed) == 3 and {0, 4} < set(killed), killed
    check(tmp_path, outcomes, method, sorted({1, 2, 3, 5} - set(killed)))


def test_several_die_at_once_and_the_last_one_goes_on(ranks, tmp_path):
    deaths = {0: ("tells arrived", 2), 1: ("sums", 9), 2: ("steps", 5)}
    with processes.service(tmp_path, 4) as address:
        outcomes = ranks.launch(
            processes.replica, 4, tmp_path, address, diloco(TAU), ROUNDS, deaths, (), init=False
        )
    of_rounds = check(tmp_path, outcomes, diloco(TAU), [3])
    assert [len(blocks) for blocks in of_rounds][-1] == 1


def test_a_service_that_does_not_answer_is_named():
    with pytest.raises(PeerLost, match=r"127\.0\.0\.1:9 \(--data_parallel\.members\) does not answer"):
        Member("127.0.0.1:9", "mine", {"tau": 1, "rounds": 1}, deadline_s=2.0)


def test_a_service_that_ends_ends_the_replicas_in_a_sentence(tmp_path):
    module = torch.nn.Linear(2, 2)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        with processes.service(tmp_path, 2, ends=False) as address:
            mine = Member(address, "mine", {"tau": 1, "rounds": 1}, deadline_s=2.0)
            outer = OuterOptimizer(module, None, local_sgd(1), sums=mine)
            coming = pool.submit(mine.join, OuterState(outer), *outer.travelling(), 0, [0])
            processes.wait_until(lambda: '"come"' in (tmp_path / "record").read_text())
        with pytest.raises(PeerLost, match=rf"at {address} is lost: "):
            coming.result()
    outer.close()


def test_a_replica_of_other_settings_is_put_out_in_a_sentence_that_names_the_key(tmp_path):
    module = torch.nn.Linear(2, 2)
    with processes.service(tmp_path, 2, ends=False) as address:
        jobs = [{"tau": 1, "rounds": 1, "train.seq_len": length} for length in (32, 64)]
        mine, other = (Member(address, f"of {job['train.seq_len']}", job, deadline_s=5.0) for job in jobs)
        mine._tell({"type": "hello", "label": "mine", "replica": "mine", "place": 0, "places": 1, "step": 0,
                    "address": ["127.0.0.1", 1], "job": jobs[0], "weights": 0, "deal": [0]})  # fmt: skip
        outer = OuterOptimizer(module, None, local_sgd(1), sums=other)
        sentence = "it was started with train.seq_len=64, but the replicas here with train.seq_len=32"
        with pytest.raises(Expelled, match=sentence):
            other.join(OuterState(outer), *outer.travelling(), 0, [0])
        outer.close()
        mine.close()


REFUSED = [
    (
        streaming_diloco(4, fragments=1),
        "streaming_diloco uses averages within it; use one of co2, local_sgd",
    ),
    (co2(), 'tau="auto" is measured in a first round'),
]


def test_methods_that_replicas_cannot_come_to_are_refused(tmp_path):
    with processes.service(tmp_path, 1, ends=False) as address:
        mine = Member(address, "mine", {"tau": 4, "rounds": 1})
        for method, sentence in REFUSED:
            with pytest.raises(ValueError, match=sentence):
                OuterOptimizer(torch.nn.Linear(2, 2), None, method, sums=mine)
        mine.close()


def test_a_sum_is_taken_beside_the_steps(tmp_path):
    """Nothing of this thread's is needed for it: it comes while that is in its steps."""

    def train(address: str, name: str) -> None:
        mine = Member(address, name, {"tau": 2, "rounds": 2, "late": 1}, deadline_s=10.0)
        module = torch.nn.Linear(300, 300)
        for parameter in module.parameters():
            torch.nn.init.zeros_(parameter)  # both have the same
        outer = OuterOptimizer(module, None, co2(2), sums=mine)
        assert mine.join(OuterState(outer), *outer.travelling(), 0, [0])
        outer.begin_anew(mine.is_behind)
        for _ in range(2):
            outer.step()
        processes.wait_until(mine._flight.done)
        outer.step()
        outer.step()
        outer.finish()
        outer.close()

    with processes.service(tmp_path, 2) as address, concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(train, [address] * 2, ["one", "other"]))


STOPPED = [(diloco(TAU), "steps", 5), (diloco(TAU), "sums", 9), (co2(TAU), "tells done", 2)]


@pytest.mark.parametrize(("method", "moment", "number"), STOPPED, ids=in_words)
@pytest.mark.second_tier(but=["diloco-sums-9"])
def test_one_that_is_stopped_is_left_behind_by_the_deadline_and_told(ranks, tmp_path, method, moment, number):
    deaths = {1: (moment, number)}
    with processes.service(tmp_path, 3, deadline_s=3.0) as address:
        outcomes = ranks.launch(
            processes.replica,
            3,
            tmp_path,
            address,
            method,
            ROUNDS,
            deaths,
            (),
            signal.SIGSTOP,
            init=False,
        )
    of_rounds = check(tmp_path, outcomes, method, [0, 2])
    assert [len(blocks) for blocks in of_rounds][-1] == 2
    assert isinstance(outcomes[1].error, Expelled), outcomes[1]
    assert "This replica was put out of the run in round " in str(outcomes[1].error)


def test_one_that_comes_takes_the_run_on_where_all_members_are_stopped(ranks, tmp_path):
    """From its own state, as nobody gives it another one."""
    with processes.service(tmp_path, 1, deadline_s=3.0) as address:
        stopped, came = ranks.launch(
            processes.replica, 2, tmp_path, address, diloco(TAU), ROUNDS, {0: ("steps", 4)}, (1,),
            signal.SIGSTOP, init=False,
        )  # fmt: skip
    assert came.error is None, came.output
    assert came.value[1] == ROUNDS
    assert isinstance(stopped.error, Expelled), stopped
    assert "nothing was heard from it for 3 s" in str(stopped.error)
