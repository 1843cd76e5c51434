"""Times both bf16 GEMMs that a CPU may have, ours and the library's, on the products of a linear layer.

Where the library has no bf16 (without AVX-512), its product is the one that is taken instead of ours: in
fp32, of operands that are converted in the call.

The measurements override pyruntime/ops/gemm_tables.json for a shape's class.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pyruntime.comm.core import _C
from pyruntime.ops.gemm_tables import PRODUCTS, GemmTable
from pyruntime.tuning.cache import Choice, Key

OURS, LIBRARY = "ours", "library"
LEAST_S = 0.02
"""Least seconds of one sample: short products are repeated."""
Run = Callable[[], object]


def op_of(product: str) -> str:
    """Returns the name of a product in the tuning file."""
    return f"gemm {product}"


def is_of_gemm(key: Key) -> bool:
    return key.op in map(op_of, PRODUCTS)


def contenders(rows: int, k: int, n: int) -> dict[str, dict[str, Run]]:
    """Returns our run and the library's for each product of x [rows, k] and a weight [n, k]. "dW +=" adds to
    a gradient. Call `_C.use_gemm(True)` before. Ours rearranges its operands in every call, as in a layer."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape).to(torch.bfloat16)

    x, dy, weight = random(rows, k), random(rows, n), random(n, k)
    y, dx, dw, total = (torch.empty_like(each) for each in (dy, x, weight, weight))
    total.zero_()

    def library(out: Tensor, left: Tensor, right: Tensor, accumulate: bool = False) -> Run:
        if not _C.library_has_bf16():
            add = out.add_ if accumulate else out.copy_
            return lambda: add(torch.mm(left.float(), right.float()))
        if accumulate:
            return lambda: torch.addmm(out, left, right, out=out)
        return lambda: torch.mm(left, right, out=out)

    def write(transposed: bool, out: Tensor, left: Tensor) -> Run:
        return lambda: _C.WeightGemm(weight, transposed, rows).write(out[None], left[None], False)

    def gradient(out: Tensor, accumulate: bool) -> Run:
        return lambda: _C.WeightGradientGemm(dy, x).write(out, 0, accumulate)

    return {
        "forward": {LIBRARY: library(y, x, weight.t()), OURS: write(True, y, x)},
        "dX": {LIBRARY: library(dx, dy, weight), OURS: write(False, dx, dy)},
        "dW": {LIBRARY: library(dw, dy.t(), x), OURS: gradient(dw, False)},
        "dW +=": {LIBRARY: library(total, dy.t(), x, accumulate=True), OURS: gradient(total, True)},
    }


def seconds_of(run: Run, repeats: int = 1) -> float:
    """Returns the seconds of one call, in this thread's processor time: other programs do not add to it."""
    begin = time.thread_time()
    for _ in range(repeats):
        run()
    return (time.thread_time() - begin) / repeats


def tuned(table: GemmTable, choices: Mapping[Key, Choice]) -> GemmTable:
    """Returns `table` with the measurements: ours in a class where it was faster for all shapes."""
    found: dict[tuple[str, int, int, int], bool] = {}
    for key, choice in choices.items():
        if is_of_gemm(key) and choice.tier in (OURS, LIBRARY):
            point = key.op.removeprefix("gemm "), *table.nearest(key.rows, key.k, key.n)
            found[point] = found.get(point, True) and choice.tier == OURS
    kept = table.ours - found.keys()
    ours = kept | {point for point, is_ours in found.items() if is_ours}
    return dataclasses.replace(table, ours=ours, tuned=len(found))


def measure(rows: int, k: int, n: int, rounds: int) -> dict[str, dict[str, float]]:
    """Returns the least seconds of ours and of the library's, by product. Both take turns."""
    found = {}
    _C.use_gemm(True)
    for product, runs in contenders(rows, k, n).items():
        repeats = max(1, int(LEAST_S / max(seconds_of(run) for run in runs.values())))
        samples = [{name: seconds_of(run, repeats) for name, run in runs.items()} for _ in range(rounds)]
        found[product] = {name: min(sample[name] for sample in samples) for name in runs}
    return found


def faster(seconds: Mapping[str, float]) -> str:
    """Returns ours if it is at least as fast, else the library's."""
    return OURS if seconds[OURS] <= seconds[LIBRARY] else LIBRARY
