"""Records and draws when a rank multiplies and when its link carries bytes, for PyTorch (collective, then
GEMM) and pyruntime.

    python -m bench.netlab --hosts 2 --ranks-per-host 1 --rate 120mbit -- \\
        python -m bench.linear.timeline --rate 120 --plot docs/pictures/timeline.svg \\
        --json bench/results/linear/timeline.json

It runs the forward of an MLP (gate and up in one gather, SwiGLU, down, scatter). GEMMs are the library's
ranges in torch.profiler. The link is the network interface's counter of received bytes, read every
millisecond. The two run in turns several times; of each, rank 0's run of median length is drawn.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from bench.common.measuring import facts, parser_of, start_together, started
from bench.common.records import write_records
from bench.linear.contenders import Ours, dtensor
from bench.linear.problem import DTYPES, Case, Operands

BEFORE, AFTER = (
    "PyTorch DTensor: the collective, then the GEMM",
    "pyruntime: the GEMM takes rows as they arrive",
)
COLOURS = {"gemm": "#2e4057", "link": "#d1495b"}
GEMMS = ("aten::mm", "aten::addmm")
BINS = 120  # over the picture's width
RUNS = 7


@dataclass(frozen=True)
class Trace:
    """One forward of one rank; seconds since it began."""

    name: str
    seconds: float
    gemms: list[tuple[float, float]]
    """(start, end)"""
    received: list[tuple[float, int]]
    """(time, bytes since the start)"""


class Interface:
    """Reads the network interface's received bytes every millisecond, while its context is open."""

    def __init__(self) -> None:
        self.readings: list[tuple[float, int]] = []

    @contextmanager
    def watched(self):
        done = threading.Event()

        def watch() -> None:
            while not done.is_set():
                self.readings.append((time.perf_counter(), received_bytes()))
                time.sleep(1e-3)

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield self
        finally:
            done.set()
            thread.join()


def received_bytes() -> int:
    """Returns the received bytes of all interfaces except the loopback."""
    lines = [line.split(":") for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]]
    return sum(int(figures.split()[0]) for name, figures in lines if name.strip() != "lo")


def record(name: str, forward: Callable[[], object]) -> Trace:
    interface = Interface()
    with interface.watched(), profile(activities=[ProfilerActivity.CPU]) as profiled:
        start_together()
        with record_function("timeline"):
            begin = time.perf_counter()
            forward()
            end = time.perf_counter()
    events = profiled.events()
    (whole,) = (event for event in events if event.name == "timeline")
    ranges = [event.time_range for event in events if event.name in GEMMS]
    gemms = [
        ((each.start - whole.time_range.start) * 1e-6, (each.end - whole.time_range.start) * 1e-6)
        for each in ranges
        # DTensor's mm is recorded too, around the one that computes
        if not any(
            other is not each and each.start <= other.start and other.end <= each.end for other in ranges
        )
    ]
    at_start = max((count for moment, count in interface.readings if moment <= begin), default=0)
    received = [
        (moment - begin, count - at_start) for moment, count in interface.readings if begin <= moment <= end
    ]
    return Trace(name, end - begin, sorted(gemms), received)


def traces(case: Case, mesh) -> list[Trace]:
    """Returns a trace of both contenders, each the run of median length."""
    operands = Operands.random(case, seed=1)
    contenders = {BEFORE: dtensor(case, operands, mesh), AFTER: Ours(case, operands, mesh, "chunked")}
    found: dict[str, list[Trace]] = {name: [] for name in contenders}
    for number in range(2 + RUNS):
        for name, contender in contenders.items():
            trace = record(name, contender.forward)
            if number >= 2:  # the first two warm up
                found[name].append(trace)
    return [sorted(runs, key=lambda trace: trace.seconds)[len(runs) // 2] for runs in found.values()]


def share_of_link(trace: Trace, width: float, bytes_per_s: float) -> list[float]:
    """Returns the used share of the link in bins of `width` seconds."""

    def received_at(moment: float) -> int:
        return max((count for when, count in trace.received if when <= moment), default=0)

    edges = [index * width for index in range(int(trace.seconds / width) + 2)]
    counts = [received_at(edge) for edge in edges]
    return [min(1.0, (b - a) / width / bytes_per_s) for a, b in pairwise(counts)]


def plot(path: str, found: list[Trace], rate: float, case: Case) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "pyruntime"  # the same trace gives the same file
    figure = Figure(figsize=(10, 3.4), dpi=120, layout="constrained")
    longest = max(trace.seconds for trace in found)
    for axes, trace in zip(figure.subplots(len(found), 1, sharex=True), found, strict=True):
        for start, end in trace.gemms:
            axes.barh(1, (end - start) * 1e3, 0.7, start * 1e3, color=COLOURS["gemm"])
        width = longest / BINS
        shares = share_of_link(trace, width, rate * 1e6 / 8)
        edges = [index * width * 1e3 for index in range(len(shares) + 1)]
        heights = [0.7 * share - 0.35 for share in shares]
        axes.stairs(heights, edges, baseline=-0.35, fill=True, color=COLOURS["link"])
        axes.axvline(trace.seconds * 1e3, color="#888888", lw=1)
        axes.set_yticks([0, 1], ["link", "GEMM"])
        axes.set_ylim(-0.5, 1.5)
        axes.set_xlim(0, longest * 1.01e3)
        axes.set_title(f"{trace.name}: {trace.seconds * 1e3:.0f} ms", fontsize=10, loc="left")
        axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel(
        f"ms; forward of an MLP, {case.rows} rows, {case.hidden} to {case.inner} features, bf16, "
        f"2 ranks behind {rate:g} Mbit/s; rank 0",
        fontsize=9,
    )
    figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--plot", required=True, metavar="FILE", help="SVG or PNG to write")
    parser.add_argument("--json", metavar="FILE", help="file to write the two traces to")
    parser.add_argument(
        "--shape", default="mlp:2048x2048x5632", metavar="KIND:MxHxI", help="default: %(default)s"
    )
    parser.add_argument(
        "--rate", type=float, required=True, help="rate of the link, Mbit/s: the height of its row"
    )
    return parser.parse_args()


def main() -> None:
    args = arguments()
    case = Case.parse(args.shape, DTYPES["bf16"])
    with started({"tp": -1}) as runtime:
        torch.manual_seed(0)
        found = traces(case, runtime.tp.mesh)
        if runtime.rank == 0:
            plot(args.plot, found, args.rate, case)
            for trace in found:
                busy = sum(end - start for start, end in trace.gemms)
                print(f"{trace.name}: {trace.seconds * 1e3:.0f} ms, of which GEMMs {busy * 1e3:.0f} ms")
            if args.json:
                kept = [asdict(trace) for trace in found]
                write_records(args.json, {"facts": facts(), "rate_mbit": args.rate, "traces": kept})


if __name__ == "__main__":
    main()
