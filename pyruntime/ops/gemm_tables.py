"""Chooses the GEMM that multiplies bf16 on the CPU: ours (csrc/cpu/packed_matrix.h) or the library's.

gemm_tables.json has a table for each processor on which `python -m bench.gemm --write` measured both. For
each product of a linear layer (forward, dX, dW) and each point of a grid of rows and features it says "o"
(ours) or "l" (the library's). A shape takes the entry of the nearest point, in logarithms
(csrc/ops/gemm/gemm_rule.h). Nothing is measured in a run, so results are the same in every run. A processor
that is not in the file uses the library until `python -m pyruntime tune` has measured a model's shapes, and
ours if the library has no bf16 for it (without AVX-512).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import product as pairs_of
from pathlib import Path

from pyruntime.comm.core import _C

FILE = Path(__file__).parent / "gemm_tables.json"
PRODUCTS = ("forward", "dX", "dW")
"""Products of x [rows, k] and a weight [n, k]: x W^T, dY W, dY^T x."""
OURS, LIBRARY = "o", "l"


@dataclass(frozen=True)
class GemmTable:
    """The choice between both GEMMs on a grid of shapes, for one processor."""

    rows: tuple[int, ...]
    features: tuple[int, ...]
    ours: frozenset[tuple[str, int, int, int]] = frozenset()
    """Points that use our GEMM: (product, rows, k, n)."""
    date: str = ""
    """Date of the measurement; empty: this processor is not in the file."""
    tuned: int = 0
    """Number of points that `tune` has measured."""

    def points(self) -> list[tuple[int, int, int]]:
        """Returns (rows, k, n) of all points, in the C++ core's order."""
        return list(pairs_of(self.rows, self.features, self.features))

    def nearest(self, rows: int, k: int, n: int) -> tuple[int, int, int]:
        """Returns the point that the shape belongs to."""
        return _nearest(self.rows, rows), _nearest(self.features, k), _nearest(self.features, n)

    def describe(self) -> str:
        """Describes the table in one line, for a report."""
        if not _C.has_own_gemm():
            return "the library's (ours needs AVX2, and no AMX)"
        points = len(PRODUCTS) * len(self.points())
        tuned = f", {self.tuned} of them by tune" if self.tuned else ""
        known = f"measured {self.date}" if self.date else "which gemm_tables.json does not know"
        if not self.date and not _C.library_has_bf16():
            known = "for which the library has no bf16"
        taken = f"ours for {len(self.ours)} of {points} classes of shapes, else the library's"
        return f"{taken}: {_C.processor_key()}, {known}{tuned}"


def read(processor: str | None = None, file: Path = FILE) -> GemmTable:
    """Returns the table of a processor, by default this one. If it is not in the file, no point is ours, or
    all are where the library has no bf16."""
    document = json.loads(file.read_text(encoding="utf-8"))
    rows, features = tuple(document["rows"]), tuple(document["features"])
    held = document["processors"].get(_C.processor_key() if processor is None else processor)
    if held is None:
        grid = pairs_of(PRODUCTS, rows, features, features)
        return GemmTable(rows, features, frozenset() if _C.library_has_bf16() else frozenset(grid))
    ours = frozenset(
        (product, m, k, n)
        for product in PRODUCTS
        for m in rows
        for k, line in zip(features, held[product][str(m)], strict=True)
        for n, letter in zip(features, line, strict=True)
        if letter == OURS
    )
    return GemmTable(rows, features, ours, held["date"])


def write(table: GemmTable, processor: str, file: Path = FILE) -> None:
    """Writes the table of a processor into the file, and keeps those of other processors."""
    document = json.loads(file.read_text(encoding="utf-8"))

    def line(product: str, m: int, k: int) -> str:
        return "".join(OURS if (product, m, k, n) in table.ours else LIBRARY for n in table.features)

    held = {
        product: {str(m): [line(product, m, k) for k in table.features] for m in table.rows}
        for product in PRODUCTS
    }
    document["processors"][processor] = {"date": table.date, **held}
    document["processors"] = dict(sorted(document["processors"].items()))
    file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def use(table: GemmTable) -> None:
    """Makes this process choose by that table from now on."""
    is_ours = [[(product, *point) in table.ours for point in table.points()] for product in PRODUCTS]
    _C.use_gemm_table(list(table.rows), list(table.features), is_ours)


def _nearest(grid: tuple[int, ...], value: int) -> int:
    place = 0
    while place + 1 < len(grid) and value * value > grid[place] * grid[place + 1]:
        place += 1
    return grid[place]


use(read())
