"""Exchanges values between ranks outside of ops, through the job's store: while they start, load, and save.

A rank that waits here learns of every failure in the job: at once of a peer's end on the same host, and also
of a peer that is stopped. For that, every process leaves a sign of life in the store ten times a second, from
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
"""Bytes that a rank may send to all others at once."""

_WAIT = 1
"""The number of this kind of entry in csrc/core/ledger/ledger.h."""


class Exchange:
    """One exchange of a group; all its ranks begin exchanges in the same order. `doing` says in words what is
    being done, and begins the sentence of an error: "Building the corpus".

    A rank may take as long as it shows signs of life; the deadline bounds its silence. Raises CommTimeout and
    PeerLost, on all ranks.
    """

    def __init__(self, group: Group, doing: str):
        self._group, self._name, self._doing = group, group_name(group), doing
        self._topic = f"exchange/{_C.next_exchange(self._name)}"

    def tell(self, value: object, to: int | None = None) -> None:
        """Sends `value`, of a type that `messages` has, to all ranks of the group, or to one."""
        topic = self._topic if to is None else f"{self._topic}/{to}"
        _C.tell(self._name, topic, messages.encode(value))

    def hear(self, rank: int, kind: Any, beside: bool = False, to_this_rank: bool = False) -> Any:
        """Returns what `rank` of the group has sent to all ranks or to this one, of the type `kind`. beside:
        this thread is not the one that computes. Raises CommError, on all ranks, if the value has another
        type."""
        topic = f"{self._topic}/{group_rank(self._group)}" if to_this_rank else self._topic
        seconds, begin = deadline(self._group), time.monotonic()
        try:
            told = _C.hear(self._name, rank, topic, self._doing, seconds, True)
        finally:
            # A ledger has these as the waits of saving and loading; at the start there is no ledger yet.
            if not beside:
                _C.ledger_enter(_WAIT, "checkpoint", "exchange", rank, 0, begin, time.monotonic())
        with _read(self._group, self._doing, rank):
            return messages.decode(told, kind)


def barrier(group: Group, doing: str, value: str = "") -> str:
    """Waits for all ranks, and returns the first of their values, by rank, that is not empty. Each rank may
    take as long as it shows signs of life."""
    if group_size(group) == 1:
        return value
    exchange = Exchange(group, doing)
    if group_rank(group) > 0:
        exchange.tell(value)
        return exchange.hear(0, str)
    for rank in range(1, group_size(group)):  # only rank 0 looks: n looks for n ranks, not n * n
        heard = exchange.hear(rank, str)
        value = value or heard
    exchange.tell(value)
    return value


def gather(group: Group, doing: str, mine: Value, kind: type[Value]) -> list[Value]:
    """Returns the values of all ranks of `group`, of the type `kind` (`messages`), by rank, on every rank.
    Two collectives of torch, which the group's deadline bounds, carry them. Raises CommTimeout or PeerLost if
    a rank is stopped or ends, CommError if a value has another type or is too long."""
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
            raise CommError(f"{doing}: a rank has sent {longest} bytes, but at most {MOST_BYTES} are read.")
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
    """Turns a ValueError in reading what `rank` of the group has sent into a CommError, on all ranks."""
    try:
        yield
    except ValueError as error:
        problem = (
            f"{doing}: the message of {rank_name(group, rank)} cannot be read ({error}); all ranks need the "
            "same version of pyruntime, and only the job's hosts may reach the store's port (MASTER_PORT)."
        )
        _C.post_failure(problem)
        raise CommError(problem) from error


@contextlib.contextmanager
def named_failures(group: Group, doing: str) -> Iterator[None]:
    """Names the rank if one of torch's collectives inside fails because a rank is gone or stopped: all ranks
    then raise PeerLost or CommTimeout in place of torch's error."""
    try:
        yield
    except CommError:
        raise
    except Exception as error:
        if group_size(group) == 1 or not is_of_connection(error):
            raise
        _C.raise_for_missing(group_name(group), doing, first_line(error))


def post_failure(message: str) -> None:
    """Makes all other ranks raise PeerLost, "rank N reports: MESSAGE", as soon as they wait for any rank.
    Takes half a second at most and raises nothing."""
    _C.post_failure(message)


def raise_for_ended(doing: str) -> None:
    """Raises what a failed rank has reported, or PeerLost if a process on this host has ended without a
    report. A rank that a signal ends calls it: launchers signal all ranks when one has failed. Takes a second
    at most."""
    _C.raise_for_ended(doing[:1].upper() + doing[1:], 1.0)


def is_of_connection(error: BaseException) -> bool:
    """Whether torch raises this if a peer or the store does not answer."""
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo" in str(error).lower())


def first_line(error: BaseException) -> str:
    """Returns the first line of the error's message, for the end of a sentence."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def different(tensors: Mapping[str, Tensor], group: dist.ProcessGroup) -> list[tuple[str, int]]:
    """Returns the tensors whose content on some rank of `group` is not the first rank's, each with the first
    such rank; the same on every rank. Reads every tensor once and exchanges a line for each.

    Raises ValueError, on every rank, if ranks have other names, shapes or dtypes."""
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
    """Returns two integer sums over the bits, one weighted by row to see permuted rows; (0, 0) on meta."""
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
