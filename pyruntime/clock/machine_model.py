"""The machine of the clock: how long a GPU takes for what a stream is asked, in seconds.

A machine is a TOML file in machines/, which names a cluster of the planner for its GPU, memory and links; its
GEMMs are the planner's (pyruntime/plan/gemm_model.py).
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pyruntime.plan.cluster import Cluster, find_cluster
from pyruntime.plan.gemm_model import Gemms, multiprocessors_of
from pyruntime.plan.gpus import LAUNCH_S

MACHINES = Path(__file__).parent / "machines"


@dataclass(frozen=True)
class Machine:
    """A GPU with its host and links, as `find` reads it."""

    name: str
    cluster: Cluster
    gemms: Gemms
    call_s: float
    event_s: float
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
            "memory": self.gemms.touch,
            "memory beside": self.gemms.touch_beside,
            "multiprocessors of blocks": multiprocessors_of,
            "gemm": self.gemms.seconds,
            "grouped gemm": self.gemms.grouped,
            "grouped gradients": self.gemms.grouped_gradients,
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
            "copy to host": lambda nbytes: LAUNCH_S + nbytes / self.cluster.to_host,
            "copy from host": lambda nbytes: LAUNCH_S + nbytes / self.cluster.to_host,
            "multiprocessors": lambda: float(self.gemms.gpu.multiprocessors),
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
        return max(LAUNCH_S + flops / self.cluster.attention_flops, self.gemms.touch(rows))


def find(name: str) -> Machine:
    """Returns the machine of that name. Raises ValueError if there is none."""
    path = MACHINES / f"{name}.toml"
    if not path.exists():
        known = ", ".join(sorted(each.stem for each in MACHINES.glob("*.toml")))
        raise ValueError(f"There is no machine {name!r}; there are: {known}.")
    values = tomllib.loads(path.read_text(encoding="utf-8"))
    cluster = find_cluster(values["cluster"])
    assert cluster.gemms is not None, f"{path} names a cluster without a model of GEMMs"
    return Machine(
        name=name,
        cluster=cluster,
        gemms=cluster.gemms,
        call_s=values["call_s"],
        event_s=values["event_s"],
        host_hop_s=values["host_hop_s"],
    )
