"""Parts "gemms" of bench/gpu: times fused kernels with all signals already set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.gpu import library as abi
from bench.gpu import problem as problem
from bench.gpu.library import Library
from bench.gpu.model import Model, gpu_named
from bench.gpu.problem import TOLERANCE, Emit
from bench.gpu.problem import WORLD_SIZE as P
from bench.gpu.ranks import (
    PIECES,
    TILES,
    Stopwatch,
    Workspaces,
    bf16,
    error_of,
    fused,
    gather_shape,
    library_of,
    scatter_shape,
)


def gemms(emit: Emit, which: str, quick: bool) -> None:
    library = library_of(which)
    shapes = problem.llama_shapes((512, 4096) if quick else problem.ROWS)
    gpu = gpu_named(torch.cuda.get_device_name())
    model = None if gpu is None else Model(library.path, gpu)
    watch = Stopwatch(0.0003)
    empty = watch.interleave({"nothing": lambda: None}, 20)["nothing"].median
    emit({"kind": "note", "text": f"gemms: two events with nothing between them are {empty * 1e6:.1f} us"})
    for shape in shapes:
        try:
            found = gemm(library, which, shape, watch, 5 if quick else 15)
            emit(found | {"model": estimates(model, which, shape, found["tiles"])})
        except (RuntimeError, ValueError) as error:
            emit({"kind": "error", "text": f"{shape}: {type(error).__name__}: {error}"})
            if "CUDA error" in str(error) or "the device said" in str(error):
                raise


def estimates(
    model: Model | None, which: str, shape: problem.Shape, tiles: str
) -> dict[str, tuple[float, str]]:
    """Returns {kernel: (seconds, the bound)} by model.py; empty on a GPU without data sheet there."""
    found = None if model is None else model.of(which, shape.op, tiles, shape)
    return {} if found is None else {which: (found.seconds, found.bound_by)}


def gemm(library: Library, which: str, shape: problem.Shape, watch: Stopwatch, rounds: int) -> dict[str, Any]:
    """Times torch.matmul, a rank's unfused work, and the fused kernel as rank 0 of 8 runs it; also returns
    the kernel's error."""
    m, n, k, gathers = shape.m, shape.n, shape.k, shape.op == "gather"
    chunk = m // P
    x, weight = bf16(m, k), bf16(n, k)
    if gathers:
        spaces = Workspaces(library, gather_shape(P, m, k, PIECES), "cuda")
        spaces.data(0, torch.bfloat16, m, k)[chunk:].copy_(x[chunk:])
        c, a = bf16(m, n), x[:chunk]
        wanted = x @ weight.t()
    else:
        spaces = Workspaces(library, scatter_shape(P, m, n), "cuda")
        parts = spaces.data(0, torch.bfloat16, P, chunk, n)
        parts.normal_()
        c, a = bf16(chunk, n), x
        wanted = (x[:chunk] @ weight.t()).float() + parts[1:].float().sum(0)
    spaces.set_all_signals()
    variants = unfused(x, weight, None if gathers else parts)
    errors = {}
    tiles = library.choose_tiles(chunk, m, n, k)
    other = abi.SMALL + abi.LARGE - tiles
    for label, chosen in ((which, tiles), (f"{which}, other tiles", other)):
        run = fused(library, spaces, shape.op, a, weight, c, m, chosen)
        c.fill_(float("nan"))
        run()
        spaces.check()
        errors[label] = error_of(c, wanted)
        variants[label] = run
    samples = watch.interleave(variants, rounds)
    spaces.check()
    seconds = {name: sample.median for name, sample in samples.items()}
    wrong = [name for name, error in errors.items() if not error < TOLERANCE]
    base = samples[list(variants)[0 if gathers else 1]]
    return {
        "kind": "gemm",
        **vars(shape),
        "seconds": seconds,
        "spread": {name: sample.spread for name, sample in samples.items()},
        "ratio": {name: base.over(samples[name]).median for name in errors if name not in wrong},
        "tflops": shape.flops / seconds["torch.matmul"] / 1e12,
        "tiles": TILES[tiles],
        "error": errors,
        "wrong": wrong,
    }


def unfused(x: Tensor, weight: Tensor, parts: Tensor | None) -> dict[str, Callable[[], object]]:
    """Returns a rank's unfused computation with the vendor's kernels: the GEMM, x [m, k] by weight [n, k],
    and for a scatter also the GEMM with the sum of all ranks' parts [P, m / P, n]. Neither includes
    transfers."""
    whole = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)

    def multiply() -> None:
        torch.matmul(x, weight.t(), out=whole)

    if parts is None:
        return {"torch.matmul": multiply}
    total = torch.empty_like(parts[0])

    def multiply_and_sum() -> None:
        multiply()
        torch.sum(parts, 0, out=total)

    return {"torch.matmul": multiply, "torch.matmul, sum": multiply_and_sum}
