"""Some layers of a Llama as a stage of a pipeline."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from pyruntime.llama.config import LlamaConfig
from pyruntime.llama.model import Llama, ModelPart
from pyruntime.pipeline.carry import Carry
from pyruntime.pipeline.split import split_layers


class LlamaStage(nn.Module):
    """Layers `layers` of `model`, with the embedding before the first layer and norm and head after the last.

    seqs: tokens of each slice of a sequence, all of them where sequences are whole; with a context those of
    this rank. `batch`, the number of sequences in a micro-batch, may be changed between steps. clock: in
    seconds, by which forward passes are timed.
    """

    def __init__(
        self,
        model: Llama,
        layers: Sequence[int],
        batch: int,
        seqs: Sequence[int],
        clock: Callable[[], float] = time.perf_counter,
    ):
        super().__init__()
        self.batch, self._clock = batch, clock
        self.layers_s = self.rest_s = 0.0
        """What layers, and embedding, norm and head, have taken in forward passes."""
        # In a list, as the stage holds its own layers of the model and no others.
        self._model, self._numbers, self._seqs = [model], tuple(layers), tuple(seqs)
        self.is_first = layers[0] == 0
        self.is_last = layers[-1] == model.config.num_hidden_layers - 1
        self.layers = nn.ModuleList(model.layer(number) for number in layers)
        if self.is_first:
            self.embed = model.embed
        if self.is_last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor, carry: Carry | None = None, documents: Tensor | None = None) -> Tensor:
        """Tokens [B, S] in the first stage, else the residual stream [T/P, D] (of two axes [T/X, D/Y]) of
        this tensor-parallel rank -> the stream, or the logits [T, V/P] in the last stage. carry: of the
        slices before this one. documents: of the whole sequences, as `Llama.forward` takes them."""
        (model,) = self._model
        seq = self._seqs[0 if carry is None else carry.part]
        began = self._clock()
        if self.is_first:
            x = model.embed(x.reshape(-1) if carry is not None else model.in_rows(x))
        caches = None if carry is None else carry.of_layers(len(self._numbers))
        start = 0 if carry is None else carry.length
        share = sum(self._seqs)
        embedded = self._clock()
        x = model.run(x, self._numbers, self.batch, seq, start, caches, share=share, documents=documents)
        through = self._clock()
        y = model.head(x, self.batch * seq) if self.is_last else x
        self.layers_s += through - embedded
        self.rest_s += embedded - began + self._clock() - through
        return y

    def loss(self, logits: Tensor, labels: Tensor, count: Tensor | None = None) -> Tensor:
        """Of the last stage: see `Llama.loss`."""
        (model,) = self._model
        return model.loss(logits, labels, count)


def layers_of_stages(config: LlamaConfig, stages: int) -> list[range]:
    """Layers of each stage, so that the costliest stage costs least; the head counts as so many layers as its
    GEMM costs. Raises ValueError where there are fewer layers than stages."""
    head = config.hidden_size * config.vocab_size / config.layer_matmul_parameters()
    return split_layers([1.0] * config.num_hidden_layers, stages, last=head)


def part_of_layers(config: LlamaConfig, runs: Sequence[Sequence[int]]) -> ModelPart:
    """What a rank with the stages of these layers holds."""
    layers = tuple(number for run in runs for number in run)
    return ModelPart(layers, embed=0 in layers, head=config.num_hidden_layers - 1 in layers)
