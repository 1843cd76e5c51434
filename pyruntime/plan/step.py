"""Predicts the seconds of an optimizer step, by part.

    step = m (F + B) of the slowest stage + bubble + exposed gradients and weights + optimizer

F and B are compute plus the exposed part of tensor-, context- and pipeline-parallel transfers. Traffic
between nodes shares their adapters: while tensor or context parallelism occupies them, no data-parallel
transfer is hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import assert_never

from pyruntime.pipeline.skipping import shares
from pyruntime.plan import axonn, co2
from pyruntime.plan.communication import (
    DataParallelExchange,
    Link,
    all_gather,
    all_reduce,
    link,
    neighbours,
    own_seconds,
    rails,
    send,
)
from pyruntime.plan.expert_costs import ExpertLayer, ExpertSeconds
from pyruntime.plan.memory import (
    BUCKET_BYTES,
    Rules,
    cut_of_experts,
    layer_activations,
    parameters_of_rank,
    split_experts,
)
from pyruntime.plan.mesh import Job, Mesh
from pyruntime.plan.models import ModelShape
from pyruntime.plan.overlap import LinearShape, Overlap, exposed, exposed_of, linears
from pyruntime.plan.pipelines import (
    bubble,
    bubble_of_skipping,
    dense_by_rank,
    last_stage_rank,
    layers_by_rank,
)
from pyruntime.plan.seconds import LayerSeconds, StepSeconds
from pyruntime.plan.touched import travelling_share

SENT_AHEAD = 1 / 3
"""The share of weights that GPUs send in the backward pass (pyruntime/data_parallel/weight_gathers.py)."""
FLASH_BACKWARD = 2.5
"""GEMM work of flash attention's backward pass over that of its forward pass."""
NORMS_OF_A_LAYER = 2
KEPT = Rules(ffn_kept=1)
"""Rules that keep all activations which selective recomputation would recompute."""
PASSES_OF_HEADS = 2, 7
"""Times that heads are read or written, forward and backward, where they are normalised: x and y; x, dY, dX,
and both sides of a copy and of a join with the values' gradients."""
BUCKETS_OF_A_LAYER = 4
"""Buckets of a layer whose weights travel one by one, because they are not small."""
OPTIMIZER_BYTES = {"nearest": 28, "stochastic": 22}
"""Bytes read and written for a parameter, by the rounding of its weight. Both count moments both ways and the
gradient; nearest adds the fp32 master both ways and the weight, stochastic the weight both ways."""
ORTHOGONAL_STEPS = 5
"""Newton-Schulz steps, each 4 n^2 k + 2 n^3 operations for a matrix of sides n and k."""
OWN_IN_WAITS = 0.4
"""Share of a rank's own seconds on stage 3's transfers that passes while it would wait for them anyway.
Fitted to meshes between hosts (bench/results/planning-time.md)."""
SUM_BYTES = 10
"""Bytes read and written to add a parameter's gradient (of a micro-batch or slice) to the fp32 sum."""


