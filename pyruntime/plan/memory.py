"""What a rank's memory holds, by formula, and whether that fits.

Symbols: s tokens and h features of the residual stream, a query and k key/value heads, t tensor-parallel
ranks, c context-parallel ranks, b sequences of a micro-batch.

Source: Fujii et al., arXiv 2411.06465 (equations 4 and 12, the 80 % rule); Megatron-LM's theoretical memory
for interleaving and logits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pyruntime.choices import Recomputation
from pyruntime.plan.mesh import Job, Mesh
from pyruntime.plan.models import ModelShape
from pyruntime.plan.pipelines import deferred, in_flight, last_stage_rank, layers_by_rank

SAFE = 0.8
"""Share of a GPU's memory up to which no estimated run went out of memory (arXiv 2411.06465, 454 runs)."""


@dataclass(frozen=True)
class Rules:
    """What a training program keeps, in bytes."""

    weight: float = 2
    """Of a parameter."""
    gradient: float = 4
    """Of a parameter's gradient, where one micro-batch after another adds to it."""
    optimizer: float = 12
    """Of a parameter's fp32 master weight and two moments."""
    ffn_kept: int = 2
    """Tensors of a gated feed-forward network that are kept besides gate and up: silu(gate) and
    silu(gate) * up, or the latter alone."""
    heap: float = 0
    """Of activations, what is resident besides: freed pieces of the heap that nothing fits into."""
    largest_gradients: float = 0
    """Gradients of the largest weight that are there for a moment beside those that are kept."""
    logits: float = 4
    """Of a logit, with what its loss keeps."""
    reduced_gradient: float | None = None
    """Of a parameter's gradient as it travels to who holds the shard; None: ZeRO-2 cuts `gradient` itself, so
    that nothing whole is kept."""
    outer: float = 6
    """Of CO2, of a parameter's outer iterate, its momentum, and what is being averaged (arXiv 2401.16265;
    derived)."""
    workspaces: bool = False
    """Whether chunks travel through symmetric memory: four slots of the largest operand of an axis."""
    peers_resident: bool = True
    """Whether the slots of peers of an axis, which are read where they lie, count as this rank's memory too,
    as pages do on CPUs."""
    element: float = 2
    """Of an activation."""
    made_whole: bool = False
    """Whether a rank makes the weights of its stage whole before ZeRO 3 cuts them."""

    @property
    def sums_whole(self) -> bool:
        """Whether sums of earlier micro-batches are kept whole at every ZeRO stage, and travel once."""
        return self.reduced_gradient is not None

    def of(self, job: Job) -> Rules:
        """These rules with the job's rounding: at random, weights need no master."""
        if job.rounding == "nearest":
            return self
        return replace(self, optimizer=self.optimizer - MASTER)


