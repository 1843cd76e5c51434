"""Shapes, figures and tables of bench/gpu. Needs no GPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bench.common.tables import table

Emit = Callable[[dict[str, Any]], None]
"""Takes one result at a time."""
WORLD_SIZE = 8
TOLERANCE = 0.02  # of |seen - wanted| / |wanted|, for bf16
ROWS = (512, 1024, 2048, 4096, 8192, 16384)
LINK_RATIOS = (0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
THROTTLED_BYTES_PER_S = 380e9
PARTS: dict[str, float] = {
    "load": 60.0,
    "smoke-portable": 45.0,
    "smoke-hopper": 45.0,
    "gemms-hopper": 45.0,
    "gemms-portable": 45.0,
    "gather-host-hopper": 30.0,
    "gather-host-portable": 30.0,
    "gather-host-chunked": 30.0,
    "training": 90.0,
    "support": 40.0,
    "scatter-host-hopper": 30.0,
    "scatter-host-portable": 30.0,
    "scatter-host-chunked": 30.0,
    "gather-throttled-hopper": 25.0,
    "gather-throttled-portable": 25.0,
    "gather-throttled-chunked": 25.0,
    "baselines": 30.0,
}
"""Each part's time limit in seconds, most informative first; parts for Hopper run only on a Hopper."""
UNMEASURED = ("load", "smoke-portable", "smoke-hopper")
"""Parts that measure nothing, and run only on request."""
AT_BANDWIDTH = tuple(
    f"pyruntime {name}"
    for name in ("adamw", "reduce", "rms_norm", "swiglu", "weighted_gating", "rope", "cross-entropy")
)
"""Name prefixes of the support kernels that should move memory as fast as a copy."""
AIMS = {"hopper": 0.95, "portable": 0.6, "overlap": 1.05, "bandwidth": 0.85, "training": 0.45}


@dataclass(frozen=True)
class Shape:
    """A GEMM of one rank: [m, k] x [n, k]^T, m over all ranks. `op`: "gather" or "scatter"."""

    name: str
    op: str
    m: int
    n: int
    k: int

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k


@dataclass(frozen=True)
class Llama:
    """The sizes of a model whose linears are cut over WORLD_SIZE ranks."""

    name: str
    dim: int
    heads: int
    kv_heads: int
    ffn: int
    head_dim: int = 128


MODELS = (Llama("8B", 4096, 32, 8, 14336), Llama("70B", 8192, 64, 8, 28672))