class Predictor:
    """Predicts steps of one job; computes once what many meshes share.

    overlap: see `pyruntime.plan.overlap`. reduce_bytes: bytes on the wire of one gradient element. regather:
    column linears gather their input again in the backward pass instead of keeping it; None: only inside
    nodes, as this project does.

    sums_whole=True describes this project (docs/explanation/primitives.md). Gradients of all micro-batches
    are summed before they travel, at every ZeRO stage, in separate passes over memory. Of x, y and z, x is tp
    and z is ZeRO 3. With False, stages 2 and 3 reduce gradients for every micro-batch, because they hold none
    whole; GEMMs add to the sums, and x, y and z are AxoNN's. head_rows: as of `Rules`; None: the head's
    gradient is one GEMM.
    """

    def __init__(
        self,
        job: Job,
        overlap: Overlap = "fused",
        reduce_bytes: float = 2.0,
        regather: bool | None = None,
        sums_whole: bool = False,
        head_rows: Callable[[int, int], int] | None = None,
    ):
        self.job, self.overlap, self.reduce_bytes, self.regather = job, overlap, reduce_bytes, regather
        self.sums_whole, self.head_rows = sums_whole, head_rows
        self._layers: dict[tuple, LayerSeconds] = {}
        self._of_dense: Predictor | None = None
        """Predicts the layers without experts of a model that has some."""
        if job.model.dense_layers:
            dense = replace(job, model=job.model.dense)
            self._of_dense = Predictor(dense, overlap, reduce_bytes, regather, sums_whole, head_rows)
        self._links: dict[tuple[int, int], Link] = {}

    def link(self, mesh: Mesh, axis: str, size: int) -> Link:
        key = mesh.inner(axis), size
        if key not in self._links:
            of = rails if self.sums_whole and self.job.cluster.is_of_gpus else link
            self._links[key] = of(self.job.cluster, *key)
        return self._links[key]

    def layer(self, mesh: Mesh) -> LayerSeconds:
        """Returns the seconds of one layer and one micro-batch."""
        counted = mesh.dp if self.job.model.experts else 1  # by routers
        key = (mesh.tp, mesh.ep, mesh.cp, mesh.x, mesh.y, mesh.z, mesh.micro_batch, mesh.slices, counted)
        if key not in self._layers:
            axonn = mesh.is_axonn and not self.sums_whole
            self._layers[key] = self._axonn_layer(mesh) if axonn else self._layer(mesh)
        found = self._layers[key]
        again = self._again(mesh, found)
        if mesh.recompute != "full":
            return replace(found, backward_input=found.backward_input + again, again=again)
        return replace(
            found,
            backward_input=found.backward_input + again,
            again=again,
            tp_backward=found.tp_backward + found.tp_forward,
            cp_backward=found.cp_backward + found.cp_forward,
            ep_backward=found.ep_backward + found.ep_forward,
            between_backward=found.between_backward + found.between_forward,
        )

    def _stages(self, mesh: Mesh) -> list[LayerSeconds]:
        """Returns the seconds of all layers of each rank of the pipeline."""
        one, model = self.layer(mesh), self.job.model
        ranks = list(zip(layers_by_rank(model, mesh), dense_by_rank(model, mesh), strict=True))
        alike = {(count, dense): one.times(count - dense) for count, dense in ranks}
        if self._of_dense is not None:
            without = self._of_dense.layer(mesh)
            alike = {key: found.beside(without.times(key[1])) for key, found in alike.items()}
        return [alike[each] for each in ranks]

    def _again(self, mesh: Mesh, once: LayerSeconds) -> float:
        """Returns the seconds in which a layer's backward pass recomputes what was not kept. Selective
        recomputation reads and writes as much as it makes."""
        if mesh.recompute == "full":
            return once.forward
        if mesh.recompute == "none":
            return 0.0
        model, tokens, ranks = self.job.model, mesh.micro_batch * self.job.seq / mesh.cp, mesh.tp * mesh.x
        made = layer_activations(model, tokens, ranks, KEPT)
        made -= layer_activations(model, tokens, ranks, KEPT, "selective")
        return 2 * made / self.job.cluster.memory_bandwidth

    def _layer(self, mesh: Mesh) -> LayerSeconds:
        job, model, cluster = self.job, self.job.model, self.job.cluster
        tokens = mesh.micro_batch * job.seq / mesh.cp
        # In this project's grids x is tp, and y is a further axis.
        ranks = mesh.tp * mesh.x
        tp, over_y = self.link(mesh, "x" if mesh.is_axonn else "tp", ranks), self.link(mesh, "y", mesh.y)
        regather = not tp.crosses if self.regather is None else self.regather
        # Each slice is multiplied and sent by itself, so latencies count once for each slice.
        of_slice = tokens / mesh.slices
        experts = self._experts(mesh, of_slice, tp)
        cut = model if experts is None else model.around_experts
        over = [self._over(mesh, each, of_slice, tp) for each in linears(cut)]
        found = tuple(
            exposed_of(
                each, rows, group, self._flops(each, rows, ranks, mesh.y), self.overlap, regather, over_y
            )
            for each, (rows, group) in zip(linears(cut), over, strict=True)
        )
        weights = (model.layer_matrices - model.layer_experts) / (ranks * mesh.y)
        weights += model.layer_experts / cut_of_experts(mesh)
        gemms = mesh.slices * (sum(each.compute for each in found) + self._loading(weights))
        attention = model.attention_flops(int(tokens), job.seq, causal=job.causal) / ranks
        attention /= cluster.attention_flops
        backward = FLASH_BACKWARD if job.causal else 2.0
        # Norms, rotations, activation and residual sums read and write about what is kept for the backward.
        moved = layer_activations(cut, tokens, ranks) / cluster.memory_bandwidth
        heads = self._norms_of_heads(tokens, ranks)
        overhead = cluster.layer_overhead * mesh.slices
        norms = NORMS_OF_A_LAYER * self._square_sums(mesh, tokens)
        waits, waits_backward = self._serving(linears(cut), of_slice, tp, regather)
        tp_forward = mesh.slices * (waits + sum(each.forward for each in found)) + norms
        tp_backward = mesh.slices * (waits_backward + sum(each.backward for each in found)) + norms
        back = mesh.slices * sum(each.transfers_backward for each in found) + norms
        if self.overlap == "filler":
            tp_backward = mesh.slices * waits_backward + max(0.0, back - 2 * gemms - backward * attention)
        cp_forward, cp_backward, ring = self._ring(mesh, tokens, attention, backward)
        cp_crosses, crosses = self.link(mesh, "cp", mesh.cp).crosses, tp.crosses or over_y.crosses
        between = [(norms, norms)] if crosses else [(0.0, 0.0)]
        between += [
            (mesh.slices * each.transfer, mesh.slices * each.transfers_backward)
            for each, (_, group) in zip(found, over, strict=True)
            if group.crosses or over_y.crosses
        ]
        occupied, occupied_back = map(sum, zip(*between, strict=True))
        layer = LayerSeconds(
            forward=gemms + attention + 2 * moved + heads[0] + overhead,
            backward_input=gemms + backward * attention + 3 * moved + heads[1] + overhead,
            backward_weight=gemms + overhead,
            attention=(1 + backward) * attention,
            tp_forward=tp_forward,
            tp_backward=tp_backward,
            cp_forward=cp_forward,
            cp_backward=cp_backward,
            between_forward=occupied + ring * cp_crosses,
            between_backward=occupied_back + 2 * ring * cp_crosses,
            linears=found,
        )
        return layer if experts is None else self._with_experts(layer, experts, mesh)

    def _norms_of_heads(self, tokens: float, ranks: int) -> tuple[float, float]:
        """Returns the seconds, forward and backward, in which a GPU normalises query and key heads."""
        model, cluster = self.job.model, self.job.cluster
        if not (model.head_norms and cluster.is_of_gpus):
            return 0.0, 0.0
        once = 2 * tokens * (model.heads + model.kv_heads) * model.head_dim / ranks / cluster.memory_bandwidth
        return PASSES_OF_HEADS[0] * once, PASSES_OF_HEADS[1] * once

    def _experts(self, mesh: Mesh, tokens: float, tp: Link) -> ExpertSeconds | None:
        """Returns the seconds of a layer's experts for `tokens` tokens of the tensor-parallel ranks, as this
        project runs them on GPUs; None: they count as linears."""
        model, cluster = self.job.model, self.job.cluster
        if not (model.experts and cluster.is_of_gpus and self.sums_whole):
            return None
        over = self.link(mesh, "ep", mesh.ep) if mesh.ep else tp
        counted = tp, self.link(mesh, "shard", mesh.dp * mesh.cp)
        inner = mesh.inner("ep" if mesh.ep else "tp")
        return ExpertLayer(model, cluster, tokens / mesh.tp, over, inner, counted).seconds()

    def _with_experts(self, layer: LayerSeconds, experts: ExpertSeconds, mesh: Mesh) -> LayerSeconds:
        crosses = self.link(mesh, "ep" if mesh.ep else "tp", mesh.experts_over).crosses
        of_adapter = mesh.slices if crosses else 0
        return replace(
            layer,
            forward=layer.forward + mesh.slices * experts.forward,
            backward_input=layer.backward_input + mesh.slices * experts.backward_input,
            backward_weight=layer.backward_weight + mesh.slices * experts.backward_weight,
            ep_forward=mesh.slices * experts.waits_forward,
            ep_backward=mesh.slices * experts.waits_backward,
            between_forward=layer.between_forward + of_adapter * experts.travels_forward,
            between_backward=layer.between_backward + of_adapter * experts.travels_backward,
        )

    def _over(self, mesh: Mesh, linear: LinearShape, tokens: float, tp: Link) -> tuple[float, Link]:
        """Returns the rows over the group of a linear, of `tokens` over the tensor-parallel one, and its
        link: that of experts, if these lie over a group of their own."""
        if mesh.ep and linear.alone is not None:
            return tokens * mesh.ep / mesh.tp, self.link(mesh, "ep", mesh.ep)
        return tokens, tp

    def _flops(self, linear: LinearShape, tokens: float, tp: int, y: int = 1) -> float:
        """Returns the operations/s of a rank's part of the linear, over its three GEMMs: those of Y and dX
        are cut into a chunk of rows for each rank if they hide transfers, that of dW is whole."""
        cluster = self.job.cluster
        if linear.alone is not None:
            return cluster.linear_flops(*linear.alone, tokens)
        if linear.whole:
            return cluster.linear_flops(linear.k, linear.n, tokens / tp)
        k, n = (linear.k / y, linear.n / tp) if linear.column else (linear.k / tp, linear.n / y)
        return cluster.linear_flops(k, n, tokens, 1 if self.overlap == "none" else tp)

    def _serving(
        self, each: tuple[LinearShape, ...], tokens: float, tp: Link, regather: bool
    ) -> tuple[float, float]:
        """Returns the seconds, forward and backward, in which a GPU itself serves a layer's chunks: a launch
        for each, and sums of parts, which read all and write a rank's rows. Those of CPU ranks are in
        `Link.core`."""
        model, cluster = self.job.model, self.job.cluster
        if cluster.core_bandwidth or tp.size == 1 or self.overlap == "none":
            return 0.0, 0.0
        each = tuple(linear for linear in each if not linear.whole)
        columns = sum(linear.column for linear in each)
        launches = tp.size * cluster.launch
        of_sum = 2 * tokens * model.hidden * (1 + 1 / tp.size) / cluster.memory_bandwidth
        forward = len(each) * launches + (len(each) - columns) * of_sum
        return forward, (len(each) + columns * regather) * launches + columns * of_sum

    def _head_sums(self, mesh: Mesh, tokens: float, head: float) -> float:
        """Returns the exposed seconds of the logits' sums over y, under `head` seconds of their GEMM."""
        over, logits = self.link(mesh, "y", mesh.y), 2 * tokens * self.job.model.vocab / mesh.x
        transfer = all_reduce(logits, over)
        if self.overlap == "none":
            return transfer
        return min(transfer, 2 * own_seconds(logits, over) + exposed(transfer, head, mesh.y))

    def _head_parts(self, mesh: Mesh, tokens: float, head: float) -> float:
        """Returns the seconds that a GPU adds up the head's gradient in fp32, over the rows whose logits it
        has at once, beyond `head`, those of its GEMM."""
        model, cut = self.job.model, mesh.tp * mesh.x
        if self.head_rows is None or not self.job.cluster.is_of_gpus:
            return 0.0
        at_once = self.head_rows(int(tokens), round(2 * model.vocab / cut))
        parts = math.ceil(tokens / at_once) if at_once else 1
        added = 4 * (2 * parts - 1) * model.head / cut / self.job.cluster.memory_bandwidth
        return max(0.0, added - head) if parts > 1 else 0.0

    def _square_sums(self, mesh: Mesh, tokens: float) -> float:
        """Returns the seconds in which a norm waits for fp32 sums of squares over y, which cuts features."""
        return all_gather(4 * mesh.y * tokens / mesh.x, self.link(mesh, "y", mesh.y))

    def _loading(self, weights: float) -> float:
        """Returns the seconds in which a GEMM's bf16 weights come from memory, or their gradient goes there.
        GPUs do it under the GEMM; the core of a CPU rank does one thing at a time."""
        cluster = self.job.cluster
        return 2 * weights / cluster.memory_bandwidth if cluster.core_bandwidth else 0.0

    def _ring(
        self, mesh: Mesh, tokens: float, attention: float, backward: float
    ) -> tuple[float, float, float]:
        """Returns exposed seconds forward and backward, and the seconds of all transfers of a forward pass.
        Keys and values go round a ring under attention. In the backward pass their gradients travel with
        them, with one more hop (arXiv 2310.01889)."""
        if mesh.cp == 1:
            return 0.0, 0.0, 0.0
        over, model = self.link(mesh, "cp", mesh.cp), self.job.model
        if self.sums_whole and self.job.cluster.is_of_gpus:
            over = neighbours(self.job.cluster, mesh.inner("cp"), mesh.cp)
        nbytes = 2 * tokens * 2 * model.kv_heads * model.head_dim / mesh.tp
        hop, own = send(nbytes, over), nbytes * over.core
        hops = mesh.cp - 1
        forward = exposed(hops * hop, attention, mesh.cp) + hops * own
        back = exposed(2 * hops * hop, backward * attention, mesh.cp) + hop + 2 * hops * own
        return forward, back, hops * hop

    def _axonn_layer(self, mesh: Mesh) -> LayerSeconds:
        """Returns a layer's seconds with AxoNN's overlap: the all-reduce of O is exposed, that of dI runs
        under dW, and weights and their gradients travel under the neighbouring layers (arXiv 2305.13525,
        section 5)."""
        job, model, cluster = self.job, self.job.model, self.job.cluster
        tokens = mesh.micro_batch * job.seq
        hides = self.overlap != "none"
        gemms = gather = output = under_weights = 0.0
        for linear in linears(model):
            each = axonn.seconds_of(linear, mesh, cluster, tokens * mesh.z)
            operations = 2.0 * linear.k * linear.n * tokens / (mesh.x * mesh.y)
            gemm = operations / cluster.linear_flops(linear.k / mesh.y, linear.n / mesh.x, tokens)
            gemms += gemm
            gather += each.gather
            output += each.output
            under_weights += max(0.0, each.input - (gemm if hides else 0.0))
        attention = model.attention_flops(tokens, job.seq, causal=job.causal) / mesh.x
        attention /= cluster.attention_flops
        backward = FLASH_BACKWARD if job.causal else 2.0
        moved = layer_activations(model, tokens, mesh.x) / cluster.memory_bandwidth
        forward = gemms + attention + 2 * moved
        backward_all = 2 * gemms + backward * attention + 3 * moved
        hidden_forward = forward if hides else 0.0
        # dW already hides the sums over x.
        hidden_backward = backward_all - gemms if hides else 0.0
        return LayerSeconds(
            forward=forward + cluster.layer_overhead,
            backward_input=backward_all - gemms + cluster.layer_overhead,
            backward_weight=gemms + cluster.layer_overhead,
            attention=(1 + backward) * attention,
            tp_forward=output,
            tp_backward=under_weights,
            # The weights' transfers over z; these meshes have no cp, so its fields hold them.
            cp_forward=max(0.0, gather - hidden_forward),
            cp_backward=max(0.0, 2 * gather - hidden_backward),
            between_forward=gather + output,
            between_backward=2 * gather,
        )

    def step(self, mesh: Mesh) -> StepSeconds:
        job, model, cluster = self.job, self.job.model, self.job.cluster
        micro_batches = mesh.micro_batches(job.batch)
        as_run = mesh.as_zero if mesh.is_axonn and self.sums_whole else mesh
        stages = self._stages(mesh)
        last = last_stage_rank(mesh)
        tokens = mesh.micro_batch * job.seq / mesh.cp
        cut = mesh.tp * mesh.x * mesh.y
        head = model.head_flops(int(tokens)) / cut / cluster.flops
        head += mesh.slices * self._loading(model.hidden * model.vocab / cut)
        head_sums = self._head_sums(mesh, tokens, head)
        # The loss and its gradient read and write the logits a few times.
        head_moved = 6 * tokens * model.vocab / (mesh.tp * mesh.x) / cluster.memory_bandwidth

        def forward_of(rank: int) -> float:
            own = stages[rank].forward + stages[rank].waits_forward
            return own + (head + head_moved + head_sums if rank == last else 0.0)

        visits = [micro_batches * share for share in shares(mesh.pp, mesh.skip)]
        slowest = max(range(mesh.pp), key=lambda rank: visits[rank] * forward_of(rank))
        times = visits[slowest]
        held, has_head = stages[slowest], slowest == last
        compute = held.forward + held.backward_input - held.again + held.backward_weight
        compute += (3 * head + 2 * head_moved) if has_head else 0.0
        compute += self._head_parts(mesh, tokens, head) if has_head else 0.0
        sums = self._sums(as_run, micro_batches)
        compute += sums
        tp = held.tp_forward + held.tp_backward + (head_sums if has_head else 0.0)
        ring, ep = held.cp_forward + held.cp_backward, held.ep_forward + held.ep_backward
        pp_exposed, idle, whole = 0.0, 0.0, compute + held.again + tp + ring + ep
        if mesh.pp > 1:
            hop = send(2 * tokens * model.hidden / (mesh.tp * mesh.slices), self.link(mesh, "pp", 2))
            forward = forward_of(slowest)
            weight = held.backward_weight + (head if has_head else 0.0) + sums
            if mesh.skip:
                of_ranks = [forward_of(rank) for rank in range(mesh.pp)]
                back = (whole - forward) / forward
                idle = bubble_of_skipping(mesh, micro_batches, of_ranks, [back * each for each in of_ranks])
            else:
                idle = bubble(mesh, micro_batches, forward, whole - forward - weight, weight)
            # The last of equal slices attends to most: (2 q - 1) / q^2 of attention in place of 1 / q.
            q = mesh.slices
            idle += (mesh.pp - 1) * held.attention * (q - 1) / q**2
            idle *= cluster.core_share
            # Messages travel under other micro-batches; only those of the first and the last are exposed.
            pp_exposed = 2 * (mesh.pp - 1) * hop
            if mesh.kind == "zb-v" or mesh.virtual > 1:
                pp_exposed *= 2 if mesh.kind == "zb-v" else mesh.virtual
        dp, optimizer = self._reduction(
            as_run, micro_batches, held, layers_by_rank(model, mesh)[slowest], head if has_head else 0.0
        )
        weights = times * ring if mesh.is_axonn else 0.0
        if as_run.zero == 3 and mesh.z > 1:
            dp, weights = 0.0, dp
        return StepSeconds(
            compute=times * compute,
            recompute=times * held.again,
            tp=times * tp,
            cp=0.0 if mesh.is_axonn else times * ring,
            ep=times * ep,
            pp=pp_exposed,
            z=weights,
            dp=self._averaging(mesh, times * whole + idle) if mesh.tau else dp,
            bubble=idle,
            optimizer=optimizer + self._orthogonalization(mesh),
        )

    def _orthogonalization(self, mesh: Mesh) -> float:
        """Returns the seconds in which Muon orthogonalizes its matrices and sends them there and back, as if
        nothing hid them (docs/explanation/data-parallel.md); 0 for AdamW."""
        match self.job.optimizer:
            case "adamw":
                return 0.0
            case "muon":
                return self._muon(mesh)
            case _:
                assert_never(self.job.optimizer)

    def _muon(self, mesh: Mesh) -> float:
        job, model = self.job, self.job.model
        dense = dense_by_rank(model, mesh)[0]
        layers = layers_by_rank(model, mesh)[0] - dense
        of_layer = _orthogonal_flops(model)
        of_all = layers * sum(of_layer) + (dense * sum(_orthogonal_flops(model.dense)) if dense else 0.0)
        work = max(of_all / (mesh.tp * mesh.shard), max(of_layer))
        matrices = layers * (model.layer_matrices - model.layer_experts)
        nbytes = 2.0 * (matrices + dense * model.dense.layer_matrices) / mesh.tp
        over_shard = all_gather(nbytes, self.link(mesh, "shard", mesh.shard))
        # An expert's matrix travels only if several ranks share it.
        shared = 2.0 * layers * sum(split_experts(model, mesh)) * model.hidden * model.expert_ffn
        over_shard += all_gather(shared, self.link(mesh, "experts shard", mesh.experts_shard))
        over_tp = all_gather(nbytes * mesh.tp / mesh.shard, self.link(mesh, "tp", mesh.tp))
        return work / job.cluster.flops + 2 * (over_shard + over_tp)

    def _averaging(self, mesh: Mesh, step: float) -> float:
        """Returns the exposed seconds of CO2's averages."""
        parameters = self.parameters(mesh)
        return co2.exposed(2 * parameters, self.link(mesh, "dp", mesh.dp), step, mesh.tau)

    def parameters(self, mesh: Mesh) -> float:
        """Returns the parameters of the pipeline's rank 0, before ZeRO cuts them."""
        model = self.job.model
        layers, dense = layers_by_rank(model, mesh)[0], dense_by_rank(model, mesh)[0]
        first_is_last = last_stage_rank(mesh) == 0
        cut = mesh.tp * mesh.x * mesh.y * mesh.z
        of_experts = (layers - dense) * model.layer_experts
        whole = sum(parameters_of_rank(model, cut, layers, True, first_is_last, dense))
        return whole - of_experts / cut + of_experts / cut_of_experts(mesh)

    def exchanges(self, mesh: Mesh) -> list[DataParallelExchange]:
        """Returns what data parallelism exchanges for the parameters of the pipeline's rank 0: one, or two
        if experts lie over a group of their own."""
        size = mesh.dp // mesh.replicate * mesh.cp
        over = self.link(mesh, "shard", size), self.link(mesh, "replicate", mesh.replicate)
        parameters, travelling = self.parameters(mesh), self.gradient_bytes(mesh)
        model = self.job.model
        layers = layers_by_rank(model, mesh)[0] - dense_by_rank(model, mesh)[0]
        experts = layers * model.layer_experts / cut_of_experts(mesh)
        stacked = self.reduce_bytes * experts
        if not mesh.ep:
            return [DataParallelExchange(parameters, travelling, *over, stacked)]
        of_experts = (
            self.link(mesh, "experts shard", mesh.experts_copies),
            self.link(mesh, "experts replicate", mesh.replicate),
        )
        return [
            DataParallelExchange(parameters - experts, travelling - stacked, *over),
            DataParallelExchange(experts, stacked, *of_experts, stacked),
        ]

    def gradient_bytes(self, mesh: Mesh) -> float:
        """Returns the gradient bytes of the pipeline's rank 0 that travel over dp and cp in a step. All
        gradients count, with one exception: between this project's CPU ranks, of a table that only one
        embedding reads, only rows that the step's tokens touch."""
        job, model = self.job, self.job.model
        parameters = self.parameters(mesh)
        if self.sums_whole and job.cluster.core_bandwidth and not (model.tied or mesh.is_axonn):
            share = travelling_share(model.vocab, mesh.tp, job.tokens)
            parameters -= (1 - share) * model.vocab * model.hidden / mesh.tp
        return self.reduce_bytes * parameters

    def _not_read_again(self, mesh: Mesh) -> float:
        """Returns the parameters of the pipeline's rank 0 that stage 3 does not gather for the backward pass:
        the embedding's table, and the last weight of the forward pass, which stays. If the head is the table,
        it is gathered twice before and stays."""
        model = self.job.model
        if last_stage_rank(mesh):
            if model.experts:
                return model.embedding / mesh.tp + model.layer_experts / 3 / mesh.experts_over
            return (model.embedding + model.hidden * model.ffn) / mesh.tp
        return 0.0 if model.tied else 2 * model.head / mesh.tp

    def _sums(self, mesh: Mesh, micro_batches: int) -> float:
        """Returns the seconds per micro-batch in which gradients are added to earlier ones; the first slice
        of the step adds nothing."""
        if not self.sums_whole:
            return 0.0
        added = (micro_batches * mesh.slices - 1) / micro_batches
        return added * SUM_BYTES * self.parameters(mesh) / self.job.cluster.memory_bandwidth

    def _served(self, exchange: DataParallelExchange, zero: int) -> tuple[float, float]:
        """Returns the seconds in which a GPU sums parts of gradients once, and those of its copies: experts'
        gradients to where they leave from, and what returns to where it belongs. Gathered weights of stage 3
        are read where they arrive. Those of CPU ranks are in `Link.core`."""
        over, bandwidth = exchange.over, self.job.cluster.memory_bandwidth
        if self.job.cluster.core_bandwidth or self.overlap == "none" or over.size == 1:
            return 0.0, 0.0
        copied = 0.0 if zero == 3 else 2 * 2 * exchange.parameters
        copied += 2 * exchange.stacked
        return exchange.gradients * (1 + 1 / over.size) / bandwidth, copied / bandwidth

    def _before_experts(
        self, mesh: Mesh, exchanges: Sequence[DataParallelExchange], gathers: float = 1.0
    ) -> float:
        """Returns the seconds in which rows of experts, which all wait for, wait for others inside a node.
        gathers: of weights in a step."""
        over = self.link(mesh, "ep" if mesh.ep else "tp", mesh.experts_over)
        if not self.job.model.experts or over.size == 1:
            return 0.0
        return sum(
            (each.gradients + gathers * 2 * each.parameters) / each.over.size * each.over.inside
            for each in exchanges
        )

    def _reduction(
        self, mesh: Mesh, micro_batches: int, held: LayerSeconds, layers: int, head: float
    ) -> tuple[float, float]:
        """Returns the exposed seconds of gradients and weights over dp and cp, and the optimizer's seconds.
        held: of all `layers` of the rank. head: seconds of its GEMM if the rank has it."""
        cluster, model = self.job.cluster, self.job.model
        parameters, exchanges = self.parameters(mesh), self.exchanges(mesh)
        shards = sum(each.parameters / (each.over.size if mesh.zero else 1) for each in exchanges)
        optimizer = shards * OPTIMIZER_BYTES[self.job.rounding] / cluster.memory_bandwidth
        if mesh.tau or mesh.dp * mesh.cp == 1:
            return 0.0, optimizer
        zero = mesh.zero if not mesh.is_axonn else 0
        gradients, weights, own_gradients, own_weights = (
            sum(each) for each in zip(*(exchange.seconds() for exchange in exchanges), strict=True)
        )
        sums, copies = (
            sum(each) for each in zip(*(self._served(exchange, zero) for exchange in exchanges), strict=True)
        )
        crosses = any(each.over.crosses for each in exchanges)
        forward = head + held.forward + held.waits_forward
        backward = 2 * head + held.backward_input + held.backward_weight + held.waits_backward
        busy_forward = held.between_forward if crosses else 0.0
        busy_backward = held.between_backward if crosses else 0.0
        window_forward, window_backward = max(0.0, forward - busy_forward), max(0.0, backward - busy_backward)
        if self.overlap == "none":
            window_forward = window_backward = own_gradients = own_weights = 0.0
        buckets = BUCKETS_OF_A_LAYER * layers + 2
        if zero < 3:
            buckets = max(1, min(buckets, round(2 * parameters / BUCKET_BYTES)))

        # The embedding's gradient is computed last, and its weights are read first.
        of_gpus = cluster.is_of_gpus and self.sums_whole
        table = all_gather(2 * model.head / mesh.tp, exchanges[0].over) if of_gpus else 0.0

        def left(transfer: float, window: float) -> float:
            # Bucket by bucket: the first transfer begins after one is computed, the last ends after all.
            return max(transfer - window * (buckets - 1) / buckets, transfer / buckets, table)

        times = 1 if self.sums_whole else micro_batches
        if zero == 3:
            # Weights arrive ahead of their use for every micro-batch, in both directions; gradients leave.
            share = 1 - self._not_read_again(mesh) / parameters
            again, own_again = share * weights, share * own_weights
            each = left(weights, window_forward + OWN_IN_WAITS * own_weights)
            without = left(again, window_backward + OWN_IN_WAITS * own_again)
            own_reducing = OWN_IN_WAITS * (own_again + own_gradients)
            reducing = left(again + gradients, window_backward + own_reducing)
            in_all = micro_batches * each + (micro_batches - times) * without + times * reducing
            own = (1 + share) * micro_batches * own_weights + times * own_gradients
            own += self._before_experts(mesh, exchanges, 1 + share)
            return in_all + own + times * sums, optimizer
        if zero < 2:
            times = 1
        own = times * (own_gradients + sums) + own_weights + copies + self._before_experts(mesh, exchanges)
        if zero == 0:  # Whole sums return in place of new weights, before the optimizer.
            return own + left(gradients + weights, window_backward), optimizer
        if of_gpus:
            # Some weights return in the backward pass, the others ahead of their use in the forward pass.
            behind = left(gradients + SENT_AHEAD * weights, window_backward)
            before = (1 - SENT_AHEAD) * weights - window_forward * (buckets - 1) / buckets
            return own + max(behind, 2 * table) + max(before, 0.0), optimizer
        return own + times * left(gradients, window_backward) + left(weights, window_forward), optimizer


def _orthogonal_flops(model: ModelShape) -> list[float]:
    """Returns the operations in which Muon orthogonalizes each matrix of a layer."""
    return [ORTHOGONAL_STEPS * (4.0 * n * n * k + 2.0 * n**3) for n, k in map(sorted, model.layer_shapes)]
