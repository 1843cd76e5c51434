"""What ranks tell each other beside all ops, through the job's store: while they start, load, and save.

A rank that waits here hears of every failure in the job, of a peer's end at once where it is on the same
host, and of a peer that is stopped: every process leaves a sign of life in the store ten times a second, from
a thread that needs no Python.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch.distributed as dist

from pyruntime.comm.core import _C
from pyruntime.comm.errors import CommError
from pyruntime.comm.groups import Group, deadline, group_name, group_rank, group_size

_WAIT = 1
"""As csrc/core/ledger.h numbers kinds of entries."""


class Exchange:
    """One exchange of a group, which all its ranks begin in the same order. `doing` says in words what is
    being done, and begins the sentence of an error: "Building the corpus".

    A rank may take as long as it shows signs of life; the deadline bounds its silence. Raises CommTimeout and
    PeerLost, on all ranks.
    """

    def __init__(self, group: Group, doing: str):
        self._group, self._name, self._doing = group, group_name(group), doing
        self._topic = f"exchange/{_C.next_exchange(self._name)}"

    def tell(self, value: bytes) -> None:
        """`value` is there for all ranks of the group."""
        _C.tell(self._name, self._topic, value)

    def hear(self, rank: int, beside: bool = False) -> bytes:
        """What `rank` of the group has told. beside: this thread is not the one that computes."""
        seconds, begin = deadline(self._group), time.monotonic()
        try:
            return _C.hear(self._name, rank, self._topic, self._doing, seconds, True)
        finally:
            # In a ledger these are what saving and loading wait for: starting has none yet.
            if not beside:
                _C.ledger_enter(_WAIT, "checkpoint", "exchange", rank, 0, begin, time.monotonic())


def barrier(group: Group, doing: str, value: bytes = b"") -> bytes:
    """Returns when all ranks are here: the first of their values, by rank, that is not empty. Each may take
    as long as it shows signs of life."""
    if group_size(group) == 1:
        return value
    exchange = Exchange(group, doing)
    if group_rank(group) > 0:
        exchange.tell(value)
        return exchange.hear(0)
    for rank in range(1, group_size(group)):  # by one rank, so that n ranks cost n looks and not n * n
        heard = exchange.hear(rank)
        value = value or heard
    exchange.tell(value)
    return value


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


def is_of_connection(error: BaseException) -> bool:
    """Whether torch raises this where a peer or the store does not answer."""
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo" in str(error).lower())


def first_line(error: BaseException) -> str:
    """What it says, for the end of a sentence."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
