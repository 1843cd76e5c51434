"""Times a stage of a Llama on slices of a sequence, by their length and the number of earlier tokens."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyruntime.llama.config import LlamaConfig
from pyruntime.llama.model import Llama, ModelPart
from pyruntime.pipeline.carry import Carry

ROUNDS = 5
"""Measured rounds after a warm-up. The least counts, because other load on the machine only adds time."""


@dataclass(frozen=True)
class Profile:
    """Measured seconds (forward and backward) of slices. `fit(*zip(*contexts), lengths, seconds)` of
    pyruntime.plan fits TeraPipe's model to them (arXiv 2102.07988, equation 9)."""

    lengths: tuple[int, ...]
    """Tokens of slices at the beginning of a sequence."""
    seconds: tuple[float, ...]
    """Seconds of these slices."""
    contexts: tuple[tuple[int, int, float], ...]
    """Slices with tokens before them: (length, tokens before it, seconds)."""


@dataclass(frozen=True)
class Ends:
    """Measured seconds (forward and backward) of embedding and head, for one whole sequence."""

    embedding: float
    head: float
    """Includes the last norm and the loss."""


def costed(config: LlamaConfig, dtype: str) -> dict[str, int | str]:
    """Returns the settings that costs depend on, by name. A profile fits models with the same values."""
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    return {**{name: getattr(config, name) for name in sizes}, "dtype": dtype}


class StageClock:
    """Times `layers` decoder layers of a model, without embedding and head, for one sequence at a time."""

    def __init__(self, config: LlamaConfig, layers: int, dtype: torch.dtype):
        self._layers = tuple(range(1, layers + 1))
        # Neither the first nor the last layer of the model, so that only layers are timed.
        deep = dataclasses.replace(config, num_hidden_layers=layers + 2, tie_word_embeddings=False)
        self._model = Llama(deep, dtype=dtype, part=ModelPart(self._layers, embed=False, head=False))
        self._config, self._dtype = deep, dtype

    def seconds(self, length: int, context: int) -> float:
        """Returns the seconds of a forward and backward pass of `length` tokens after `context` tokens."""
        return _least(lambda: self._once(length, context))

    def _once(self, length: int, context: int) -> float:
        x = self._random(length, self._config.hidden_size).requires_grad_()
        grad = self._random(length, self._config.hidden_size)
        carry = self._carry(context)
        begin = time.perf_counter()
        y = self._model.run(x, self._layers, 1, length, carry.length, carry.of_layers(len(self._layers)))
        y.backward(grad)
        taken = time.perf_counter() - begin
        self._model.zero_grad()
        return taken

    def _carry(self, context: int) -> Carry:
        """Returns a carry with random keys and values of `context` tokens, in which a slice begins."""
        carry = Carry().begin(0)
        if context == 0:
            return carry
        shape = (1, context, self._config.num_key_value_heads, self._config.head_dim)
        for layer in carry.of_layers(len(self._layers)):
            layer.append(*(self._random(*shape).transpose(1, 2) for _ in range(2)))
        return carry.begin(1)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float32).to(self._dtype)


def _least(once: Callable[[], float]) -> float:
    return min([once() for _ in range(1 + ROUNDS)][1:])


def time_ends(config: LlamaConfig, dtype: torch.dtype, tokens: int) -> Ends:
    """Times embedding and head of a model for a sequence of `tokens` tokens."""
    config = dataclasses.replace(config, num_hidden_layers=1, tie_word_embeddings=False)
    model = Llama(config, dtype=dtype)
    ids = torch.randint(config.vocab_size, (tokens,))
    hidden = torch.randn(tokens, config.hidden_size).to(dtype)

    x = hidden.clone().requires_grad_()

    def seconds(run: Callable[[], None]) -> float:
        begin = time.perf_counter()
        run()
        taken = time.perf_counter() - begin
        model.zero_grad()
        x.grad = None
        return taken

    def embed() -> None:
        model.embed(ids).backward(hidden)

    def head() -> None:
        model.loss(model.norm(x), ids.view(1, -1)).backward()

    return Ends(_least(lambda: seconds(embed)), _least(lambda: seconds(head)))


def profile_stage(
    config: LlamaConfig, layers: int, dtype: torch.dtype, lengths: Sequence[int], contexts: Sequence[int]
) -> Profile:
    """Times slices of `lengths` tokens at the beginning of a sequence, and some of these lengths after
    `contexts` tokens if both together are within the longest length."""
    clock = StageClock(config, layers, dtype)
    base = tuple(clock.seconds(length, 0) for length in lengths)
    longest = max(lengths)
    # About eight lengths, spread evenly, are enough for four coefficients.
    some = lengths[:: max(1, len(lengths) // 8)]
    pairs = [(length, context) for length in some for context in contexts if 0 < context <= longest - length]
    later = tuple((*pair, clock.seconds(*pair)) for pair in pairs)
    return Profile(tuple(lengths), base, later)
