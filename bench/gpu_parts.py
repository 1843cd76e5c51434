"""The parts of bench/gpu.py, each a function of `emit`, which takes one result (a dict) at a time.

Every part runs in a process of its own: after a fault on the device nothing else can be done in that process.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from ctypes import byref, c_void_p
from typing import Any

import gpu_problem as problem
import torch
from gpu_baselines import baselines
from gpu_ranks import (
    Stopwatch,
    Workspaces,
    error_of,
    fused,
    gather_shape,
    load,
    scatter_shape,
    stream,
    tiles_for,
)
from gpu_training import training
from torch import Tensor

from pyruntime.cuda import library as abi
from pyruntime.cuda.kernels import Kernels
from pyruntime.cuda.library import Library

Emit = Callable[[dict[str, Any]], None]
P = problem.WORLD_SIZE
PIECES = 4
LEAD_S = 0.006  # longer than the host takes to queue the hundred launches of an overlap
GATHER_SIZES = {"whole": (16384, 8192), "quick": (4096, 4096)}  # (m, k); n follows from T_c / T_g
SCATTER_SIZES = {"whole": (8192, 8192), "quick": (4096, 4096)}  # (m, n); k follows
PROBE = 8192  # the third size of the product that tells the rate of products
TOLERANCE = 0.02  # of |seen - wanted| / |wanted|, for bf16
TILES = {abi.SMALL: "small", abi.LARGE: "large"}


def library_of(which: str) -> Library:
    """The portable kernels, or those for Hopper. Raises RuntimeError where these do not run."""
    if which == "portable":
        return load(hopper=False)
    if torch.cuda.get_device_capability() != (9, 0):
        raise RuntimeError(f"{torch.cuda.get_device_name()} is no Hopper, for which these kernels are.")
    library, ones = load(hopper=True), torch.ones(128, 128, dtype=torch.bfloat16, device="cuda")
    Kernels(library).matmul(ones, ones)
    if library.refusal:
        raise RuntimeError(library.refusal)
    return library


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


# ---- a: fused kernels with all signals already set ----


def products(emit: Emit, which: str, quick: bool) -> None:
    library = library_of(which)
    shapes = problem.llama_shapes((512, 4096) if quick else problem.ROWS)
    watch = Stopwatch(0.0003)
    empty = watch.interleave({"nothing": lambda: None}, 20)["nothing"].median
    emit({"kind": "note", "text": f"products: two events with nothing between them are {empty * 1e6:.1f} us"})
    for shape in shapes:
        try:
            emit(product(library, which, shape, watch, 5 if quick else 15))
        except (RuntimeError, ValueError) as error:
            emit({"kind": "error", "text": f"{shape}: {type(error).__name__}: {error}"})
            if "CUDA error" in str(error) or "the device said" in str(error):
                raise


def product(
    library: Library, which: str, shape: problem.Shape, watch: Stopwatch, rounds: int
) -> dict[str, Any]:
    """Times of torch.matmul and of a fused kernel as rank 0 of 8 runs it, and how wrong that is."""
    m, n, k, gathers = shape.m, shape.n, shape.k, shape.op == "gather"
    chunk = m // P
    x, weight = bf16(m, k), bf16(n, k)
    if gathers:
        spaces = Workspaces(library, gather_shape(library, P, m, k, x, PIECES), "cuda")
        spaces.data(0, torch.bfloat16, m, k)[chunk:].copy_(x[chunk:])
        c, a = bf16(m, n), x[:chunk]
        wanted = x @ weight.t()
    else:
        spaces = Workspaces(library, scatter_shape(library, P, m, n, x), "cuda")
        parts = spaces.data(0, torch.bfloat16, P, chunk, n)
        parts.normal_()
        c, a = bf16(chunk, n), x
        wanted = (x[:chunk] @ weight.t()).float() + parts[1:].float().sum(0)
    spaces.set_all_signals()
    theirs = bf16(m, n)
    variants: dict[str, Callable[[], object]] = {
        "torch.matmul": lambda: torch.matmul(x, weight.t(), out=theirs)
    }
    errors = {}
    tiles = tiles_for(library, which == "hopper", chunk, m, n, k)
    other = abi.SMALL + abi.LARGE - tiles
    for label, chosen in ((which, tiles), (f"{which}, other tiles", other)):
        run = fused(library, spaces, shape.op, a, weight, c, m, chosen)
        c.fill_(float("nan"))
        run()
        spaces.check()
        if library.refusal:
            raise RuntimeError(library.refusal)
        errors[label] = error_of(c, wanted)
        variants[label] = run
    samples = watch.interleave(variants, rounds)
    spaces.check()
    seconds = {name: sample.median for name, sample in samples.items()}
    wrong = [name for name, error in errors.items() if not error < TOLERANCE]
    base = samples["torch.matmul"]
    return {
        "kind": "product",
        **vars(shape),
        "seconds": seconds,
        "spread": {name: sample.spread for name, sample in samples.items()},
        "ratio": {name: base.over(samples[name]).median for name in errors if name not in wrong},
        "tflops": shape.flops / base.median / 1e12,
        "tiles": TILES[tiles],
        "error": errors,
        "wrong": wrong,
    }


# ---- b: overlap against a link ----


class Gather:
    """Rank 0 of a gather whose other ranks' rows come over a link: from `source` [m, k] into its slot.

    `pause`: clock cycles that the link rests after each piece, which is how it is throttled.
    """

    def __init__(self, library: Library, source: Tensor, x: Tensor, pause: int = 0) -> None:
        self.library, self.source, self.x, self.pause = library, source, x, pause
        self.m, self.k = x.shape
        self.chunk = self.m // P
        self.spaces = Workspaces(library, gather_shape(library, P, self.m, self.k, x, PIECES), str(x.device))
        self.slot = self.spaces.data(0, x.dtype, self.m, self.k)
        cuda = x.is_cuda
        self.streams = [torch.cuda.Stream(priority=-1) for _ in range(2)] if cuda else []
        self.views = [byref(view) for view in self.spaces.views]

    def pieces(self) -> Iterator[tuple[int, int, int, int]]:
        """(peer, piece, first row, rows), in the order in which rank 0 needs them."""
        rows = self.chunk // PIECES
        for peer, piece in itertools.product(range(1, P), range(PIECES)):
            yield peer, piece, peer * self.chunk + piece * rows, rows

    def send(self, lanes: int) -> None:
        """All puts of all peers, in turns on `lanes` streams; then rank 0's stream goes on beside them."""
        streams = self.streams[:lanes]
        for one in streams:
            one.wait_stream(torch.cuda.current_stream())
        row_bytes = self.k * self.x.element_size()
        for number, (peer, piece, first, rows) in enumerate(self.pieces()):
            on = streams[number % lanes] if streams else None
            self.library.call(
                "put",
                self.views[peer],
                self.source.data_ptr() + first * row_bytes,
                rows * row_bytes,
                0,
                first * row_bytes,
                piece,
                1,
                on.cuda_stream if on else None,
            )
            if self.pause and on:
                with torch.cuda.stream(on):
                    torch.cuda._sleep(self.pause)
        if lanes > 1 and streams:
            streams[0].wait_stream(streams[1])
        for peer in range(1, P):
            self.library.call("end_puts", self.views[peer], streams[0].cuda_stream if streams else None)

    def join(self) -> None:
        if self.streams:
            torch.cuda.current_stream().wait_stream(self.streams[0])

    def fused(self, run: Callable[[], None], lanes: int) -> Callable[[], None]:
        def flight() -> None:
            self.send(lanes)
            run()
            self.join()

        return flight

    def chunked(self, weight: Tensor, c: Tensor, by_piece: bool) -> Callable[[], None]:
        """torch.matmul on each chunk, or on each piece of one, as soon as it is here."""

        def flight() -> None:
            self.send(1)
            torch.matmul(self.x[: self.chunk], weight.t(), out=c[: self.chunk])
            for peer, piece, first, rows in self.pieces():
                last = piece == PIECES - 1
                if not by_piece and not last:
                    continue
                if not by_piece:  # one stream brings the pieces in order
                    first, rows = peer * self.chunk, self.chunk
                self.library.call("await", self.views[0], peer, piece, 1, stream())
                here = slice(first, first + rows)
                torch.matmul(self.slot[here], weight.t(), out=c[here])
            self.library.call("finish", self.views[0], stream())
            self.join()

        return flight

    def puts_alone(self) -> None:
        """A flight that reads nothing: beside `copy_all` it shows what waits and signals cost the link."""
        self.send(1)
        self.join()
        self.library.call("finish", self.views[0], stream())

    def copy_all(self) -> None:
        """The best copy of the same bytes: one. Throttled: the same pieces and rests."""
        if not self.pause:
            self.slot[self.chunk :].copy_(self.source[self.chunk :], non_blocking=True)
            return
        for _, _, first, rows in self.pieces():
            here = slice(first, first + rows)
            self.slot[here].copy_(self.source[here], non_blocking=True)
            torch.cuda._sleep(self.pause)


