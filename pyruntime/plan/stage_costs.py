"""Measured costs of a model's parts on a machine and the best slices there. `python -m pyruntime profile`
writes them and a training run reads them."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any


@dataclasses.dataclass(frozen=True)
class StageCosts:
    """Seconds of forward and backward passes of one whole sequence.

    Raises ValueError if a number is negative or not finite, or the slices do not add up to the sequence.
    """

    seq_len: int
    """Tokens in the sequence."""
    model: dict[str, Any]
    """The measured model: sizes and dtype by name."""
    stages: int
    """Ranks of the pipeline that the slices are for."""
    layer: float
    embedding: float
    head: float
    """Head with last norm and loss."""
    slices: tuple[int, ...]
    """Tokens of the slices that take a sequence through the pipeline fastest, in order."""

    def __post_init__(self) -> None:
        for name in ("layer", "embedding", "head"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{name} must be a number of seconds, found {value!r}.")
            if not (math.isfinite(float(value)) and value >= 0):
                raise ValueError(f"{name} must be finite and at least 0 seconds, found {value}.")
        if not self.slices or min(self.slices) < 1 or sum(self.slices) != self.seq_len:
            raise ValueError(
                f"slices={list(self.slices)} must be of at least 1 token and add up to seq_len="
                f"{self.seq_len}."
            )


def read(text: str) -> StageCosts:
    """Returns the costs in a JSON document. Raises ValueError for missing or wrong keys, ignores others."""
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from error
    names = [field.name for field in dataclasses.fields(StageCosts)]
    missing = [name for name in names if not isinstance(document, dict) or name not in document]
    if missing:
        raise ValueError(f"it lacks {', '.join(missing)}")
    values = {name: document[name] for name in names}
    if not _are_whole([values["seq_len"], values["stages"]]) or not _are_whole(values["slices"]):
        raise ValueError("seq_len and slices must be numbers of tokens, and stages a number of ranks")
    if not isinstance(values["model"], dict):
        raise ValueError(f"model must give sizes and dtype by name, found {values['model']!r}")
    return StageCosts(**{**values, "slices": tuple(values["slices"])})


def _are_whole(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int for value in values)
