"""One decoder layer of a Llama (`model.py` has its shapes), and what the layers of a forward pass share."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pyruntime import ops
from pyruntime.context import Context
from pyruntime.llama.adapters import adapters_of
from pyruntime.llama.attention import causal_attention
from pyruntime.llama.config import LlamaConfig
from pyruntime.llama.elementwise import Elementwise, for_this_pass
from pyruntime.llama.expert_layer import MixtureOfExperts
from pyruntime.llama.latent_layer import LatentHeads
from pyruntime.llama.recompute import computed_again
from pyruntime.llama.tensor_shards import TensorCuts
from pyruntime.nn import MergedColumnParallelLinear, RMSNorm, RowParallelLinear
from pyruntime.nn.low_rank import LoRA
from pyruntime.nn.norm import Normed

EQUAL_CUTS = TensorCuts()


@dataclasses.dataclass(frozen=True)
class ForwardPass:
    """Local sizes, angles of the positions and documents, which all layers of one forward pass share."""

    batch: int
    seq: int
    heads: int  # query heads on this rank
    key_value_heads: int  # on this rank
    cos: Tensor  # [seq, features that are rotated]
    sin: Tensor
    context: Context | None  # the ranks that share the sequence
    # Without a context: the first key that each query sees, [B, seq] int32, in layers without a window and in
    # those with one. None: the first of all.
    begin: Tensor | None = None
    begin_in_window: Tensor | None = None
    # With documents and a context: document ids of prefixes of the sequences, by the tokens of one rank.
    documents: Mapping[int, Tensor] = dataclasses.field(default_factory=dict)

    def documents_of(self, share: int) -> Tensor | None:
        """Returns the document ids of the first `share` tokens of every context rank."""
        return self.documents.get(share)

    def begin_of(self, window: int | None) -> Tensor | None:
        """Returns the first key that each query sees in a layer with that window; None: the first of all."""
        return self.begin if window is None else self.begin_in_window


class Cache(Protocol):
    """Keys and values of earlier tokens."""

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Appends k and v of this layer, [B, G, S, d]; returns those of all tokens so far."""


