"""Everything about a run that follows from its configuration, its model and its number of ranks.

    spelled_out(config)                   writes out shorthands (`config.py`)
    settled(config, shape)                reads the file of pipeline.costs, on one rank for all
    resolve(config, shape, world_size)    makes the `ResolvedRun` that all other code reads

`train --dry_run` prints it, and a run writes it into its folder.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, assert_never

from pyruntime.data_parallel import Compression
from pyruntime.data_parallel.compression.compressor import PIECES
from pyruntime.llama import origin, stage
from pyruntime.llama.config import LlamaConfig
from pyruntime.llama.model import ModelPart
from pyruntime.llama.stage_profile import costed
from pyruntime.llama.tensor_shards import TensorCuts, tensor_cuts
from pyruntime.pipeline import Costs, Schedule, make_schedule, placement_of
from pyruntime.pipeline.list_schedule import Paths
from pyruntime.pipeline.routing import Speeds, by_stage, routes
from pyruntime.pipeline.skipping import shares as shares_of
from pyruntime.pipeline.split import least_largest, split_layers
from pyruntime.plan import stage_costs
from pyruntime.replicas.methods import Method
from pyruntime.text import finite
from pyruntime.train import validate
from pyruntime.train.checkpoint_folder import CheckpointFacts
from pyruntime.train.config import (
    MeshSizes,
    RunConfig,
    meets_every_step,
    mesh_of,
    micro_batches,
    spelled_out,
    tokens_per_step,
)
from pyruntime.train.errors import ConfigError, refusing
from pyruntime.train.shape import open_model
from pyruntime.train.validate.replicas import outer_method
from pyruntime.train.validate.routed_stages import check_speeds_of_shape
from pyruntime.train.validate.skipped_stages import check_skip_of_shape

FILE_NAME = "resolved.json"
EQUAL_PART = 1000
"""The `work` of a tensor-parallel rank that holds as much as the others."""
Movable: TypeAlias = Literal["layers", "micro-batches", "parts"]
_FACTS: dict[Movable, str] = {"layers": "layers", "micro-batches": "micro_batches", "parts": "tp_parts"}
"""The fact of a checkpoint that says where it is."""


@dataclasses.dataclass(frozen=True)
class ResolvedRun:
    """A run's configuration and what follows from it, the same on all ranks."""

    config: RunConfig
    """The configuration that `settled` returned."""
    shape: LlamaConfig
    """The shape of the model."""
    mesh: MeshSizes
    micro_batches: int
    """Forward and backward passes of a rank in a step; their mean, if ranks take unequal numbers."""
    micro_batches_of: tuple[int, ...]
    """Those of each data-parallel rank."""
    tokens_per_step: int
    """Tokens of a step over all ranks."""
    slices: tuple[int, ...]
    """Tokens of each pipeline slice of a sequence; on a context-parallel rank, of its share."""
    placement: tuple[int, ...]
    """The rank of each pipeline stage; without a pipeline there is one stage."""
    layers: tuple[range, ...]
    """The layers of each stage."""
    speeds: Speeds
    """Speeds of the data-parallel ranks of each pipeline stage, by which micro-batches go to them; empty:
    each rank passes its own on to the same ranks."""
    cuts: TensorCuts
    """The sizes that each tensor-parallel rank holds, if these are unequal."""
    outer: Method | None
    """Method by which replicas synchronize; None if they sum their gradients in every step."""
    compression: Compression | None
    """Compression of gradients; of displacements if replicas do not synchronize in every step."""
    facts: CheckpointFacts
    """The facts that a checkpoint stores about the run, as they are before the first step."""

    @property
    def meets_every_step(self) -> bool:
        """Whether data-parallel ranks sum their gradients in every step."""
        return self.outer is None

    @property
    def adapters(self) -> int:
        """Parameters of the low-rank adapters; 0 if all weights train."""
        lora = self.config.lora
        return self.shape.adapter_parameter_count(lora.rank, lora.targets)

    @property
    def flops_per_token(self) -> int:
        """Model FLOPs of a token as MFU counts them."""
        shares, adapters = self.layer_shares, self.adapters
        met = round(adapters * sum(shares) / len(shares)) if shares else adapters
        return self.shape.flops_per_token(self.config.train.seq_len, adapters=met, shares=shares)

    @property
    def layer_shares(self) -> tuple[float, ...]:
        """The share of the micro-batches that goes through each layer; empty: all go through all."""
        skip = self.config.pipeline.skip
        of_stages = zip(self.layers, shares_of(len(self.layers), skip), strict=True)
        return tuple(share for layers, share in of_stages for _ in layers) if skip else ()

    @functools.cached_property
    def schedule(self) -> Schedule:
        """The pipeline's schedule, made on first use: it may have millions of actions."""
        asked, slices = self.config.pipeline, len(self.slices)
        with refusing("[pipeline]: "):
            return make_schedule(
                asked.kind,
                self.mesh.pp,
                self.micro_batches * (self.mesh.dp if self.speeds else 1),
                virtual=asked.virtual,
                slices=slices,
                skip=asked.skip,
                speeds=[speed for each in self.speeds for speed in each],
                costs=self.stage_costs if asked.skip or self.speeds else None,
            )

    @functools.cached_property
    def _routes(self) -> Paths:
        return routes(self.speeds, self.micro_batches * self.mesh.dp)

    def micro_batches_at(self, pp: int, dp: int) -> Sequence[int]:
        """Returns the numbers, among all of a step, of the micro-batches that come to that place."""
        if self.speeds:
            place = pp * self.mesh.dp + dp
            return [number for number, path in enumerate(self._routes) if place in path]
        ends = [0, *itertools.accumulate(self.micro_batches_of)]
        return range(ends[dp], ends[dp + 1])

    @property
    def stage_costs(self) -> Costs:
        """The costs of stages by the GEMMs of their layers and head, in those of a layer's forward."""
        of_stages = [[cost] for cost in stage.costs_of_stages(self.shape, self.layers)]
        return Costs(of_stages, of_stages, of_stages)

    def layers_of(self, rank: int) -> list[range]:
        """Returns the layers of each stage on that pipeline rank."""
        return [run for run, owner in zip(self.layers, self.placement, strict=True) if owner == rank]

    def part_of(self, rank: int) -> ModelPart | None:
        """Returns the part of the model on that pipeline rank; None (the whole model) without a pipeline."""
        return None if self.mesh.pp == 1 else stage.part_of_layers(self.shape, self.layers_of(rank))

    def sequences_at(self, pp: int, dp: int) -> list[int]:
        """Returns the sequences of a step that the ranks at that place take, in ascending order."""
        size = self.config.train.micro_batch_size
        return [
            sequence
            for number in self.micro_batches_at(pp, dp)
            for sequence in range(size * number, size * (number + 1))
        ]

    @property
    def movable(self) -> Movable:
        """The kind of work that may move away from a slow rank."""
        if self.mesh.pp > 1:
            return "layers"
        return "micro-batches" if self.mesh.dp > 1 else "parts"

    @property
    def work(self) -> tuple[int, ...]:
        """How much of it each one has: layers of each stage, micro-batches of each data-parallel rank, or the
        part of each tensor-parallel rank in thousandths of an equal one."""
        match self.movable:
            case "layers":
                return tuple(map(len, self.layers))
            case "micro-batches":
                return self.micro_batches_of
            case "parts":
                tp = self.mesh.tp
                slowness = [1 / speed for speed in self.config.parallel.tp_speeds or (1.0,) * tp]
                return tuple(least_largest(slowness, [0.0] * tp, 1, EQUAL_PART * tp))
            case _:
                assert_never(self.movable)

    def with_work(self, work: Sequence[int]) -> ResolvedRun:
        """Returns the run with this `work`. Raises ConfigError if it does not fit."""
        match self.movable:
            case "layers":
                config = _with_layers(self.config, work)
            case "micro-batches":
                train = dataclasses.replace(self.config.train, micro_batches=tuple(work))
                config = dataclasses.replace(self.config, train=train)
            case "parts":
                parallel = dataclasses.replace(self.config.parallel, tp_speeds=tuple(map(float, work)))
                config = dataclasses.replace(self.config, parallel=parallel)
            case _:
                assert_never(self.movable)
        return resolve(config, self.shape, self.mesh.ranks)

    def moved_before(self, facts: CheckpointFacts) -> tuple[int, ...]:
        """Returns the `work` to which a checkpoint's run had moved; empty if it had not, or does not fit."""
        moved = getattr(facts, _FACTS[self.movable])
        return tuple(moved) if (len(moved), sum(moved)) == (len(self.work), sum(self.work)) else ()

    def moving(self, facts: CheckpointFacts, work: Sequence[int]) -> CheckpointFacts:
        """Returns the facts of a checkpoint with which a run goes on with that `work`."""
        changes: dict[str, Any] = {_FACTS[self.movable]: tuple(work)}
        return dataclasses.replace(facts, **changes)

    def to_json(self) -> str:
        """Returns the content of FILE_NAME."""
        return json.dumps(finite(dataclasses.asdict(self)), indent=2, default=_plain) + "\n"


