"""How benchmarks print their tables; without torch, for programs that only show what was found."""

from __future__ import annotations

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned: the first to the left, the others to the right."""
    widths = [max(len(line[column]) for line in [head, *rows]) for column in range(len(head))]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in [head, *rows]
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
