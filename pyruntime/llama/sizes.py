"""Checks the numbers of a model's shape, which may come from a damaged file."""

from __future__ import annotations

from typing import Any

from pyruntime.text import short_repr

LARGEST = 2**31 - 1
"""Limit on all sizes; a larger one means a damaged file."""
LARGEST_OF = {
    "num_hidden_layers": 2**14,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "head_dim": 2**16,
    "hidden_size": 2**22,
    "intermediate_size": 2**24,
    "vocab_size": 2**26,
    "q_rank": 2**16,
    "kv_rank": 2**16,
}
"""Limits of some thirty times the largest published sizes. Products of two still fit torch's sizes."""


def check_size(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is a size from 1 to the limit of that name."""
    if type(value) is not int or not 1 <= value <= LARGEST:
        raise ValueError(f"{name}={short_repr(value)} must be a positive whole number below 2**31.")
    most = LARGEST_OF.get(name, LARGEST)
    if value > most:
        raise ValueError(f"{name}={value} is larger than any model's; it must be at most {most}.")


def check_number(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e38 <= value <= 1e38:
        raise ValueError(f"{name}={short_repr(value)} must be a finite number.")