PAPER = Rules()
"""Mixed precision as Megatron-LM has it: fp32 main gradients, 18 bytes a parameter."""
MASTER = 4
"""Bytes of an fp32 master weight."""
MOMENT = 4
"""Bytes of an fp32 running mean; of a parameter AdamW keeps two, Muon one."""
SLOTS = 4
"""Flights of a group that may be under way, and messages of a channel between stages."""
BUCKET_BYTES = 4 << 20
"""Up to so much, with its padding, weights travel together; not at ZeRO stage 3, where few do
(`pyruntime.shard`)."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    workspaces: float
    """Gathered weights, symmetric memory, messages between stages."""
    heap: float
    """Memory that is resident without being in use, and what is there for a moment."""
    process: float
    """Context, communicators, libraries."""
    start: float = 0.0
    """While the model is made, all together; 0 where that is never more than a step takes."""

    @property
    def total(self) -> float:
        """At most: in a step, or while the model is made."""
        return max(self.step, self.start)

    @property
    def step(self) -> float:
        return self.states + self.activations + self.logits + self.workspaces + self.heap + self.process

    @property
    def states(self) -> float:
        return self.weights + self.gradients + self.optimizer


def verdict(needed: float, capacity: float) -> str:
    """`fits` up to 80 % of the capacity, `risky` up to 100 %, `does not fit` beyond (arXiv 2411.06465)."""
    if needed <= SAFE * capacity:
        return "fits"
    return "risky" if needed <= capacity else "does not fit"


def layer_activations(
    model: ModelShape,
    tokens: float,
    tp: int = 1,
    rules: Rules = PAPER,
    recompute: Recomputation = "none",
) -> float:
    """Bytes that one layer keeps of a forward pass of `tokens` tokens until its backward pass, with flash
    attention.

    By default and for a gated network tokens h (12 + 4 k/a + 8 h_ffn/h) / t, equation 12: inputs of the two
    norms and of the two column linears (8), queries and attention's output (4), keys and values, gate, up,
    silu(gate) and silu(gate) * up. Selective recomputation leaves out the inputs of column linears, which the
    norms make again, and what is made of gate and up: tokens h (8 + 4 k/a + 4 h_ffn/h) / t. Full
    recomputation keeps the layer's input: tokens h 2 / t.
    """
    return tokens * (_wide(model, recompute) + _cut(model, rules, recompute)) / tp


def _wide(model: ModelShape, recompute: Recomputation) -> float:
    """Bytes of a token that are kept of the residual stream."""
    return 2 * {"none": 4, "selective": 2, "full": 1}[recompute] * model.hidden


def _cut(model: ModelShape, rules: Rules, recompute: Recomputation) -> float:
    """And of what is as wide as heads and feed-forward columns."""
    if recompute == "full":
        return 0.0
    made = 0 if recompute == "selective" else (rules.ffn_kept if model.gated else 1)
    return 2 * (model.qkv + model.attention_width + model.up + made * model.ffn)


def parameters_of_rank(
    model: ModelShape, tp: int, layers: int, first: bool, last: bool
) -> tuple[float, float]:
    """Parameters of a rank with so many layers, with the embedding, with the head: matrices, which tensor
    parallelism cuts, and vectors, which it does not."""
    matrices = layers * model.layer_matrices
    vectors = layers * model.layer_vectors
    if first:
        matrices += model.embedding
    if last:
        vectors += model.last_norm
        matrices += 0 if model.tied and first else model.head
    return matrices / tp, vectors


def states(parameters: float, mesh: Mesh, micro_batches: int, rules: Rules) -> tuple[float, float, float]:
    """Bytes of weights, gradients and optimizer states of `parameters` parameters.

    ZeRO (Rajbhandari et al. 2020): stage 1 cuts optimizer states over dp cp ranks, 2 gradients too, 3 weights
    too.
    """
    shard, zero = mesh.shard, mesh.zero if not mesh.tau else 0
    weights = rules.weight / (shard if zero == 3 else 1)
    optimizer = rules.optimizer / (shard if zero else 1)
    gradients = rules.gradient / (shard if zero >= 2 else 1)
    if rules.reduced_gradient is not None and mesh.dp * mesh.cp > 1:
        # Where weights are cut, what they are going to be lies beside the gradients until the step counts.
        held = (rules.reduced_gradient + rules.weight) / shard if zero else rules.reduced_gradient
        gradients = held + (4 if micro_batches > 1 else 0)
    if mesh.tau:
        optimizer += rules.outer
    return weights * parameters, gradients * parameters, optimizer * parameters


def memory_of_rank(
    job: Job,
    mesh: Mesh,
    rank: int,
    rules: Rules = PAPER,
    process: float | None = None,
    layers: int | None = None,
) -> Memory:
    """What rank `rank` of the pipeline holds at most.

    process: bytes beside tensors; None: the cluster's. layers: of this rank; None: as the trainer cuts them.
    """
    rules = rules.of(job)
    model, last = job.model, last_stage_rank(mesh)
    micro_batches = mesh.micro_batches(job.batch)
    cut = mesh.tp * mesh.x * mesh.y * mesh.z
    if layers is None:
        layers = layers_by_rank(model, mesh)[rank]
    matrices, vectors = parameters_of_rank(model, 1, layers, rank == 0, rank == last)
    parameters = matrices / cut + vectors
    weights, gradients, optimizer = states(parameters, mesh, micro_batches, rules)
    muon = 0.0
    if job.optimizer == "muon":
        held = layers * model.layer_matrices / cut / mesh.shard
        optimizer -= MOMENT * held
        muon = _muon(model, held, mesh, rules)
    process = job.cluster.process_bytes if process is None else process
    start = 0.0
    if rules.made_whole:
        # Beside what stands whole, that which ZeRO 3 leaves a rank of it.
        shards = mesh.z * (mesh.shard if mesh.zero == 3 else 1)
        whole = matrices * mesh.z / cut + vectors
        start = rules.weight * whole * (1 + 1 / shards if shards > 1 else 1) + process
    tokens = mesh.micro_batch * job.seq / mesh.cp
    one, again = _one_layer(model, tokens, mesh, rules), mesh.recompute != "none"
    held = in_flight(mesh, rank, micro_batches)
    waiting = deferred(mesh, rank, micro_batches)
    # Where weights' gradients wait and nothing is computed again, about as much is kept as for the backward
    # pass.
    activations = (held - waiting if again else held) * layers * one
    if again:
        activations += waiting * layers * _waiting_layer(model, tokens) / mesh.tp
    if mesh.recompute == "full":
        # One layer whole while it is run again.
        activations += _one_layer(model, tokens, replace(mesh, recompute="none"), rules)
    activations *= rules.element / 2  # the formulas are of 16 bits
    logits = 0.0
    if rank == last:
        # Of one micro-batch: the last stage goes backward right after it went forward.
        logits = tokens * model.vocab / (mesh.tp * mesh.x * mesh.slices) * rules.logits
        logits += 2 * rules.element * tokens * model.hidden / (mesh.tp * mesh.y)
        logits += math.ceil(waiting) * rules.element * tokens * (model.hidden + model.vocab) / mesh.tp
    return Memory(
        weights,
        gradients,
        optimizer,
        activations,
        logits,
        _workspaces(job, mesh, tokens, rules) + muon,
        rules.heap * activations + rules.largest_gradients * rules.weight * model.largest / cut,
        process,
        start,
    )


def worst_memory(job: Job, mesh: Mesh, rules: Rules = PAPER, process: float | None = None) -> Memory:
    """Of the rank that needs most: the first, which has most in flight, the first of those with as many
    layers, or the last, which has the logits. process: as `memory_of_rank` has it.

    All that estimates a run's memory comes here, so that no two commands answer differently.
    """
    layers = layers_by_rank(job.model, mesh)
    ranks = {0, mesh.pp // 2, mesh.pp - 1, *map(layers.index, set(layers))}
    return max(
        (memory_of_rank(job, mesh, rank, rules, process, layers[rank]) for rank in sorted(ranks)),
        key=lambda each: each.total,
    )


def _muon(model: ModelShape, held: float, mesh: Mesh, rules: Rules) -> float:
    """Bytes of matrices that Muon makes orthogonal, of which a rank owns as many parameters as it holds
    momentum of (docs/explanation/data-parallel.md): what it owns, and of one matrix its fp32 copy, the next
    iterate and two products; slots that they travel in."""
    n, k = max(map(sorted, model.layer_shapes), key=lambda sides: sides[0] * sides[1])
    bytes_ = rules.weight * (held + n * k + 2 * n * n) + 4 * n * k
    if rules.workspaces:
        bucket = rules.weight * max(model.hidden * model.up, model.hidden * model.qkv) / mesh.tp
        for ranks in (mesh.shard, mesh.tp):
            bytes_ += SLOTS * bucket * ranks if ranks > 1 else 0
    return bytes_


def _one_layer(model: ModelShape, tokens: float, mesh: Mesh, rules: Rules) -> float:
    if mesh.is_axonn:
        # Heads and the feed-forward network's columns lie over x, the residual stream's features over y.
        wide, cut = _wide(model, mesh.recompute), _cut(model, rules, mesh.recompute)
        return tokens * (wide / mesh.y + cut / mesh.x)
    return layer_activations(model, tokens, mesh.tp, rules, mesh.recompute)


def _waiting_layer(model: ModelShape, tokens: float) -> float:
    """Bytes of a layer's weight gradients that wait: bf16 inputs of its linears, and gradients of their
    outputs."""
    inputs = 2 * model.hidden + model.attention_width + model.ffn
    outputs = model.qkv + 2 * model.hidden + model.up
    return 2 * tokens * (inputs + outputs)


def _workspaces(job: Job, mesh: Mesh, tokens: float, rules: Rules) -> float:
    model = job.model
    bytes_ = 0.0
    if mesh.zero == 3 and mesh.shard > 1 and not mesh.tau:
        bytes_ += 2 * rules.weight * model.layer_matrices / mesh.tp  # a layer at work, the next one coming
    if mesh.z > 1:
        bytes_ += 2 * rules.weight * model.layer_matrices / (mesh.x * mesh.y)
    if mesh.pp > 1:
        bytes_ += 2 * SLOTS * rules.element * tokens * model.hidden / (mesh.tp * mesh.slices)
    if rules.workspaces:
        if mesh.tp > 1:
            bytes_ += SLOTS * rules.element * tokens * model.hidden
        if mesh.dp * mesh.cp > 1:
            bucket = rules.weight * model.largest / mesh.tp
            if mesh.zero < 3:
                bucket = max(bucket, min(BUCKET_BYTES, rules.weight * model.parameters / (mesh.tp * mesh.pp)))
            bytes_ += SLOTS * bucket * (mesh.dp * mesh.cp if rules.peers_resident else 1)
            if mesh.zero:
                bytes_ += SLOTS * bucket  # weights have slots of their own, of each rank's rows
    return bytes_
