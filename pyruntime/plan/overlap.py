"""Computes the part of a transfer that is exposed when it runs under the GEMM that reads or writes it.

A gather has its own rows at once. The rows of the P - 1 peers arrive one after another while earlier rows are
multiplied (fill: none; drain: the last peer's rows are multiplied after all have arrived). A reduce-scatter
is the same backwards. With T_g the GEMM's seconds and T_c the transfer's::

    exposed = max(0, T_c - T_g (P - 1) / P)

If the transfer takes as long as the GEMM (T_c = T_g), T_g / P of it is still exposed: the drain. Derived;
`threshold` is the rule without the drain.
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

    column: its input is gathered; otherwise its result is reduce-scattered."""

    name: str
    k: int
    n: int
    column: bool
    beside: int = 0
    """Features of a row that travel beside its input, once in either direction, and that no GEMM reads."""
    whole: bool = False
    """Whether every rank has the whole weight, for its own rows: only the weight's gradient travels."""
    alone: tuple[int, int] | None = None
    """k and n of one GEMM on a rank, where that is not a rank's share of this one: an expert's."""

    @property
    def deciding(self) -> int:
        """The features that decide whether it hides its transfer: N of a gather, K of a reduce-scatter."""
        return self.n if self.column else self.k

    @property
    def travels(self) -> int:
        """Features of a row on the wire."""
        return self.k if self.column else self.n


def linears(model: ModelShape) -> tuple[LinearShape, ...]:
    """Returns the tensor-parallel linears of one layer, with their names in Llama. Experts gather all rows
    and scatter sums, so they are two linears of the features that a token uses."""
    out = LinearShape("o_proj", model.attention_width, model.hidden, False)
    attention: tuple[LinearShape, ...] = LinearShape("qkv_proj", model.hidden, model.qkv, True), out
    if model.latent is not None:
        (queries, of_queries), (keys, of_keys) = model.of_heads
        attention = (
            LinearShape("latent_proj", model.hidden, model.of_latents, False, whole=True),
            LinearShape("q_proj", of_queries, queries, True),
            LinearShape("kv_proj", of_keys, keys, True, beside=model.latent.rope_dim),
            out,
        )
    if model.experts:
        width = model.expert_ffn
        return (
            *attention,
            LinearShape(
                "experts.gate_up_proj", model.hidden, model.up, True, alone=(model.hidden, 2 * width)
            ),
            LinearShape("experts.down_proj", model.wide, model.hidden, False, alone=(width, model.hidden)),
        )
    if not model.ffn:
        return attention
    return (
        *attention,
        LinearShape("gate_up_proj" if model.gated else "up_proj", model.hidden, model.up, True),
        LinearShape("down_proj", model.ffn, model.hidden, False),
    )


def threshold(ranks: int, flops: float, bandwidth: float) -> float:
    """Returns the features, over all ranks, from which a bf16 linear can hide its transfer: (P - 1) F / B.

    flops: operations/s of a rank's GEMMs; bandwidth: bytes/s through a rank. Derived: rows cancel.
    """
    return (ranks - 1) * flops / bandwidth


def exposed(transfer: float, compute: float, ranks: int) -> float:
    """Returns the exposed seconds of a transfer of `transfer` seconds under `compute` seconds of GEMMs, in
    one chunk per rank; see the module's docstring."""
    return max(0.0, transfer - compute * (ranks - 1) / ranks) if ranks > 1 else 0.0


@dataclass(frozen=True)
class Exposed:
    """Seconds of one linear in one layer and one micro-batch."""

    linear: LinearShape
    compute: float
    """Seconds of its GEMM, forward; the backward pass has two of these."""
    transfer: float
    """Seconds of its transfers, forward."""
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
    """Returns the seconds of `linear` for `tokens` tokens over the tensor-parallel group. flops: operations/s
    of its GEMM. sums: the group that cuts the features of the stream (y, docs/explanation/primitives.md).

    In the backward pass a column linear gathers its input again (`regather`; between hosts it is kept) and
    reduce-scatters dX, under dX and dW. A row linear gathers dY, under dX. Over `sums` a column linear's
    results are summed under its GEMM, and a row linear's dX under dX and dW.
    """
    ranks = over.size * sums.size
    if linear.whole:
        gradient = all_reduce(2 * linear.k * linear.n, over)
        return Exposed(
            linear, 2.0 * tokens * linear.k * linear.n / ranks / flops, 0.0, 0.0, gradient, gradient
        )
    compute = 2.0 * tokens * linear.k * linear.n / ranks / flops
    stream, wide = 2 * tokens * linear.travels / sums.size, 2 * tokens * linear.deciding / over.size
    rows, added = all_gather(stream, over), all_reduce(wide, sums)
    own_rows, own_added = own_seconds(stream, over), 2 * own_seconds(wide, sums)
    again = 2 if linear.column and regather else 1
    beside = all_gather(2 * tokens * linear.beside, over)
    if linear.column:
        transfer, own = rows + beside + added, own_rows + own_added
        backward, own_backward = rows * again + beside, own_rows * again
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
    """Returns advice on linears that cannot hide their transfers over the tensor-parallel link `over`."""
    if over.size == 1:
        return []
    wanted = threshold(over.size, job.cluster.flops, over.bandwidth)
    every = [each for each in linears(job.model) if not each.whole]
    weak = [each for each in every if each.deciding < wanted]
    sentences = [
        f"{each.name} cannot hide its transfer at tp {mesh.tp}: it has {each.deciding:,} "
        f"{'output' if each.column else 'input'} features and needs {wanted:,.0f} ((P - 1) F / B)"
        for each in weak
    ]
    if len(weak) == len(every) and over.crosses:
        sentences.append(
            f"nothing hides at tp {mesh.tp} between nodes: keep tensor parallelism inside a node"
        )
    elif weak:
        sentences.append(
            "use two micro-batches or sequence slices in flight, and weight gradients as filler in the "
            "backward pass, to hide these"
        )
    return sentences
