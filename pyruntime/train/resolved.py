"""What a run is: all that follows from its configuration, its model and the number of its ranks.

    spelled_out(config)                   writes out what stands for something else (`config.py`)
    settled(config, shape)                reads the file of pipeline.costs, which one rank does for all
    resolve(config, shape, world_size)    makes the value that everything else goes by

`train --dry_run` prints it, and a run writes it into its folder.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from pyruntime.data_parallel import Compression
from pyruntime.data_parallel.compression.compressor import PIECES
from pyruntime.llama import stage
from pyruntime.llama.config import LlamaConfig
from pyruntime.llama.model import ModelPart
from pyruntime.llama.stage_profile import costed
from pyruntime.pipeline import Schedule, make_schedule, placement_of
from pyruntime.pipeline.split import split_layers
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

FILE_NAME = "resolved.json"


@dataclasses.dataclass(frozen=True)
class ResolvedRun:
    """What a run is, the same on all ranks."""

    config: RunConfig
    """As `settled` returns it."""
    shape: LlamaConfig
    """The model's."""
    mesh: MeshSizes
    micro_batches: int
    """Forward and backward passes of a rank in a step."""
    tokens_per_step: int
    """Tokens that all ranks together learn from in a step."""
    slices: tuple[int, ...]
    """Tokens of each slice of a sequence in a pipeline, on a context-parallel rank of its share."""
    placement: tuple[int, ...]
    """The rank of each stage of the pipeline; without a pipeline there is one stage."""
    layers: tuple[range, ...]
    """The layers of each stage."""
    outer: Method | None
    """How replicas meet; None where they meet in every step."""
    compression: Compression | None
    """How gradients are compressed, or where replicas do not meet in every step their displacements."""
    facts: CheckpointFacts
    """What a checkpoint says of the run before its first step."""

    @property
    def meets_every_step(self) -> bool:
        """Whether data-parallel ranks sum their gradients in every step."""
        return self.outer is None

    @functools.cached_property
    def schedule(self) -> Schedule:
        """The pipeline's schedule, made when it is first asked for: it may have millions of actions."""
        asked, slices = self.config.pipeline, len(self.slices)
        return make_schedule(
            asked.kind, self.mesh.pp, self.micro_batches, virtual=asked.virtual, slices=slices
        )

    def layers_of(self, rank: int) -> list[range]:
        """The layers of the stages of that rank of the pipeline."""
        return [run for run, owner in zip(self.layers, self.placement, strict=True) if owner == rank]

    def part_of(self, rank: int) -> ModelPart | None:
        """What that rank of the pipeline holds of the model; None: all, as there is no pipeline."""
        return None if self.mesh.pp == 1 else stage.part_of_layers(self.shape, self.layers_of(rank))

    def with_layers(self, layers: Sequence[int]) -> ResolvedRun:
        """The same run with so many layers in each stage. Raises ConfigError where they do not fit."""
        return resolve(_with_layers(self.config, layers), self.shape, self.mesh.ranks)

    def to_json(self) -> str:
        """The content of FILE_NAME."""
        return json.dumps(finite(dataclasses.asdict(self)), indent=2, default=_plain) + "\n"


def _plain(value: range | Callable) -> object:
    """Writes what JSON does not know: the layers of a stage, and the function of a penalty as its name."""
    return list(value) if isinstance(value, range) else value.__name__


def check(config: RunConfig, world_size: int) -> ResolvedRun:
    """The run that `config` is on so many ranks, without these and without weights. Raises ConfigError for
    all that the run would refuse before it trains."""
    validate.check(config, world_size)
    config = spelled_out(config)
    _, shape = open_model(config, world_size)
    return resolve(settled(config, shape), shape, world_size)


