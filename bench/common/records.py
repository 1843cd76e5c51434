"""Writes measurements as JSON with one line for each record."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyruntime.text import as_lines


def write_records(path: str | Path, document: Mapping[str, Any]) -> None:
    """Replaces the file as a whole, so that a reader finds the old or the new one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_suffix(".part")
    whole.write_text(as_lines(document), encoding="utf-8")
    whole.replace(path)
