"""Death and return at every moment of a round, of the first and of several replicas: what the service decides
keeps all iterates alike, counts every block once, and comes to an end."""

from __future__ import annotations

import pytest

from pyruntime.replicas.coordinator import OUTAGE, Phase, ReplicaState
from tests.replicas.simulation import DEADLINE_S, World


def moves_of(seed: int, **world) -> int:
    """Of an undisturbed run."""
    one = World(seed, **world)
    one.run()
    one.check()
    return one.moves


@pytest.mark.parametrize("late", [0, 1])
def test_undisturbed_replicas_share_the_blocks_in_order(late):
    one = World(0, replicas=3, quorum=2, rounds=4, late=late)
    one.run()
    assert one.check() == list(range(12))
    assert all(rank.is_finished for rank in one.ranks)


SHAPES = [
    {"replicas": 3, "quorum": 1, "rounds": 3},
    {"replicas": 3, "quorum": 2, "rounds": 3},
    {"replicas": 2, "quorum": 2, "rounds": 3},
    {"replicas": 3, "quorum": 2, "rounds": 3, "places": 2},
    {"replicas": 3, "quorum": 1, "rounds": 4, "late": 1},
    {"replicas": 3, "quorum": 2, "rounds": 4, "late": 1},
    {"replicas": 2, "quorum": 2, "rounds": 4, "late": 1},
    {"replicas": 3, "quorum": 2, "rounds": 4, "places": 2, "late": 1},
]


