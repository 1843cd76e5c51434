"""Builds the parts of a trainer; each function makes one of them for a run."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import assert_never

from torch.distributed.device_mesh import DeviceMesh

from pyruntime import comm
from pyruntime.comm import Runtime
from pyruntime.context import positions
from pyruntime.data_parallel import Muon, Offload, OffloadError, Sharded, shard
from pyruntime.data_parallel.adamw import ShardedAdamW
from pyruntime.llama import Llama
from pyruntime.nn import ParallelExperts
from pyruntime.nn.router import Scores
from pyruntime.ops.placements import PlacementCheck
from pyruntime.replicas.member import Member
from pyruntime.replicas.sharded_outer import ShardedOuter
from pyruntime.train.data.batches import Batch, Batches, validation_batches
from pyruntime.train.data.corpus import Corpus
from pyruntime.train.device import Device
from pyruntime.train.errors import ConfigError, refusing
from pyruntime.train.figures import ExchangedFigures, Figures, LateFigures, RoundFigures
from pyruntime.train.passes.accumulated import Accumulated
from pyruntime.train.passes.pipelined import Pipelined, shared_weights
from pyruntime.train.passes.preference_loss import PreferenceLoss
from pyruntime.train.resolved import ResolvedRun
from pyruntime.train.slow.own_clock import OwnClock
from pyruntime.train.slow.windows import EVERY, SlowReport
from pyruntime.train.watching.expert_load import ExpertLoad


def check_trains(model: Llama, runtime: Runtime) -> None:
    if any(parameter.requires_grad for parameter in model.parameters()):
        return
    if runtime.pp.mesh is None:
        raise ConfigError("No parameter of the model requires a gradient; leave one unfrozen.")
    layers = ", ".join(map(str, model.part.layers))
    raise ConfigError(
        f"No parameter of layers {layers}, which pipeline rank {runtime.coordinate.pp} has, requires a "
        "gradient, and every pipeline rank must train some; leave one unfrozen, or give the rank other "
        "layers with pipeline.layers."
    )


def data_axes(run: ResolvedRun, runtime: Runtime) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """Returns two axes. First the ranks over which gradients are summed in every step; None if this rank is
    the only one. Then the ranks that hold the same part of the replicas that synchronize rarely; None if this
    job has no such replicas.

    Raises ValueError if there should be such replicas and the mesh has no axis for them.
    """
    mesh = runtime.replicas.mesh
    if run.meets_every_step or run.config.data_parallel.members:
        return mesh, None
    names = () if mesh is None else tuple(mesh.mesh_dim_names or ())
    if mesh is None or names[:1] != ("dp_replicate",):
        raise ValueError(
            f"Replicas that do not synchronize in every step need an axis dp_replicate; the mesh has {names}."
        )
    within = mesh[names[1]] if len(names) > 1 else None
    return (within if within is not None and within.size() > 1 else None), mesh["dp_replicate"]


def sharded_of(run: ResolvedRun, model: Llama, within: DeviceMesh | None) -> Sharded:
    config = run.config
    return shard(
        model,
        within,
        stage=config.parallel.zero,
        compression=run.compression if run.meets_every_step else None,
        weight_wire=config.data_parallel.weight_wire,
    )


def optimizer_of(
    run: ResolvedRun, model: Llama, sharded: Sharded, runtime: Runtime, run_dir: Path
) -> ShardedAdamW:
    """Returns the optimizer. Raises ConfigError if there is no room for states that lie elsewhere."""
    asked = run.config.optimizer
    offload = None
    if asked.offload == "states":
        offload = Offload(asked.offload_dir or str(run_dir), run.config.comm.deadline_s)
    match asked.name:
        case "adamw":
            muon = None
        case "muon":
            muon = _muon(model, asked.momentum)
        case _:
            assert_never(asked.name)
    with refusing("optimizer.offload: ", (OffloadError,)):
        return sharded.adamw(
            betas=(asked.beta1, asked.beta2),
            eps=asked.eps,
            weight_decay=asked.weight_decay,
            max_norm=asked.clip_grad_norm,
            nonfinite="skip" if asked.on_bad_step == "skip" else "raise",
            rounding=asked.rounding,
            muon=muon,
            offload=offload,
            shared=shared_weights(run, model, runtime),
        )


def _muon(model: Llama, momentum: float) -> Muon:
    """Muon for the layers' matrices, but for routers and gates, whose rows are scores by themselves."""
    scores = {id(p) for each in model.modules() if isinstance(each, Scores) for p in each.parameters()}
    matrices = [
        p for p in model.layers.parameters() if p.dim() == 2 and p.requires_grad and id(p) not in scores
    ]
    stacks = {
        p: 2 if p is each.gate_up_proj else 1
        for each in model.modules()
        if isinstance(each, ParallelExperts)
        for p in each.parameters()
        if p.requires_grad
    }
    return Muon(matrices, momentum, stacks)


def outer_of(
    run: ResolvedRun,
    sharded: Sharded,
    within: DeviceMesh | None,
    between: DeviceMesh | None,
    member: Member | None,
    runtime: Runtime,
) -> ShardedOuter | None:
    """Returns the object that synchronizes replicas; None if they synchronize in every step. `data_axes`
    explains within and between."""
    if run.outer is None:
        return None
    axes = (runtime.tp.mesh, runtime.tp_y.mesh, within, runtime.pp.mesh)
    parts = [axis for axis in axes if axis is not None]
    return ShardedOuter(sharded, between, run.outer, parts, member, run.compression)


