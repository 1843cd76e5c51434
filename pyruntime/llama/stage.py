"""Some layers of a Llama as a stage of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from pyruntime.llama.model import Llama
from pyruntime.pipeline.slices import Carry


class LlamaStage(nn.Module):
    """Layers `layers` of `model`, with the embedding before the first layer and norm and head after the last.

    seqs: tokens of each slice of a sequence, all of them where sequences are whole. `batch`, the number of
    sequences in a micro-batch, may be changed between steps.
    """

    def __init__(self, model: Llama, layers: Sequence[int], batch: int, seqs: Sequence[int]):
        super().__init__()
        self.batch = batch
        self._model, self._numbers, self._seqs = [model], tuple(layers), tuple(seqs)
        self.is_first = layers[0] == 0
        self.is_last = layers[-1] == model.config.num_hidden_layers - 1
        self.layers = nn.ModuleList(model.layers.of(number) for number in layers)
        if self.is_first:
            self.embed = model.embed
        if self.is_last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor, carry: Carry | None = None) -> Tensor:
        """Tokens [B, S] in the first stage, else the residual stream [T/P, D] of this tensor-parallel rank,
        -> the stream, or the logits [T, V/P] in the last stage. carry: of the slices before this one."""
        (model,) = self._model
        seq = self._seqs[0 if carry is None else carry.part]
        if self.is_first:
            x = model.embed(x.reshape(-1))
        caches = None if carry is None else [carry] * len(self._numbers)
        start = 0 if carry is None else carry.length
        context = model.context if carry is None else None
        x = model.run(x, self._numbers, self.batch, seq, start, caches, context)
        return model.head(x, self.batch * seq) if self.is_last else x
