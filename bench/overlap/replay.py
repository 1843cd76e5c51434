"""Models a layer's exposed communication by replaying the schedule that the code runs.

    python -m bench.overlap.replay

The model has two resources, a device's computing thread and one link. Nothing contends, and small GEMMs lose
no speed. A dry run of the model's code (dry_run.py) gives the order of computation and transfers, for 8192
tokens in bf16; other frameworks and no overlap are closed forms. Exposed: the device waits for rows. The last
table, with the shape of bench.overlap.rates on two hosts, is the limit of any machine with this order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from bench.common.measuring import parser_of
from bench.common.tables import table
from bench.overlap.dry_run import Call, backward, calls_of
from pyruntime.llama.presets import preset

FILLS_WAITS = False
"""Whether "ours" computes weight gradients during waits: CPU ranks of several hosts do, devices not yet."""
SEQ = 8192
GEMM = 650e12
"""Operations/s of GEMMs; attention, with causal operations counted, runs at half of it."""
MEMORY, SUMS = 3.0e12, 2.8e12
"""Bytes/s of norms, and of torchtitan's sum of received parts."""
DATA_PARALLEL = 45e9
"""Bytes/s of a rank between hosts, for gradients and weights."""
LATENCY = 10e-6
"""Latency of a chunk between hosts in seconds; the number of chunks follows as in
csrc/transport/ring/cost.h."""


@dataclass(frozen=True)
class Case:
    model: str
    ranks: int
    bandwidth: float
    """Bytes/s through a rank."""
    between_hosts: bool = False
    seq: int = SEQ
    chunk_bytes: int = 0
    """Bytes of a chunk between hosts; 0: follows from LATENCY."""


RATES = Case("dim1024", 2, float("inf"), True, seq=512, chunk_bytes=64 * 1024 * 2)
"""Tensor parallelism in bench.overlap.rates, on a link whose rate follows from each ratio."""
RATIOS = (0.3, 0.7, 1.0, 3.0)

CASES = {
    "8B tp 8 NVLink": Case("llama3-8b", 8, 380e9),
    "70B tp 8 NVLink": Case("llama3-70b", 8, 380e9),
    "8B tp 2 at 45 GB/s": Case("llama3-8b", 2, 45e9, True),
    "70B tp 2 at 45 GB/s": Case("llama3-70b", 2, 45e9, True),
}


