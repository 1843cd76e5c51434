"""What one rank does for all: files are written once, and its result or its refusal reaches every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from pyruntime import comm
from pyruntime.train.errors import ConfigError

Result = TypeVar("Result")

LONGEST_WORK = timedelta(days=1)


def on_first_rank(group: dist.ProcessGroup, work: Callable[[], Result], *, slow: bool = False) -> Result:
    """Runs `work` on rank 0 of `group` and returns its (picklable) result on every rank.

    A ConfigError of rank 0 is raised on every rank, so that all end alike. `slow` work may take longer than
    the group's deadline; should rank 0 die, its closed connection still ends the others at once. Not for the
    inside of a step: this pickles and goes through torch.distributed.
    """
    outcome: list = [None]
    failure: BaseException | None = None
    if group.rank() == 0:
        try:
            outcome = [(work(), None)]
        except ConfigError as error:
            failure, outcome = error, [(None, str(error))]
        except BaseException as error:
            failure, outcome = error, [(None, f"Rank 0 failed: {error}")]
    if group.size() > 1:
        with patience(group) if slow else contextlib.nullcontext():
            dist.broadcast_object_list(outcome, group=group, group_src=0)
    if failure is not None:
        raise failure
    result, refusal = outcome[0]
    if refusal is not None:
        raise ConfigError(refusal)
    return result


@contextlib.contextmanager
def patience(group: dist.ProcessGroup) -> Iterator[None]:
    """Collectives of `group` in it may take longer than its deadline."""
    # torch has no public way to give one collective more time than the group's others.
    set_timeout = dist.distributed_c10d._set_pg_timeout
    set_timeout(LONGEST_WORK, group)
    try:
        yield
    finally:
        set_timeout(timedelta(seconds=comm.deadline(group)), group)
