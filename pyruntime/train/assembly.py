"""The parts that a trainer is put together from: each function decides one of them, from what the run is."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from pyruntime import comm
from pyruntime.comm import Runtime
from pyruntime.data_parallel import Muon, Sharded, shard
from pyruntime.data_parallel.adamw import ShardedAdamW
from pyruntime.llama import Llama
from pyruntime.ops.placements import PlacementCheck
from pyruntime.replicas.member import Member
from pyruntime.replicas.sharded_outer import ShardedOuter
from pyruntime.train.data.batches import Batch, Batches, validation_batches
from pyruntime.train.data.corpus import Corpus
from pyruntime.train.device import Device
from pyruntime.train.errors import ConfigError
from pyruntime.train.figures import ExchangedFigures, Figures, LateFigures, RoundFigures
from pyruntime.train.pipelined import Pipelined, shared_weights
from pyruntime.train.resolved import ResolvedRun
from pyruntime.train.slow.windows import EVERY, SlowReport


def check_trains(model: Llama, runtime: Runtime) -> None:
    if any(parameter.requires_grad for parameter in model.parameters()):
        return
    if runtime.pp.mesh is None:
        raise ConfigError("No parameter of the model requires a gradient; leave one unfrozen.")
    layers = ", ".join(map(str, model.part.layers))
    raise ConfigError(
        f"No parameter of layers {layers}, which are rank {runtime.coordinate.pp}'s of the pipeline, "
        "requires a gradient, and every rank of it has to train some; leave one unfrozen, or give the rank "
        "other layers with pipeline.layers."
    )


def data_axes(run: ResolvedRun, runtime: Runtime) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """Returns two axes: the ranks over which gradients are summed in every step, None where this rank is
    alone; and the ranks that hold the same part of replicas that do not meet in every step, None where there
    are no such replicas in this job.

    Raises ValueError where there are to be such replicas and the mesh has none.
    """
    mesh = runtime.replicas.mesh
    if run.meets_every_step or run.config.data_parallel.members:
        return mesh, None
    names = () if mesh is None else tuple(mesh.mesh_dim_names or ())
    if mesh is None or names[:1] != ("dp_replicate",):
        raise ValueError(
            "Replicas that meet less often than in every step are the axis dp_replicate, and there are "
            f"{names}."
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


def optimizer_of(run: ResolvedRun, model: Llama, sharded: Sharded, runtime: Runtime) -> ShardedAdamW:
    asked, muon = run.config.optimizer, None
    if asked.name == "muon":
        of_layers = model.layers.parameters()
        muon = Muon([p for p in of_layers if p.dim() == 2 and p.requires_grad], asked.momentum)
    return sharded.adamw(
        betas=(asked.beta1, asked.beta2),
        eps=asked.eps,
        weight_decay=asked.weight_decay,
        max_norm=asked.clip_grad_norm,
        nonfinite="skip" if asked.on_bad_step == "skip" else "raise",
        rounding=asked.rounding,
        muon=muon,
        shared=shared_weights(run, model, runtime),
    )


def outer_of(
    run: ResolvedRun,
    sharded: Sharded,
    within: DeviceMesh | None,
    between: DeviceMesh | None,
    member: Member | None,
    runtime: Runtime,
) -> ShardedOuter | None:
    """Returns what lets replicas meet; None where they meet in every step. For within and between see
    `data_axes`."""
    if run.outer is None:
        return None
    axes = (runtime.tp.mesh, runtime.tp_y.mesh, within, runtime.pp.mesh)
    parts = [axis for axis in axes if axis is not None]
    return ShardedOuter(sharded, between, run.outer, parts, member, run.compression)


def figures_of(
    run: ResolvedRun, within: DeviceMesh | None, outer: ShardedOuter | None, runtime: Runtime
) -> Figures:
    """Chooses how ranks tell each other what a step has found."""
    device, asked = Device(runtime.device, runtime.why_device), run.config.optimizer
    if outer is not None:
        return RoundFigures(runtime, device, within, outer.stats, bool(run.config.data_parallel.members))
    # What decides whether a step counts is read in that step.
    is_read_at_once = asked.on_bad_step == "skip" or asked.spike_factor
    if device.is_cuda and run.mesh.ranks == 1 and not is_read_at_once:
        return LateFigures(device)
    return ExchangedFigures(runtime, device)


def batches_of(run: ResolvedRun, corpus: Corpus, runtime: Runtime) -> Batches:
    """The sequences that this data-parallel rank learns from."""
    train = run.config.train
    return Batches(
        corpus, train.seed, train.batch_size, train.seq_len, run.shape.vocab_size,
        share=runtime.coordinate.dp, shares=run.mesh.dp, masks=run.config.data.document_masks,
    )  # fmt: skip


def validation_of(run: ResolvedRun, corpus: Corpus) -> list[tuple[int, Batch]]:
    """The batches to validate on, each with the number of its set."""
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
    """Follows tensors over tensor- and context-parallel ranks: gradients of the model's parameters are summed
    over the latter by `sharded`. What data-parallel ranks have is each one's own by intent. None where the
    run does not check types."""
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


def stages_of(
    run: ResolvedRun, model: Llama, sharded: Sharded, runtime: Runtime
) -> tuple[Pipelined | None, SlowReport | None]:
    """Returns what runs the stages of this rank, None without a pipeline; and what looks for slow ranks and
    links, None where the run does not look."""
    every, by_place = run.config.train.slow_every, run.config.context.layout == "contiguous"
    if every is None:
        every = EVERY if runtime.device.type == "cpu" else 0
    every = 0 if run.mesh.ranks == 1 else every
    if runtime.pp.mesh is None:
        return None, SlowReport(runtime, every, by_place=by_place) if every else None
    pipelined = Pipelined(run, model, runtime.pp, sharded, is_timed=every > 0)
    if not every:
        return pipelined, None
    return pipelined, SlowReport(runtime, every, len(model.part.layers), pipelined.layer_seconds, by_place)
