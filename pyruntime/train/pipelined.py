"""The training loop's forward and backward passes over the stages of a pipeline."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from pyruntime import comm
from pyruntime.comm.companions import companion
from pyruntime.data_parallel import Sharded
from pyruntime.data_parallel.optimizer import Holders
from pyruntime.llama import Llama, stage
from pyruntime.llama.config import LlamaConfig
from pyruntime.llama.model import Part
from pyruntime.llama.profile import costed
from pyruntime.llama.stage import LlamaStage
from pyruntime.pipeline import Schedule, make_schedule, placement_of
from pyruntime.pipeline.executor import Pipeline
from pyruntime.pipeline.split import split_layers
from pyruntime.plan import stage_costs
from pyruntime.train import checkpoint_folder
from pyruntime.train.config import RunConfig, micro_batches
from pyruntime.train.data.batches import Batch
from pyruntime.train.errors import ConfigError, refusing
from pyruntime.train.slow.judge import WINDOWS
from pyruntime.train.slow.rebalance import Move, best_move
from pyruntime.train.slow.windows import SlowReport, own_seconds


def schedule_of(config: RunConfig) -> Schedule:
    """The schedule that a configuration asks for. Raises ConfigError where there is none."""
    pipeline = config.pipeline
    with refusing("[pipeline]: "):
        return make_schedule(
            pipeline.kind,
            config.parallel.pp,
            micro_batches(config),
            virtual=pipeline.virtual,
            slices=len(slice_lengths(config)),
        )


def placement(config: RunConfig) -> tuple[int, ...]:
    """The rank of each stage of that schedule. Raises ConfigError where there is none."""
    pipeline = config.pipeline
    with refusing("[pipeline]: "):
        return placement_of(
            pipeline.kind,
            config.parallel.pp,
            micro_batches(config),
            virtual=pipeline.virtual,
            slices=len(slice_lengths(config)),
        )


def slice_lengths(config: RunConfig) -> list[int]:
    """Tokens of each slice of a sequence, on a context-parallel rank of its share."""
    tokens = config.train.seq_len // config.parallel.cp
    if config.pipeline.slice_tokens:
        return [each // config.parallel.cp for each in config.pipeline.slice_tokens]
    return [len(part) for part in torch.arange(tokens).tensor_split(max(1, config.pipeline.slices))]


def resolved(config: RunConfig, shape: LlamaConfig) -> RunConfig:
    """The same configuration with what the file of pipeline.costs says written out: layers of the stages
    and, where pipeline.slices is 0, tokens of the slices. One rank calls it for all, whose files might
    differ. Raises ConfigError where the file cannot be read, or is of another model or sequence."""
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
    layers, stages = shape.num_hidden_layers, len(placement(config))
    with refusing("parallel.pp: "):
        runs = split_layers([found.layer] * layers, stages, first=found.embedding, last=found.head)
    return with_layers(config, [len(run) for run in runs])


def _check_movable(config: RunConfig, shape: LlamaConfig) -> None:
    """Raises ConfigError where layers are to move between stages that each hold but one."""
    layers = shape.num_hidden_layers
    if config.parallel.rebalance == "on" and layers == len(placement(config)):
        raise ConfigError(
            f"parallel.rebalance=on moves layers between stages, and the model's {layers} layers are one for "
            "each; use fewer stages, or leave it out."
        )


def with_layers(config: RunConfig, layers: Sequence[int]) -> RunConfig:
    """The same configuration with so many layers in each stage."""
    pipeline = dataclasses.replace(config.pipeline, layers=tuple(layers))
    return dataclasses.replace(config, pipeline=pipeline)


def with_moved_layers(config: RunConfig, folder: Path) -> RunConfig:
    """The same configuration with the layers of the stages that the checkpoint in `folder` goes on with,
    where they had been moved, between as many stages."""
    layers = checkpoint_folder.read(folder).layers
    return with_layers(config, layers) if len(layers) == len(placement(config)) else config


def layers_of_stages(config: RunConfig, shape: LlamaConfig) -> list[range]:
    """Which layers each stage holds. Raises ConfigError where there are fewer layers than stages, or
    pipeline.layers does not fit the model."""
    counts, stages = config.pipeline.layers, len(placement(config))
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


def part_of(config: RunConfig, shape: LlamaConfig, rank: int) -> Part:
    """What rank `rank` of the pipeline holds of the model."""
    runs = layers_of_stages(config, shape)
    held = [run for run, owner in zip(runs, placement(config), strict=True) if owner == rank]
    return stage.part_of_layers(shape, held)


def shared_weights(config: RunConfig, model: Llama, pp: comm.Group) -> dict[nn.Parameter, Holders]:
    """The weights of this rank that another rank of the pipeline holds too: that of tied embeddings, on the
    ranks of the first and the last stage where these are not one."""
    of_stages = placement(config)
    rank, ends = comm.group_rank(pp), (of_stages[0], of_stages[-1])
    if not model.config.tie_word_embeddings or ends[0] == ends[1] or rank not in ends:
        return {}
    if not model.embed.weight.requires_grad:
        return {}
    return {model.embed.weight: Holders(companion(pp, "dp", ends).name, counts=rank == ends[0])}


def move_of(
    config: RunConfig, shape: LlamaConfig, runtime: comm.Runtime, slow: SlowReport, is_moved: bool
) -> Move | None:
    """Which layers are to move between stages now, the same on all ranks; None: none are. They stay while no
    rank is slow, unless they have been moved before (is_moved): then they may move back."""
    if len(slow.windows) < WINDOWS or not (slow.slow_ranks or is_moved):
        return None
    ranks = runtime.by_axes(torch.arange(runtime.world.size())).flatten(1).tolist()
    counts = [len(run) for run in layers_of_stages(config, shape)]
    return best_move(slow.windows, ranks, placement(config), counts, slow.slow_ranks, slow.names)


def _no_time() -> float:
    return 0.0


class Pipelined:
    """This rank's stages of `model`, which has the `part_of` this rank; over the pipeline's ranks `pp`.

    sharded: takes the gradients of the model. is_timed: `layer_seconds` is asked for.
    """

    def __init__(
        self,
        config: RunConfig,
        model: Llama,
        pp: comm.Group,
        sharded: Sharded,
        is_timed: bool = False,
    ):
        schedule = schedule_of(config)
        self._clock = clock = own_seconds if is_timed else _no_time
        self._model, self._step_s, self._loss_s = model, 0.0, 0.0
        self._slices, self._batch = slice_lengths(config), config.train.micro_batch_size
        runs = layers_of_stages(config, model.config)
        self._stages = {
            number: LlamaStage(model, runs[number], self._batch, self._slices, clock)
            for number in schedule.stages_of(comm.group_rank(pp))
        }
        weight = next(model.parameters())
        self._pipeline = Pipeline(
            schedule,
            self._stages,
            pp,
            shapes=self._shapes(self._batch),
            dtype=weight.dtype,
            device=weight.device,
            gradients=sharded,
            wire=config.pipeline.wire,
        )

    def _shapes(self, batch: int) -> list[tuple[int, int]]:
        """Of this tensor-parallel rank's part of the residual stream, by slice."""
        group = self._model.group
        rows = (len(torch.arange(batch * seq).tensor_split(group.size)[group.rank]) for seq in self._slices)
        return [(count, self._model.stream_features) for count in rows]

    def step(self, micro_batches: Sequence[Batch], scale: float) -> float:
        """Forward and backward of all micro-batches; the gradients are those of `scale` times the losses.
        Returns their sum, of which the last stage alone has any."""
        began = self._clock()
        losses = self._pipeline.step(
            self._cut([each.ids for each in micro_batches]),
            self._loss(micro_batches, scale),
            [{"documents": each.documents} for each in micro_batches],
        )
        self._step_s += self._clock() - began
        return sum(float(part) for parts in losses for part in parts)

    @torch.no_grad()
    def evaluate(self, whole: Batch) -> float:
        """Mean loss of one batch, in the last stage; 0 in others."""
        batch = len(whole.ids)
        for each in self._stages.values():
            each.batch = batch
        try:
            losses = self._pipeline.evaluate(
                self._cut([whole.ids]),
                self._loss([whole], 1.0),
                self._shapes(batch),
                [{"documents": whole.documents}],
            )
        finally:
            for each in self._stages.values():
                each.batch = self._batch
        return sum(float(part) for parts in losses for part in parts)

    def layer_seconds(self) -> float:
        """What this rank did for layers since the last call, of what it did in `step`: their share of it is
        that in forward passes, as backward passes take twice as long for either, and layers that are
        computed anew are so once more."""
        stages = self._stages.values()
        layers = sum(each.layers_s for each in stages) * (4 / 3 if self._model.recompute == "full" else 1)
        rest = sum(each.rest_s for each in stages) + self._loss_s
        own, self._step_s, self._loss_s = self._step_s, 0.0, 0.0
        for each in stages:
            each.layers_s = each.rest_s = 0.0
        return own * layers / (layers + rest) if own > 0 else 0.0

    def close(self) -> None:
        self._pipeline.close()

    def _cut(self, tokens: Sequence[Tensor]) -> list[list[Tensor]]:
        """[B, S] of every micro-batch, by slice."""
        return [list(each.split(self._slices, 1)) for each in tokens]

    def _loss(self, micro_batches: Sequence[Batch], scale: float):
        cut = self._cut([each.labels for each in micro_batches])

        def loss(logits: Tensor, micro_batch: int, part: int) -> Tensor:
            began = self._clock()
            count = torch.tensor(sum(each.numel() for each in cut[micro_batch]))
            value = self._model.loss(logits, cut[micro_batch][part].contiguous(), count) * scale
            self._loss_s += self._clock() - began
            return value

        return loss
