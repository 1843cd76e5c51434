"""Writes measurements as JSON with one line for each record."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


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


def write_records(path: str | Path, document: Mapping[str, Any]) -> None:
    """Replaces the file as a whole, so that a reader finds the old or the new one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_suffix(".part")
    whole.write_text(as_lines(document), encoding="utf-8")
    whole.replace(path)
