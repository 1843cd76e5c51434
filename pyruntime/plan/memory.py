"""Estimates a rank's memory by formula, and whether it fits.

Symbols: s tokens and h features of the residual stream, a query and k key/value heads, t tensor-parallel
ranks, c context-parallel ranks, b sequences of a micro-batch.

Source: Fujii et al., arXiv 2411.06465 (equations 4 and 12, the 80 % rule); Megatron-LM's theoretical memory
for interleaving and logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import assert_never

from pyruntime.choices import Recomputation
from pyruntime.plan.expert_costs import dealt_share
from pyruntime.plan.mesh import Job, Mesh
from pyruntime.plan.models import ModelShape
from pyruntime.plan.pipelines import deferred, dense_by_rank, in_flight, last_stage_rank, layers_by_rank

SAFE = 0.8
"""Share of a GPU's memory up to which no estimated run ran out of memory (arXiv 2411.06465, 454 runs)."""


@dataclass(frozen=True)
class Rules:
    """Bytes that a training program keeps."""

    weight: float = 2
    """Bytes of a parameter."""
    gradient: float = 4
    """Bytes of a parameter's gradient to which several micro-batches add."""
    optimizer: float = 12
    """Bytes of a parameter's fp32 master weight and two moments."""
    ffn_kept: int = 2
    """Tensors of a gated feed-forward network that are kept besides gate and up: silu(gate) and silu(gate) *
    up, or only the latter."""
    heap: float = 0
    """Resident memory besides activations, as a share of them: freed heap too small for reuse."""
    largest_gradients: float = 0
    """Number of temporary gradients of the largest weight, besides those that are kept."""
    logits: float = 4
    """Bytes of a logit, including what its loss keeps."""
    head_rows: Callable[[int, int], int] | None = None
    """Returns, of the rows of a loss and the bytes of a row's logits on a rank, how many rows' logits are in
    memory at once, 0 for all (`pyruntime.nn.chunked_head.chunk_rows`). None: always all."""
    reduced_gradient: float | None = None
    """Bytes of a parameter's gradient on its way to the owner of the shard; None: ZeRO-2 cuts `gradient`
    itself, and nothing whole is kept."""
    outer: float = 6
    """Bytes that CO2 adds for a parameter: outer iterate, momentum, and the average under way (arXiv
    2401.16265; derived)."""
    workspaces: bool = False
    """Whether chunks travel through symmetric memory: four slots of the largest operand of an axis."""
    peers_resident: bool = True
    """Whether peers' slots that this rank reads in place count as its memory too, as pages do on CPUs."""
    element: float = 2
    """Bytes of an activation's element."""
    whole_inputs: bool = False
    """Whether column linears keep the rows of all tensor-parallel ranks, as those of causal slices may."""
    made_whole: bool = False
    """Whether a rank makes the weights of its stage whole before ZeRO 3 cuts them."""

    @property
    def sums_whole(self) -> bool:
        """Whether sums of earlier micro-batches are kept whole at every ZeRO stage, and travel once."""
        return self.reduced_gradient is not None

    def of(self, job: Job) -> Rules:
        """Returns these rules with the job's rounding (stochastic rounding needs no master weights) and its
        offloading."""
        if job.offload == "states":
            return replace(self, optimizer=0.0)
        if job.rounding == "nearest":
            return self
        return replace(self, optimizer=self.optimizer - MASTER)


PAPER = Rules()
"""Mixed precision as in Megatron-LM: fp32 main gradients, 18 bytes a parameter."""
FP32 = MASTER = 4
"""Bytes of an fp32 master weight."""
MOMENT = 4
"""Bytes of an fp32 running mean; AdamW keeps two for a parameter, Muon one."""
OFFLOAD_BUFFERS = 48 << 20
"""Bytes of the buffers that offloaded states pass through (`pyruntime.data_parallel.offload`)."""
SLOTS = 4
"""Most open flights of a group, and most messages of a channel between stages."""
ROUTER_BYTES = 12
"""Bytes of a token and an expert that a router keeps: three fp32 numbers."""
IMBALANCE = 2.0
"""Rows of the experts of the busiest rank over the mean, in the first steps of a run."""
BUCKET_BYTES = 4 << 20
"""Padded size up to which weights travel together; not at ZeRO stage 3, where few do (`pyruntime.shard`)."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, by use."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    workspaces: float
    """Gathered weights, symmetric memory, messages between stages."""
    heap: float
    """Resident memory that is not in use, and temporary memory."""
    process: float
    """Context, communicators, libraries."""
    start: float = 0.0
    """All memory while the model is made; 0 if that never exceeds a step's."""

    @property
    def total(self) -> float:
        """The maximum over a step and the making of the model."""
        return max(self.step, self.start)

    @property
    def step(self) -> float:
        return self.states + self.activations + self.logits + self.workspaces + self.heap + self.process

    @property
    def states(self) -> float:
        return self.weights + self.gradients + self.optimizer