def figures_of(
    run: ResolvedRun,
    model: Llama,
    within: DeviceMesh | None,
    outer: ShardedOuter | None,
    runtime: Runtime,
    looks: bool,
    preferences: PreferenceLoss | None,
) -> Figures:
    """Returns the object by which ranks exchange a step's figures. looks: whether slow ranks are looked for,
    which counts a stream's waits, as a ledger does. preferences: counts rewards."""
    device, asked = Device(runtime.device, runtime.why_device), run.config.optimizer
    if outer is not None:
        return RoundFigures(runtime, device, within, outer.stats, bool(run.config.data_parallel.members))
    load = preferences or ExpertLoad.of_run(run, model, runtime.ep.size, runtime.device)
    # With these options the figures decide whether a step counts, so it must read them itself.
    is_read_at_once = asked.on_bad_step == "skip" or asked.spike_factor
    if device.is_gpu and run.mesh.ranks == 1 and not is_read_at_once:
        return LateFigures(device, load)
    return ExchangedFigures(runtime, device, looks or run.config.train.ledger, load)


def batches_of(run: ResolvedRun, corpus: Corpus, runtime: Runtime) -> Batches:
    """Returns the sequences that this rank learns from, or passes on."""
    train, mesh, rank = run.config.train, run.mesh, runtime.coordinate.dp
    is_one = run.meets_every_step or run.config.data_parallel.members
    count = mesh.dp if is_one else mesh.dp // mesh.dp_replicate
    ranks = range(rank // count * count, (rank // count + 1) * count)
    of_ranks = train.micro_batch_size * sum(run.micro_batches_of[ranks.start : ranks.stop])
    first = rank // count * of_ranks  # replicas that synchronize rarely take equally many
    return Batches(
        corpus, train.seed, train.batch_size, train.seq_len, run.shape.vocab_size,
        own=run.sequences_at(runtime.coordinate.pp, rank), together=range(first, first + of_ranks),
        masks=run.config.data.document_masks, prepare=functools.partial(_place, run),
    )  # fmt: skip


def _place(run: ResolvedRun, batch: Batch) -> None:
    """Places the documents of a batch, which the step then finds done."""
    if run.mesh.cp > 1 and run.config.context.layout == "placed":
        for each in batch.split(run.config.train.micro_batch_size):
            positions("placed", run.config.train.seq_len, run.mesh.cp, each.documents)


def validation_of(run: ResolvedRun, corpus: Corpus) -> list[tuple[int, Batch]]:
    """Returns the validation batches, each with the number of its set."""
    train, masks = run.config.train, run.config.data.document_masks
    return [
        (number, batch)
        for number, each in enumerate(corpus.sets)
        for batch in validation_batches(
            each, train.val_sequences, train.micro_batch_size, train.seq_len, masks
        )
    ]


def placement_check(
    run: ResolvedRun, model: Llama, sharded: Sharded, runtime: Runtime
) -> PlacementCheck | None:
    """Returns the check of placements over tensor- and context-parallel ranks; None unless the run checks
    types. `sharded` sums parameter gradients over cp. Values of dp ranks differ by intent, so dp is not
    checked."""
    if not run.config.train.check_types:
        return None
    axes = {"tp": [comm.group_name(runtime.tp)] if runtime.sizes.tp > 1 else [], "cp": []}
    if runtime.cp.mesh is not None:
        axes["cp"] = [comm.group_name(runtime.cp), comm.companion(runtime.cp, "cp").name]
    axes = {axis: groups for axis, groups in axes.items() if groups}
    check = PlacementCheck(axes)
    trained = [parameter for bucket in sharded.buckets for parameter in bucket.parameters]
    check.mark_parameters(model, "tp", {"cp": trained})
    return check


def preferences_of(run: ResolvedRun, runtime: Runtime) -> PreferenceLoss | None:
    """Returns the loss of pairs of answers; None if the run does not learn from such."""
    beta = run.config.dpo.beta
    return PreferenceLoss(beta, runtime.device) if beta else None


def passes_of(
    run: ResolvedRun, model: Llama, sharded: Sharded, runtime: Runtime, preferences: PreferenceLoss | None
) -> tuple[Accumulated | Pipelined, SlowReport | None]:
    """Returns the runner of a step's forward and backward passes; and the search for slow ranks and links,
    None if the run has none."""
    every, by_place = run.config.train.slow_every, run.config.context.layout == "contiguous"
    every = 0 if run.mesh.ranks == 1 else EVERY if every is None else every
    clock = OwnClock(runtime.device) if every else None
    passes: Accumulated | Pipelined
    units: float
    if runtime.pp.mesh is not None:
        passes = Pipelined(run, model, runtime, sharded, preferences, clock)
        shares, at = run.layer_shares, runtime.coordinate
        units = sum(shares[number] for number in model.part.layers) if shares else len(model.part.layers)
        units *= len(run.micro_batches_at(at.pp, at.dp)) / run.micro_batches
        unit = "layer"
    elif run.config.parallel.rebalance == "on" or run.config.train.micro_batches:
        passes = Accumulated(run, model, sharded, preferences, clock)
        units, unit = run.micro_batches_of[runtime.coordinate.dp], "micro-batch"
        if run.movable == "parts":
            units, unit = run.work[runtime.coordinate.tp], "thousandth of an equal part"
    else:
        passes = Accumulated(run, model, sharded, preferences)
        return passes, SlowReport(runtime, every, clock, by_place=by_place) if clock else None
    if clock is None:
        return passes, None
    return passes, SlowReport(runtime, every, clock, units, unit, passes.take_spans, by_place)
