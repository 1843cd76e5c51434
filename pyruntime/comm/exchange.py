"""What ranks tell each other beside all ops, through the job's store: while they start, load, and save.

A rank that waits here hears of every failure in the job, of a peer's end at once where it is on the same
host, and of a peer that is stopped: every process leaves a sign of life in the store ten times a second, from
a thread that needs no Python.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pyruntime.comm import messages
from pyruntime.comm.core import _C
from pyruntime.comm.errors import CommError
from pyruntime.comm.groups import (
    Group,
    deadline,
    group_name,
    group_rank,
    group_size,
    process_group,
    rank_name,
)

Value = TypeVar("Value")
MOST_BYTES = 1 << 26
"""Of what a rank tells all others at once."""

_WAIT = 1
"""As csrc/core/ledger/ledger.h numbers kinds of entries."""


class Exchange:
    """One exchange of a group, which all its ranks begin in the same order. `doing` says in words what is
    being done, and begins the sentence of an error: "Building the corpus".

    A rank may take as long as it shows signs of life; the deadline bounds its silence. Raises CommTimeout and
    PeerLost, on all ranks.
    """

    def __init__(self, group: Group, doing: str):
        self._group, self._name, self._doing = group, group_name(group), doing
        self._topic = f"exchange/{_C.next_exchange(self._name)}"

    def tell(self, value: object, to: int | None = None) -> None:
        """`value`, of a type that `messages` has, is there for all ranks of the group, or for one."""
        topic = self._topic if to is None else f"{self._topic}/{to}"
        _C.tell(self._name, topic, messages.encode(value))

    def hear(self, rank: int, kind: Any, beside: bool = False, to_this_rank: bool = False) -> Any:
        """What `rank` of the group has told all ranks or this one, of the type `kind`. beside: this thread is
        not the one that computes. Raises CommError, on all ranks, where it is of no such type."""
        topic = f"{self._topic}/{group_rank(self._group)}" if to_this_rank else self._topic
        seconds, begin = deadline(self._group), time.monotonic()
        try:
            told = _C.hear(self._name, rank, topic, self._doing, seconds, True)
        finally:
            # In a ledger these are what saving and loading wait for: starting has none yet.
            if not beside:
                _C.ledger_enter(_WAIT, "checkpoint", "exchange", rank, 0, begin, time.monotonic())
        with _read(self._group, self._doing, rank):
            return messages.decode(told, kind)


def barrier(group: Group, doing: str, value: str = "") -> str:
    """Returns when all ranks are here: the first of their values, by rank, that is not empty. Each may take
    as long as it shows signs of life."""
    if group_size(group) == 1:
        return value
    exchange = Exchange(group, doing)
    if group_rank(group) > 0:
        exchange.tell(value)
        return exchange.hear(0, str)
    for rank in range(1, group_size(group)):  # by one rank, so that n ranks cost n looks and not n * n
        heard = exchange.hear(rank, str)
        value = value or heard
    exchange.tell(value)
    return value


def gather(group: Group, doing: str, mine: Value, kind: type[Value]) -> list[Value]:
    """What every rank of `group` has, of the type `kind` (`messages`), by rank, on every rank. By two
    collectives of torch's, which the group's deadline bounds. Raises CommTimeout or PeerLost where a rank is
    stopped or ends, CommError where what came is of no such type."""
    ranks = group_size(group)
    if ranks == 1:
        return [mine]
    own, found = process_group(group), []
    told = torch.frombuffer(bytearray(messages.encode(mine)), dtype=torch.uint8)
    with named_failures(group, doing):
        able = dist.distributed_c10d._device_capability(own)
        device = torch.device("cpu" if "cpu" in able else able[0])
        sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(ranks)]
        dist.all_gather(sizes, torch.tensor([len(told)], device=device), group=own)
        longest = max(int(size) for size in sizes)
        if not 0 <= longest <= MOST_BYTES or min(int(size) for size in sizes) < 0:
            raise CommError(f"{doing}: a rank has told {longest} bytes, and at most {MOST_BYTES} are read.")
        padded = torch.zeros(longest, dtype=torch.uint8, device=device)
        padded[: len(told)] = told
        parts = [torch.empty_like(padded) for _ in range(ranks)]
        dist.all_gather(parts, padded, group=own)
    for rank, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        with _read(group, doing, rank):
            found.append(messages.decode(part[: int(size)].cpu().numpy().tobytes(), kind))
    return found


@contextlib.contextmanager
def _read(group: Group, doing: str, rank: int) -> Iterator[None]:
    """Around the reading of what `rank` of the group has told."""
    try:
        yield
    except ValueError as error:
        problem = (
            f"{doing}: what {rank_name(group, rank)} has told cannot be read ({error}); all ranks need one "
            "version of pyruntime, and the job's hosts alone may reach the store's port (MASTER_PORT)."
        )
        _C.post_failure(problem)
        raise CommError(problem) from error


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


def raise_for_ended(doing: str) -> None:
    """For a rank that a signal ends: a launcher sends one to all ranks when one of them has failed. Raises
    what that one has reported, or PeerLost where a process on this host has ended without a word. Takes a
    second at most."""
    _C.raise_for_ended(doing[:1].upper() + doing[1:], 1.0)


def is_of_connection(error: BaseException) -> bool:
    """Whether torch raises this where a peer or the store does not answer."""
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo" in str(error).lower())


def first_line(error: BaseException) -> str:
    """What it says, for the end of a sentence."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def different(tensors: Mapping[str, Tensor], group: dist.ProcessGroup) -> list[tuple[str, int]]:
    """The tensors whose content is not the first rank's on some rank of `group`, each with the first such
    rank; the same on every rank. Reads every tensor once and exchanges a line for each.

    Raises ValueError, on every rank alike, where ranks have other names, shapes or dtypes."""
    mine = [(name, f"{name} {list(t.shape)} {t.dtype}", _checksum(t)) for name, t in tensors.items()]
    kind = list[tuple[str, str, tuple[int, int]]]
    everyone = gather(group, "Comparing the models of the ranks", mine, kind)
    first = rank_name(group.group_name, 0)
    found: dict[str, int] = {}
    for rank, theirs in enumerate(everyone):
        one = rank_name(group.group_name, rank)
        for (name, ours, own_sum), (_, other, other_sum) in zip(everyone[0], theirs, strict=False):
            if ours != other:
                raise ValueError(
                    f"The ranks hold different models: where {first} has {ours}, {one} has {other}; build "
                    "the same model on every rank."
                )
            if own_sum != other_sum:
                found.setdefault(name, rank)
        if len(theirs) != len(everyone[0]):
            raise ValueError(
                f"The ranks hold different models: {first} has {len(everyone[0])} parameters, {one} has "
                f"{len(theirs)}; build the same model on every rank."
            )
    return list(found.items())


@torch.no_grad()
def _checksum(tensor: Tensor) -> tuple[int, int]:
    """Two integer sums over the bits, one weighted by row so that permuted rows differ; (0, 0) on meta."""
    if tensor.is_meta or tensor.numel() == 0:
        return 0, 0
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    rows = tensor.detach().contiguous().view(integer).view(len(tensor) if tensor.dim() else 1, -1)
    # Integer sums wrap and do not round, so their order does not matter.
    sums = rows.sum(1, dtype=torch.int64)
    weights = torch.arange(1, sums.numel() + 1, device=sums.device)
    return int(sums.sum()), int((sums * weights).sum())