def verdict(needed: float, capacity: float) -> str:
    """Returns `fits` up to 80 % of capacity, `risky` up to 100 %, else `does not fit` (arXiv 2411.06465)."""
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
    """Returns the bytes that one layer keeps from a forward pass of `tokens` tokens until its backward pass,
    with flash attention.

    By default and for a gated network tokens h (12 + 4 k/a + 8 h_ffn/h) / t, equation 12: inputs of the two
    norms and of the two column linears (8), queries and attention's output (4), keys and values, gate, up,
    silu(gate) and silu(gate) * up. Selective recomputation drops the inputs of column linears, which the
    norms recompute, and what is made of gate and up: tokens h (8 + 4 k/a + 4 h_ffn/h) / t. Full recomputation
    keeps the layer's input: tokens h 2 / t.
    """
    kept = _wide(model, recompute) + _cut(model, rules, recompute)
    if rules.whole_inputs and recompute != "full":  # of two column linears, in place of this rank's rows
        kept += 2 * 2 * model.hidden * (tp if recompute == "selective" else tp - 1)
    return tokens * kept / tp


def _wide(model: ModelShape, recompute: Recomputation) -> float:
    """Returns the bytes of a token that are kept of the residual stream."""
    if (
        recompute == "selective" and model.norms_after
    ):  # linears read the stream, which no norm computes again
        recompute = "none"
    return 2 * {"none": 4, "selective": 2, "full": 1}[recompute] * model.hidden


def _cut(model: ModelShape, rules: Rules, recompute: Recomputation) -> float:
    """Returns the bytes of a token that are kept of tensors as wide as heads and feed-forward columns."""
    if recompute == "full":
        return 0.0
    made = 0 if recompute == "selective" else (rules.ffn_kept if model.gated else 1)
    attention = model.qkv + model.attention_width
    if (
        model.latent is not None
    ):  # attention's result as wide as keys, latent features and their norms' results
        attention += model.heads * model.head_dim + 2 * model.of_latents
    if not model.experts:
        return 2 * (attention + model.up + made * model.ffn)
    # An expert keeps only gate and up of its rows; a router keeps fp32.
    routed = 2 * model.per_token * model.expert_ffn
    return 2 * (attention + routed + (2 + made) * model.shared_ffn) + ROUTER_BYTES * model.experts


def parameters_of_rank(
    model: ModelShape, tp: int, layers: int, first: bool, last: bool, dense: int = 0
) -> tuple[float, float]:
    """Returns the parameters of a rank with `layers` layers, `dense` of which have no experts though the
    model has, with the embedding if `first`, with the head if `last`: matrices, which tensor parallelism
    cuts, and vectors, which it does not."""
    matrices = (layers - dense) * model.layer_matrices + dense * model.dense.layer_matrices
    vectors = (layers - dense) * model.layer_vectors + dense * model.dense.layer_vectors
    if first:
        matrices += model.embedding
    if last:
        vectors += model.last_norm
        matrices += 0 if model.tied and first else model.head
    return matrices / tp, vectors


def states(
    parameters: float, mesh: Mesh, micro_batches: int, rules: Rules, shard: int | None = None
) -> tuple[float, float, float]:
    """Returns the bytes of weights, gradients and optimizer states of `parameters` parameters. shard: the
    ranks over which ZeRO cuts them; None: those of the mesh.

    ZeRO (Rajbhandari et al. 2020): stage 1 cuts optimizer states over dp cp ranks, stage 2 gradients too,
    stage 3 weights too.
    """
    shard, zero = mesh.shard if shard is None else shard, mesh.zero if not mesh.tau else 0
    weights = rules.weight / (shard if zero == 3 else 1)
    optimizer = rules.optimizer / (shard if zero else 1)
    gradients = rules.gradient / (shard if zero >= 2 else 1)
    if rules.reduced_gradient is not None and mesh.dp * mesh.cp > 1:
        # If weights are cut, the new weights lie beside the gradients until the step counts.
        held = (rules.reduced_gradient + rules.weight) / shard if zero else rules.reduced_gradient
        gradients = held + (4 if micro_batches > 1 else 0)
    if mesh.tau:
        optimizer += rules.outer
    return weights * parameters, gradients * parameters, optimizer * parameters


