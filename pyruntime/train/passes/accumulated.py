"""The training loop's forward and backward passes without a pipeline: one micro-batch after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor

from pyruntime.comm.ranges import marked
from pyruntime.data_parallel import Sharded
from pyruntime.llama import Llama
from pyruntime.ops.placements import PlacementCheck
from pyruntime.train.data.batches import Batch
from pyruntime.train.passes.preference_loss import PreferenceLoss
from pyruntime.train.resolved import ResolvedRun
from pyruntime.train.slow.own_clock import OwnClock, PassSpans


class Accumulated:
    """Runs the whole model; only the last micro-batch's backward pass lets gradients leave.

    Data-parallel ranks may take different numbers of micro-batches. A gradient is a mean over these ranks, so
    each rank divides by their mean number, not by its own: then every micro-batch of the step counts alike.

    sharded: takes the model's gradients. preferences: the loss of pairs of answers. clock: times the passes,
    for `take_spans`.
    """

    def __init__(
        self,
        run: ResolvedRun,
        model: Llama,
        sharded: Sharded,
        preferences: PreferenceLoss | None = None,
        clock: OwnClock | None = None,
    ):
        self._model, self._sharded, self._clock = model, sharded, clock
        self._preferences = preferences
        self._device = next(model.parameters()).device
        self._seed = torch.tensor(1.0 / run.micro_batches, device=self._device)
        self._spans = PassSpans()

    def step(self, micro_batches: Sequence[Batch], types: PlacementCheck | None = None) -> Tensor:
        """Runs forward and backward of all micro-batches. Returns the sum of their losses, each by its
        weight, divided by the mean number of micro-batches of a rank: its mean over ranks is the step's."""
        began = self._clock.now() if self._clock else None
        loss = torch.zeros((), device=self._device)
        for each in micro_batches:
            with marked("forward"), types or contextlib.nullcontext():
                loss_micro = self._loss(each)
            if types is not None:
                types.expect(loss_micro, "The loss", tp="replicated", cp="partial")
            is_last = each is micro_batches[-1]
            accumulating = contextlib.nullcontext() if is_last else self._sharded.accumulate()
            seed = self._seed if each.weight == 1 else self._seed * each.weight
            with accumulating, marked("backward"):
                loss_micro.backward(seed)
            loss += loss_micro.detach() * seed
        if self._clock and began:
            self._spans.passes.append((began, self._clock.now()))
        return loss

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """Returns the mean loss of one batch."""
        return self._loss(batch)

    @torch.no_grad()
    def log_probabilities(self, batch: Batch) -> Tensor:
        """Returns those of the answers of one batch, [pairs, 2] fp64, in nats."""
        assert self._preferences is not None
        x = self._model.hidden(batch.ids, documents=batch.documents)
        return self._preferences.log_probabilities(self._model, x, batch)

    def _loss(self, batch: Batch) -> Tensor:
        if self._preferences is None:
            return self._model(batch.ids, batch.labels, batch.documents)
        x = self._model.hidden(batch.ids, documents=batch.documents)
        return self._preferences.loss(self._model, x, batch)

    def take_spans(self) -> PassSpans:
        """Returns what this rank did since the last call."""
        spans, self._spans = self._spans, PassSpans()
        spans.layers += spans.passes  # all of a pass grows with the number of micro-batches
        return spans

    def close(self) -> None:
        """Does nothing: it holds no ranks."""
