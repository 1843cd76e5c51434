"""What ranks tell each other beside all ops, through the job's store: while they start, load, and save.

A rank that waits here hears of every failure in the job, of a peer's end at once where it is on the same
host, and of a peer that is stopped: every process leaves a sign of life in the store ten times a second, from
a thread that needs no Python.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from pyruntime.comm.core import _C
from pyruntime.comm.errors import CommError
from pyruntime.comm.groups import Group, deadline, group_name, group_rank, group_size


class Meeting:
    """One exchange of a group, which all its ranks begin in the same order. `doing` says in words what is
    being done, and begins the sentence of an error: "Building the corpus".

    With while_it_lives a rank may take as long as it shows signs of life, and the deadline bounds its
    silence; else the deadline bounds the wait.
    Raises CommTimeout and PeerLost, on all ranks.
    """

    def __init__(self, group: Group, doing: str, *, while_it_lives: bool):
        self._group, self._name, self._doing = group, group_name(group), doing
        self._while_it_lives = while_it_lives
        self._topic = f"meeting/{_C.next_meeting(self._name)}"

    def tell(self, value: bytes = b"") -> None:
        """`value` is there for all ranks of the group."""
        _C.tell(self._name, self._topic, value)

    def hear(self, rank: int) -> bytes:
        """What `rank` of the group has told."""
        seconds = deadline(self._group)
        return _C.hear(self._name, rank, self._topic, self._doing, seconds, self._while_it_lives)


def meet(group: Group, doing: str) -> None:
    """Returns when all ranks are here. Each may take as long as it shows signs of life."""
    if group_size(group) == 1:
        return
    meeting = Meeting(group, doing, while_it_lives=True)
    if group_rank(group) == 0:  # by one rank, so that n ranks cost n looks and not n * n
        for rank in range(1, group_size(group)):
            meeting.hear(rank)
        meeting.tell()
    else:
        meeting.tell()
        meeting.hear(0)


@contextlib.contextmanager
def named_failures(group: Group, doing: str) -> Iterator[None]:
    """Around collectives of torch's: where one fails because a rank is gone or stopped, all ranks raise
    PeerLost or CommTimeout that names it, in the place of torch's message."""
    try:
        yield
    except CommError:
        raise
    except Exception as error:
        if group_size(group) == 1 or not is_of_connection(error):
            raise
        _C.raise_for_missing(group_name(group), doing, first_line(error))


def post_failure(message: str) -> None:
    """All other ranks end with PeerLost, "rank N reports: MESSAGE", as soon as they wait for anybody. Takes
    half a second at most and raises nothing."""
    _C.post_failure(message)


def raise_if_failed() -> None:
    """Raises what a rank of the job has failed with, if any has."""
    _C.raise_if_failed()


def is_of_connection(error: BaseException) -> bool:
    """Whether torch raises this where a peer or the store does not answer."""
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo" in str(error).lower())


def first_line(error: BaseException) -> str:
    """What it says, for the end of a sentence."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