def _states_of_rank(
    job: Job, mesh: Mesh, layers: int, dense: int, matrices: float, vectors: float, rules: Rules
) -> tuple[float, float, float, float]:
    """Returns the bytes of weights, gradients and optimizer states of a rank with so many layers, `dense` of
    them without experts, and with so many parameters in matrices and vectors; and those that Muon needs
    besides."""
    model, micro_batches = job.model, mesh.micro_batches(job.batch)
    cut = mesh.tp_cut * mesh.x * mesh.y * mesh.z
    # A rank has whole experts, of which ZeRO cuts the rows: the fullest has more than its share.
    of_all = (layers - dense) * model.layer_experts
    fullest = of_all * model.fullest(mesh.experts_over) / cut_of_experts(mesh)
    parameters = (matrices - of_all) / cut + vectors
    if job.adapters is None:
        weights, gradients, optimizer = states(parameters, mesh, micro_batches, rules)
    else:
        own = layers * job.adapters.parameters(mesh.tp_cut)
        weights, gradients, optimizer = states(own, mesh, micro_batches, rules)
        weights += states(parameters, mesh, micro_batches, rules)[0]  # frozen weights have nothing else
    of_experts = states(fullest, mesh, micro_batches, rules, mesh.experts_shard)
    if job.adapters is not None:
        of_experts = of_experts[0], 0.0, 0.0
    weights, gradients, optimizer = (
        sum(each) for each in zip((weights, gradients, optimizer), of_experts, strict=True)
    )
    muon = 0.0
    match job.optimizer:
        case "adamw":
            pass
        case "muon":
            of_layers = (layers - dense) * model.layer_matrices + dense * model.dense.layer_matrices
            held = (of_layers - of_all) / cut / mesh.shard
            held += fullest / mesh.experts_shard
            optimizer -= MOMENT * held
            muon = _muon(model, held, mesh, rules)
        case _:
            assert_never(job.optimizer)
    return weights, gradients, optimizer, muon


def cut_of_experts(mesh: Mesh) -> int:
    """Returns by how much a rank's share of the experts is less than all."""
    return mesh.experts_over * mesh.x * mesh.y * mesh.z


def memory_of_rank(
    job: Job,
    mesh: Mesh,
    rank: int,
    rules: Rules = PAPER,
    process: float | None = None,
    layers: int | None = None,
) -> Memory:
    """Returns the most memory that rank `rank` of the pipeline needs.

    process: bytes besides tensors; None: the cluster's. layers: of this rank, as if all had experts where the
    model has; None: as the trainer cuts them.
    """
    rules = rules.of(job)
    model, last = job.model, last_stage_rank(mesh)
    micro_batches = mesh.micro_batches(job.batch)
    cut = mesh.tp_cut * mesh.x * mesh.y * mesh.z
    dense = 0
    if layers is None:
        layers, dense = layers_by_rank(model, mesh)[rank], dense_by_rank(model, mesh)[rank]
    matrices, vectors = parameters_of_rank(model, 1, layers, rank == 0, rank == last, dense)
    weights, gradients, optimizer, muon = _states_of_rank(job, mesh, layers, dense, matrices, vectors, rules)
    optimizer += OFFLOAD_BUFFERS if job.offload == "states" else 0
    process = job.cluster.process_bytes if process is None else process
    start = 0.0
    if rules.made_whole:
        # The whole weights, and beside them the shard that ZeRO 3 leaves a rank.
        shards = mesh.z * (mesh.shard if mesh.zero == 3 else 1)
        of_experts = (layers - dense) * model.layer_experts
        whole = ((matrices - of_experts) / cut + of_experts / cut_of_experts(mesh)) * mesh.z + vectors
        start = rules.weight * whole * (1 + 1 / shards if shards > 1 else 1) + process
    tokens = mesh.micro_batch * job.seq / mesh.cp
    held = in_flight(mesh, rank, micro_batches)
    waiting = deferred(mesh, rank, micro_batches)
    if job.adapters is not None:
        # Gradients of adapters do not wait: they are computed with those of the activations.
        held, waiting = held - waiting, 0.0
    activations = (layers - dense) * _kept(job, model, mesh, held, waiting, rules)
    if dense:
        activations += dense * _kept(job, model.dense, mesh, held, waiting, rules)
    if mesh.recompute == "full":
        # All activations of one layer, while it is run again.
        activations += _one_layer(model, tokens, replace(mesh, recompute="none"), rules)
    activations *= rules.element / 2  # the formulas assume 16 bits
    logits = 0.0
    if rank == last:
        # Only one micro-batch: the last stage runs its backward pass right after the forward pass.
        logits = _logits(model, tokens, mesh, rules, math.ceil(waiting), job.adapters is None)
    largest = model.largest / cut if job.adapters is None else job.adapters.largest
    return Memory(
        weights,
        gradients,
        optimizer,
        activations,
        logits,
        _workspaces(job, mesh, tokens, rules) + muon,
        rules.heap * activations + rules.largest_gradients * rules.weight * largest,
        process,
        start,
    )


