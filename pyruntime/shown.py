"""What was found, as errors say it."""

from __future__ import annotations

LONGEST = 80


def shown(value: object) -> str:
    """`value` on one line of ASCII, not longer than an error is read."""
    try:
        text = ascii(value)
    except (ValueError, RecursionError):  # of more digits than Python prints
        return "a number of thousands of digits" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}.."