def calibrated_pause(gather: Gather, watch: Stopwatch, bytes_per_s: float) -> int:
    """Cycles of rest after each piece with which the copies come to `bytes_per_s`."""
    count = sum(1 for _ in gather.pieces())
    sent = gather.x[gather.chunk :].numel() * gather.x.element_size()
    low, high = 1000, 100_000
    seconds = []
    for gather.pause in (low, high):
        seconds.append(watch.interleave({"copy": gather.copy_all}, 5)["copy"].median)
    per_cycle = (seconds[1] - seconds[0]) / (high - low)
    pause = low + (sent / bytes_per_s - seconds[0]) / per_cycle
    if pause < 1:
        raise RuntimeError(f"{count} copies alone take {seconds[0] * 1e6:.0f} us: no rest makes them faster.")
    return int(pause)


def gather_overlap(emit: Emit, link: str, which: str, quick: bool) -> None:
    """`which`: "hopper" or "portable" for a fused kernel, or "chunked"."""
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
    found = watch.interleave({"copy": gather.copy_all, "product": lambda: x @ probe.t()}, 5)
    t_c, rate = found["copy"].median, 2.0 * m * k * len(probe) / found["product"].median
    sent = x[gather.chunk :].numel() * x.element_size()
    emit(
        {
            "kind": "note",
            "text": f"gather, {link}: {sent / 1e6:.0f} MB in {t_c * 1e3:.3f} ms, "
            f"{sent / t_c / 1e9:.1f} GB/s; products at {rate / 1e12:.0f} TFLOP/s",
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
            tiles = tiles_for(library, which == "hopper", gather.chunk, m, n, k)
            run = fused(library, gather.spaces, "gather", x[: gather.chunk], weight, c, m, tiles)
            variants[f"fused {which}"] = gather.fused(run, 1)
            if link == "host":  # a throttle on each of two streams would let twice as much through
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


def scatter_overlap(emit: Emit, which: str, quick: bool) -> None:
    """Parts leave for the pinned memory of the host: by the kernels' own stores (fused; `which` of them), or
    by the copy engine, chunk by chunk. The others' parts are there already, as if they had come meanwhile."""
    m, n = SCATTER_SIZES["quick" if quick else "whole"]
    chunk = m // P
    library = library_of("hopper" if which == "hopper" else "portable")
    one = bf16(1, 1)
    spaces = Workspaces(library, scatter_shape(library, P, m, n, one), "cuda", peers="pinned")
    parts = spaces.data(0, torch.bfloat16, P, chunk, n)
    parts.normal_()
    spaces.set_all_signals()
    views = [byref(view) for view in spaces.views]
    staging, theirs, own, out = bf16(m, n), bf16(m, n), bf16(chunk, n), bf16(chunk, n)
    away = torch.empty(m - chunk, n, dtype=torch.bfloat16, pin_memory=True)
    engine = torch.cuda.Stream(priority=-1)
    kernels = Kernels(library)
    watch = Stopwatch(LEAD_S)

    def copy_all() -> None:
        away.copy_(theirs[chunk:], non_blocking=True)

    probe_a, probe_b = bf16(m, PROBE), bf16(n, PROBE)
    found = watch.interleave({"copy": copy_all, "product": lambda: probe_a @ probe_b.t()}, 5)
    t_c, rate = found["copy"].median, 2.0 * m * n * PROBE / found["product"].median
    sent = away.numel() * 2
    emit({"kind": "note", "text": f"scatter, host: {sent / 1e6:.0f} MB at {sent / t_c / 1e9:.1f} GB/s"})
    for ratio in (1.0,) if quick else problem.LINK_RATIOS:
        k = problem.size_for(t_c / ratio, rate, 2.0 * m * n)
        x, weight = bf16(m, k), bf16(n, k)

        def gemm(x: Tensor = x, weight: Tensor = weight) -> None:
            torch.matmul(x, weight.t(), out=theirs)

        def add(mine: Tensor) -> None:
            out.copy_(kernels.reduce([mine, *parts[1:]]))

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
            tiles = tiles_for(library, which == "hopper", chunk, m, n, k)
            variants = {f"fused {which}": fused(library, spaces, "scatter", x, weight, out, m, tiles)}
        errors = {}
        for name, run in variants.items():
            out.fill_(float("nan"))
            spaces.memory[P - 1][spaces.layout.data :].fill_(255)  # NaN as bf16
            torch.cuda.synchronize()
            run()
            spaces.check()
            # What rank 0 sent to the last rank lies first in that one's slot.
            arrived = spaces.data(P - 1, torch.bfloat16, chunk, n).cuda()
            errors[name] = max(error_of(out, wanted), error_of(arrived, theirs[(P - 1) * chunk :]))
        samples = watch.interleave(
            {**variants, "gemm": gemm, "copy": copy_all, "unfused": unfused}, 3 if quick else 9
        )
        spaces.check()
        emit(overlap_result("scatter, host", {"m": m, "n": n, "k": k}, samples, errors))
        del x, weight, gemm, unfused, chunked, variants


# ---- c: support kernels ----


def support(emit: Emit, quick: bool) -> None:
    library = load(hopper=False)
    kernels = Kernels(library)
    watch = Stopwatch(0.001)
    count = (1 << 24) if quick else (1 << 28)
    rounds = 5 if quick else 15
    made: dict[str, tuple[Callable[[], object], float]] = {}

    source, target = torch.randn(count, device="cuda"), torch.empty(count, device="cuda")
    size = count * 4
    made["torch copy"] = (lambda: target.copy_(source), 2 * size)
    addresses = c_void_p(target.data_ptr()), c_void_p(source.data_ptr())
    made["pyruntime copy"] = (lambda: library.call("copy", *addresses, size, 0, stream()), 2 * size)

    for dtype, ranks in itertools.product((torch.bfloat16, torch.float32), (2, 8)):
        elements = count // 4
        parts = [torch.randn(elements, device="cuda").to(dtype) for _ in range(ranks)]
        moved = (ranks + 1) * elements * parts[0].element_size()
        label = f"pyruntime reduce of {ranks}, {str(dtype).removeprefix('torch.')}"
        made[label] = (lambda parts=parts: kernels.reduce(parts), moved)

    tokens, heads, width = count // 8192, 32, 128
    out, block = torch.randn(1, tokens, heads, width, device="cuda"), bf16(1, tokens, heads, width)
    lse, block_lse = torch.randn(2, 1, heads, tokens, device="cuda").unbind()
    moved = out.numel() * 10 + lse.numel() * 12
    made["pyruntime lse_merge"] = (lambda: kernels.lse_merge_(out, lse, block, block_lse), moved)

    made |= optimizers(kernels, count // 2)
    samples = watch.interleave({name: run for name, (run, _) in made.items()}, rounds)
    copy = made["torch copy"][1] / samples["torch copy"].median
    for name, (_, moved) in made.items():
        seconds = samples[name].median
        emit(
            {
                "kind": "support",
                "name": name,
                "seconds": seconds,
                "spread": samples[name].spread,
                "gb_per_second": moved / seconds / 1e9,
                "of_copy": moved / seconds / copy,
            }
        )


def optimizers(kernels: Kernels, count: int) -> dict[str, tuple[Callable[[], object], float]]:
    """AdamW on `count` parameters in eight tensors: ours; torch's fused one on fp32, alone and with what it
    takes to train bf16 weights by it (gradients to fp32, weights to bf16)."""
    pieces = 8
    masters = [torch.randn(count // pieces, device="cuda") for _ in range(pieces)]
    weights = [master.bfloat16() for master in masters]
    grads = [torch.randn_like(weight) for weight in weights]
    first, second = ([torch.zeros_like(master) for master in masters] for _ in range(2))
    settings = {"lr": 1e-4, "eps": 1e-8}
    step = itertools.count(1)

    def ours() -> None:
        kernels.adamw_(
            weights,
            grads,
            masters,
            first,
            second,
            betas=(0.9, 0.95),
            weight_decay=[0.1] * pieces,
            step=next(step),
            **settings,
        )

    params = [torch.nn.Parameter(master.clone()) for master in masters]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.float()
    optimizer = torch.optim.AdamW(params, betas=(0.9, 0.95), weight_decay=0.1, fused=True, **settings)

    @torch.no_grad()
    def with_casts() -> None:
        torch._foreach_copy_([param.grad for param in params], grads)
        optimizer.step()
        torch._foreach_copy_(weights, params)

    return {
        "pyruntime adamw, bf16 with fp32 master": (ours, 30.0 * count),
        "torch fused adamw, fp32": (optimizer.step, 28.0 * count),
        "torch fused adamw, fp32, and casts": (with_casts, 40.0 * count),
    }


# ---- what compute-sanitizer watches ----


def smoke(emit: Emit, which: str) -> None:
    """One small run of each fused kernel with all signals set, by as few kernels of others as can be: data
    and references are made on the CPU."""
    library = library_of(which)
    wrong: list[str] = []
    for op, tiles in itertools.product(("gather", "scatter"), (abi.SMALL, abi.LARGE)):
        error = smoke_of(library, op, tiles, "cuda")
        emit({"kind": "note", "text": f"smoke: {which} {op}, {TILES[tiles]} tiles: error {error:.2e}"})
        wrong += [f"{op}, {TILES[tiles]} tiles"] if not error < TOLERANCE else []
    if wrong:
        raise RuntimeError(f"wrong results: {'; '.join(wrong)}.")


def smoke_of(library: Library, op: str, tiles: int, device: str, sizes=(264, 136, 72)) -> float:
    """Relative error of rank 0's part of one flight."""
    m, n, k = sizes
    chunk = m // P
    x, weight = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
    if op == "gather":
        spaces = Workspaces(library, gather_shape(library, P, m, k, x, PIECES), device)
        spaces.data(0, torch.bfloat16, m, k)[chunk:].copy_(x[chunk:])
        a, c = x[:chunk].to(device), torch.full((m, n), float("nan")).bfloat16().to(device)
        wanted = x.float() @ weight.float().t()
    else:
        spaces = Workspaces(library, scatter_shape(library, P, m, n, x), device)
        sent = torch.randn(P, chunk, n).bfloat16()
        spaces.data(0, torch.bfloat16, P, chunk, n).copy_(sent)
        a, c = x.to(device), torch.full((chunk, n), float("nan")).bfloat16().to(device)
        wanted = x[:chunk].float() @ weight.float().t() + sent[1:].float().sum(0)
    spaces.set_all_signals()
    fused(library, spaces, op, a, weight.to(device), c, m, tiles)()
    spaces.check()
    return error_of(c.cpu(), wanted)


def run(name: str, emit: Emit, quick: bool) -> None:
    """The part of this name: one of gpu_problem.PARTS, which says what each is."""
    kind, _, which = name.rpartition("-")
    if name == "support":
        support(emit, quick)
    elif name == "baselines":
        baselines(emit, quick)
    elif name == "training":
        training(emit, quick)
    elif kind == "products":
        products(emit, which, quick)
    elif kind == "gather-host":
        gather_overlap(emit, "host", which, quick)
    elif kind == "gather-throttled":
        gather_overlap(emit, "380 GB/s", which, quick)
    elif kind == "scatter-host":
        scatter_overlap(emit, which, quick)
    elif kind == "smoke":
        smoke(emit, which)
    else:
        raise ValueError(f"there is no part {name!r}.")