def _kept(job: Job, model: ModelShape, mesh: Mesh, held: float, waiting: float, rules: Rules) -> float:
    """Returns the bytes, of 16-bit numbers, that one layer keeps for `held` micro-batches, of which `waiting`
    wait for their weight gradients alone."""
    tokens = mesh.micro_batch * job.seq / mesh.cp
    one = _one_layer(model, tokens, mesh, rules)
    if job.adapters is not None and mesh.recompute != "full":
        one += 2 * tokens * job.adapters.features(mesh.tp)
    if job.adapters is not None and mesh.recompute == "none":
        one -= 2 * tokens * job.adapters.unread / mesh.tp
    # A waiting weight gradient keeps about as much as the backward pass needs, unless that recomputes
    # something or takes experts' rows again.
    if mesh.recompute == "none" and not model.experts:
        return held * one
    return (held - waiting) * one + waiting * _waiting_layer(model, tokens) / mesh.tp


def _logits(model: ModelShape, tokens: float, mesh: Mesh, rules: Rules, waiting: int, trains: bool) -> float:
    """Returns the bytes of the last norm's results, the logits and what their loss keeps. waiting: weight
    gradients that wait. trains: whether the head does."""
    rows, width = tokens / mesh.slices, model.vocab / (mesh.tp_cut * mesh.x)
    normed = 2 * rules.element * tokens * model.hidden / (mesh.tp * mesh.y)
    chunk = 0
    if rules.head_rows is not None and mesh.y == 1:
        chunk = rules.head_rows(math.ceil(rows), math.floor(rules.element * width))
    if not chunk:
        kept = waiting * rules.element * tokens * (model.hidden + model.vocab) / mesh.tp
        return rows * width * rules.logits + normed + kept
    # Both gradients are made in the forward pass, dW in fp32, so that none waits; with several ranks the
    # logits of the next chunk are beside those of one.
    chunks = 2 if mesh.tp * mesh.x > 1 else 1
    return chunks * chunk * width * rules.element + normed + trains * FP32 * width * model.hidden


