"""Layers of a Llama as a pipeline stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from pyruntime.llama.config import LlamaConfig
from pyruntime.llama.model import Llama, ModelPart
from pyruntime.pipeline.carry import Carry
from pyruntime.pipeline.split import split_layers


class LlamaStage(nn.Module):
    """Layers `layers` of `model`, with the embedding before the first layer and norm and head after the last.

    batch: sequences in a micro-batch; the attribute may be changed between steps.
    seqs: tokens of each slice of a sequence (one number for whole sequences); with a context, of this rank.
    clock: returns moments, for `spans`; None: nothing is timed.
    """

    def __init__(
        self,
        model: Llama,
        layers: Sequence[int],
        batch: int,
        seqs: Sequence[int],
        clock: Callable[[], Any] | None = None,
    ):
        super().__init__()
        self.batch, self._clock = batch, clock
        self.spans: list[tuple[Any, Any, Any, Any]] = []
        """Moments of each forward pass: its begin, begin and end of its layers, its end."""
        # In a list, so that the model and its other layers do not become submodules.
        self._model, self._numbers, self._seqs = [model], tuple(layers), tuple(seqs)
        self.is_first = layers[0] == 0
        self.is_last = layers[-1] == model.config.num_hidden_layers - 1
        self.layers = nn.ModuleList(model.layer(number) for number in layers)
        if self.is_first:
            self.embed = model.embed
        if self.is_last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor, carry: Carry | None = None, documents: Tensor | None = None) -> Tensor:
        """x: tokens [B, S] in the first stage, else this tensor-parallel rank's residual stream [T/P, D]
        (with two axes [T/X, D/Y]). Returns the stream, in the last stage the last norm's output. carry: keys
        and values of earlier slices. documents: as `Llama.forward` takes them, for whole sequences."""
        (model,) = self._model
        seq = self._seqs[0 if carry is None else carry.part]
        moments = [self._now()]
        if self.is_first:
            x = model.embed(x.reshape(-1) if carry is not None else model.in_rows(x))
        caches = None if carry is None else carry.of_layers(len(self._numbers))
        start = 0 if carry is None else carry.length
        share = sum(self._seqs)
        moments.append(self._now())
        x = model.run(x, self._numbers, self.batch, seq, start, caches, share=share, documents=documents)
        moments.append(self._now())
        if self._clock is not None:
            self.spans.append((moments[0], moments[1], moments[2], self._now()))
        return x

    def _now(self) -> Any:
        return None if self._clock is None else self._clock()

    def loss(self, x: Tensor, labels: Tensor, count: Tensor | None = None) -> Tensor:
        """See `Llama.loss`; for the last stage."""
        (model,) = self._model
        return model.loss(x, labels, count)


def layers_of_stages(config: LlamaConfig, stages: int, shares: Sequence[float] = ()) -> list[range]:
    """Returns the layers of each stage such that the costliest stage costs least, by the GEMMs of a token in
    layers and head. shares: see `split_layers`. Raises ValueError if there are fewer layers than stages."""
    layers, head = _costs(config)
    return split_layers(layers, stages, last=head, shares=shares)


def costs_of_stages(config: LlamaConfig, layers: Sequence[range]) -> list[float]:
    """Returns the cost of a micro-batch in each stage that has these layers, in those of the last layer."""
    costs, head = _costs(config)
    of_stages = [sum(costs[number] for number in own) for own in layers]
    return [*of_stages[:-1], of_stages[-1] + head]


def _costs(config: LlamaConfig) -> tuple[list[float], float]:
    """Returns the costs of every layer and of the head, by the GEMMs of a token, in those of the last
    layer."""
    numbers = range(config.num_hidden_layers)
    costs = [config.layer_matmul_parameters(number, used=True) for number in numbers]
    return [cost / costs[-1] for cost in costs], config.hidden_size * config.vocab_size / costs[-1]


def part_of_layers(config: LlamaConfig, runs: Sequence[Sequence[int]]) -> ModelPart:
    """Returns the model part of a rank whose stages have these layers."""
    layers = tuple(number for run in runs for number in run)
    return ModelPart(layers, embed=0 in layers, head=config.num_hidden_layers - 1 in layers)
