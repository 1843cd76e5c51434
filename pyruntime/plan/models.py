"""Shapes of known models as data, and what follows from a shape alone: parameters and operations."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer: a Llama, or (`gated` False, `biased` True) a GPT."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    gated: bool = True
    """Three matrices in the feed-forward network (gate, up, down), else two."""
    biased: bool = False
    """Linears and norms have biases."""
    tied: bool = False
    """Embedding and head are one weight."""
    positions: int = 0
    """Learned position embeddings; 0: rotary ones, which have no weights."""
    preset: str = ""
    """The trainer's name of the shape; empty: it has none."""

    @cached_property
    def qkv(self) -> int:
        """Output features of the linear of queries, keys and values."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @cached_property
    def attention_width(self) -> int:
        """Features that attention gives, and that its output linear takes."""
        return self.heads * self.head_dim

    @cached_property
    def up(self) -> int:
        """Output features of the feed-forward network's first linear, gate and up together."""
        return self.ffn * (2 if self.gated else 1)

    @cached_property
    def layer_shapes(self) -> tuple[tuple[int, int], ...]:
        """Of the matrices of one layer, each by itself."""
        key_value = self.kv_heads * self.head_dim
        heads = [self.attention_width, key_value, key_value, self.attention_width]
        return tuple((width, self.hidden) for width in [*heads, *[self.ffn] * (3 if self.gated else 2)])

    @cached_property
    def layer_matrices(self) -> int:
        """Weights of one layer that tensor parallelism cuts."""
        return self.hidden * (self.qkv + self.attention_width + self.up + self.ffn)

    @cached_property
    def layer_vectors(self) -> int:
        """Weights of one layer's norms and biases, which every tensor-parallel rank holds."""
        norms = 2 * self.hidden * (2 if self.biased else 1)
        biases = self.qkv + self.up + 2 * self.hidden
        return norms + (biases if self.biased else 0)

    @cached_property
    def embedding(self) -> int:
        return (self.vocab + self.positions) * self.hidden

    @cached_property
    def head(self) -> int:
        """Weights of the head; where they are the embedding's it still holds them on a stage of its own."""
        return self.vocab * self.hidden

    @cached_property
    def largest(self) -> int:
        """Parameters of the largest weight."""
        return max(self.hidden * self.up, self.hidden * self.qkv, self.head)

    @cached_property
    def last_norm(self) -> int:
        # Megatron-LM's count of a GPT leaves it out.
        return 0 if self.biased else self.hidden

    @cached_property
    def parameters(self) -> int:
        """All of them; a tied head counts once."""
        layers = self.layers * (self.layer_matrices + self.layer_vectors)
        return layers + self.embedding + (0 if self.tied else self.head) + self.last_norm

    def layer_flops(self, tokens: int) -> float:
        """Operations of one layer's linears in a forward pass of so many tokens, a multiply-add being two."""
        return 2.0 * self.layer_matrices * tokens

    def attention_flops(self, tokens: int, seq: int, *, causal: bool = True) -> float:
        """Operations of one layer's attention in a forward pass of `tokens` tokens of sequences of `seq`."""
        return (2.0 if causal else 4.0) * seq * self.attention_width * tokens

    def head_flops(self, tokens: int) -> float:
        return 2.0 * self.head * tokens

    def step_flops(self, tokens: int, seq: int) -> float:
        """Model FLOPs of a step, as MFU counts them: forward and twice that backward, attention causal,
        nothing recomputed."""
        layer = self.layer_flops(tokens) + self.attention_flops(tokens, seq)
        return 3 * (self.layers * layer + self.head_flops(tokens))


def gpt(name: str, layers: int, hidden: int, heads: int, vocab: int = 51200, seq: int = 2048) -> ModelShape:
    """A GPT as Megatron-LM makes it (arXiv 2104.04473, equation 2 counts its parameters)."""
    return ModelShape(
        name,
        layers,
        hidden,
        heads,
        heads,
        hidden // heads,
        4 * hidden,
        vocab,
        gated=False,
        biased=True,
        tied=True,
        positions=seq,
    )


# Layers, hidden, heads. The first ten are Megatron-LM's (arXiv 2104.04473, table 1), the next three those of
# arXiv 2312.12705, the others AxoNN's (arXiv 2305.13525; heads of 128 features).
_GPTS = {
    "gpt-1.7b": (24, 2304, 24),
    "gpt-3.6b": (30, 3072, 32),
    "gpt-7.5b": (36, 4096, 32),
    "gpt-18.4b": (40, 6144, 48),
    "gpt-39.1b": (48, 8192, 64),
    "gpt-76.1b": (60, 10240, 80),
    "gpt-145.6b": (80, 12288, 96),
    "gpt-310.1b": (96, 16384, 128),
    "gpt-529.6b": (105, 20480, 128),
    "gpt-1008b": (128, 25600, 160),
    "frontier-22b": (48, 6144, 48),
    "frontier-175b": (96, 12288, 96),
    "frontier-1t": (128, 25600, 128),
    "axonn-5b": (24, 4096, 32),
    "axonn-10b": (32, 5120, 40),
    "axonn-20b": (32, 7168, 56),
    "axonn-40b": (38, 9216, 72),
    "axonn-60b": (56, 9216, 72),
    "axonn-80b": (42, 12288, 96),
    "axonn-160b": (84, 12288, 96),
    "axonn-175b": (96, 12288, 96),
}

GPTS = {name: gpt(name, *sizes) for name, sizes in _GPTS.items()}


def find_model(name: str, models: Mapping[str, ModelShape]) -> ModelShape:
    """The one of `models` with that name, however it is spelled: llama-3-70b, Llama3_70B, llama-3.1-70b.

    Raises ValueError with the nearest name.
    """
    known = {_spelled(each): each for each in models}
    wanted = _spelled(name)
    if wanted in known:
        return models[known[wanted]]
    close = difflib.get_close_matches(wanted, known, n=1, cutoff=0.0)
    raise ValueError(
        f"There is no model {name!r}; the nearest is {known[close[0]]}. Known are {', '.join(models)}."
    )


def _spelled(name: str) -> str:
    plain = re.sub(r"[-_ ]", "", name.lower())
    return re.sub(r"^(meta)?llama3\.[123]", "llama3", plain)
