"""The training loop's forward and backward passes over the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pyruntime import comm
from pyruntime.comm.companions import companion
from pyruntime.data_parallel import Sharded
from pyruntime.data_parallel.optimizer import Holders
from pyruntime.llama import Llama
from pyruntime.llama.stage import LlamaStage
from pyruntime.pipeline.executor import Pipeline
from pyruntime.train.data.batches import Batch
from pyruntime.train.resolved import ResolvedRun
from pyruntime.train.slow.judge import WINDOWS
from pyruntime.train.slow.rebalance import Move, best_move
from pyruntime.train.slow.windows import SlowReport, own_seconds


def shared_weights(run: ResolvedRun, model: Llama, runtime: comm.Runtime) -> dict[nn.Parameter, Holders]:
    """The weights of this rank that another rank of the pipeline holds too: that of tied embeddings, on the
    ranks of the first and the last stage where these are not one."""
    rank, ends = runtime.coordinate.pp, (run.placement[0], run.placement[-1])
    if not model.config.tie_word_embeddings or ends[0] == ends[1] or rank not in ends:
        return {}
    if not model.embed.weight.requires_grad:
        return {}
    return {model.embed.weight: Holders(companion(runtime.pp, "dp", ends).name, counts=rank == ends[0])}


def move_of(run: ResolvedRun, runtime: comm.Runtime, slow: SlowReport, is_moved: bool) -> Move | None:
    """Which layers are to move between stages now, the same on all ranks; None: none are. They stay while no
    rank is slow, unless they have been moved before (is_moved): then they may move back."""
    if len(slow.windows) < WINDOWS or not (slow.slow_ranks or is_moved):
        return None
    ranks = runtime.by_axes(torch.arange(runtime.world.size())).flatten(1).tolist()
    counts = [len(layers) for layers in run.layers]
    return best_move(slow.windows, ranks, run.placement, counts, slow.slow_ranks, slow.names)


def _no_time() -> float:
    return 0.0


class Pipelined:
    """This rank's stages of `model`, which has the `part_of` this rank; over the pipeline's ranks `pp`.

    sharded: takes the gradients of the model. is_timed: `layer_seconds` is asked for.
    """

    def __init__(
        self,
        run: ResolvedRun,
        model: Llama,
        pp: comm.Group,
        sharded: Sharded,
        is_timed: bool = False,
    ):
        self._clock = clock = own_seconds if is_timed else _no_time
        self._model, self._step_s, self._loss_s = model, 0.0, 0.0
        self._slices, self._batch = run.slices, run.config.train.micro_batch_size
        self._stages = {
            number: LlamaStage(model, run.layers[number], self._batch, self._slices, clock)
            for number in run.schedule.stages_of(comm.group_rank(pp))
        }
        weight = next(model.parameters())
        self._pipeline = Pipeline(
            run.schedule,
            self._stages,
            pp,
            shapes=self._shapes(self._batch),
            dtype=weight.dtype,
            device=weight.device,
            gradients=sharded,
            wire=run.config.pipeline.wire,
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