def worst_memory(job: Job, mesh: Mesh, rules: Rules = PAPER, process: float | None = None) -> Memory:
    """Returns the memory of the rank that needs most. Compares the first rank (most in flight), the middle
    one, the last (logits), and the first with each layer count. process: see `memory_of_rank`.

    Every estimate of a run's memory comes from here, so that no two commands differ.
    """
    held = list(zip(layers_by_rank(job.model, mesh), dense_by_rank(job.model, mesh), strict=True))
    ranks = {0, mesh.pp // 2, mesh.pp - 1, *map(held.index, set(held))}
    return max(
        (memory_of_rank(job, mesh, rank, rules, process) for rank in sorted(ranks)),
        key=lambda each: each.total,
    )


def _muon(model: ModelShape, held: float, mesh: Mesh, rules: Rules) -> float:
    """Returns the bytes that Muon needs to orthogonalize matrices (docs/explanation/data-parallel.md).

    A rank owns as many parameters as it holds momentum of (`held`). It needs these, then for one matrix an
    fp32 copy, the next iterate and two products, and the slots that matrices travel in."""
    n, k = max(map(sorted, model.layer_shapes), key=lambda sides: sides[0] * sides[1])
    bytes_ = rules.weight * (held + n * k + 2 * n * n) + 4 * n * k
    if rules.workspaces:
        bucket = rules.weight * max(model.hidden * model.up, *(n * k for n, k in model.of_heads)) / mesh.tp
        for ranks in (mesh.shard, mesh.tp):
            bytes_ += SLOTS * bucket * ranks if ranks > 1 else 0
        split = max(split_experts(model, mesh))
        bytes_ += SLOTS * rules.weight * split * model.hidden * model.expert_ffn * mesh.experts_shard
    return bytes_


def split_experts(model: ModelShape, mesh: Mesh) -> tuple[int, int]:
    """Returns how many of a rank's gates and ups, and of its downs, of one layer several ranks share, so that
    they travel to be orthogonalized."""
    if not model.experts:
        return 0, 0
    of_rank, ranks = -(-model.experts // mesh.experts_over), mesh.experts_shard
    gates, downs = (
        len({cut * count // ranks for cut in range(1, ranks) if cut * count % ranks})
        for count in (2 * of_rank, of_rank)
    )
    return gates, downs


def _one_layer(model: ModelShape, tokens: float, mesh: Mesh, rules: Rules) -> float:
    if mesh.is_axonn:
        # Heads and feed-forward columns are cut over x, the residual stream's features over y.
        wide, cut = _wide(model, mesh.recompute), _cut(model, rules, mesh.recompute)
        return tokens * (wide / mesh.y + cut / mesh.x)
    kept = layer_activations(model, tokens, mesh.tp, rules, mesh.recompute)
    if mesh.tp_share:
        kept += tokens * _cut(model, rules, mesh.recompute) * (mesh.tp_share - 1 / mesh.tp)
    if model.experts and mesh.recompute != "full":
        busiest = min(IMBALANCE, mesh.experts_over) - 1
        kept += busiest * tokens * 4 * model.per_token * model.expert_ffn / mesh.tp
    return kept


def _waiting_layer(model: ModelShape, tokens: float) -> float:
    """Returns the bytes kept for a layer's waiting weight gradients: inputs of its linears and gradients of
    their outputs, bf16. Each expert of a token has rows of its own."""
    copies = model.per_token if model.experts else 1
    inputs = copies * model.hidden + sum(k for _, k in model.of_heads) + model.attention_width + model.wide
    outputs = sum(n for n, _ in model.of_heads) + (1 + copies) * model.hidden + model.up
    return 2 * tokens * (inputs + outputs)


def _workspaces(job: Job, mesh: Mesh, tokens: float, rules: Rules) -> float:
    model = job.model
    bytes_ = 0.0
    if mesh.zero == 3 and mesh.shard > 1 and not mesh.tau:
        layer = (model.layer_matrices - model.layer_experts) / mesh.tp_cut
        layer += model.layer_experts / mesh.experts_over
        bytes_ += 2 * rules.weight * layer  # the current layer and the next one
    if mesh.z > 1:
        bytes_ += 2 * rules.weight * model.layer_matrices / (mesh.x * mesh.y)
    if mesh.pp > 1:
        bytes_ += 2 * SLOTS * rules.element * tokens * model.hidden / (mesh.tp * mesh.slices)
    if rules.workspaces:
        if mesh.tp > 1:
            bytes_ += SLOTS * rules.element * tokens * model.hidden
        if mesh.ep > 1:
            share = dealt_share(model, job.cluster, mesh.inner("ep"), mesh.ep)
            ends = 2 if share < 1 else 1  # where dealt rows leave from is as large as where they arrive
            bytes_ += ends * share * SLOTS * rules.element * tokens / mesh.tp * mesh.ep * model.hidden
        if mesh.dp * mesh.cp > 1:
            trained, largest = model.parameters / (mesh.tp_cut * mesh.pp), model.largest / mesh.tp_cut
            if job.adapters is not None:
                trained = job.adapters.parameters(mesh.tp_cut) * model.layers / mesh.pp
                largest = largest if mesh.zero == 3 else job.adapters.largest
            bucket = rules.weight * largest
            if mesh.zero < 3:
                bucket = max(bucket, min(BUCKET_BYTES, rules.weight * trained))
            bytes_ += SLOTS * bucket * (mesh.dp * mesh.cp if rules.peers_resident else 1)
            if mesh.zero:
                bytes_ += SLOTS * bucket  # weights have their own slots, for each rank's rows
    return bytes_
