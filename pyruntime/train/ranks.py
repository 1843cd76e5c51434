"""Runs work on one rank for all: files are written once, and every rank gets the result or the refusal.

`doing` names the work and begins the sentence of an error: "Building the corpus". The work may take as long
as the ranks show signs of life.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, Union

import torch.distributed as dist

from pyruntime.comm import CommError, post_failure, rank_name
from pyruntime.comm.exchange import Exchange, barrier
from pyruntime.train.errors import ConfigError, TrainingError

Result = TypeVar("Result")


def on_rank_0(group: dist.ProcessGroup, doing: str, work: Callable[[], Result], kind: Any = None) -> Result:
    """Runs `work` on rank 0 of `group` and returns its result on every rank. The result travels as JSON and
    is read as the type `kind` (`comm.messages`).

    A ConfigError of rank 0 is raised on every rank, so that all end alike. Raises CommTimeout or PeerLost if
    rank 0 stops or ends. Not for use inside a step: it goes through the store.
    """
    if group.size() == 1:
        return work()
    exchange = Exchange(group, doing)
    if group.rank() > 0:
        result, refusal = exchange.hear(0, tuple[Union[kind, None], str | None])  # noqa: UP007 - kind may be None
        if refusal is not None:
            raise ConfigError(refusal)
        return result
    try:
        result = work()
    except BaseException as error:
        refusal = str(error) if isinstance(error, ConfigError) else f"{_name(group, 0)} failed: {error}"
        exchange.tell((None, refusal))
        raise
    exchange.tell((result, None))
    return result


def on_every_rank(group: dist.ProcessGroup, doing: str, work: Callable[[], Result]) -> Result:
    """Runs `work` on every rank of `group`, and returns this rank's result once all are done.

    If ranks raise ConfigErrors, that of the lowest rank is raised on every rank. Another failure is raised as
    it is where it happened, and as a ConfigError elsewhere. Raises CommTimeout or PeerLost if a rank stops or
    ends.
    """
    if group.size() == 1:
        return work()
    result, refusal, failure = None, "", None
    try:
        result = work()
    except ConfigError as error:
        refusal = str(error)
    except CommError:
        raise
    except Exception as error:
        refusal, failure = f"{_name(group, group.rank())} failed: {error}", error
    refusal = barrier(group, doing, refusal)
    if failure is not None:
        raise failure
    if refusal:
        raise ConfigError(refusal)
    return result  # type: ignore[return-value]


@contextlib.contextmanager
def told_to_all() -> Iterator[None]:
    """Surrounds work of one rank inside a step: its TrainingError ends the waiting ranks too, with its
    reason."""
    try:
        yield
    except TrainingError as error:
        post_failure(str(error))
        raise


def _name(group: dist.ProcessGroup, rank: int) -> str:
    return rank_name(group, rank).replace("rank", "Rank", 1)
