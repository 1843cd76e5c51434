"""The machine of the clock: how long a GPU takes for what a stream is asked, in seconds.

A machine is a TOML file in machines/, which names a cluster of the planner for peaks, memory and links.
GEMMs follow bench/gpu/model.py: a tile's step over k takes the longest of its tensor cores', shared memory's
and L2's clocks, and tiles run in waves over the multiprocessors. The fastest of the tiles, and of cuts of k,
counts. Clocks are scaled so that a GEMM of 8192 x 8192 x 8192 reaches the cluster's efficiency, because GPUs
lower theirs under load.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pyruntime.clock.gpus import (
    DEPTH,
    FIRST_LOAD_S,
    GPUS,
    L2_BYTES_PER_CLOCK,
    LAUNCH_S,
    SHARED_BYTES_PER_CLOCK,
    Gpu,
)
from pyruntime.plan.cluster import Cluster, find_cluster

MACHINES = Path(__file__).parent / "machines"
LARGE = 8192
"""The m, n and k of the GEMM that reaches the cluster's efficiency."""
EPILOGUE_ELEMENTS_PER_CLOCK = 64
"""Elements of C that a multiprocessor rounds and stores in a clock, as in bench/gpu/model.py."""
CLUSTER_OF_BLOCKS = 2
"""Blocks below each other that load B once."""


