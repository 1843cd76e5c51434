"""Parts "smoke" of bench/gpu: a small run of each fused kernel, for compute-sanitizer."""

from __future__ import annotations

import itertools

import torch

from bench.gpu import library as abi
from bench.gpu.library import Library
from bench.gpu.problem import TOLERANCE, Emit
from bench.gpu.problem import WORLD_SIZE as P
from bench.gpu.ranks import (
    PIECES,
    TILES,
    Workspaces,
    error_of,
    fused,
    gather_shape,
    library_of,
    scatter_shape,
)


def smoke(emit: Emit, which: str) -> None:
    """Runs each fused kernel once, small and with all signals set. Data and references are made on the CPU,
    so that few other kernels run."""
    library = library_of(which)
    wrong: list[str] = []
    for op, tiles in itertools.product(("gather", "scatter"), (abi.SMALL, abi.LARGE)):
        error = smoke_of(library, op, tiles, "cuda")
        emit({"kind": "note", "text": f"smoke: {which} {op}, {TILES[tiles]} tiles: error {error:.2e}"})
        wrong += [f"{op}, {TILES[tiles]} tiles"] if not error < TOLERANCE else []
    if wrong:
        raise RuntimeError(f"wrong results: {'; '.join(wrong)}.")


def smoke_of(library: Library, op: str, tiles: int, device: str, sizes=(264, 136, 72)) -> float:
    """Returns the relative error of rank 0's part of one flight."""
    m, n, k = sizes
    chunk = m // P
    x, weight = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
    if op == "gather":
        spaces = Workspaces(library, gather_shape(P, m, k, PIECES), device)
        spaces.data(0, torch.bfloat16, m, k)[chunk:].copy_(x[chunk:])
        a, c = x[:chunk].to(device), torch.full((m, n), float("nan")).bfloat16().to(device)
        wanted = x.float() @ weight.float().t()
    else:
        spaces = Workspaces(library, scatter_shape(P, m, n), device)
        sent = torch.randn(P, chunk, n).bfloat16()
        spaces.data(0, torch.bfloat16, P, chunk, n).copy_(sent)
        a, c = x.to(device), torch.full((chunk, n), float("nan")).bfloat16().to(device)
        wanted = x[:chunk].float() @ weight.float().t() + sent[1:].float().sum(0)
    spaces.set_all_signals()
    fused(library, spaces, op, a, weight.to(device), c, m, tiles)()
    spaces.check()
    return error_of(c.cpu(), wanted)
