"""How values and tables are written for people."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import re
from collections.abc import Sequence
from typing import Any

LONGEST = 80
"""Characters of a value in an error."""


def short_repr(value: object) -> str:
    """`value` on one line of ASCII, not longer than an error is read."""
    try:
        text = ascii(value)
    except (ValueError, RecursionError):  # of more digits than Python prints
        return "a number of thousands of digits" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}.."


def finite(value: Any) -> Any:
    """`value` as JSON can hold it: None in place of numbers that are not finite, at any depth."""
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def toml_value(value: object) -> str:
    """A string, number, bool, or list, tuple, dict or dataclass of them, as a TOML file has it."""
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # which TOML wants escaped


def block_name(name: str) -> str:
    """The qualified name of a module, the same for its like in every block: layers.*.mlp.up_proj."""
    return re.sub(r"(?:(?<=\.)|^)\d+(?=\.)", "*", name)


def footnotes(sentences: Sequence[str]) -> tuple[list[str], list[str]]:
    """What each row of a table says, and the lines below it: a sentence of several rows becomes [1], [2], ..
    and is said there once."""
    counts = collections.Counter(sentences)
    repeated = [sentence for sentence, count in counts.items() if sentence and count > 1]
    marks = {sentence: f"[{number}]" for number, sentence in enumerate(repeated, start=1)}
    cells = [marks.get(sentence, sentence) for sentence in sentences]
    return cells, [f"{mark} {sentence}" for sentence, mark in marks.items()]


def columns(head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """A table, aligned: the columns `left` to the left, others to the right."""
    widths = [max(len(row[index]) for row in [head, *rows]) for index in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [head, *rows]
    )
