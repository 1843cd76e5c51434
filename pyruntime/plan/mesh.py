"""A candidate of the planner: the job, and how its model is spread over the GPUs of a cluster."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pyruntime.choices import Offloading, OptimizerName, PipelineKind, Recomputation, Rounding
from pyruntime.plan.cluster import Cluster
from pyruntime.plan.models import Adapters, ModelShape


@dataclass(frozen=True)
class Job:
    """The model to train, the batch, and the cluster."""

    model: ModelShape
    cluster: Cluster
    gpus: int
    batch: int
    """Sequences in an optimizer step."""
    seq: int
    """Tokens in a sequence."""
    causal: bool = True
    """Whether attention computes only the causal half; False: all of it, as before flash attention."""
    rounding: Rounding = "nearest"
    """Rounding of bf16 weights: nearest to an fp32 master weight, or stochastic without one."""
    optimizer: OptimizerName = "adamw"
    """Optimizer of the layers' matrices; AdamW updates the rest."""
    offload: Offloading = "none"
    """Optimizer states outside the memory of the ranks' devices."""
    adapters: Adapters | None = None
    """The low-rank adapters that train in place of the weights; None: all weights train."""

    @property
    def tokens(self) -> int:
        """Tokens in an optimizer step."""
        return self.batch * self.seq


