"""Shapes of known models as data, and numbers that follow from a shape: parameters and operations."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property


@dataclass(frozen=True)
class Adapters:
    """Low-rank adapters (LoRA) of a layer's linears. Of A [rank, in] and B [out, rank], tensor parallelism
    cuts B of a column linear and A of a row linear."""

    rank: int
    columns: tuple[tuple[int, int], ...]
    """Shapes [out, in] of the linears with an adapter whose out features are cut."""
    rows: tuple[tuple[int, int], ...]
    """Shapes of those whose in features are cut."""
    unread: int = 0
    """Input features of a token, of the linears of a layer, that no adapter reads: they are not kept."""

    def parameters(self, tp: float) -> float:
        """Returns the parameters of one layer's adapters on a tensor-parallel rank."""
        whole = sum(into for _, into in self.columns) + sum(out for out, _ in self.rows)
        cut = sum(out for out, _ in self.columns) + sum(into for _, into in self.rows)
        return self.rank * (whole + cut / tp)

    def features(self, tp: int) -> float:
        """Returns the low-rank features of a token that a rank keeps in one layer, over all its rows."""
        return self.rank * (len(self.columns) + len(self.rows) / tp)

    @property
    def largest(self) -> int:
        """Parameters of the largest matrix."""
        return self.rank * max(map(max, (*self.columns, *self.rows)))


@dataclass(frozen=True)
class LatentAttention:
    """Sizes of multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434, section 2.1; DeepSeek-V3,
    arXiv 2412.19437, equations 1 to 11).

    A token's `kv_rank` features make the keys and values of all heads. A key has `nope_dim` features of its
    head, and `rope_dim` rotated ones that all heads share; a value has `value_dim`."""

    kv_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    q_rank: int | None = None
    """Latent features of which queries are made; None: they are made of the residual stream."""
    interleaved: bool = True
    """Whether rotated features turn in pairs of neighbours, else the halves of a head against each other."""

    @property
    def head_dim(self) -> int:
        """Features of a query or key head."""
        return self.nope_dim + self.rope_dim

    @property
    def features(self) -> int:
        """Features of a token that are made of the residual stream and belong to no head."""
        return (self.q_rank or 0) + self.kv_rank + self.rope_dim

    def shapes(self, hidden: int, heads: int) -> tuple[tuple[int, int], ...]:
        """The shapes [out, in] of one layer's linears of queries, keys and values. Tensor parallelism cuts
        all but the last, which makes latent features."""
        queries = heads * self.head_dim, hidden if self.q_rank is None else self.q_rank
        keys_and_values = heads * (self.nope_dim + self.value_dim), self.kv_rank
        return queries, keys_and_values, (self.features, hidden)