def llama_shapes(rows: Iterable[int] = ROWS) -> list[Shape]:
    """Returns the four linears of Llama-3 8B and 70B at tp 8, for every number of rows."""
    shapes = []
    for model in MODELS:
        qkv = (model.heads + 2 * model.kv_heads) * model.head_dim // WORLD_SIZE
        ffn = model.ffn // WORLD_SIZE
        for m in rows:
            shapes += [
                Shape(f"{model.name} qkv", "gather", m, qkv, model.dim),
                Shape(f"{model.name} gate+up", "gather", m, 2 * ffn, model.dim),
                Shape(f"{model.name} o", "scatter", m, model.dim, model.heads * model.head_dim // WORLD_SIZE),
                Shape(f"{model.name} down", "scatter", m, model.dim, ffn),
            ]
    return shapes


def size_for(seconds: float, flops_per_s: float, flops_per_element: float, multiple: int = 256) -> int:
    """Returns the free dimension, a multiple of `multiple`, with which a GEMM takes about `seconds`."""
    return max(multiple, round(seconds * flops_per_s / flops_per_element / multiple) * multiple)


def overlap_figures(t_g: float, t_c: float, t_o: float) -> dict[str, float]:
    """Returns R and E from three times in seconds."""
    return {"R": t_o / max(t_g, t_c), "E": (t_g + t_c - t_o) / min(t_g, t_c)}


def median_ratio(results: Iterable[Mapping[str, Any]], contender: str, op: str = "") -> float | None:
    """Returns the median over shapes, of one op or all, of the vendor library's time over the contender's."""
    ratios = [
        r["ratio"][contender] for r in results if contender in r.get("ratio", {}) and op in ("", r.get("op"))
    ]
    return statistics.median(ratios) if ratios else None


def summary(results: list[dict[str, Any]]) -> str:
    """Returns all tables, and each aim beside the measured figure."""
    texts = [
        made
        for made in (
            gemms_table([r for r in results if r.get("kind") == "gemm"]),
            overlap_table([r for r in results if r.get("kind") == "overlap"]),
            support_table([r for r in results if r.get("kind") == "support"]),
            baselines_table([r for r in results if r.get("kind") == "baseline"]),
            training_table([r for r in results if r.get("kind") == "training"]),
            attention_table([r for r in results if r.get("kind") == "attention"]),
            notes([r for r in results if r.get("kind") in ("note", "error", "part")]),
            aims_table(results),
        )
        if made
    ]
    return "\n\n".join(texts)


def gemms_table(results: list[dict[str, Any]]) -> str:
    if not results:
        return ""
    contenders = sorted({name for r in results for name in r["ratio"]})
    modelled = sorted({name for r in results for name in r.get("model", {})})
    merged: dict[tuple[Any, ...], dict[str, Any]] = {}  # each kind of kernel ran separately
    for r in results:
        empty = {"ratio": {}, "model": {}}
        row = merged.setdefault(tuple(r[of] for of in ("name", "op", "m", "n", "k")), {**r, **empty})
        row["ratio"] |= r["ratio"]
        row["model"] |= {
            name: f"{r['seconds'][name] / seconds:.2f} {bound_by}"
            for name, (seconds, bound_by) in r.get("model", {}).items()
        }
    rows = [
        [f"{r['name']} {r['op']}", *(str(r[s]) for s in "mnk"), f"{r['seconds']['torch.matmul'] * 1e6:.1f}"]
        + [f"{r['tflops']:.0f}"]
        + [f"{r['ratio'][name]:.3f}" if name in r["ratio"] else "-" for name in contenders]
        + [r["model"].get(name, "-") for name in modelled]
        for r in merged.values()
    ]
    for op in sorted({r["op"] for r in merged.values()}):
        medians = [median_ratio(results, name, op) for name in contenders]
        rows.append([f"median {op}", *[""] * 5, *("-" if x is None else f"{x:.3f}" for x in medians)])
        rows[-1] += [""] * len(modelled)
    head = ["signals already set", "m", "n", "k", "cuBLAS us", "TFLOP/s", *contenders]
    head += [f"{name} / model" for name in modelled]
    how = "Ratio: time of torch.matmul, of a scatter with torch.sum of all parts, / time of the fused kernel"
    if modelled:
        how += "\n/ model: that kernel's time over model.py's least, and what the model says bounds it"
    return f"{how}\n{table(head, rows)}"


def overlap_table(results: list[dict[str, Any]]) -> str:
    if not results:
        return ""
    names = sorted({name for r in results for name in r["R"]})
    rows = [
        [r["name"], f"{r['t_c'] / r['t_g']:.2f}", f"{r['t_g'] * 1e3:.3f}", f"{r['t_c'] * 1e3:.3f}"]
        + [f"{r['R'][name]:.3f}" if name in r["R"] else "-" for name in names]
        for r in results
    ]
    return "R = T_o / max(T_g, T_c)\n" + table(["link", "T_c/T_g", "T_g ms", "T_c ms", *names], rows)


def support_table(results: list[dict[str, Any]]) -> str:
    rows = [
        [r["name"], f"{r['seconds'] * 1e3:.3f}", f"{r['gb_per_second']:.0f}", f"{r['of_copy']:.3f}"]
        for r in results
    ]
    return table(["", "ms", "GB/s", "of copy"], rows) if rows else ""


def baselines_table(results: list[dict[str, Any]]) -> str:
    """Returns the times of the libraries that torch calls, beside torch's."""
    rows = [
        [
            r["name"],
            *(str(r.get(size, "")) for size in "mnk"),
            "; ".join(f"{name} {seconds * 1e6:.1f}" for name, seconds in r["seconds"].items()),
            *(f"{ratio:.3f}" for ratio in r.get("ratio", {"": float("nan")}).values()),
        ]
        for r in results
    ]
    return table(["baseline", "m", "n", "k", "us", "torch / raw"], rows) if rows else ""


def training_table(results: list[dict[str, Any]]) -> str:
    rows = [
        [
            r["name"],
            f"{r['tokens']}",
            f"{r['seconds'] * 1e3:.1f}",
            f"{r['tokens_per_second']:,.0f}",
            "-" if r["mfu"] is None else f"{r['mfu']:.1%}",
            f"{r['memory_bytes'] / 1e9:.1f}",
        ]
        for r in results
    ]
    head = ["training step of Llama-3.2 1B", "tokens", "ms", "tok/s", "MFU", "GB"]
    return table(head, rows) if rows else ""


def attention_table(results: list[dict[str, Any]]) -> str:
    rows = [
        [
            r["model"],
            str(r["head_dim"]),
            r["name"],
            f"{r['seconds'] * 1e3:.2f}",
            f"{r['tflops']:.0f}",
            "yes" if r["taken"] else "",
        ]
        for r in results
    ]
    head = ["attention, forward and backward", "head_dim", "", "ms", "TFLOP/s", "taken by torch"]
    return table(head, rows) if rows else ""


def notes(results: list[dict[str, Any]]) -> str:
    return "\n".join(f"{r['kind']}: {r['text']}" for r in results)


def aims_table(results: list[dict[str, Any]]) -> str:
    """Returns one line for each aim with a measured figure."""
    gemms = [r for r in results if r.get("kind") == "gemm"]
    rows = []
    for kernels in ("hopper", "portable"):
        for op, of in (("", ""), ("gather", "gathers, "), ("scatter", "scatters, ")):
            if (found := median_ratio(gemms, kernels, op)) is not None:
                rows.append([f"{kernels}, {of}median ratio", f"{found:.3f}", f">= {AIMS[kernels]}"])
    overlaps = [r for r in results if r.get("kind") == "overlap"]
    for link in sorted({r["name"] for r in overlaps}):
        for kind in ("fused hopper", "fused portable", "chunked"):
            best = [
                min((value for name, value in r["R"].items() if name.startswith(kind)), default=None)
                for r in overlaps
                if r["name"] == link
            ]
            found_best = [value for value in best if value is not None]
            if found_best:
                rows.append([f"{link}, {kind}, worst R", f"{max(found_best):.3f}", f"<= {AIMS['overlap']}"])
    for r in results:
        if r.get("kind") == "support" and r["name"].startswith(AT_BANDWIDTH):
            rows.append([f"{r['name']}, of copy", f"{r['of_copy']:.3f}", f">= {AIMS['bandwidth']}"])
        if r.get("kind") == "training" and r["name"].startswith("pyruntime") and r["mfu"] is not None:
            rows.append([f"{r['name']}, MFU of a 1B step", f"{r['mfu']:.3f}", f">= {AIMS['training']}"])
    return table(["aim", "found", "wanted"], rows) if rows else ""