@dataclass(frozen=True)
class Mesh:
    """Ranks by axis, fastest-varying first (tp or AxoNN's y, x, z; then cp, dp, pp), and their schedule.

    Neighbours on an axis are `inner(axis)` ranks apart.
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    zero: int = 1
    """ZeRO stage, over dp and cp: 0 cuts nothing, 1 optimizer states, 2 gradients too, 3 weights too."""
    replicate: int = 1
    """Groups of data-parallel ranks that each hold everything once (HSDP); divides dp."""
    kind: PipelineKind = "1f1b"
    """Pipeline schedule."""
    virtual: int = 1
    """Pipeline stages of a rank."""
    slices: int = 1
    """Parts of a sequence in sliced schedules."""
    skip: int = 0
    """Stages that every micro-batch leaves out. No search chooses it, as it changes the model."""
    micro_batch: int = 1
    """Sequences of a forward pass, over all context-parallel ranks together."""
    recompute: Recomputation = "none"
    """Activation checkpointing of every layer. selective: recomputes norms and the activation of the
    feed-forward network. full: keeps a layer's input and runs its forward pass again."""
    x: int = 1
    """AxoNN's axes (arXiv 2305.13525). x, the outer axis: columns of weights, attention heads. y, the inner
    and fastest axis: rows of weights. z, depth: samples, and pieces of the weights."""
    y: int = 1
    z: int = 1
    tau: int = 0
    """Inner steps for each CO2 average of the parameters over dp (arXiv 2401.16265); 0: gradients are reduced
    in every step."""
    layers: tuple[int, ...] = ()
    """Layers of each pipeline stage if chosen; empty: as the trainer cuts them."""
    ep: int = 0
    """Ranks over which experts lie, if not those of tp (0)."""
    tp_share: float = 0.0
    """Largest share of weights that a rank of tp holds, if they are unequal (0: they are not)."""

    @property
    def tp_cut(self) -> float:
        """By how much less than all a rank of tp holds of weights; the one with most counts."""
        return 1 / self.tp_share if self.tp_share else self.tp

    @property
    def is_axonn(self) -> bool:
        return self.x * self.y * self.z > 1

    @property
    def as_zero(self) -> Mesh:
        """The tensor- and data-parallel mesh whose gradients and weights travel as in this project's grids.
        It has blocks over x and y; z becomes ZeRO 3 inside each of dp groups."""
        zero, replicate = (3, self.dp) if self.z > 1 else (1, 1)
        return replace(
            self, tp=self.x * self.y, x=1, y=1, z=1, dp=self.dp * self.z, zero=zero, replicate=replicate
        )

    @property
    def ranks(self) -> int:
        return self.tp * self.cp * self.dp * self.pp * self.x * self.y * self.z

    @property
    def shard(self) -> int:
        """Ranks over which ZeRO cuts."""
        return self.dp // self.replicate * self.cp if self.zero and not self.tau else 1

    @property
    def experts_over(self) -> int:
        """Ranks over which experts lie."""
        return self.ep or self.tp

    @property
    def experts_copies(self) -> int:
        """Ranks that hold the same experts, in each of `replicate` groups."""
        return self.dp // self.replicate * self.cp * self.tp // self.experts_over

    @property
    def experts_shard(self) -> int:
        """Ranks over which ZeRO cuts experts."""
        return self.experts_copies if self.zero and not self.tau else 1

    @property
    def samples(self) -> int:
        """Groups of ranks that see different sequences."""
        return self.dp * self.z

    def micro_batches(self, batch: int) -> int:
        """Returns the forward passes of a rank for `batch` sequences."""
        return batch // (self.samples * self.micro_batch)

    def inner(self, axis: str) -> int:
        """Returns the number of ranks of all faster-varying axes together."""
        model = self.tp * self.x * self.y * self.z
        before = {
            "tp": 1,
            "ep": 1,
            "y": 1,
            "x": self.y,
            "z": self.y * self.x,
            "cp": model,
            "shard": model,
            "dp": model * self.cp,
            "replicate": model * self.cp * (self.dp // self.replicate),
            "experts shard": self.experts_over,
            "experts replicate": self.experts_over * self.experts_copies,
            "pp": model * self.cp * self.dp,
        }
        return before[axis]

    def text(self) -> str:
        """Describes the mesh in a few words, without default values."""
        axes = [(name, getattr(self, name)) for name in ("x", "y", "z", "tp", "cp", "pp", "dp")]
        words = [f"{name}{size}" for name, size in axes if size > 1] or ["1 rank"]
        if self.ep:
            words.append(f"ep{self.ep}")
        if self.pp > 1:
            kind = self.kind + (f"/{self.virtual}" if self.kind == "interleaved" else "")
            words.append(kind + (f"/{self.slices}" if self.slices > 1 else ""))
            words += [f"skip{self.skip}"] if self.skip else []
        if self.dp * self.cp > 1 and not self.is_axonn and not self.tau:
            words.append(f"zero{self.zero}" + (f" in {self.replicate}" if self.replicate > 1 else ""))
        if self.tau:
            words.append(f"CO2 tau {self.tau}")
        words.append(f"mb{self.micro_batch}")
        if self.recompute != "none":
            words.append("recompute" if self.recompute == "full" else "selective recompute")
        return " ".join(words)


def check_job(job: Job) -> None:
    """Raises ValueError with the nearest valid number for an impossible job."""
    for name in ("gpus", "batch", "seq"):
        if getattr(job, name) < 1:
            raise ValueError(f"{name} must be at least 1, found {getattr(job, name)}.")
    node = job.cluster.gpus_per_node
    if job.gpus > node and job.gpus % node:
        below = job.gpus // node * node
        raise ValueError(
            f"{job.gpus} GPUs do not fill nodes of {node} on {job.cluster.name}; the nearest are {below} and "
            f"{below + node}."
        )


def sequences(tokens: int, seq: int) -> int:
    """Returns the sequences in a step of `tokens` tokens. Raises ValueError with the nearest multiple if
    `seq` does not divide it."""
    if seq < 1 or tokens < 1:
        raise ValueError(f"--tokens_per_step={tokens} and --seq={seq} must both be at least 1.")
    if tokens % seq:
        nearest = max(1, round(tokens / seq)) * seq
        raise ValueError(
            f"--tokens_per_step={tokens} is no whole number of sequences of {seq} tokens; the nearest is "
            f"{nearest}."
        )
    return tokens // seq


def divisors(n: int) -> list[int]:
    """Returns all positive divisors of `n`, ascending."""
    small = [p for p in range(1, math.isqrt(n) + 1) if n % p == 0]
    return small + [n // p for p in reversed(small) if p * p != n]
