"""What a configuration and a model make of the parts that a trainer is put together from."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from pyruntime import comm
from pyruntime.comm import Runtime
from pyruntime.data_parallel import Compression, Muon, Sharded
from pyruntime.data_parallel.compression.compressor import PIECES
from pyruntime.llama import Llama
from pyruntime.ops.placements import PlacementCheck
from pyruntime.train.config import RunConfig
from pyruntime.train.errors import ConfigError
from pyruntime.train.pipelined import Pipelined
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


def within_and_between(mesh: DeviceMesh | None) -> tuple[DeviceMesh | None, DeviceMesh]:
    """Of a mesh (dp_replicate, dp_shard): the ranks that share one replica, None where it is on one rank, and
    those that hold the same of different replicas.

    Raises ValueError where the mesh has no replicas.
    """
    names = () if mesh is None else tuple(mesh.mesh_dim_names or ())
    if mesh is None or names[:1] != ("dp_replicate",):
        raise ValueError(
            "Replicas that meet less often than in every step are the axis dp_replicate, and there are "
            f"{names}."
        )
    within = mesh[names[1]] if len(names) > 1 else None
    return (within if within is not None and within.size() > 1 else None), mesh["dp_replicate"]


def placement_check(model: Llama, sharded: Sharded, runtime: Runtime) -> PlacementCheck:
    """Follows tensors over tensor- and context-parallel ranks: gradients of the model's parameters are summed
    over the latter by `sharded`. What data-parallel ranks have is each one's own by intent."""
    axes = {"tp": [comm.group_name(runtime.tp)] if runtime.sizes.tp > 1 else [], "cp": []}
    if runtime.cp.mesh is not None:
        axes["cp"] = [comm.group_name(runtime.cp), comm.companion(runtime.cp, "cp").name]
    axes = {axis: groups for axis, groups in axes.items() if groups}
    check = PlacementCheck(axes)
    trained = [parameter for bucket in sharded.buckets for parameter in bucket.parameters]
    check.mark_parameters(model, "tp", {"cp": trained})
    return check


def muon_of(config: RunConfig, model: Llama) -> Muon | None:
    """Of the matrices of this rank's layers."""
    if config.optimizer.name != "muon":
        return None
    of_layers = model.layers.parameters()
    return Muon([p for p in of_layers if p.dim() == 2 and p.requires_grad], config.optimizer.momentum)


def slow_every(config: RunConfig, runtime: Runtime) -> int:
    """Steps between two looks at which rank is slow; 0: none."""
    if runtime.world.size() == 1:
        return 0
    every = config.train.slow_every
    return (EVERY if runtime.device.type == "cpu" else 0) if every is None else every


def slow_report(
    config: RunConfig, model: Llama, runtime: Runtime, pipelined: Pipelined | None
) -> SlowReport | None:
    """What looks for slow ranks and links; None where nothing does."""
    every, by_place = slow_every(config, runtime), config.context.layout == "contiguous"
    if not every:
        return None
    if pipelined is None:
        return SlowReport(runtime, every, by_place=by_place)
    return SlowReport(runtime, every, len(model.part.layers), pipelined.layer_seconds, by_place)


def compression_of(config: RunConfig) -> Compression | None:
    """What the [data_parallel] section asks for: of gradients, or where replicas do not meet in every step of
    their displacements."""
    chosen = config.data_parallel
    if chosen.compression == "none":
        return None
    return Compression(
        chosen.compression,
        bits=chosen.compression_bits,
        density=chosen.compression_density,
        rank=chosen.compression_rank,
        error_feedback=chosen.error_feedback,
        plan_every=chosen.compression_plan_every,
        seed=config.train.seed,
    )


def compressed_how(config: RunConfig, runtime: Runtime) -> str:
    """All that decides what a rank keeps of what compression lost; empty without."""
    settings = compression_of(config)
    if settings is None:
        return ""
    sizes = ", ".join(f"{name}={size}" for name, size in runtime.sizes._asdict().items())
    pieces = f" in {PIECES} pieces" if settings.plan_every and settings.method == "quantize" else ""
    return f"{settings}{pieces} at zero={config.parallel.zero} over {sizes}"
