"""A machine as data: speed and memory of its GPUs, and bandwidths of nested groups of them."""

from __future__ import annotations

import difflib
import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from pyruntime.plan.gemm_model import Gemms
from pyruntime.plan.gpus import GPUS
from pyruntime.text import toml_value

FOLDER = Path(__file__).parent / "clusters"


HOPPER = 90


@dataclass(frozen=True)
class Inside:
    """A measured group inside a node: `size` ranks, `inner` apart."""

    inner: int
    size: int
    bandwidth: float
    """Bytes/s through each rank."""


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal GPUs. Bandwidths are what a ring collective moves through each rank, in bytes/s."""

    name: str
    description: str
    gpu: str
    peak_flops: float
    """Operations/s of one GPU in 16-bit GEMMs."""
    efficiency: float
    """Share of the peak that large GEMMs reach."""
    memory_bytes: float
    """Memory of one GPU."""
    memory_bandwidth: float
    """Bandwidth of one GPU's own memory, bytes/s."""
    gpus_per_node: int
    between: float
    """Bytes/s that leave a node through all its adapters together."""
    inside: tuple[Inside, ...]
    latency_inside: float = 0.0
    """Seconds of a step of a ring inside a node."""
    latency_between: float = 0.0
    """Seconds of a step of a ring between nodes."""
    chip: str = ""
    """Its name in plan/gpus.py, by which GEMMs have a model (plan/gemm_model.py); empty: large GEMMs reach
    `efficiency`, others less by `half_features` and `half_outputs`."""
    half_features: float = 0.0
    """Features of the smaller side of a rank's weight at which GEMMs reach half of that share. In thin GEMMs,
    tiles and the work before and after a kernel's loop count for more."""
    half_outputs: float = 0.0
    """Elements of a GEMM's result at which it reaches half: of few tiles not every multiprocessor has one."""
    attention_efficiency: float = 0.0
    """Share of the peak that attention reaches; 0: as GEMMs do."""
    launch: float = 0.0
    """Seconds of a launch that waits for a chunk, or tells of one."""
    to_host: float = 0.0
    """Bytes/s between a GPU and its host, which reads the routes of experts; 0: not counted."""
    core_bandwidth: float = 0.0
    """Bytes/s at which a rank spends its own time on what it receives, hidden or not. 0: none, because copy
    engines and adapters move data. CPU ranks copy and sum with the core that multiplies, and that core also
    waits for a GEMM's weights to come from memory."""
    core_share: float = 1.0
    """Speed of a rank while all ranks of its node compute, over its speed when they do not. CPU ranks may
    share cores: what one leaves idle goes to the others."""
    layer_overhead: float = 0.0
    """Seconds of a layer's forward pass that do not depend on its size; a backward pass takes twice that."""
    process_bytes: float = 1.5e9
    """Bytes of a rank's memory besides tensors: context, communicators, libraries."""
    rings: tuple[str, ...] = ()
    """Orders of a node's GPUs, such as "0-1-3-2". In each order every GPU has a direct link to the next, and
    the last to the first. Empty: any two GPUs have a direct link."""

    @classmethod
    def of_ranks(cls, per_node: int, core_bandwidth: float = 0.0) -> Cluster:
        """Returns a cluster for counting bytes; its times mean nothing."""
        return cls(
            name="these ranks",
            description="",
            gpu="",
            peak_flops=1.0,
            efficiency=1.0,
            memory_bytes=1.0,
            memory_bandwidth=1.0,
            gpus_per_node=per_node,
            between=1.0,
            inside=(Inside(1, 1, 1.0),),
            core_bandwidth=core_bandwidth,
        )

    @property
    def is_of_gpus(self) -> bool:
        """Whether the ranks' data is moved by something other than their own cores."""
        return not self.core_bandwidth

    def fits(self, inner: int, size: int) -> bool:
        """Whether groups of `size` ranks, `inner` apart, lie inside nodes."""
        return inner * size <= self.gpus_per_node

    def bandwidth(self, inner: int, size: int) -> float:
        """Returns bytes/s through each rank of groups of `size` ranks, with all groups at work at once. The
        groups of the faster-varying axes have `inner` ranks together.

        Inside a node it is the measured value, or the nearest one. Between nodes `inner` rings share a node's
        adapters: between / min(gpus_per_node, inner). Source: AxoNN, arXiv 2305.13525, the communication
        model.
        """
        if size == 1:
            return math.inf
        if not self.fits(inner, size):
            return self.between / min(self.gpus_per_node, inner)

        def distance(one: Inside) -> float:
            return abs(math.log2(one.inner / inner)) + abs(math.log2(one.size / size))

        return min(self.inside, key=distance).bandwidth

    @property
    def flops(self) -> float:
        """Operations/s that large GEMMs reach."""
        return self.peak_flops * self.efficiency

    def gemm_seconds(self, m: float, n: float, k: float, size: int = 2) -> float:
        """Returns the seconds of one GEMM [m, k] [k, n] of elements of `size` bytes on this rank. Those of 4
        bytes take twice as long."""
        if self.gemms is not None:
            return self.gemms.seconds(m, n, k, size=size)
        large = self.flops * min(k, n) / (min(k, n) + self.half_features)
        return self.launch + size / 2 * 2 * m * n * k / large * (1 + self.half_outputs / (m * n))

    def experts_seconds(self, experts: int, rows: float, n: float, k: float) -> float:
        """Returns the seconds of `rows` rows of each expert times its matrix [k, n]; on Hopper it is one
        launch."""
        if self.groups:
            assert self.gemms is not None
            return self.gemms.grouped(experts, experts * rows, n, k)
        return experts * self.gemm_seconds(rows, n, k)

    def experts_gradients_seconds(self, experts: int, rows: float, n: float, k: float) -> float:
        """Returns the seconds of sums [n, k] over `rows` rows of each expert."""
        if self.groups:
            assert self.gemms is not None
            return self.gemms.grouped_gradients(experts, experts * rows, n, k)
        return experts * self.gemm_seconds(n, k, rows)

    @property
    def groups(self) -> bool:
        """Whether its GPUs multiply for all experts of a rank in one launch."""
        return self.gemms is not None and self.gemms.gpu.architecture == HOPPER

    def linear_flops(self, k: float, n: float, rows: float, chunks: int = 1) -> float:
        """Returns operations/s over the three GEMMs of a linear [rows, k] [k, n] on this rank: those of Y and
        dX are cut into `chunks` of rows, that of dW is whole."""
        operations, cut = 2 * rows * k * n, rows / chunks
        if self.gemms is not None:
            of = self.gemms.seconds
            return 3 * operations / (chunks * (of(cut, n, k) + of(cut, k, n)) + of(n, k, rows))
        thin = min(k, n)
        large = self.flops * thin / (thin + self.half_features)
        idle = sum(1 + self.half_outputs / outputs for outputs in (cut * n, cut * k, k * n))
        return 3 * large / idle

    @cached_property
    def gemms(self) -> Gemms | None:
        """The model of its GPU's GEMMs; None if there is none."""
        if not self.chip:
            return None
        return Gemms(GPUS[self.chip], self.peak_flops, self.efficiency, self.memory_bandwidth)

    @property
    def attention_flops(self) -> float:
        return self.peak_flops * (self.attention_efficiency or self.efficiency)