@dataclass
class Clock:
    """One device and its link, in seconds; all ranks do the same at the same time."""

    case: Case
    fills: bool
    now: float = 0.0
    link_free: float = 0.0
    exposed: float = 0.0
    waiting_work: float = 0.0
    """Seconds of weight gradients that may be computed at any time."""
    come: dict[int, list[float]] = field(default_factory=dict)
    """Arrival times of a flight's chunks."""

    def compute(self, seconds: float) -> None:
        self.now += seconds

    def wait(self, until: float) -> None:
        gap = max(0.0, until - self.now)
        filled = min(gap, self.waiting_work)
        self.waiting_work -= filled
        self.exposed += gap - filled
        self.now += gap

    def chunks(self, nbytes: float) -> int:
        """Returns the number of chunks of all peers' rows."""
        peers = self.case.ranks - 1
        if not self.case.between_hosts:
            return peers
        if self.case.chunk_bytes:
            return peers * max(1, round(nbytes / self.case.ranks / self.case.chunk_bytes))
        return peers * max(1, round((nbytes / self.case.ranks / self.case.bandwidth / LATENCY) ** 0.5))

    def send(self, flight: int, nbytes: float) -> None:
        """Sends a chunk to a peer, while one of the same size arrives."""
        self.link_free = max(self.link_free, self.now) + nbytes / self.case.bandwidth
        self.come.setdefault(flight, []).append(self.link_free)

    def publish(self, flight: int, nbytes: float) -> None:
        """Publishes this rank's rows of a gather whose operand has `nbytes`."""
        count = self.chunks(nbytes)
        for _ in range(count):
            self.send(flight, nbytes * (1 - 1 / self.case.ranks) / count)

    def gemm_of_gathered(self, flight: int, seconds: float) -> None:
        """Multiplies the own rows first, then the others' as they arrive."""
        self.compute(seconds / self.case.ranks)
        come = self.come.pop(flight)
        for moment in come:
            self.wait(moment)
            self.compute(seconds * (1 - 1 / self.case.ranks) / len(come))

    def gemm_to_scatter(self, flight: int, seconds: float, nbytes: float) -> None:
        """Multiplies the others' rows first, sending each finished chunk; the own rows last."""
        count = self.chunks(nbytes)
        for _ in range(count):
            self.compute(seconds * (1 - 1 / self.case.ranks) / count)
            self.send(flight, nbytes * (1 - 1 / self.case.ranks) / count)
        self.compute(seconds / self.case.ranks)

    def finish(self, flight: int) -> None:
        self.wait(max(self.come.pop(flight), default=0.0))

    def multiply_weight(self, seconds: float) -> None:
        if self.fills:
            self.waiting_work += seconds
        else:
            self.compute(seconds)

    def do_forward(self, call: Call) -> None:
        seconds = call.flops / GEMM
        if call.name == "begin_column":
            self.publish(call.flight, call.bytes)
        elif call.name == "end_column":
            self.gemm_of_gathered(call.flight, seconds)
        elif call.name == "begin_row":
            self.gemm_to_scatter(call.flight, seconds, call.bytes)
        elif call.name == "end_row":
            self.finish(call.flight)
        elif call.name == "attention":
            self.compute(2 * seconds)
        elif call.name == "norm":
            self.compute(2 * call.bytes / MEMORY)  # read and written

    def do_backward(self, call: Call, products: dict[int, float]) -> None:
        """Runs a call's backward. products: seconds of each weight's gradient for the finished slices."""
        seconds = call.flops / GEMM
        if call.name == "end_row":
            self.publish(call.flight, call.bytes)
        elif call.name == "begin_row":
            self.gemm_of_gathered(call.flight, seconds)
        elif call.name == "end_column":
            again = call.whole and not self.case.between_hosts
            if again:
                self.publish(~call.flight, call.bytes)
            self.gemm_to_scatter(call.flight, seconds, call.bytes)
            if again:
                self.finish(~call.flight)
        elif call.name == "begin_column":
            self.finish(call.flight)
        elif call.name == "attention":
            self.compute(2.5 * 2 * seconds)
        elif call.name == "norm":
            self.compute(2 * call.bytes / MEMORY)  # read and written
        if call.name in ("begin_row", "end_column"):
            products[call.weight] += seconds
        if call.name == "share_weight" or (call.whole and call.name in ("begin_row", "end_column")):
            self.multiply_weight(products.pop(call.weight))


@dataclass(frozen=True)
class Layer:
    """Seconds of one layer: computing, and exposed."""

    forward: float
    backward: float
    exposed_forward: float
    exposed_backward: float

    @property
    def share(self) -> float:
        return (self.exposed_forward + self.exposed_backward) / (self.forward + self.backward)


