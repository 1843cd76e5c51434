"""Failures that a run foresees; the command line turns each into one sentence."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class ConfigError(ValueError):
    """An impossible request: the command line exits with 2. The message is one sentence."""


class TrainingError(RuntimeError):
    """A failure that ends training: the command line exits with 1. The message is one sentence."""


@contextlib.contextmanager
def refusing(prefix: str = "", kinds: tuple[type[Exception], ...] = (ValueError,)) -> Iterator[None]:
    """Turns an exception of `kinds` in the block into a ConfigError whose message begins with `prefix`."""
    try:
        yield
    except kinds as error:
        raise ConfigError(f"{prefix}{error}") from error


def require(condition: bool, sentence: str) -> None:
    """Raises ConfigError with `sentence` unless `condition` holds."""
    if not condition:
        raise ConfigError(sentence)