@dataclass(frozen=True)
class ModelShape:
    """The shape of a decoder-only transformer: a Llama, or (`gated` False, `biased` True) a GPT.

    With `experts`, a layer has so many gated ones and a router in place of its feed-forward network, and
    perhaps a shared expert with a gate of its own. The first `dense_layers` have a network of `ffn`; numbers
    of "a layer" are of one with experts."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    gated: bool = True
    """Whether the feed-forward network has three matrices (gate, up, down), else two."""
    biased: bool = False
    """Whether linears and norms have biases."""
    tied: bool = False
    """Whether embedding and head are one weight."""
    positions: int = 0
    """Learned position embeddings; 0: rotary ones, which have no weights."""
    preset: str = ""
    """The trainer's name of the shape; empty if it has none."""
    folder: str = ""
    """Hugging Face folder that the trainer reads the shape from; empty if there is none."""
    experts: int = 0
    per_token: int = 0
    """Experts that a token goes to."""
    expert_ffn: int = 0
    """Features between the linears of one expert."""
    shared_ffn: int = 0
    """Features between the linears of the shared expert; 0: there is none."""
    shared_gate: bool = True
    """Whether the shared expert is weighed by a linear of one output."""
    dense_layers: int = 0
    head_norms: bool = False
    """Whether query and key heads are normalised."""
    attention_vectors: int = 0
    """Biases and weights of norms within one layer's attention, if not `biased`."""
    norms_after: bool = False
    """Whether results of attention and network are normalised, not their inputs."""
    window: int = 0
    """Keys that a query sees in `windowed` layers, its own included; 0: all up to its own."""
    windowed: int = 0
    latent: LatentAttention | None = None

    @cached_property
    def qkv(self) -> int:
        """Features of queries, keys and values, as attention reads them."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @cached_property
    def attention_width(self) -> int:
        """Input features of attention's output linear."""
        return self.heads * (self.head_dim if self.latent is None else self.latent.value_dim)

    @cached_property
    def of_heads(self) -> tuple[tuple[int, int], ...]:
        """The shapes [out, in] of the linears of queries, keys and values that tensor parallelism cuts, as
        they run."""
        if self.latent is None:
            return ((self.qkv, self.hidden),)
        return self.latent.shapes(self.hidden, self.heads)[:-1]

    @cached_property
    def of_latents(self) -> int:
        """Output features of the linear that makes latent features, which every tensor-parallel rank has."""
        return 0 if self.latent is None else self.latent.features

    @cached_property
    def wide(self) -> int:
        """Features between the linears of the feed-forward network, of all experts that a token goes to."""
        return self.per_token * self.expert_ffn + self.shared_ffn if self.experts else self.ffn

    @cached_property
    def up(self) -> int:
        """Output features of the feed-forward network's first linear, gate and up together; of all experts
        that a token goes to."""
        return self.wide * (2 if self.gated else 1)

    def fits_tp(self, tp: int) -> bool:
        """Whether tensor parallelism over `tp` ranks leaves each whole heads, columns and an expert."""
        if self.kv_heads % tp or self.shared_ffn % tp:
            return False
        if not self.experts:
            return self.ffn % tp == 0
        return -(-self.experts // tp) * (tp - 1) < self.experts and (
            self.dense_layers == 0 or self.ffn % tp == 0
        )

    def fullest(self, tp: int) -> float:
        """Returns the experts of the rank with most, over the mean: they are cut into equal chunks."""
        return -(-self.experts // tp) * tp / self.experts if self.experts else 1.0

    @cached_property
    def layer_shapes(self) -> tuple[tuple[int, int], ...]:
        """The shapes of one layer's matrices, unmerged."""
        key_value = self.kv_heads * self.head_dim
        heads = [self.attention_width, key_value, key_value, self.attention_width]
        if self.latent is not None:
            heads = [self.attention_width]
        networks = [self.ffn] * (3 if self.gated else 2)
        if self.experts:
            networks = [self.expert_ffn] * 3 * self.experts + [self.shared_ffn] * (
                3 if self.shared_ffn else 0
            )
        of_latent = () if self.latent is None else self.latent.shapes(self.hidden, self.heads)
        return (*((width, self.hidden) for width in [*heads, *networks]), *of_latent)

    @cached_property
    def layer_experts(self) -> int:
        """Weights of all experts of one layer, without the shared one."""
        return 3 * self.hidden * self.expert_ffn * self.experts

    @cached_property
    def layer_matrices(self) -> int:
        """Weights of one layer that tensor parallelism cuts."""
        attention = sum(n * k for n, k in self.of_heads) + self.hidden * self.attention_width
        if self.experts:
            return attention + self.layer_experts + 3 * self.hidden * self.shared_ffn
        return attention + self.hidden * (self.up + self.ffn)

    @cached_property
    def layer_vectors(self) -> int:
        """Weights of one layer's norms, biases and router, and of what makes latent features, which every
        tensor-parallel rank holds."""
        norms = 2 * self.hidden * (2 if self.biased else 1)
        biases = self.qkv + self.up + 2 * self.hidden
        whole = self.hidden * (self.experts + self._gates + self.of_latents)
        return norms + (biases if self.biased else self.attention_vectors) + whole

    @property
    def _gates(self) -> int:
        """Linears of one output that weigh a shared expert."""
        return 1 if self.shared_ffn and self.shared_gate else 0

    @cached_property
    def embedding(self) -> int:
        return (self.vocab + self.positions) * self.hidden

    @cached_property
    def head(self) -> int:
        """Weights of the head; a tied head still takes them if it is on another stage than the embedding."""
        return self.vocab * self.hidden

    @cached_property
    def largest(self) -> int:
        """Parameters of the largest weight."""
        of_experts = 2 * self.hidden * self.expert_ffn * self.experts
        return max(of_experts or self.hidden * self.up, *(n * k for n, k in self.of_heads), self.head)

    @cached_property
    def last_norm(self) -> int:
        # Megatron-LM's count for a GPT leaves it out.
        return 0 if self.biased else self.hidden

    @cached_property
    def parameters(self) -> int:
        """All parameters; a tied head counts once."""
        layers = self.layers * (self.layer_matrices + self.layer_vectors)
        if self.dense_layers:
            dense = self.dense
            of_dense = dense.layer_matrices + dense.layer_vectors
            layers += self.dense_layers * (of_dense - self.layer_matrices - self.layer_vectors)
        return layers + self.embedding + (0 if self.tied else self.head) + self.last_norm

    @cached_property
    def around_experts(self) -> ModelShape:
        """The same shape with the shared expert, or nothing, in the place of experts."""
        return replace(self, experts=0, ffn=self.shared_ffn, shared_ffn=0, dense_layers=0)

    @cached_property
    def dense(self) -> ModelShape:
        """The same shape, with all layers like the first `dense_layers`."""
        return replace(self, experts=0, shared_ffn=0, dense_layers=0)

    def dense_flops(self, tokens: int) -> float:
        """Returns the same as `layer_flops`, of a layer without experts."""
        return self.dense.layer_flops(tokens)

    def layer_flops(self, tokens: int) -> float:
        """Returns the operations of one layer's linears in a forward pass; a multiply-add counts as two. Of
        experts those count that a token goes to."""
        used = self.layer_matrices + self.hidden * self.of_latents
        if self.experts:
            used += 3 * self.hidden * self.expert_ffn * (self.per_token - self.experts)
            used += self.hidden * (self.experts + self._gates)
        return 2.0 * used * tokens

    def attention_flops(self, tokens: int, seq: int, *, causal: bool = True) -> float:
        """Returns the operations of one layer's attention in a forward pass, in sequences of `seq`: the mean
        over layers with a window and others."""
        wide = (self.heads * self.head_dim + self.attention_width) * tokens
        if not causal:
            return 2.0 * seq * wide
        seen = keys_seen(seq, None)
        if self.windowed:
            seen += (keys_seen(seq, self.window) - seen) * self.windowed / self.layers
        return 2.0 * seen * wide

    def head_flops(self, tokens: int) -> float:
        return 2.0 * self.head * tokens

    def step_flops(self, tokens: int, seq: int) -> float:
        """Returns a step's model FLOPs as MFU counts them: forward and twice that backward, causal attention,
        nothing recomputed."""
        linears = (self.layers - self.dense_layers) * self.layer_flops(tokens)
        linears += self.dense_layers * self.dense_flops(tokens)
        attention = self.layers * self.attention_flops(tokens, seq)
        return 3 * (linears + attention + self.head_flops(tokens))


def keys_seen(seq: int, window: int | None) -> float:
    """Returns the keys that a query sees in causal attention, as a mean over a long sequence of `seq` tokens.
    window: the most keys that it sees."""
    if window is None or window >= seq:
        return seq / 2
    return window - window**2 / (2 * seq)


def gpt(name: str, layers: int, hidden: int, heads: int, vocab: int = 51200, seq: int = 2048) -> ModelShape:
    """Returns the shape of a GPT as Megatron-LM makes it (parameters: arXiv 2104.04473, equation 2)."""
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


# Layers, hidden, heads. The first ten are Megatron-LM's (arXiv 2104.04473, table 1), the next three are from
# arXiv 2312.12705, the rest AxoNN's (arXiv 2305.13525; heads of 128 features).
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
    """Returns the model of that name, however it is spelled: llama-3-70b, Llama3_70B, llama-3.1-70b.

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
