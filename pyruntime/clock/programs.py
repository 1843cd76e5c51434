"""Runs each program of a job in a process of its own, in virtual time; they meet on a board
(csrc/sim/clock/programs.h)."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from pyruntime.clock.mirrors import ProgramPlace

Result = TypeVar("Result")
PATIENCE_S = 900.0
"""The longest wait of a program for another, in real time."""


def run(
    program: Callable[[ProgramPlace], Result], places: Sequence[Mapping[str, int]], gpus_per_host: int
) -> list[Result]:
    """Returns what `program` returns of each place, which a forked process calls. A single one is run here.

    Raises ValueError with the message of the first one that raised it, or that one has been killed;
    RuntimeError with the traceback of one that failed otherwise. The others are ended.
    """
    if len(places) == 1:
        return [program(ProgramPlace(places[0], gpus_per_host))]
    patience = timedelta(seconds=PATIENCE_S)
    board = dist.TCPStore("127.0.0.1", 0, None, True, patience, wait_for_workers=False)
    fork = multiprocessing.get_context("fork")
    ends: dict[Connection, int] = {}
    children = []
    for number, at in enumerate(places):
        here, there = fork.Pipe(duplex=False)
        child = fork.Process(
            target=_in_child, args=(program, at, gpus_per_host, board.port, there), daemon=True
        )
        child.start()
        there.close()
        ends[here] = number
        children.append(child)
    found: dict[int, Result] = {}
    try:
        while ends:
            for end in [each for each in wait(list(ends)) if isinstance(each, Connection)]:
                number = ends.pop(end)
                found[number] = _heard(end, places[number])
    finally:
        for child in children:
            if len(found) < len(places):
                child.kill()
            child.join()
    return [found[number] for number in range(len(places))]


def _heard(end: Connection, at: Mapping[str, int]) -> Any:
    where = ", ".join(f"{name} {number}" for name, number in at.items())
    try:
        result, refusal, failure = end.recv()
    except EOFError:
        raise ValueError(
            f"The program of {where} has ended without a result; the system ends programs where memory does."
        ) from None
    if refusal is not None:
        raise ValueError(refusal)
    if failure is not None:
        raise RuntimeError(f"The program of {where} has failed:\n{failure}")
    return result


def _in_child(
    program: Callable[[ProgramPlace], object],
    at: Mapping[str, int],
    gpus_per_host: int,
    port: int,
    end: Connection,
) -> None:
    torch.set_num_threads(1)  # programs share the cores, and none computes
    try:
        patience = timedelta(seconds=PATIENCE_S)
        board = dist.TCPStore("127.0.0.1", port, None, False, patience, wait_for_workers=False)
        end.send((program(ProgramPlace(at, gpus_per_host, board)), None, None))
    except ValueError as error:
        end.send((None, str(error), None))
    except BaseException:
        end.send((None, None, traceback.format_exc()))
