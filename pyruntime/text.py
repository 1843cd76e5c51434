"""Writes values and tables for people to read."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

LONGEST = 80
"""Characters of a value that an error shows at most."""


def short_repr(value: object) -> str:
    """Returns `value` on one line of ASCII, cut after LONGEST characters."""
    try:
        text = ascii(value)
    except (ValueError, RecursionError):  # an int with more digits than Python prints
        return "a number of thousands of digits" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}.."


def finite(value: Any) -> Any:
    """Returns `value` with None in place of non-finite floats at any depth, since JSON has none."""
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_lines(document: Mapping[str, Any]) -> str:
    """Returns the document as JSON, with a line for each entry of its lists and mappings."""
    parts = [f" {json.dumps(key)}: {_entries(value)}" for key, value in document.items()]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _entries(value: Any) -> str:
    if value and isinstance(value, dict):
        begin, lines, end = (
            "{",
            [f"{json.dumps(str(k))}: {json.dumps(each)}" for k, each in value.items()],
            "}",
        )
    elif value and isinstance(value, list):
        begin, lines, end = "[", [json.dumps(each) for each in value], "]"
    else:
        return json.dumps(value)
    return f"{begin}\n  " + ",\n  ".join(lines) + f"\n {end}"


def toml_value(value: object) -> str:
    """Returns a string, number, bool, or a list, tuple, dict or dataclass of them, as TOML."""
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML wants DEL escaped


def block_name(name: str) -> str:
    """Returns a module's qualified name with `*` for block numbers: layers.*.mlp.up_proj."""
    return re.sub(r"(?:(?<=\.)|^)\d+(?=\.)", "*", name)


def footnotes(sentences: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the cell of each row of a table, and the lines below the table. A sentence that several rows
    share becomes [1], [2], .. and is written out once, below."""
    counts = collections.Counter(sentences)
    repeated = [sentence for sentence, count in counts.items() if sentence and count > 1]
    marks = {sentence: f"[{number}]" for number, sentence in enumerate(repeated, start=1)}
    cells = [marks.get(sentence, sentence) for sentence in sentences]
    return cells, [f"{mark} {sentence}" for sentence, mark in marks.items()]


def columns(head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Returns an aligned table: the columns in `left` left-aligned, the others right-aligned."""
    widths = [max(len(row[index]) for row in [head, *rows]) for index in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [head, *rows]
    )