def _plain(value: range | Callable) -> object:
    """Converts what JSON does not know: a stage's layers, and a penalty function to its name."""
    return list(value) if isinstance(value, range) else value.__name__


def check(config: RunConfig, world_size: int) -> ResolvedRun:
    """Returns the run that `config` gives on `world_size` ranks; needs neither ranks nor weights. Raises
    ConfigError for everything that a run would refuse before it trains."""
    validate.check(config, world_size)
    config = spelled_out(config)
    _, shape = open_model(config, world_size)
    return resolve(settled(config, shape), shape, world_size)


def resolve(config: RunConfig, shape: LlamaConfig, world_size: int) -> ResolvedRun:
    """Returns the run of a configuration from `settled` for a model of that shape. Raises ConfigError if its
    pipeline is impossible."""
    mesh, compression = mesh_of(config, world_size), _compression(config)
    with refusing("parallel."):
        cuts = tensor_cuts(shape, mesh.tp, config.parallel.tp_speeds, mesh.ep)
    return ResolvedRun(
        config,
        shape,
        mesh,
        micro_batches(config),
        config.train.micro_batches or (micro_batches(config),) * mesh.dp,
        tokens_per_step(config),
        _slices(config),
        _placement(config),
        tuple(_layers(config, shape)),
        _speeds(config),
        cuts,
        None if meets_every_step(config) else outer_method(config),
        compression,
        _facts(config, shape, mesh, compression, cuts),
    )


