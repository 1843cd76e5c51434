"""The protocol of csrc/cuda/protocol.md in all states of small groups: every call ends and reads
what its own epoch wrote; a protocol that lacks a rule is found out.

A program is a straight line of steps, and every word has one writer, so the state of everything is how far
each program has come. Programs: puts and gemm of a gather, which run on two streams, by copies or
by multicast; the blocks of a scatter, and what the last of them does at the end; a scatter whose sums the
switch takes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest

SLOTS = 2  # in truth 4; fewer bind sooner


@dataclasses.dataclass(frozen=True)
class Step:
    # "write"; "wait" until the word is at least the value; "read", which must find exactly that; "see", which
    # must find at least that
    kind: str
    word: tuple
    value: int


Program = list[Step]


@dataclasses.dataclass(frozen=True)
class Setup:
    ranks: int
    calls: int
    slots: int = SLOTS
    blocks: int = 2  # of a scatter
    without: str = ""  # the rule that is broken


def uses(setup: Setup) -> Iterator[tuple[int, int, int]]:
    """(call, slot, epoch) of every call: the slots by turns, and how often each has been used."""
    for call in range(1, setup.calls + 1):
        yield call, call % setup.slots, (call - 1) // setup.slots + 1


def send(setup: Setup, me: int, peer: int, call: int, slot: int, epoch: int) -> Program:
    """Something of this rank into the peer's slot."""
    steps = [
        Step("wait", ("credit", me, slot, peer), epoch - 1),
        Step("write", ("data", peer, slot, me), call),
        Step("write", ("flag", peer, slot, me), epoch),
    ]
    if setup.without == "credit awaited":
        return steps[1:]
    if setup.without == "data before flag":
        return [steps[0], steps[2], steps[1]]
    return steps


def receive(setup: Setup, me: int, peer: int, call: int, slot: int, epoch: int) -> Program:
    expected = epoch - 1 if setup.without == "flags of this epoch" else epoch
    read = Step("read", ("data", me, slot, peer), call)
    return [Step("wait", ("flag", me, slot, peer), expected), read, read]  # reading takes its time


def give_credit(setup: Setup, me: int, slot: int, epoch: int) -> Program:
    return [Step("write", ("credit", peer, slot, me), epoch) for peer in range(setup.ranks) if peer != me]


def gather(setup: Setup) -> list[Program]:
    programs = []
    for me in range(setup.ranks):
        puts: Program = []
        gemm: Program = []
        for use in uses(setup):
            others = [(me + step) % setup.ranks for step in range(1, setup.ranks)]
            for peer in reversed(others):
                puts += send(setup, me, peer, *use)
            received = [step for peer in others for step in receive(setup, me, peer, *use)]
            credit = give_credit(setup, me, *use[1:])
            early = setup.without == "reading before credit"
            gemm += credit + received if early else received + credit
        programs += [puts, gemm]
    return programs


def scatter(setup: Setup) -> list[Program]:
    programs = []
    for me in range(setup.ranks):
        blocks: list[Program] = [[] for _ in range(setup.blocks)]
        last: Program = []
        for use in uses(setup):
            others = [(me + step) % setup.ranks for step in range(1, setup.ranks)]
            tiles = [send(setup, me, peer, *use) for peer in others]
            own = [step for peer in others for step in receive(setup, me, peer, *use)]
            tiles = [own, *tiles] if setup.without == "others' tiles first" else [*tiles, own]
            for number, tile in enumerate(tiles):
                blocks[number % setup.blocks] += tile
            for block, program in enumerate(blocks):
                program.append(Step("write", ("ended", me, block), use[0]))
                if setup.without != "all blocks ended" or block == 0:
                    last.append(Step("wait", ("ended", me, block), use[0]))
            last += give_credit(setup, me, *use[1:])
            last.append(Step("write", ("closed", me), use[0]))
            for program in blocks:  # the next launch of the stream begins when this one has ended
                program.append(Step("wait", ("closed", me), use[0]))
        programs += [*blocks, last]
    return programs


def multicast_gather(setup: Setup) -> list[Program]:
    """A store writes all copies, this rank's own too. Peers may put something else over that one, once they
    have leave; so they must find that the store has ended."""
    programs = []
    for me in range(setup.ranks):
        puts: Program = []
        gemm: Program = []
        peers = [peer for peer in range(setup.ranks) if peer != me]
        for call, slot, epoch in uses(setup):
            asked = peers[:1] if setup.without == "leave of all" else peers
            puts += [Step("wait", ("credit", me, slot, peer), epoch - 1) for peer in asked]
            puts += [Step("see", ("own", peer, slot), call - setup.slots) for peer in peers]
            puts += [Step("write", ("data", peer, slot, me), call) for peer in peers]
            puts.append(Step("write", ("own", me, slot), call))
            puts += [Step("write", ("flag", peer, slot, me), epoch) for peer in peers]
            gemm += [step for peer in peers for step in receive(setup, me, peer, call, slot, epoch)]
            if setup.without != "own store before credit":
                gemm.append(Step("wait", ("own", me, slot), call))
            gemm += give_credit(setup, me, slot, epoch)
        programs += [puts, gemm]
    return programs