@pytest.mark.parametrize("how", ["killed", "stopped"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("victim", ["first", "last"])
@pytest.mark.second_tier(but=["first-{'replicas': 2, 'quorum': 2, 'rounds': 3}-stopped"])
def test_one_that_is_gone_at_any_moment_leaves_the_round_and_one_comes_in_its_place(shape, victim, how):
    for seed in range(2):
        for moment in range(0, moves_of(seed, **shape), 1 if how == "killed" else 3):
            one = World(seed, **shape)
            while one.moves < moment and one.move():
                pass
            names = one.alive()
            if not names or one.coordinator.phase is Phase.OVER:
                continue
            name = names[0 if victim == "first" else -1]
            one.kill(name) if how == "killed" else one.stop(name)
            one.start()
            one.run()
            one.check()


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_several_die_and_return_at_moments_of_their_own(seed, shape):
    """Donors and replicas that come too, one after the other and at once, with nobody left at times."""
    one = World(seed, **shape | {"rounds": 6})
    deaths = 0
    while one.coordinator.phase is not Phase.OVER and one.moves < 3000:
        if not one.move():
            one.pass_time(DEADLINE_S + 3)
            one.blame_the_silent()
        if deaths < 12 and one.random.random() < 0.03 and one.alive():
            deaths += 1
            one.kill(one.random.choice(one.alive()))
            one.start()
    one.run()
    one.check()


def test_a_round_waits_for_its_quorum_and_one_that_comes_takes_part_in_it():
    one = World(1, replicas=2, quorum=2, rounds=2)
    while one.coordinator.phase is not Phase.COMPUTING:
        one.move()
    while any(not rank.is_member for rank in one.ranks):
        one.move()
    one.kill("replica-1")
    while one.move():
        pass
    one.pass_time(10 * DEADLINE_S)
    assert one.coordinator.round == 0 and len(one.coordinator.members) == 1
    one.start()
    one.run()
    assert one.check() == [0, 1, 2, 3]  # block 0, of the one that died, first
    assert one.of("replica-3")[0].iterate[0] == (0, (0, 1))


def test_no_step_of_the_others_is_lost():
    """Killed while the sums are taken: the round counts with what the others had computed before."""
    one = World(2, replicas=3, quorum=2, rounds=1)
    while one.coordinator.phase is not Phase.EXCHANGING:
        one.move()
    blocks = {rank.replica: rank.sent[0] for rank in one.ranks}
    one.kill("replica-2")
    one.run()
    assert one.check() == [blocks["replica-1"], blocks["replica-3"]]


def flying() -> World:
    """Averages are a round late, and the first sum is on its way while a replica takes its next steps."""
    for seed in range(50):
        one = World(seed, replicas=3, quorum=1, rounds=4, late=1)
        while one.coordinator.round == 0 and one.move():
            is_exchanging = one.coordinator.phase is Phase.EXCHANGING
            if is_exchanging and one.of("replica-1")[0].steps == 1 and not one.posted:
                return one
    raise AssertionError("no seed has come there")


def test_no_step_of_the_others_is_lost_where_one_dies_in_its_steps_beside_the_sum():
    """The sum is taken again among the others, from the snapshots that they keep; the two blocks of the one
    that died are dealt again."""
    one = flying()
    blocks = {rank.replica: (rank.sent[0], rank.blocks[0]) for rank in one.ranks}
    one.kill("replica-2")
    one.run()
    counted = one.check()
    for number in range(2):
        of_others = {blocks["replica-1"][number], blocks["replica-3"][number]}
        assert set(counted[2 * number : 2 * number + 2]) == of_others
    assert set(blocks["replica-2"]) <= set(counted)


def test_one_that_comes_while_a_sum_is_on_its_way_adds_nothing_to_it_and_takes_it():
    one = flying()
    name = one.start()
    one.run()
    one.check()
    entered = next(e for e in one.coordinator.events if e.get("replica") == name and e["event"] == "enter")
    rounds = [e for e in one.coordinator.events if e["event"] == "round"]
    assert name not in rounds[entered["round"]]["blocks"]
    assert rounds[entered["round"] + 1]["blocks"][name] == entered["blocks"][0]


def test_all_that_had_displacements_may_die_beside_the_sum():
    """One that has come with the state alone goes on, from an outer iterate that has not moved."""
    for seed in range(40):
        one = World(seed, replicas=2, quorum=1, rounds=5, late=1)
        while not (one.coordinator.phase is Phase.EXCHANGING and one.coordinator.round == 1):
            one.move()
        name = one.start()
        while one.coordinator.phase is not Phase.OVER and not (
            one.of(name)[0].is_member and one.of(name)[0].sent == (None, one.of(name)[0].round)
        ):
            one.move()
        if one.coordinator.phase is Phase.OVER:
            continue
        one.kill("replica-1")
        one.kill("replica-2")
        one.run()
        one.check()
        if any(e["event"] == "round" and not e["blocks"] for e in one.coordinator.events):
            return
    raise AssertionError("no seed has come to a round without a displacement")


def test_one_that_comes_does_not_have_to_be_faster_than_the_sums():
    """It enters a round with the next but one sum of its donor's still to come."""
    one = World(4, replicas=2, quorum=1, rounds=6, late=1)
    while one.coordinator.round < 1:
        one.move()
    name = one.start()
    while one.coordinator.replicas.get(name) is None or not one.coordinator.replicas[name].ready:
        one.move()
    while one.coordinator.replicas[name].state is ReplicaState.READY:
        assert one.move(but=("take", name)), "it is never let in"
    assert one.coordinator.replicas[name].state is ReplicaState.ENTERING
    one.run()
    one.check()
    assert one.of(name)[0].is_member


def test_where_all_others_have_died_one_that_has_come_begins_as_at_the_start_of_a_run():
    for seed in range(40):
        one = World(seed, replicas=2, quorum=1, rounds=5, late=1)
        while one.coordinator.round < 1:
            one.move()
        name = one.start()
        replica = None
        while one.coordinator.phase is not Phase.OVER and not (
            replica and one.coordinator._is_ready(replica)
        ):
            one.move()
            replica = one.coordinator.replicas.get(name)
        if one.coordinator.phase is Phase.OVER:
            continue
        number = one.coordinator.round
        one.kill("replica-1")
        one.kill("replica-2")
        one.run()
        one.check()
        assert list(one.of(name)[0].iterate[number][1]), "its first round counts"
        return
    raise AssertionError("no seed has come there")


def test_the_last_sum_waits_for_its_quorum_and_one_that_is_too_late_for_a_step_makes_it():
    one = World(9, replicas=2, quorum=2, rounds=2, late=1)
    while not (one.coordinator.round == 1 and one.coordinator.phase is Phase.EXCHANGING):
        one.move()
    one.kill("replica-1")
    name = one.start()
    one.run()
    assert one.of(name)[0].is_finished and one.of(name)[0].iterate == one.of("replica-2")[0].iterate
    assert len(one.coordinator.events[-1]["blocks"]) == 1


def test_replicas_that_have_all_rounds_are_told_that_the_run_is_over():
    one = World(0, replicas=2, quorum=1, rounds=2)
    for rank in one.ranks:
        rank.iterate, rank.deal = [(0, (0, 1)), (1, (2, 3))], [4]
        rank.outbox[0] |= rank.own()
    while one.move() or one.coordinator.phase is not Phase.OVER:
        one.pass_time(1.0)
    assert all(rank.is_finished and not rank.is_member for rank in one.ranks)


def test_ranks_of_a_replica_that_has_taken_the_last_sum_are_not_put_out_when_one_leaves():
    """The others may not have read yet that it counted."""
    one = World(3, replicas=2, quorum=1, rounds=1, places=2)
    while one.coordinator.phase is not Phase.OVER:
        one.move()
    one.coordinator.lost("replica-1", "its process ended", one.now)
    assert not one.coordinator.orders
    one.run()
    assert all(rank.is_finished and not rank.expelled for rank in one.ranks)


def test_the_slow_one_is_left_behind_only_past_the_deadline():
    one = World(3, replicas=3, quorum=2, rounds=2)
    while not one.of("replica-3")[0].is_member:
        one.move()
    one.stop("replica-3", is_silent=False)
    while one.move():
        pass
    one.pass_time(DEADLINE_S - 1)
    assert one.coordinator.round == 0 and "replica-3" in one.coordinator.replicas
    one.run()
    assert one.coordinator.round == 2
    (slow,) = one.of("replica-3")
    slow.is_stopped = False
    one.run()
    assert "did not reach the end of round 0 in time" in slow.expelled
    one.check()


@pytest.mark.parametrize("phase", [Phase.COMPUTING, Phase.EXCHANGING])
@pytest.mark.parametrize("late", [0, 1])
def test_where_all_are_stopped_all_are_put_out_and_one_that_comes_takes_the_run_on(phase, late):
    """Nobody else is there who could have waited for them."""
    one = World(3, replicas=3, quorum=2, rounds=3, late=late)
    while one.coordinator.phase is not phase or any(not rank.is_member for rank in one.ranks):
        one.move()
    names = one.alive()
    for name in names:
        one.stop(name)
    while one.move():
        pass
    one.pass_time(OUTAGE * DEADLINE_S)
    assert list(one.coordinator.replicas) == names
    one.pass_time(2)
    assert not one.coordinator.replicas and one.coordinator.phase is Phase.GATHERING
    again = [one.start() for _ in names]
    one.run()
    assert all(rank.is_finished for name in again for rank in one.of(name))
    for name in names:
        (rank,) = one.of(name)
        reason = next(message["reason"] for message in rank.inbox if message["type"] == "expelled")
        assert reason == f"nothing was heard from it for {OUTAGE * DEADLINE_S:g} s"


def test_while_the_link_of_the_service_is_down_nobody_is_put_out():
    one = World(3, replicas=3, quorum=2, rounds=3)
    while one.coordinator.phase is not Phase.COMPUTING or any(not rank.is_member for rank in one.ranks):
        one.move()
    for name in one.alive():
        one.stop(name)
    one.pass_time(3 * DEADLINE_S)
    for rank in one.ranks:
        rank.is_stopped = rank.is_silent = False
    one.run()
    assert all(rank.is_finished and not rank.expelled for rank in one.ranks)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_replica_is_silent_when_one_of_its_ranks_is(is_there):
    """Also where that one has never come."""
    one = World(3, replicas=2, quorum=1, rounds=2, places=2)
    one.of("replica-2")[1].is_silent = one.of("replica-2")[1].is_stopped = True
    if not is_there:
        one.of("replica-2")[1].outbox.clear()
    one.run()
    assert [rank.is_finished for rank in one.ranks] == [True, True, False, False]
    assert one.of("replica-2")[0].expelled == f"nothing was heard from it for {DEADLINE_S:g} s"


def test_a_replica_of_another_job_is_put_out_in_a_sentence_that_names_the_key():
    one = World(4, replicas=1, quorum=1, rounds=2)
    while not all(rank.is_member for rank in one.ranks):
        one.move()
    name = one.start()
    one.of(name)[0].outbox[0]["job"] = {"tau": 2, "rounds": 3}
    one.run()
    assert one.of(name)[0].expelled == ("it was started with rounds=3, but the replicas here with rounds=2")


@pytest.mark.parametrize("first", ["10.0.0.1", "127.0.0.1"])
def test_a_loopback_address_beside_another_one_is_refused(first):
    second = {"10.0.0.1": "127.0.0.1", "127.0.0.1": "10.0.0.1"}[first]
    one = World(8, replicas=2, quorum=1, rounds=1)
    for name, host in (("replica-1", first), ("replica-2", second)):
        one.of(name)[0].outbox[0]["address"] = [host, 1]
        one.send(one.of(name)[0])
    one.carry_out()
    one.run()
    found = one.of("replica-2")[0].expelled
    assert found.startswith("it" if first == "10.0.0.1" else "replica-1")
    assert "set --data_parallel.members to the address that other hosts use" in found
    assert one.of("replica-1")[0].is_finished


def test_loopback_addresses_alone_are_one_host():
    one = World(8, replicas=2, quorum=2, rounds=1)
    for rank, host in zip(one.ranks, ("127.0.0.1", "127.0.1.1"), strict=True):
        rank.outbox[0]["address"] = [host, 1]
    one.run()
    assert len(one.check()) == 2


def test_replicas_from_checkpoints_go_on_from_the_furthest():
    """With what that one knows of the blocks."""
    one = World(5, replicas=3, quorum=3, rounds=3)
    history = [(0, (0, 1, 2)), (1, (3, 4, 6))]
    for name, rounds, deal in (("replica-2", 2, [9, 5, 7, 8]), ("replica-3", 1, [6, 3, 4, 5])):
        (rank,) = one.of(name)
        rank.iterate, rank.deal = history[:rounds], deal
        rank.outbox[0] |= rank.own()
    one.run()
    assert one.check() == [0, 1, 2, 3, 4, 6, 5, 7, 8]


def test_one_that_comes_when_the_run_is_over_is_told():
    one = World(6, replicas=2, quorum=1, rounds=1)
    one.run()
    name = one.start()
    one.run()
    assert one.of(name)[0].is_finished and not one.of(name)[0].is_member