def settled(config: RunConfig, shape: LlamaConfig) -> RunConfig:
    """Returns the configuration spelled out, with the results of the file pipeline.costs: layers of the
    stages and, if pipeline.slices is 0, tokens of the slices. One rank calls it for all, whose files might
    differ. Raises ConfigError if the file cannot be read, or was measured for another model or sequence."""
    config = spelled_out(config)
    pipeline = config.pipeline
    _check_movable(config, shape)
    check_skip_of_shape(config, shape)
    check_speeds_of_shape(config, shape)
    if not pipeline.costs:
        return config
    file = Path(pipeline.costs)
    try:
        found = stage_costs.read(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"pipeline.costs: {file} cannot be used: {error}; write it with `python -m pyruntime profile "
            "--json`."
        ) from error
    of_run: dict[str, object] = {**costed(shape, config.train.dtype), "seq_len": config.train.seq_len}
    of_file: dict[str, object] = {**found.model, "seq_len": found.seq_len}
    if pipeline.slices == 0:
        of_run["stages"], of_file["stages"] = config.parallel.pp, found.stages
    for name, value in of_run.items():
        if of_file.get(name) != value:
            raise ConfigError(
                f"pipeline.costs: {file} was measured with {name}={of_file.get(name)}, and this run has "
                f"{name}={value}; measure again with `python -m pyruntime profile`."
            )
    if pipeline.slices == 0:
        pipeline = dataclasses.replace(pipeline, slices=len(found.slices), slice_tokens=found.slices)
    config = dataclasses.replace(config, pipeline=dataclasses.replace(pipeline, costs=""))
    if pipeline.layers:
        return config
    layers, stages = shape.num_hidden_layers, len(_placement(config))
    shares = shares_of(stages, pipeline.skip)
    with refusing("parallel.pp: "):
        runs = split_layers(
            [found.layer] * layers, stages, first=found.embedding, last=found.head, shares=shares
        )
    return _with_layers(config, [len(run) for run in runs])


def _check_movable(config: RunConfig, shape: LlamaConfig) -> None:
    """Raises ConfigError if work may move that this model does not have."""
    layers = shape.num_hidden_layers
    parallel = config.parallel
    if parallel.rebalance == "on" and parallel.pp == parallel.dp == 1 and shape.latent is not None:
        raise ConfigError(
            "parallel.rebalance=on moves heads and MLP features between tensor-parallel ranks, which is not "
            "built for latent attention; leave it out."
        )
    if parallel.rebalance == "on" and parallel.pp > 1 and layers == len(_placement(config)):
        raise ConfigError(
            f"parallel.rebalance=on moves layers between stages, but the model's {layers} layers are one per "
            "stage; use fewer stages, or leave out parallel.rebalance."
        )