@dataclass(frozen=True)
class Machine:
    """A GPU with its host and links, as `find` reads it."""

    name: str
    cluster: Cluster
    gpu: Gpu
    tiles: tuple[tuple[int, int], ...]
    most_splits: int
    call_s: float
    event_s: float
    to_host: float
    """Bytes/s between host and GPU."""
    host_hop_s: float
    """Seconds of a message between the processors of two hosts."""

    def seconds(self, kind: str, sizes: Sequence[int]) -> float:
        """Returns the seconds of a kind of work (csrc/sim/clock/clock.h). Raises ValueError for one without a
        model."""
        model = self._models.get(kind)
        if model is None:
            raise ValueError(f"{kind!r} has no model on {self.name}; models: {', '.join(self._models)}.")
        return model(*sizes)

    @cached_property
    def _models(self) -> dict[str, Callable[..., float]]:
        return {
            "call": lambda: self.call_s,
            "event": lambda: self.event_s,
            "signal": lambda: LAUNCH_S,
            "memory": self.touch,
            "gemm": self.gemm,
            "attention": self.attention,
            "bytes": lambda nbytes: nbytes / self.cluster.memory_bandwidth,
            "put": lambda nbytes: LAUNCH_S + self.sent(nbytes),
            "store": self.sent,
            "latency inside a host": lambda: self.cluster.latency_inside,
            "latency between hosts": lambda: self.cluster.latency_between,
            "message inside a host": self.sent,
            "message between hosts": lambda nbytes: nbytes / self.adapter,
            "all_reduce": lambda nbytes, ranks, inner: self.collective(2 * nbytes, ranks, inner),
            "all_gather": lambda nbytes, ranks, inner: self.collective(ranks * nbytes, ranks, inner),
            "reduce_scatter": lambda nbytes, ranks, inner: self.collective(ranks * nbytes, ranks, inner),
            "broadcast": lambda nbytes, ranks, inner: self.collective(nbytes, ranks, inner),
            "copy to host": lambda nbytes: LAUNCH_S + nbytes / self.to_host,
            "copy from host": lambda nbytes: LAUNCH_S + nbytes / self.to_host,
            "multiprocessors": lambda: float(self.gpu.multiprocessors),
        }

    def sent(self, nbytes: int) -> float:
        """Returns the seconds in which a GPU sends `nbytes` to the others of its host."""
        return nbytes / self.cluster.bandwidth(1, self.cluster.gpus_per_node)

    @property
    def adapter(self) -> float:
        """Bytes/s that leave a GPU's host by its adapter: a host has one for each GPU."""
        return self.cluster.between / self.cluster.gpus_per_node

    def exchanged(self, hosts: int) -> float:
        """Returns the seconds in which a few numbers go round a ring of hosts, by their processors."""
        return (hosts - 1) * self.host_hop_s

    def collective(self, nbytes: int, ranks: int, inner: int) -> float:
        """Returns the seconds of the vendor library's collective, a ring whose ranks lie `inner` apart:
        `nbytes` pass through each but for one rank's part."""
        inside = self.cluster.fits(inner, ranks)
        latency = self.cluster.latency_inside if inside else self.cluster.latency_between
        share = (ranks - 1) / ranks
        return LAUNCH_S + (ranks - 1) * latency + share * nbytes / self.cluster.bandwidth(inner, ranks)

    def touch(self, nbytes: int) -> float:
        """Returns the seconds of a launch that reads or writes `nbytes` of the GPU's memory."""
        return LAUNCH_S + nbytes / self.cluster.memory_bandwidth

    def attention(
        self,
        batch: int,
        heads: int,
        key_heads: int,
        queries: int,
        keys: int,
        features: int,
        size: int,
        causal: int,
        backward: int,
    ) -> float:
        """Returns the seconds of attention that keeps no scores; `size`: bytes of an element. The backward
        pass has 5 GEMMs where the forward pass has 2 (Dao 2023, FlashAttention-2, arXiv:2307.08691). causal:
        the last query sees all keys, and each one before it one less."""
        scores = queries * keys - (queries * queries / 2 if causal else 0)
        flops = 4.0 * batch * heads * scores * features
        flops *= 2.5 if backward else 1.0
        rows = batch * features * size * (heads * queries + key_heads * keys) * 2
        return max(LAUNCH_S + flops / self.cluster.attention_flops, self.touch(rows))

    def gemm(self, m: int, n: int, k: int, batch: int = 1, size: int = 2) -> float:
        """Returns the seconds of `batch` products [m, k] [k, n], elements of `size` bytes. Elements of 4
        bytes take the time of TF32, half the rate of bf16."""
        if not (m and n and k and batch):
            return LAUNCH_S
        slower = size / 2
        moved = self.touch(size * batch * (m * k + k * n + m * n))
        return max(slower * self._tiled(m, n, k, batch) / self.sustained + LAUNCH_S + FIRST_LOAD_S, moved)

    @cached_property
    def sustained(self) -> float:
        """Share of the nominal clock at which GEMMs run."""
        ideal = 2.0 * LARGE**3 / (self.cluster.peak_flops * self._tiled(LARGE, LARGE, LARGE, 1))
        return self.cluster.efficiency / ideal

    def _tiled(self, m: int, n: int, k: int, batch: int) -> float:
        """Returns seconds at the nominal clock, without launch, of the best tiles."""
        return min(
            self._with(rows, columns, splits, m, n, k, batch)
            for rows, columns in self.tiles
            for splits in range(1, self.most_splits + 1)
        )

    def _with(self, rows: int, columns: int, splits: int, m: int, n: int, k: int, batch: int) -> float:
        tiles = batch * splits * math.ceil(m / rows) * math.ceil(n / columns)
        waves = math.ceil(tiles / self.gpu.multiprocessors)
        steps = math.ceil(math.ceil(k / DEPTH) / splits)
        clocks = waves * (steps * self._step(rows, columns) + rows * columns / EPILOGUE_ELEMENTS_PER_CLOCK)
        seconds = clocks / self.gpu.clock_hz
        if splits > 1:  # parts in fp32, written and read, in another launch
            seconds += self.touch(4 * batch * m * n * (splits + 1))
        return seconds

    def _step(self, rows: int, columns: int) -> float:
        """Returns the clocks of a tile for DEPTH of k."""
        loaded = (rows + columns) * DEPTH * 2
        read = math.ceil(rows / 64) * (64 + columns) * DEPTH * 2
        fetched = (rows + columns / CLUSTER_OF_BLOCKS) * DEPTH * 2
        return max(
            2.0 * rows * columns * DEPTH / self.gpu.flops_per_clock,
            (read + loaded) / SHARED_BYTES_PER_CLOCK,
            fetched * self.gpu.multiprocessors / L2_BYTES_PER_CLOCK,
        )


def find(name: str) -> Machine:
    """Returns the machine of that name. Raises ValueError if there is none."""
    path = MACHINES / f"{name}.toml"
    if not path.exists():
        known = ", ".join(sorted(each.stem for each in MACHINES.glob("*.toml")))
        raise ValueError(f"There is no machine {name!r}; there are: {known}.")
    values = tomllib.loads(path.read_text(encoding="utf-8"))
    return Machine(
        name=name,
        cluster=find_cluster(values["cluster"]),
        gpu=GPUS[values["gpu"]],
        tiles=tuple((rows, columns) for rows, columns in values["tiles"]),
        most_splits=values["most_splits"],
        call_s=values["call_s"],
        event_s=values["event_s"],
        to_host=values["to_host"],
        host_hop_s=values["host_hop_s"],
    )