def replay(case: Case, slices: int, fills: bool, layers: int = 8) -> Layer:
    """Returns one layer of `layers`, from the difference to half as many, which removes the ends."""
    found = []
    for count in (layers // 2, layers):
        calls = calls_of(
            preset(case.model), count, case.ranks, case.seq, slices, keep_gathered=case.between_hosts
        )
        clock = Clock(case, fills)
        for call in calls:
            clock.do_forward(call)
        forward, exposed = clock.now, clock.exposed
        clock.wait(clock.link_free)
        clock.now, clock.link_free, clock.exposed, clock.come = 0.0, 0.0, 0.0, {}
        products: dict[int, float] = defaultdict(float)
        for call in backward(calls):
            clock.do_backward(call, products)
        assert not products
        clock.compute(clock.waiting_work)
        found.append((forward - exposed, clock.now - clock.exposed, exposed, clock.exposed))
    half = layers - layers // 2
    return Layer(*((more - less) / half for less, more in zip(*found, strict=True)))


def least(case: Case, ratio: float, slices: int, fills: bool) -> float:
    """Returns a layer's seconds, forward and backward, divided by the longer of computing and transfers.
    Transfers take `ratio` times as long as computing; between hosts, where no rows are gathered twice."""
    free = replay(replace(case, bandwidth=float("inf")), 1, False)
    computed = free.forward + free.backward
    calls = calls_of(preset(case.model), 1, case.ranks, case.seq, 1, keep_gathered=True)
    there = sum(call.bytes for call in calls if call.name in ("begin_column", "begin_row"))
    bandwidth = 2 * there * (1 - 1 / case.ranks) / (ratio * computed)
    found = replay(replace(case, bandwidth=bandwidth), slices, fills)
    taken = found.forward + found.backward + found.exposed_forward + found.exposed_backward
    return taken / max(computed, ratio * computed)


# --- other frameworks: closed forms of one layer


@dataclass(frozen=True)
class Linear:
    """A linear of a layer, in seconds."""

    gemm: float
    transfer: float
    column: bool
    moved: float
    """Bytes of all rows that are sent."""


def linears(case: Case) -> tuple[list[Linear], Layer]:
    """Returns the linears, and the layer without any transfer."""
    calls = calls_of(preset(case.model), 2, case.ranks, SEQ, 1, keep_gathered=True)
    calls = calls[: len(calls) // 2]
    seconds = (1 - 1 / case.ranks) / case.bandwidth
    found = [
        Linear(call.flops / GEMM, call.bytes * seconds, call.name == "end_column", call.bytes)
        for call in calls
        if call.name in ("end_column", "begin_row")
    ]
    free = replay(replace(case, bandwidth=float("inf")), 1, False)
    return found, free


def alone(case: Case, each: Linear, gemm: float, transfer: float) -> float:
    """Returns the exposed part of a transfer, one part a rank, under its GEMM; one part has no cover."""
    return max(0.0, transfer - gemm * (1 - 1 / case.ranks))


def no_overlap(case: Case, each: Linear) -> tuple[float, float]:
    return each.transfer, each.transfer * (2 if each.column else 1)


def perfect_fusion(case: Case, each: Linear) -> tuple[float, float]:
    times = 2 if each.column else 1
    return (
        alone(case, each, each.gemm, each.transfer),
        alone(case, each, times * each.gemm, times * each.transfer),
    )


def transformer_engine(case: Case, each: Linear) -> tuple[float, float]:
    """Gathers by ring exchange, scatters in 4 splits, a column linear's backward in bulk: dX hides the gather
    of X, dW hides the scatter of dX."""
    if each.column:
        return alone(case, each, each.gemm, each.transfer), 2 * max(0.0, each.transfer - each.gemm)
    splits = max(each.transfer / 4, each.transfer - 0.75 * each.gemm)
    return splits, alone(case, each, each.gemm, each.transfer)


def torchtitan(case: Case, each: Linear) -> tuple[float, float]:
    """One chunk a rank, and after every scatter the sum of the received parts."""
    forward, back = perfect_fusion(case, each)
    sums = each.moved * (1 + 1 / case.ranks) / SUMS
    return (forward, back + sums) if each.column else (forward + sums, back)


OTHERS = {
    "no overlap": no_overlap,
    "TransformerEngine's scheme": transformer_engine,
    "torchtitan's scheme": torchtitan,
    "perfect fusion of every op alone": perfect_fusion,
}


def other(case: Case, scheme: str) -> Layer:
    found, free = linears(case)
    exposed = [OTHERS[scheme](case, each) for each in found]
    return replace(
        free,
        exposed_forward=sum(forward for forward, _ in exposed),
        exposed_backward=sum(back for _, back in exposed),
    )


def data_parallel(case: Case, layer: Layer, layers: int, micro_batches: int, early: bool) -> float:
    """Returns the exposed share of a step. The last backward pass hides a reduce-scatter of every layer's
    gradients, the next forward pass an all-gather of its weights: bf16, many ranks, a separate link. early:
    weights return when their own gradient is reduced, not after the norm of all."""
    found, _ = linears(case)
    one = sum(each.gemm for each in found) * GEMM / (2 * SEQ) * 2 / DATA_PARALLEL  # seconds of a transfer
    back, forth = layer.backward + layer.exposed_backward, layer.forward + layer.exposed_forward
    gradients = [one] * layers  # remaining seconds of each transfer
    weights = [one] * layers

    def carry(transfers: Sequence[tuple[list[float], int]], seconds: float) -> None:
        for left, index in transfers:
            carried = min(seconds, left[index])
            left[index] -= carried
            seconds -= carried

    for done in range(1, layers):  # the last layers' gradients are ready first
        there = range(layers - 1, layers - 1 - done, -1)
        reduced = [index for index in there if early and gradients[index] <= 0]
        carry([(gradients, index) for index in there] + [(weights, index) for index in reduced], back)
    exposed = 0.0 if early else sum(gradients)
    if early:
        exposed = gradients[0]  # the first layer's, which the next forward pass reads first
        for index in range(1, layers):
            weights[index] += gradients[index]
    for index in range(layers):
        exposed += weights[index]
        weights[index] = 0.0
        carry([(weights, later) for later in range(index + 1, layers)], forth)
    return exposed / (layers * micro_batches * (layer.forward + layer.backward))


def lines(case: Case) -> list[tuple[str, Layer]]:
    ours = [(f"ours, {count} slice{'s' * (count > 1)}", count) for count in (1, 2, 4)]
    rows = [(name, other(case, name)) for name in OTHERS]
    rows += [(name, replay(case, count, FILLS_WAITS)) for name, count in ours]
    if not FILLS_WAITS:
        rows += [
            (f"{name}, and weight gradients as filler", replay(case, count, True)) for name, count in ours
        ]
    return rows


def main() -> None:
    parser_of(__doc__).parse_args()
    columns: Sequence[list[tuple[str, Layer]]] = [lines(case) for case in CASES.values()]
    rows = [
        ["compute, forward / backward"]
        + [f"{1e3 * found[0][1].forward:.2f} / {1e3 * found[0][1].backward:.2f}" for found in columns]
    ]
    for group in zip(*columns, strict=True):
        rows.append(
            [group[0][0]]
            + [
                f"{1e3 * layer.exposed_forward:.2f} / {1e3 * layer.exposed_backward:.2f} ({layer.share:.1%})"
                for _, layer in group
            ]
        )
    print("Exposed milliseconds of a layer, forward / backward (share of compute)\n")
    print(table(["", *CASES], rows))
    print("\nData parallelism beside it at 45 GB/s: exposed share of a step, ours with 4 slices\n")
    rows = []
    for early in (False, True):
        for count in (1, 4, 16):
            shares = [
                data_parallel(
                    case, replay(case, 4, FILLS_WAITS), preset(case.model).num_hidden_layers, count, early
                )
                for case in list(CASES.values())[:2]
            ]
            name = "weights return as units are reduced" if early else "weights return behind the norm"
            rows.append([f"{name}, {count} micro-batches", *(f"{share:.1%}" for share in shares)])
    print(table(["", *list(CASES)[:2]], rows))
    print("\nTwo hosts, dim1024, 512 tokens: the least R of the order, at T_c / T_g\n")
    rows = [
        [f"{count} slice{'s' * (count > 1)}{', weight gradients as filler' * fills}"]
        + [f"{least(RATES, ratio, count, fills):.2f}" for ratio in RATIOS]
        for count in (1, 2, 4)
        for fills in (False, True)
    ]
    print(table(["", *map(str, RATIOS)], rows))


if __name__ == "__main__":
    main()
