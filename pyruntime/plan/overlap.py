"""What of a transfer is exposed when it runs under the GEMM that reads or writes it.

The own rows of a gather are there at once, those of the P - 1 peers come one after another while the rows
before them are multiplied (fill: none; drain: the last peer's rows are multiplied when all has come). A
reduce-scatter is the same backwards. With T_g the GEMM's seconds and T_c the transfer's::

    exposed = max(0, T_c - T_g (P - 1) / P)

At T_c = T_g, where the transfer is just as long as the GEMM, T_g / P of it is still exposed: the drain.
Derived; `threshold` is the rule without it.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyruntime.choices import Overlap
from pyruntime.plan.communication import ALONE, Link, all_gather, all_reduce, own_seconds
from pyruntime.plan.mesh import Job, Mesh
from pyruntime.plan.models import ModelShape


@dataclass(frozen=True)
class LinearShape:
    """A tensor-parallel linear of `k` input and `n` output features, over all ranks.

    column: its input is gathered, else its GEMM is reduce-scattered."""

    name: str
    k: int
    n: int
    column: bool

    @property
    def deciding(self) -> int:
        """The features that decide whether it hides its transfer: N of a gather, K of a reduce-scatter."""
        return self.n if self.column else self.k

    @property
    def travels(self) -> int:
        """Features of a row that travels."""
        return self.k if self.column else self.n


def linears(model: ModelShape) -> tuple[LinearShape, ...]:
    """The tensor-parallel linears of one layer, by their names in Llama."""
    return (
        LinearShape("qkv_proj", model.hidden, model.qkv, True),
        LinearShape("o_proj", model.attention_width, model.hidden, False),
        LinearShape("gate_up_proj" if model.gated else "up_proj", model.hidden, model.up, True),
        LinearShape("down_proj", model.ffn, model.hidden, False),
    )


def threshold(ranks: int, flops: float, bandwidth: float) -> float:
    """Features, over all ranks, from which on a bf16 linear can hide its transfer: (P - 1) F / B.

    flops: operations/s of a rank's GEMMs; bandwidth: bytes/s through a rank. Derived: the rows' number
    cancels.
    """
    return (ranks - 1) * flops / bandwidth


def exposed(transfer: float, compute: float, ranks: int) -> float:
    """Seconds of a transfer of `transfer` seconds that are left over under `compute` seconds of GEMMs in
    as many chunks as there are ranks; see the module's docstring."""
    return max(0.0, transfer - compute * (ranks - 1) / ranks) if ranks > 1 else 0.0


@dataclass(frozen=True)
class Exposed:
    """Seconds of one linear in one layer and one micro-batch."""

    linear: LinearShape
    compute: float
    """Of its GEMM, forward; the backward pass has two of these."""
    transfer: float
    """Of what travels, forward."""
    forward: float
    """Exposed in the forward pass."""
    backward: float
    transfers_backward: float


def exposed_of(
    linear: LinearShape,
    tokens: float,
    over: Link,
    flops: float,
    overlap: Overlap = "fused",
    regather: bool = True,
    sums: Link = ALONE,
) -> Exposed:
    """Of `linear` for `tokens` tokens over the tensor-parallel group; flops: operations/s of its GEMM. sums:
    the group that cuts the features of the stream (y, docs/explanation/primitives.md).

    A column linear's backward pass gathers its input again (`regather`; between hosts it is kept) and
    reduce-scatters dX, under dX and dW; a row linear's gathers dY, under dX. Over `sums` a column linear's
    results are summed, under its GEMM, and a row linear's dX, under dX and dW.
    """
    ranks = over.size * sums.size
    compute = 2.0 * tokens * linear.k * linear.n / ranks / flops
    stream, wide = 2 * tokens * linear.travels / sums.size, 2 * tokens * linear.deciding / over.size
    rows, added = all_gather(stream, over), all_reduce(wide, sums)
    own_rows, own_added = own_seconds(stream, over), 2 * own_seconds(wide, sums)
    again = 2 if linear.column and regather else 1
    if linear.column:
        transfer, own = rows + added, own_rows + own_added
        backward, own_backward = rows * again, own_rows * again
    else:
        transfer, own = rows, own_rows
        backward, own_backward = rows + added, own_rows + own_added
    if overlap == "none":
        return Exposed(linear, compute, transfer, transfer, backward, backward)
    under = compute * (2 if linear.column or sums.size > 1 else 1)
    return Exposed(
        linear,
        compute,
        transfer,
        min(transfer, own + exposed(transfer, compute, ranks)),
        min(backward, own_backward + exposed(backward, under, ranks)),
        backward,
    )


def advice(job: Job, mesh: Mesh, over: Link) -> list[str]:
    """What to do about linears that cannot hide their transfers over the tensor-parallel link `over`."""
    if over.size == 1:
        return []
    wanted = threshold(over.size, job.cluster.flops, over.bandwidth)
    weak = [each for each in linears(job.model) if each.deciding < wanted]
    sentences = [
        f"{each.name} cannot hide alone at tp {mesh.tp}: it has {each.deciding:,} "
        f"{'output' if each.column else 'input'} features and needs {wanted:,.0f} ((P - 1) F / B)"
        for each in weak
    ]
    if len(weak) == len(linears(job.model)) and over.crosses:
        sentences.append(
            f"nothing hides at tp {mesh.tp} between nodes: keep tensor parallelism inside a node"
        )
    elif weak:
        sentences.append(
            "use two micro-batches or sequence slices in flight, and weight gradients as filler in the "
            "backward pass, to hide these"
        )
    return sentences
