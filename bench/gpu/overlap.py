"""Parts "gather" and "scatter" of bench/gpu: GEMMs whose operand or result crosses a link."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref
from typing import Any

import torch
from torch import Tensor

from bench.gpu import problem
from bench.gpu.gather import Gather, calibrated_pause
from bench.gpu.problem import TOLERANCE, Emit
from bench.gpu.problem import WORLD_SIZE as P
from bench.gpu.ranks import (
    PIECES,
    Stopwatch,
    Workspaces,
    bf16,
    error_of,
    fused,
    library_of,
    reduce,
    scatter_shape,
)

LEAD_S = 0.006  # longer than the host needs to queue an overlap's hundred launches
GATHER_SIZES = {"whole": (16384, 8192), "quick": (4096, 4096)}  # (m, k); n follows from T_c / T_g
SCATTER_SIZES = {"whole": (8192, 8192), "quick": (4096, 4096)}  # (m, n); k follows
PROBE = 8192  # third size of the GEMM that measures the rate


def gather_overlap(emit: Emit, link: str, which: str, quick: bool) -> None:
    """Times a gather behind `link`. `which`: "hopper" or "portable" for a fused kernel, or "chunked"."""
    library = library_of("hopper" if which == "hopper" else "portable")
    m, k = GATHER_SIZES["quick" if quick else "whole"]
    x = bf16(m, k)
    if link == "host":
        source = torch.empty(m, k, dtype=torch.bfloat16, pin_memory=True)
        source.copy_(x)
    else:
        source = x.clone()
    gather = Gather(library, source, x)
    watch = Stopwatch(LEAD_S)
    if link != "host":
        gather.pause = calibrated_pause(gather, watch, problem.THROTTLED_BYTES_PER_S)
    probe = bf16(PROBE, k)
    found = watch.interleave({"copy": gather.copy_all, "gemm": lambda: x @ probe.t()}, 5)
    t_c, rate = found["copy"].median, 2.0 * m * k * len(probe) / found["gemm"].median
    sent = x[gather.chunk :].numel() * x.element_size()
    emit(
        {
            "kind": "note",
            "text": f"gather, {link}: {sent / 1e6:.0f} MB in {t_c * 1e3:.3f} ms, "
            f"{sent / t_c / 1e9:.1f} GB/s; GEMMs at {rate / 1e12:.0f} TFLOP/s",
        }
    )
    for ratio in (1.0,) if quick else problem.LINK_RATIOS:
        n = problem.size_for(t_c / ratio, rate, 2.0 * m * k)
        weight, c, theirs = bf16(n, k), bf16(m, n), bf16(m, n)

        def gemm(weight: Tensor = weight, theirs: Tensor = theirs) -> None:
            torch.matmul(x, weight.t(), out=theirs)

        def unfused(gemm: Callable[[], None] = gemm) -> None:
            gather.copy_all()
            gemm()

        variants: dict[str, Callable[[], None]] = {}
        if which == "chunked":
            variants["chunked"] = gather.chunked(weight, c, by_piece=False)
            variants[f"chunked, {PIECES} pieces"] = gather.chunked(weight, c, by_piece=True)
        else:
            tiles = library.choose_tiles(gather.chunk, m, n, k)
            run = fused(library, gather.spaces, "gather", x[: gather.chunk], weight, c, m, tiles)
            variants[f"fused {which}"] = gather.fused(run, 1)
            if link == "host":  # two throttled streams would carry twice as much
                variants[f"fused {which}, 2 streams"] = gather.fused(run, 2)
        gemm()
        errors = {}
        for name, run in variants.items():
            gather.slot.fill_(float("nan"))
            c.fill_(float("nan"))
            torch.cuda.synchronize()
            run()
            gather.spaces.check()
            errors[name] = error_of(c, theirs)
        variants |= {"gemm": gemm, "copy": gather.copy_all, "puts": gather.puts_alone, "unfused": unfused}
        samples = watch.interleave(variants, 3 if quick else 9)
        gather.spaces.check()
        emit(overlap_result(f"gather, {link}", {"m": m, "n": n, "k": k}, samples, errors))
        del weight, c, theirs, variants, gemm, unfused


def scatter_overlap(emit: Emit, which: str, quick: bool) -> None:
    """Times a scatter to the host's pinned memory: by the kernels' own stores (fused; `which` of them), or by
    the copy engine, chunk by chunk. The other ranks' parts are in place from the beginning."""
    m, n = SCATTER_SIZES["quick" if quick else "whole"]
    chunk = m // P
    library = library_of("hopper" if which == "hopper" else "portable")
    spaces = Workspaces(library, scatter_shape(P, m, n), "cuda", peers="pinned")
    parts = spaces.data(0, torch.bfloat16, P, chunk, n)
    parts.normal_()
    spaces.set_all_signals()
    views = [byref(view) for view in spaces.views]
    staging, theirs, own, out = bf16(m, n), bf16(m, n), bf16(chunk, n), bf16(chunk, n)
    away = torch.empty(m - chunk, n, dtype=torch.bfloat16, pin_memory=True)
    engine = torch.cuda.Stream(priority=-1)
    watch = Stopwatch(LEAD_S)

    def copy_all() -> None:
        away.copy_(theirs[chunk:], non_blocking=True)

    probe_a, probe_b = bf16(m, PROBE), bf16(n, PROBE)
    found = watch.interleave({"copy": copy_all, "gemm": lambda: probe_a @ probe_b.t()}, 5)
    t_c, rate = found["copy"].median, 2.0 * m * n * PROBE / found["gemm"].median
    sent = away.numel() * 2
    emit({"kind": "note", "text": f"scatter, host: {sent / 1e6:.0f} MB at {sent / t_c / 1e9:.1f} GB/s"})
    for ratio in (1.0,) if quick else problem.LINK_RATIOS:
        k = problem.size_for(t_c / ratio, rate, 2.0 * m * n)
        x, weight = bf16(m, k), bf16(n, k)

        def gemm(x: Tensor = x, weight: Tensor = weight) -> None:
            torch.matmul(x, weight.t(), out=theirs)

        def add(mine: Tensor) -> None:
            reduce(library, out, [mine, *parts[1:]])

        def unfused(gemm: Callable[[], None] = gemm) -> None:
            gemm()
            copy_all()
            add(theirs[:chunk])

        def chunked(x: Tensor = x, weight: Tensor = weight) -> None:
            engine.wait_stream(torch.cuda.current_stream())
            for peer in range(1, P):
                rows = slice(peer * chunk, (peer + 1) * chunk)
                torch.matmul(x[rows], weight.t(), out=staging[rows])
                engine.wait_stream(torch.cuda.current_stream())
                library.call(
                    "put",
                    views[0],
                    staging[rows].data_ptr(),
                    chunk * n * 2,
                    peer,
                    0,
                    0,
                    1,
                    engine.cuda_stream,
                )
            library.call("end_puts", views[0], engine.cuda_stream)
            torch.matmul(x[:chunk], weight.t(), out=own)
            add(own)
            torch.cuda.current_stream().wait_stream(engine)

        gemm()
        wanted = theirs[:chunk].float() + parts[1:].float().sum(0)
        if which == "chunked":
            variants: dict[str, Callable[[], None]] = {"chunked": chunked}
        else:
            tiles = library.choose_tiles(chunk, m, n, k)
            variants = {f"fused {which}": fused(library, spaces, "scatter", x, weight, out, m, tiles)}
        errors = {}
        for name, run in variants.items():
            out.fill_(float("nan"))
            spaces.memory[P - 1][spaces.layout.data :].fill_(255)  # NaN as bf16
            torch.cuda.synchronize()
            run()
            spaces.check()
            # Rank 0's part is the first in the last rank's slot.
            arrived = spaces.data(P - 1, torch.bfloat16, chunk, n).cuda()
            errors[name] = max(error_of(out, wanted), error_of(arrived, theirs[(P - 1) * chunk :]))
        samples = watch.interleave(
            {**variants, "gemm": gemm, "copy": copy_all, "unfused": unfused}, 3 if quick else 9
        )
        spaces.check()
        emit(overlap_result("scatter, host", {"m": m, "n": n, "k": k}, samples, errors))
        del x, weight, gemm, unfused, chunked, variants


def overlap_result(name: str, sizes: dict[str, int], samples: dict, errors: dict) -> dict[str, Any]:
    seconds = {variant: sample.median for variant, sample in samples.items()}
    t_g, t_c = seconds["gemm"], seconds["copy"]
    wrong = [variant for variant, error in errors.items() if not error < TOLERANCE]
    figures = {
        variant: problem.overlap_figures(t_g, t_c, t_o)
        for variant, t_o in seconds.items()
        if variant not in ("gemm", "copy", "puts") and variant not in wrong
    }
    return {
        "kind": "overlap",
        "name": name,
        **sizes,
        "t_g": t_g,
        "t_c": t_c,
        "seconds": seconds,
        "spread": {variant: sample.spread for variant, sample in samples.items()},
        "R": {variant: both["R"] for variant, both in figures.items()},
        "E": {variant: both["E"] for variant, both in figures.items()},
        "error": errors,
        "wrong": wrong,
    }