def _with_layers(config: RunConfig, layers: Sequence[int]) -> RunConfig:
    pipeline = dataclasses.replace(config.pipeline, layers=tuple(layers))
    return dataclasses.replace(config, pipeline=pipeline)


def _slices(config: RunConfig) -> tuple[int, ...]:
    cp, asked = config.parallel.cp, config.pipeline
    if asked.slice_tokens:
        return tuple(each // cp for each in asked.slice_tokens)
    count = max(1, asked.slices)
    tokens, longer = divmod(config.train.seq_len // cp, count)
    return (tokens + 1,) * longer + (tokens,) * (count - longer)


def _placement(config: RunConfig) -> tuple[int, ...]:
    pp, asked, slices = config.parallel.pp, config.pipeline, len(_slices(config))
    if pp == 1:
        return (0,)
    with refusing("[pipeline]: "):
        return placement_of(
            asked.kind, pp, micro_batches(config), virtual=asked.virtual, slices=slices, skip=asked.skip
        )


def _speeds(config: RunConfig) -> Speeds:
    """Returns pipeline.speeds by stage; empty if the speeds of each stage are equal. Raises ConfigError if
    they leave a rank without micro-batches."""
    with refusing("pipeline."):
        found = by_stage(config.pipeline.speeds, config.parallel.pp)
        if all(len(set(each)) <= 1 for each in found):
            return ()
        routes(found, micro_batches(config) * config.parallel.dp)
        return found


def _layers(config: RunConfig, shape: LlamaConfig) -> list[range]:
    """Returns the layers of each stage. Raises ConfigError if there are fewer layers than stages, or
    pipeline.layers does not fit the model."""
    counts, stages = config.pipeline.layers, len(_placement(config))
    if not counts:
        with refusing("parallel.pp: "):
            return stage.layers_of_stages(shape, stages, shares_of(stages, config.pipeline.skip))
    if len(counts) != stages or min(counts) < 1 or sum(counts) != shape.num_hidden_layers:
        raise ConfigError(
            f"pipeline.layers={list(counts)} must be {stages} numbers of at least 1, one for each stage, "
            f"with a sum of {shape.num_hidden_layers} layers."
        )
    ends = list(itertools.accumulate(counts))
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def _compression(config: RunConfig) -> Compression | None:
    asked = config.data_parallel
    if asked.compression == "none":
        return None
    return Compression(
        asked.compression,
        bits=asked.compression_bits,
        density=asked.compression_density,
        rank=asked.compression_rank,
        error_feedback=asked.error_feedback,
        plan_every=asked.compression_plan_every,
        seed=config.train.seed,
    )


def adapters_in_words(config: RunConfig) -> str:
    """Names the adapters of a run and the weights that they belong to; empty if all weights train."""
    lora, source = config.lora, config.model.init_from
    if lora.rank == 0:
        return ""
    with refusing("model.init_from: ", (ValueError, OSError)):
        base = origin.fingerprint(Path(source)) if source else f"the random ones of seed {config.train.seed}"
    scale = f"alpha={lora.alpha:g}{' (rslora)' if lora.rslora else ''}"
    return f"rank={lora.rank} {scale} on {','.join(sorted(lora.targets))} of weights {base}"


def _facts(
    config: RunConfig,
    shape: LlamaConfig,
    mesh: MeshSizes,
    compression: Compression | None,
    cuts: TensorCuts,
) -> CheckpointFacts:
    of_replicas = "" if meets_every_step(config) else f" of {mesh.dp_replicate} replicas"
    if config.data_parallel.members:
        of_replicas = " of replicas that come and go"
    compressed = ""
    if compression is not None:  # all that decides which compression errors a rank keeps
        in_pieces = compression.plan_every and compression.method == "quantize"
        pieces = f" in {PIECES} pieces" if in_pieces else ""
        sizes = ", ".join(f"{name}={size}" for name, size in mesh.axes.items())
        compressed = f"{compression}{pieces} at zero={config.parallel.zero} over {sizes}"
        compressed += f", cut {cuts}" if str(cuts) else ""
    return CheckpointFacts(
        0,
        config.train.dtype,
        dataclasses.asdict(shape),
        config.optimizer.name,
        config.optimizer.rounding,
        method=config.data_parallel.method + of_replicas,
        adapters=adapters_in_words(config),
        compression=compressed,
    )