def switch_sums(setup: Setup) -> list[Program]:
    """Parts stay with their rank, and their owner reads them there."""
    programs = []
    for me in range(setup.ranks):
        program: Program = []
        peers = [peer for peer in range(setup.ranks) if peer != me]
        for call, slot, epoch in uses(setup):
            if setup.without != "leave at the beginning":
                program += [Step("wait", ("credit", me, slot, peer), epoch - 1) for peer in peers]
            program.append(Step("write", ("part", me, slot), call))
            # The put that brings no data waits for its peer's credit all the same.
            for peer in peers:
                program.append(Step("wait", ("credit", me, slot, peer), epoch - 1))
                program.append(Step("write", ("flag", peer, slot, me), epoch))
            program += [Step("wait", ("flag", me, slot, peer), epoch) for peer in peers]
            program += [Step("read", ("part", peer, slot), call) for peer in peers]
            program += give_credit(setup, me, slot, epoch)
        programs.append(program)
    return programs


def explore(programs: list[Program]) -> str:
    """What goes wrong in some order of steps: "", or a sentence."""
    writer = {}
    values: list[list[dict]] = []  # of a program's words after each number of its steps
    for index, program in enumerate(programs):
        history: list[dict] = [{}]
        for step in program:
            history.append(history[-1] | {step.word: step.value} if step.kind == "write" else history[-1])
            if step.kind == "write":
                assert writer.setdefault(step.word, index) == index, f"{step.word} has two writers"
        values.append(history)

    def value(state: tuple[int, ...], word: tuple) -> int:
        index = writer.get(word)
        return 0 if index is None else values[index][state[index]].get(word, 0)

    start = (0,) * len(programs)
    seen, open_states = {start}, [start]
    while open_states:
        state = open_states.pop()
        moved = False
        for index, program in enumerate(programs):
            if state[index] == len(program):
                continue
            step = program[state[index]]
            found = value(state, step.word)
            if step.kind == "wait" and found < step.value:
                continue
            if step.kind == "read" and found != step.value:
                return f"read {found} where {step.value} was meant: {step.word}"
            if step.kind == "see" and found < step.value:
                return f"saw {found} where {step.value} was meant: {step.word}"
            moved = True
            after = (*state[:index], state[index] + 1, *state[index + 1 :])
            if after not in seen:
                seen.add(after)
                open_states.append(after)
        if not moved and any(done < len(program) for done, program in zip(state, programs, strict=True)):
            return "nobody can go on"
    return ""


@pytest.mark.parametrize("protocol", [gather, scatter, multicast_gather, switch_sums])
@pytest.mark.parametrize("slots", [1, 2])
def test_every_call_ends_and_reads_its_own_epoch(protocol, slots):
    assert explore(protocol(Setup(ranks=2, calls=4, slots=slots))) == ""


@pytest.mark.parametrize("protocol", [gather, scatter, multicast_gather, switch_sums])
def test_with_as_many_slots_as_there_are_the_first_is_used_again(protocol):
    assert explore(protocol(Setup(ranks=2, calls=5, slots=4))) == ""


def test_three_ranks_scatter():
    assert explore(scatter(Setup(ranks=3, calls=2, slots=1, blocks=1))) == ""


def test_three_ranks_multicast():
    assert explore(multicast_gather(Setup(ranks=3, calls=2, slots=1))) == ""
    assert explore(switch_sums(Setup(ranks=3, calls=4, slots=2))) == ""
    # One peer's leave is not enough.
    assert "read" in explore(multicast_gather(Setup(ranks=3, calls=2, slots=1, without="leave of all")))


@pytest.mark.parametrize(
    ("protocol", "without", "error"),
    [
        *itertools.product(
            [gather, scatter], ["credit awaited", "data before flag", "flags of this epoch"], ["read"]
        ),
        (gather, "reading before credit", "read"),
        (multicast_gather, "own store before credit", "saw"),
        (switch_sums, "leave at the beginning", "read"),
        (scatter, "all blocks ended", "read"),
        (scatter, "others' tiles first", "nobody can go on"),
    ],
)
def test_a_protocol_that_lacks_a_rule_fails(protocol, without, error):
    # Between two ranks a scatter's second slot stands in for credits: a call ends with parts of both.
    slots = 1 if (protocol, without) == (scatter, "credit awaited") or protocol == switch_sums else 2
    blocks = 1 if error == "nobody can go on" else 2
    assert error in explore(protocol(Setup(2, calls=4, slots=slots, blocks=blocks, without=without)))