class Block(nn.Module):
    """One decoder layer. Its norms only hold weights; `forward` gets them from `Llama.norm_weights`."""

    def __init__(
        self,
        config: LlamaConfig,
        options: dict,
        keep_gathered: bool | None,
        selective: bool,
        elementwise: Elementwise,
        mixture: MixtureOfExperts | None = None,
        window: int | None = None,
        lora: LoRA | None = None,
        cuts: TensorCuts = EQUAL_CUTS,
    ):
        super().__init__()
        self.selective, self.elementwise, self.window = selective, elementwise, window
        hidden, ffn = config.hidden_size, config.intermediate_size
        q = config.num_attention_heads * config.head_dim
        kv = config.num_key_value_heads * config.head_dim
        of_qkv, mlp = config.attention_bias or config.qkv_bias, config.mlp_bias
        column = {**options, "keep_gathered": keep_gathered}
        place = {name: options[name] for name in ("group", "dtype", "device")}
        self.eps, self.norms_after = config.rms_norm_eps, config.norms_after
        self.hidden, self.y = hidden, options["group"].y
        self.attention_norm = RMSNorm(hidden, self.eps, **place)
        of_keys = cuts.heads(config.head_dim)
        of_queries = cuts.heads(config.head_dim * config.num_attention_heads // config.num_key_value_heads)
        self.latent: LatentHeads | None = None
        if config.latent is None:
            self.qkv = MergedColumnParallelLinear(
                hidden,
                {"q": q, "k": kv, "v": kv},
                of_qkv,
                shares={"q": of_queries, "k": of_keys, "v": of_keys},
                **column,
            )
        else:
            self.latent = LatentHeads(
                config.latent,
                hidden,
                config.num_attention_heads,
                config.attention_bias,
                keep_gathered,
                options,
            )
        self.scale, self.value_dim = config.attention_scale, config.value_dim
        self.out = RowParallelLinear(
            config.num_attention_heads * self.value_dim,
            hidden,
            config.attention_bias,
            shares=of_queries,
            **options,
        )
        self.has_head_norms = config.qk_norm
        self.has_norms_of_all_heads = config.qk_norm_of_all
        if config.qk_norm:
            of_all, width = config.qk_norm_of_all, config.head_dim
            self.q_norm, self.k_norm = (
                RMSNorm(features, self.eps, is_cut=True, shares=shares, **place)
                if of_all
                else RMSNorm(width, self.eps, **place)
                for features, shares in ((q, of_queries), (kv, of_keys))
            )
        self.mlp_norm = RMSNorm(hidden, self.eps, **place)
        self.mixture = mixture
        if mixture is None:
            shares = {"gate": cuts.features, "up": cuts.features}
            self.gate_up = MergedColumnParallelLinear(
                hidden, {"gate": ffn, "up": ffn}, mlp, shares=shares, **column
            )
            self.down = RowParallelLinear(ffn, hidden, mlp, shares=cuts.features, **options)
        self.adapters = adapters_of(self, lora)

    def forward(
        self,
        normed: Normed,
        x: Tensor,
        norm: Tensor,
        mlp_norm: Tensor,
        next_norm: Tensor | None,
        step: ForwardPass,
        cache: Cache | None,
    ) -> tuple[Normed, Tensor]:
        """Takes this layer's normalised input and the residual stream, [T/P, D]; returns both for the next
        layer. Adding to the stream and normalising it is one pass over memory, so a layer ends with the norm
        of the next. If that layer is on another rank (next_norm=None), both are the stream. norm: the weight
        by which x was normalised.

        With norms after (OLMo 2), norm and mlp_norm are weights of the norms of attention's result and of the
        network's. A layer then takes and returns the stream in place of its normalised input, except that
        the last one ends with the last norm, its next_norm."""
        rows, between = step.batch * step.seq, for_this_pass(self.elementwise)
        with self._norm_again(normed, x, norm, between):
            q, k, v = self._heads(normed.rows, rows, step, between, cache)
        if cache is not None:
            k, v = cache.append(k, v)
        if step.context is None:
            attended = causal_attention(q, k, v, step.begin_of(self.window), self.scale).transpose(1, 2)
        else:
            q, k, v = (each.transpose(1, 2) for each in (q, k, v))
            documents = step.documents_of(k.shape[1])
            attended = step.context.attention(q, k, v, documents, self.window, self.scale)
        attended = attended[..., : self.value_dim].reshape(rows, -1)
        out = self._adapted("out", self.out(attended), attended)
        if self.norms_after:
            x = x + between.rms_norm(out, norm, self.eps, self.hidden, self.y).rows
            normed = Normed(x, None)
        else:
            normed, x = between.add_rms_norm(out, x, mlp_norm, self.eps, self.hidden, self.y)
        with self._norm_again(normed, x, mlp_norm, between):
            made = (self.mixture or self.gate_up)(normed.rows, rows)
            made = self._adapted("gate_up", made, normed.rows, rows)
        if self.mixture is not None:
            mlp = made
        else:
            product = between.swiglu(made)
            with self.again(product, between.swiglu, made):
                mlp = self._adapted("down", self.down(product), product)
        if self.norms_after:
            mlp = between.rms_norm(mlp, mlp_norm, self.eps, self.hidden, self.y).rows
        if next_norm is None:
            x = x + mlp
            return Normed(x, None), x
        return between.add_rms_norm(mlp, x, next_norm, self.eps, self.hidden, self.y)

    def _heads(
        self, x: Tensor, rows: int, step: ForwardPass, between: Elementwise, cache: Cache | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the rotated queries and keys, and the values, [B, H/P, S, d], of this layer's normalised
        input x."""
        if self.latent is not None:
            return self.latent(x, rows, step.batch, step.seq, step.cos, step.sin, between)
        qkv = self._adapted("qkv", self.qkv(x, rows), x, rows)
        if self.has_head_norms:
            qkv = self.with_normed_heads(qkv, step, between, head_norm_weights([self])[0])
        return between.rope(
            qkv,
            step.cos,
            step.sin,
            step.batch,
            step.seq,
            step.heads,
            step.key_value_heads,
            # Keys and values that outlive the layer, or travel, need memory of their own.
            overwrite_qkv=cache is None and step.context is None,
        )

    def _adapted(self, name: str, y: Tensor, *arguments: Any) -> Tensor:
        """Adds to a linear's result y what its adapter makes of the arguments; returns y if it has none."""
        return self.adapters[name](y, *arguments) if name in self.adapters else y

    def with_normed_heads(
        self, qkv: Tensor, step: ForwardPass, between: Elementwise, weights: Sequence[Tensor]
    ) -> Tensor:
        """Returns qkv [T, (H + 2 G) d / P] with every query and key head normalised, or all together. weights
        of this layer: from `head_norm_weights`."""
        if self.has_norms_of_all_heads:
            width = qkv.shape[1] // (step.heads + 2 * step.key_value_heads)
            sizes = [width * step.heads, width * step.key_value_heads, width * step.key_value_heads]
            q, k, v = qkv.split(sizes, 1)
            return torch.cat([self.q_norm(q.contiguous()), self.k_norm(k.contiguous()), v], 1)
        heads = qkv.view(qkv.shape[0], step.heads + 2 * step.key_value_heads, -1)
        q, k, v = heads.split([step.heads, step.key_value_heads, step.key_value_heads], 1)
        q, k = (
            between.of_norm(each.contiguous(), weight, self.eps)
            for each, weight in zip((q, k), weights, strict=True)
        )
        return torch.cat([q, k, v], 1).view(qkv.shape)

    def _norm_again(
        self, normed: Normed, x: Tensor, weight: Tensor, between: Elementwise
    ) -> contextlib.AbstractContextManager[None]:
        """`again` for the norm of x by weight. With norms after, `normed` is the stream itself."""
        if self.norms_after:
            return contextlib.nullcontext()
        return self.again(normed.rows, between.rms_norm_again, x, normed.rstd, weight, self.eps)

    def again(
        self, made: Tensor, compute: Callable[..., Tensor], *arguments: Any
    ) -> contextlib.AbstractContextManager[None]:
        """Within this context, with selective recomputation, a linear does not save `made`: its backward pass
        computes it again, as `compute(*arguments)`."""
        if not self.selective or not torch.is_grad_enabled():
            return contextlib.nullcontext()
        if torch.compiler.is_compiling():
            raise ValueError(
                "recompute='selective' does not run under torch.compile, which chooses by itself what it "
                "computes again; build the model with recompute='none' or 'full'."
            )
        free = [each.detach() if isinstance(each, Tensor) else each for each in arguments]
        return computed_again(made, functools.partial(compute, *free))


def head_norm_weights(blocks: Sequence[Block]) -> list[Sequence[Tensor]]:
    """Returns the weights of the norms of query and of key heads of each layer for a forward pass; none for a
    layer without them, or that normalises all heads together. Their gradients are summed at once."""
    first = blocks[0]
    if not first.has_head_norms or first.has_norms_of_all_heads:
        return [() for _ in blocks]
    weights = torch.stack([norm.weight for block in blocks for norm in (block.q_norm, block.k_norm)])
    if first.qkv.group.size > 1:  # every rank has its own heads
        weights = ops.replicate_grad(weights, first.qkv.group.name)
    each = weights.unbind()
    return [each[2 * index : 2 * index + 2] for index in range(len(blocks))]


class NormedOnce:
    """A layer for `checkpoint`, which keeps the arguments and runs the layer twice. The normalised x is given
    for the first run and computed again for the second, so that it is not kept."""

    def __init__(self, block: Block, normed: Normed):
        self._block, self._rstd, self._first = block, normed.rstd, [normed.rows]
        self._requires_grad = normed.rows.requires_grad

    def __call__(self, x: Tensor, norm: Tensor, *others: Any) -> tuple[Normed, Tensor]:
        return self._block(Normed(self._rows(x, norm), self._rstd), x, norm, *others)

    def _rows(self, x: Tensor, norm: Tensor) -> Tensor:
        if self._block.norms_after:
            return x
        if self._first:
            return self._first.pop()
        with torch.no_grad():
            rows = self._block.elementwise.rms_norm_again(x, self._rstd, norm, self._block.eps)
        # The second graph must save the same tensors as the first.
        return rows.requires_grad_(self._requires_grad)