def cluster_names() -> list[str]:
    """Returns the names of the known clusters."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def find_cluster(name_or_path: str) -> Cluster:
    """Returns the cluster of that name, or the one in that TOML file.

    Raises ValueError with the nearest name if there is neither, or for what `cluster_from` refuses.
    """
    names = cluster_names()
    if name_or_path.lower() in names:
        path = FOLDER / f"{name_or_path.lower()}.toml"
    else:
        path = Path(name_or_path)
        if not os.path.isfile(path):
            close = difflib.get_close_matches(name_or_path.lower(), names, n=1, cutoff=0.0)
            raise ValueError(
                f"There is no cluster {name_or_path!r}, and no such file; the nearest is {close[0]}. "
                f"Known are {', '.join(names)}, and any TOML file with the same keys."
            )
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"The cluster file {path} cannot be read: {error}.") from error
    return cluster_from(values, path.stem, str(path))


def cluster_from(values: Mapping[str, Any], name: str, source: str) -> Cluster:
    """Returns the cluster that the keys of a TOML file describe. Raises ValueError that names a key which is
    missing, unknown or no number above 0."""
    known = {field.name: field for field in fields(Cluster)}
    for key in values:
        if key not in known or key == "name":
            close = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
            raise ValueError(f"{source}: a cluster has no key {key}; the nearest is {close[0]}.")
    needed = [key for key, field in known.items() if field.default is MISSING and key != "name"]
    missing = [key for key in needed if key not in values]
    if missing:
        raise ValueError(
            f"{source} lacks {', '.join(missing)}; see {FOLDER.name}/dgx-h100.toml for an example."
        )
    plain: dict[str, Any] = {}
    for key, value in values.items():
        if key in ("description", "gpu", "chip"):
            plain[key] = str(value)
        elif key not in ("inside", "rings"):
            plain[key] = _number(value, f"{source}: {key}", optional=key not in needed)
    if plain.get("chip") and plain["chip"] not in GPUS:
        raise ValueError(f"{source}: chip must be one of {', '.join(GPUS)}, found {plain['chip']!r}.")
    if plain["gpus_per_node"] != int(plain["gpus_per_node"]):
        raise ValueError(f"{source}: gpus_per_node must be a whole number, found {plain['gpus_per_node']}.")
    plain["gpus_per_node"] = int(plain["gpus_per_node"])
    plain["rings"] = _rings(values.get("rings", []), plain["gpus_per_node"], source)
    if not 0 < plain.get("core_share", 1.0) <= 1:
        raise ValueError(f"{source}: core_share must be above 0 and at most 1, found {plain['core_share']}.")
    return Cluster(name=name, inside=_inside(values["inside"], source), **plain)


def _inside(rows: Any, source: str) -> tuple[Inside, ...]:
    keys = [field.name for field in fields(Inside)]
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{source}: inside must be a list of tables with {', '.join(keys)}.")
    found = []
    for row in rows:
        if sorted(row) != sorted(keys):
            raise ValueError(
                f"{source}: a row of inside has {', '.join(sorted(row)) or 'nothing'}; it needs "
                f"{', '.join(keys)}."
            )
        inner, size, bandwidth = (_number(row[key], f"{source}: inside.{key}") for key in keys)
        found.append(Inside(int(inner), int(size), bandwidth))
    return tuple(found)


def _rings(orders: Any, gpus: int, source: str) -> tuple[str, ...]:
    for order in orders if isinstance(orders, list) else [orders]:
        numbers = order.split("-") if isinstance(order, str) else []
        if sorted(numbers) != sorted(map(str, range(gpus))):
            raise ValueError(
                f"{source}: rings must be orders of the {gpus} GPUs of a node such as '0-1-2', "
                f"found {order!r}."
            )
    return tuple(orders)


def _number(value: Any, what: str, optional: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{what} must be a number, found {value!r}.")
    if value < 0 or (value == 0 and not optional):
        raise ValueError(f"{what} must be above 0, found {value}.")
    return float(value)


def to_toml(cluster: Cluster) -> str:
    """Returns a TOML file from which `find_cluster` reads an equal cluster."""
    lines = []
    for name, value in ((field.name, getattr(cluster, field.name)) for field in fields(cluster)):
        if name == "inside":
            rows = ", ".join(
                f"{{ inner = {row.inner}, size = {row.size}, bandwidth = {row.bandwidth:.4g} }}"
                for row in value
            )
            lines.append(f"inside = [{rows}]")
        elif name != "name":
            lines.append(f"{name} = {toml_value(value)}")
    return "\n".join(lines) + "\n"
