"""Samples text from a Llama, with a cache of keys and values, on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyruntime import ops
from pyruntime.llama.config import LEAST_TEMPERATURE, MOST_TEMPERATURE
from pyruntime.llama.model import Llama
from pyruntime.nn.cut import memory_of


class LayerCache:
    """Keys and values of one layer, `[B, G, capacity, d]` each; G: key heads of this rank."""

    def __init__(self, batch: int, heads: int, capacity: int, head_dim: int, like: Tensor):
        self.length = 0
        self._keys = like.new_empty(batch, heads, capacity, head_dim)
        self._values = torch.empty_like(self._keys)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Appends k and v `[B, G, S, d]`; returns views of all, `[B, G, length, d]`."""
        start, self.length = self.length, self.length + k.shape[2]
        if self.length > self._keys.shape[2]:
            raise ValueError(
                f"The cache holds {self._keys.shape[2]} tokens, but {self.length} were given; make it larger."
            )
        self._keys[:, :, start : self.length] = k
        self._values[:, :, start : self.length] = v
        return self._keys[:, :, : self.length], self._values[:, :, : self.length]


class KVCache:
    """The caches of all layers of `model`, for up to `capacity` tokens of each of `batch` sequences."""

    def __init__(self, model: Llama, batch: int, capacity: int):
        config = model.config
        self.layers = [
            LayerCache(batch, model.key_value_heads, capacity, config.head_dim, model.embed.weight)
            for _ in model.layers
        ]

    @property
    def length(self) -> int:
        """Tokens of each sequence in the cache so far."""
        return self.layers[0].length


def generate(model: Llama, ids: Tensor, max_new_tokens: int, **options: Any) -> Tensor:
    """Returns `ids` [B, S] followed by up to `max_new_tokens` sampled tokens, int64 `[B, S + new]`.

    Options and errors are those of `generate_steps`. All ranks of the model's group must call this with equal
    arguments; all get the result.
    """
    steps = generate_steps(model, ids, max_new_tokens, **options)
    return torch.cat([ids, *(token.unsqueeze(1) for token in steps)], dim=1)


def generate_steps(
    model: Llama,
    ids: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    eos_token_id: int | None = None,
    use_cache: bool = True,
) -> Iterator[Tensor]:
    """Like `generate`, but yields the new tokens [B] step by step, for a caller that shows them at once.

    temperature: divides the logits, 1e-6 to 1e6; 0 takes the most likely token.
    top_k: draw only from the k most likely tokens (None: all).
    top_p: draw only from the fewest tokens whose probabilities together reach p (None: all).
    seed: seed of the draws. The same seed, weights and tp give the same text.
    eos_token_id: a sequence that has drawn it is padded with it; generation ends when all sequences have.
    use_cache: False computes every step from all tokens: slower, without the cache's memory.

    Raises ValueError for arguments out of range and for texts longer than the model's
    max_position_embeddings.
    """
    _check(model, ids, max_new_tokens, temperature, top_k, top_p)

    def steps() -> Iterator[Tensor]:
        batch, prompt = ids.shape
        # The last token is never fed back, so it needs no place in the cache.
        cache = KVCache(model, batch, prompt + max_new_tokens - 1) if use_cache else None
        generator = torch.Generator().manual_seed(seed)
        ended = torch.zeros(batch, dtype=torch.bool, device=ids.device)
        feed = ids
        for _ in range(max_new_tokens):
            logits = next_logits(model, feed, cache)
            token = sample(logits, temperature, top_k, top_p, generator).to(ids.device)
            if eos_token_id is not None:
                token = token.masked_fill(ended, eos_token_id)
                ended |= token == eos_token_id
            yield token
            if ended.all():
                return
            feed = token.unsqueeze(1) if use_cache else torch.cat([feed, token.unsqueeze(1)], dim=1)

    return steps()


@torch.no_grad()
def next_logits(model: Llama, ids: Tensor, cache: KVCache | None = None) -> Tensor:
    """Returns the logits of each sequence's next token, fp32 [B, V], bitwise the same on every rank.

    `ids` [B, S] continue the tokens in the cache. Only the last positions reach the head.
    """
    batch, seq = ids.shape
    start, caches = (0, None) if cache is None else (cache.length, cache.layers)
    hidden = model.hidden(ids, start, caches, whole=True)  # every context rank generates by itself
    if model.group.size > 1:
        hidden = ops.all_gather(hidden, model.group.name, dim=0, rows=batch * seq)
    logits = F.linear(hidden.view(batch, seq, -1)[:, -1], memory_of(model.head.weight))
    if model.group.y is not None:
        logits = ops.all_reduce(logits, model.group.y.name)
    return model.gather_logits(logits).float()


def sample(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator
) -> Tensor:
    """Draws one token per row of logits [B, V], int64 [B] on the CPU; arguments as in `generate_steps`.
    Raises ValueError for logits that are not finite."""
    logits = logits.float().cpu()
    if not logits.isfinite().all():
        raise ValueError(
            "The model's logits are not finite, so no token can be drawn; its weights are damaged."
        )
    if temperature == 0:
        return logits.argmax(dim=-1)
    # In falling order of probability both limits keep a prefix. The draw is a place in that order.
    scores, order = (logits / temperature).sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        scores[:, top_k:] = float("-inf")
    probabilities = scores.softmax(dim=-1)
    if top_p is not None:
        before = probabilities.cumsum(dim=-1) - probabilities  # of all likelier tokens; 0 for the first
        unlikely = before >= top_p
        unlikely[:, 0] = False  # whatever top_p is in fp32
        probabilities = probabilities.masked_fill(unlikely, 0.0)
    place = torch.multinomial(probabilities, 1, generator=generator)
    return order.gather(1, place).squeeze(1)


def _check(
    model: Llama,
    ids: Tensor,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
) -> None:
    if ids.dim() != 2 or ids.numel() == 0:
        raise ValueError(f"ids have shape {list(ids.shape)}; pass prompts [B, S] of at least one token.")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1.")
    if temperature != 0.0 and not LEAST_TEMPERATURE <= temperature <= MOST_TEMPERATURE:
        raise ValueError(
            f"temperature={temperature} must be 0 (most likely token), or between {LEAST_TEMPERATURE:g} and "
            f"{MOST_TEMPERATURE:g}; fp32 cannot divide logits by other values."
        )
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k} must be at least 1, or None for every token.")
    if top_p is not None and not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p={top_p} must be above 0 and at most 1, or None for every token.")
    total, most = ids.shape[1] + max_new_tokens, model.config.max_position_embeddings
    if total > most:
        raise ValueError(
            f"{ids.shape[1]} prompt tokens and max_new_tokens={max_new_tokens} make {total}, but the model "
            f"has max_position_embeddings={most}; shorten the prompt or generate fewer tokens."
        )