def resolve(config: RunConfig, shape: LlamaConfig, world_size: int) -> ResolvedRun:
    """The run of a configuration that `settled` has returned, whose model has that shape. Raises ConfigError
    where there is no such pipeline."""
    mesh, compression = mesh_of(config, world_size), _compression(config)
    return ResolvedRun(
        config,
        shape,
        mesh,
        micro_batches(config),
        tokens_per_step(config),
        _slices(config),
        _placement(config),
        tuple(_layers(config, shape)),
        None if meets_every_step(config) else outer_method(config),
        compression,
        _facts(config, shape, mesh, compression),
    )


def settled(config: RunConfig, shape: LlamaConfig) -> RunConfig:
    """The same configuration, spelled out, with what the file of pipeline.costs says in it: layers of the
    stages and, where pipeline.slices is 0, tokens of the slices. One rank calls it for all, whose files might
    differ. Raises ConfigError where the file cannot be read, or is of another model or sequence."""
    config = spelled_out(config)
    pipeline = config.pipeline
    _check_movable(config, shape)
    if not pipeline.costs:
        return config
    file = Path(pipeline.costs)
    try:
        found = stage_costs.read(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"pipeline.costs: {file} cannot be used, as {error}; write it with `python -m pyruntime profile "
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
                f"{name}={value}; measure it anew with `python -m pyruntime profile`."
            )
    if pipeline.slices == 0:
        pipeline = dataclasses.replace(pipeline, slices=len(found.slices), slice_tokens=found.slices)
    config = dataclasses.replace(config, pipeline=dataclasses.replace(pipeline, costs=""))
    if pipeline.layers:
        return config
    layers, stages = shape.num_hidden_layers, len(_placement(config))
    with refusing("parallel.pp: "):
        runs = split_layers([found.layer] * layers, stages, first=found.embedding, last=found.head)
    return _with_layers(config, [len(run) for run in runs])


def _check_movable(config: RunConfig, shape: LlamaConfig) -> None:
    """Raises ConfigError where layers are to move between stages that each hold but one."""
    layers = shape.num_hidden_layers
    if config.parallel.rebalance == "on" and layers == len(_placement(config)):
        raise ConfigError(
            f"parallel.rebalance=on moves layers between stages, and the model's {layers} layers are one for "
            "each; use fewer stages, or leave it out."
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
        return placement_of(asked.kind, pp, micro_batches(config), virtual=asked.virtual, slices=slices)


def _layers(config: RunConfig, shape: LlamaConfig) -> list[range]:
    """Of each stage. Raises ConfigError where there are fewer layers than stages, or pipeline.layers does not
    fit the model."""
    counts, stages = config.pipeline.layers, len(_placement(config))
    if not counts:
        with refusing("parallel.pp: "):
            return stage.layers_of_stages(shape, stages)
    if len(counts) != stages or min(counts) < 1 or sum(counts) != shape.num_hidden_layers:
        raise ConfigError(
            f"pipeline.layers={list(counts)} must be {stages} numbers, one for each stage, of at least 1, "
            f"that add up to {shape.num_hidden_layers} layers."
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


def _facts(
    config: RunConfig, shape: LlamaConfig, mesh: MeshSizes, compression: Compression | None
) -> CheckpointFacts:
    of_replicas = "" if meets_every_step(config) else f" of {mesh.dp_replicate} replicas"
    if config.data_parallel.members:
        of_replicas = " of replicas that come and go"
    compressed = ""
    if compression is not None:  # all that decides what a rank keeps of what compression lost
        in_pieces = compression.plan_every and compression.method == "quantize"
        pieces = f" in {PIECES} pieces" if in_pieces else ""
        sizes = ", ".join(f"{name}={size}" for name, size in mesh.axes.items())
        compressed = f"{compression}{pieces} at zero={config.parallel.zero} over {sizes}"
    return CheckpointFacts(
        0,
        config.train.dtype,
        dataclasses.asdict(shape),
        config.optimizer.name,
        config.optimizer.rounding,
        method=config.data_parallel.method + of_replicas,
        compression=compressed,
    )
