"""The training loop's forward and backward passes over the stages of a pipeline."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pyruntime import comm
from pyruntime.comm.companions import companion
from pyruntime.data_parallel import Sharded
from pyruntime.data_parallel.optimizer import Holders
from pyruntime.llama import Llama
from pyruntime.llama.stage import LlamaStage
from pyruntime.ops.placements import PlacementCheck
from pyruntime.pipeline.executor import Loss, Pipeline
from pyruntime.train.data.batches import Batch
from pyruntime.train.passes.preference_loss import PreferenceLoss
from pyruntime.train.resolved import ResolvedRun
from pyruntime.train.slow.own_clock import OwnClock, PassSpans


def shared_weights(run: ResolvedRun, model: Llama, runtime: comm.Runtime) -> dict[nn.Parameter, Holders]:
    """Returns the weights of this rank that another pipeline rank also holds: the tied embeddings, on the
    ranks of the first and the last stage if these differ."""
    rank, ends = runtime.coordinate.pp, (run.placement[0], run.placement[-1])
    if not model.config.tie_word_embeddings or ends[0] == ends[1] or rank not in ends:
        return {}
    if not model.embed.weight.requires_grad:
        return {}
    return {model.embed.weight: Holders(companion(runtime.pp, "dp", ends).name, counts=rank == ends[0])}


class Pipelined:
    """Runs this rank's stages over the pipeline ranks of `runtime`, and over those of all its data-parallel
    ranks if micro-batches are routed by speed. `model` has the layers `part_of` this rank.

    sharded: takes the model's gradients. preferences: the loss of pairs of answers. clock: times the passes,
    for `take_spans`.
    """

    def __init__(
        self,
        run: ResolvedRun,
        model: Llama,
        runtime: comm.Runtime,
        sharded: Sharded,
        preferences: PreferenceLoss | None = None,
        clock: OwnClock | None = None,
    ):
        self._preferences = preferences
        self._clock, self._model, self._scale = clock, model, 1.0 / run.micro_batches
        self._spans, self._sharded = PassSpans(), sharded
        self._slices, self._batch = run.slices, run.config.train.micro_batch_size
        at, schedule = runtime.coordinate, run.schedule
        numbers = run.micro_batches_at(at.pp, at.dp) if run.speeds else range(schedule.micro_batches)
        self._own = {number: own for own, number in enumerate(numbers)}
        """The place, among the micro-batches that come to this rank, of each number in the schedule."""
        group = runtime.pp_and_dp if run.speeds else runtime.pp
        self._stages = {
            number: LlamaStage(
                model,
                run.layers[number // schedule.replicas],
                self._batch,
                self._slices,
                clock.now if clock else None,
            )
            for number in schedule.stages_of(comm.group_rank(group))
        }
        weight = next(model.parameters())
        self._pipeline = Pipeline(
            schedule,
            self._stages,
            group,
            shapes=self._shapes(self._batch),
            dtype=weight.dtype,
            device=weight.device,
            gradients=sharded,
            wire=run.config.pipeline.wire,
        )

    def _shapes(self, batch: int) -> list[tuple[int, int]]:
        """Returns the shape of this tensor-parallel rank's rows of the residual stream, for each slice."""
        group = self._model.group
        rows = (len(torch.arange(batch * seq).tensor_split(group.size)[group.rank]) for seq in self._slices)
        return [(count, self._model.stream_features) for count in rows]

    def step(self, micro_batches: Sequence[Batch], types: PlacementCheck | None = None) -> Tensor:
        """Runs forward and backward of this rank's micro-batches. Returns the sum of their losses, each by
        its weight, divided by the mean number of micro-batches of a data-parallel rank, on the last stage; 0
        on others; float64 on the device."""
        began = self._clock.now() if self._clock else None
        if self._pipeline.schedule.replicas > 1:
            # Else a forward waits for weights from the stage's other replicas, one of which may wait for a
            # micro-batch that comes only after this rank's backward.
            self._sharded.complete()
        numbers = range(self._pipeline.schedule.micro_batches)
        own = [micro_batches[self._own[each]] if each in self._own else None for each in numbers]
        with types or contextlib.nullcontext():
            losses = self._pipeline.step(
                [each.ids.split(self._slices, 1) if each else [] for each in own],
                self._loss(own, self._scale),
                [{"documents": each.documents} if each else {} for each in own],
            )
        if self._clock and began:
            self._spans.passes.append((began, self._clock.now()))
        return self._sum(losses)

    def evaluate(self, whole: Batch) -> Tensor:
        """Returns the mean loss of one batch on the last stage, 0 on others, float64 on the device."""
        return self._sum(self._evaluated(whole, self._loss([whole], 1.0)))

    def log_probabilities(self, whole: Batch) -> Tensor:
        """Returns those of the answers of one batch on the last stage, 0 on others, [pairs, 2] fp64."""
        preferences = self._preferences
        assert preferences is not None

        def found(x: Tensor, micro_batch: int, part: int) -> Tensor:
            return preferences.log_probabilities(self._model, x, whole)

        parts = [part for parts in self._evaluated(whole, found) for part in parts]
        none = torch.zeros(whole.targets, 2, dtype=torch.float64, device=whole.ids.device)
        return parts[0] if parts else none

    @torch.no_grad()
    def _evaluated(self, whole: Batch, loss: Loss) -> list[list[Tensor]]:
        batch = len(whole.ids)
        for each in self._stages.values():
            each.batch = batch
        try:
            return self._pipeline.evaluate(
                [whole.ids.split(self._slices, 1)],
                loss,
                self._shapes(batch),
                [{"documents": whole.documents}],
            )
        finally:
            for each in self._stages.values():
                each.batch = self._batch

    def take_spans(self) -> PassSpans:
        """Returns what this rank did since the last call. Recomputed layers count once more."""
        spans, self._spans = self._spans, PassSpans()
        spans.weight = 4 / 3 if self._model.recompute == "full" else 1.0
        for stage in self._stages.values():
            for began, embedded, through, ended in stage.spans:
                spans.layers.append((embedded, through))
                spans.rest += [(began, embedded), (through, ended)]
            stage.spans.clear()
        return spans

    def close(self) -> None:
        self._pipeline.close()

    def _sum(self, losses: list[list[Tensor]]) -> Tensor:
        parts = [part for parts in losses for part in parts] or [next(self._model.parameters()).new_zeros(())]
        return torch.stack(parts).sum(dtype=torch.float64)

    def _loss(self, micro_batches: Sequence[Batch | None], scale: float):
        context = self._model.context

        def loss(x: Tensor, micro_batch: int, part: int) -> Tensor:
            began = self._clock.now() if self._clock else None
            batch = micro_batches[micro_batch]
            assert batch is not None  # it comes to this rank
            # A context sums the counts of its ranks.
            count = torch.tensor(batch.targets / (context.size if context is not None else 1))
            labels = batch.labels.split(self._slices, 1)[part].contiguous()
            if self._preferences is None:
                value = self._model.loss(x, labels, count)
            else:
                value = self._preferences.loss(self._model, x, batch)
            value = value * (scale * batch.weight)
            if self._clock and began:
                self._spans.rest.append((began, self._clock.now()))
            return value

        return loss
