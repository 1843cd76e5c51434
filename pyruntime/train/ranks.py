"""What one rank does for all: files are written once, and its result or its refusal reaches every rank.

`doing` says in words what is being done, and begins the sentence of an error: "Building the corpus". All of
it may take as long as the ranks show signs of life.
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
    """Runs `work` on rank 0 of `group` and returns its result on every rank: it travels as JSON and is read
    as the type `kind` (`comm.messages`).

    A ConfigError of rank 0 is raised on every rank, so that all end alike. Raises CommTimeout or PeerLost
    where rank 0 is stopped or ends. Not for the inside of a step: this goes through the store.
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
    """Runs `work` on every rank of `group`, and returns this rank's result once all have done.

    The first ConfigError, by rank, is raised on every rank, and so is the sentence of another failure where
    there was one; the rank that failed raises that itself. Raises CommTimeout or PeerLost where a rank is
    stopped or ends.
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
    """Around what one rank does while others wait for it inside a step: they end with its reason."""
    try:
        yield
    except TrainingError as error:
        post_failure(str(error))
        raise


def _name(group: dist.ProcessGroup, rank: int) -> str:
    """At the beginning of a sentence."""
    return rank_name(group, rank).replace("rank", "Rank", 1)
