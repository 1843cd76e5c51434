"""A Llama decoder whose linears are tensor parallel and whose residual stream is cut by tokens over the same
ranks.

With P ranks, T = B * S tokens, D channels, H query and G key/value heads of size d, F feed-forward columns,
V tokens::

    x [T/P, D] -> norm -> all_gather_matmul -> qkv [T, (H + 2 G) d / P] -> attention on H/P heads
               -> matmul_reduce_scatter -> + x -> norm -> all_gather_matmul -> gate, up [T, 2 F/P] ->
               silu(gate) * up -> matmul_reduce_scatter -> + x

Rows are cut as `torch.tensor_split` cuts T, so any B and S will do. The head gives logits [T, V/P], which
the loss reads where they are; they are gathered only for a caller who asks for logits.

With context parallelism S is this rank's share of the sequence, and everything but attention, the angles of
the positions and the number of labels is as without.

A group of two axes, x and y, is AxoNN's grid (docs/explanation/primitives.md): P above is the size of x, and
the stream is [T/X, D/Y]. Heads, feed-forward columns and vocabulary are cut over x alone; what column linears
compute of their features is summed over y.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pyruntime import ops
from pyruntime.choices import Recomputation, WireFormat
from pyruntime.comm.ranges import BackwardRanges, is_heard, marked
from pyruntime.context import Context
from pyruntime.context.layouts import document_bounds
from pyruntime.llama import recompute as recomputing
from pyruntime.llama import slices as sliced
from pyruntime.llama.attention import causal_attention
from pyruntime.llama.config import LlamaConfig
from pyruntime.llama.elementwise import KERNELS, Elementwise, compiled, for_this_pass
from pyruntime.llama.init import init_shard
from pyruntime.llama.recompute import computed_again
from pyruntime.llama.rope import rope_tables
from pyruntime.llama.tensor_shards import TensorShard, shards_of_layer, shards_of_model
from pyruntime.nn import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)
from pyruntime.nn.cut import CutTensor
from pyruntime.nn.gather import gather_features
from pyruntime.nn.module import ParallelModule
from pyruntime.nn.norm import Normed
from pyruntime.nn.parameters import Group, TensorGroup, shard_bounds

IGNORE_INDEX = -100  # labels of this value are left out of the loss, as in torch.nn.functional.cross_entropy


@dataclasses.dataclass(frozen=True)
class ForwardPass:
    """What the layers of one forward pass share: the local sizes and the angles of the positions."""

    batch: int
    seq: int
    heads: int  # query heads on this rank
    key_value_heads: int  # of this rank
    cos: Tensor  # [seq, head_dim]
    sin: Tensor
    context: Context | None  # of the ranks that share the sequence
    # Of documents that are told apart, without a context: the first key that each query sees, [B, seq] int32.
    begin: Tensor | None = None
    # With one: the documents of whole sequences, by how many tokens of a rank they begin.
    documents: Mapping[int, Tensor] = dataclasses.field(default_factory=dict)

    def documents_of(self, share: int) -> Tensor | None:
        """Those of the tokens that are the first `share` of every context rank."""
        return self.documents.get(share)


class Cache(Protocol):
    """Keys and values of earlier tokens."""

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Those of this layer, [B, G, S, d], behind what is there; returns all."""


@dataclasses.dataclass(frozen=True)
class ModelPart:
    """What a pipeline's rank holds of a model."""

    layers: tuple[int, ...]
    embed: bool
    head: bool
    """And the last norm."""


class Block(nn.Module):
    """One decoder layer. Its norms only hold weights: `Llama.norm_weights` says what is computed with."""

    def __init__(
        self,
        config: LlamaConfig,
        options: dict,
        keep_gathered: bool | None,
        selective: bool,
        elementwise: Elementwise,
    ):
        super().__init__()
        self.selective, self.elementwise = selective, elementwise
        hidden, ffn = config.hidden_size, config.intermediate_size
        q = config.num_attention_heads * config.head_dim
        kv = config.num_key_value_heads * config.head_dim
        attention, mlp = config.attention_bias, config.mlp_bias
        column = {**options, "keep_gathered": keep_gathered}
        place = {name: options[name] for name in ("group", "dtype", "device")}
        self.eps = config.rms_norm_eps
        self.hidden, self.y = hidden, options["group"].y
        self.attention_norm = RMSNorm(hidden, self.eps, **place)
        self.qkv = MergedColumnParallelLinear(hidden, {"q": q, "k": kv, "v": kv}, attention, **column)
        self.out = RowParallelLinear(q, hidden, attention, **options)
        self.mlp_norm = RMSNorm(hidden, self.eps, **place)
        self.gate_up = MergedColumnParallelLinear(hidden, {"gate": ffn, "up": ffn}, mlp, **column)
        self.down = RowParallelLinear(ffn, hidden, mlp, **options)

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
        """`normed` and `x` [T/P, D] are this layer's normalised input and the residual stream; returns both
        for the next layer: adding to the stream and normalising it is one pass over memory, so a layer ends
        with the norm of the layer that follows it. Where that is on another rank, both are the stream. norm:
        the weight by which x was normalised."""
        rows, between = step.batch * step.seq, for_this_pass(self.elementwise)
        with self.again(normed.rows, between.rms_norm_again, x, normed.rstd, norm, self.eps):
            qkv = self.qkv(normed.rows, rows)
        q, k, v = between.rope(
            qkv,
            step.cos,
            step.sin,
            step.batch,
            step.seq,
            step.heads,
            step.key_value_heads,
            # What is kept beyond the layer, or travels, lies by itself.
            overwrite_qkv=cache is None and step.context is None,
        )
        if cache is not None:
            k, v = cache.append(k, v)
        if step.context is None:
            attended = causal_attention(q, k, v, step.begin).transpose(1, 2)
        else:
            q, k, v = (each.transpose(1, 2) for each in (q, k, v))
            attended = step.context.attention(q, k, v, step.documents_of(k.shape[1]))
        attended = attended.reshape(rows, -1)
        normed, x = between.add_rms_norm(self.out(attended), x, mlp_norm, self.eps, self.hidden, self.y)
        with self.again(normed.rows, between.rms_norm_again, x, normed.rstd, mlp_norm, self.eps):
            gate_up = self.gate_up(normed.rows, rows)
        product = between.swiglu(gate_up)
        with self.again(product, between.swiglu, gate_up):
            mlp = self.down(product)
        if next_norm is None:
            x = x + mlp
            return Normed(x, None), x
        return between.add_rms_norm(mlp, x, next_norm, self.eps, self.hidden, self.y)

    def again(
        self, made: Tensor, compute: Callable[..., Tensor], *arguments: Any
    ) -> contextlib.AbstractContextManager[None]:
        """Under it, where recomputation is selective, a linear keeps nothing of `made`: `compute` makes it of
        `arguments` again."""
        if not self.selective or not torch.is_grad_enabled():
            return contextlib.nullcontext()
        if torch.compiler.is_compiling():
            raise ValueError(
                "recompute='selective' under torch.compile, which chooses itself what it computes again; "
                "build the model with recompute='none' or 'full'."
            )
        free = [each.detach() if isinstance(each, Tensor) else each for each in arguments]
        return computed_again(made, functools.partial(compute, *free))


class _NormedOnce:
    """A layer for `checkpoint`, which runs it twice and keeps its arguments: what x was normalised to is
    given the first time and made again the second."""

    def __init__(self, block: Block, normed: Normed):
        self._block, self._rstd, self._first = block, normed.rstd, [normed.rows]
        self._requires_grad = normed.rows.requires_grad

    def __call__(self, x: Tensor, norm: Tensor, *others: Any) -> tuple[Normed, Tensor]:
        return self._block(Normed(self._rows(x, norm), self._rstd), x, norm, *others)

    def _rows(self, x: Tensor, norm: Tensor) -> Tensor:
        if self._first:
            return self._first.pop()
        with torch.no_grad():
            rows = self._block.elementwise.rms_norm_again(x, self._rstd, norm, self._block.eps)
        # The second graph only has to save what the first did.
        return rows.requires_grad_(self._requires_grad)


class Llama(nn.Module):
    """The Llama described by `config`, cut over `group` (None: this process alone), which may be a mesh of
    two dimensions (x, y).

    dtype: of parameters and activations. Statistics of norms, softmax and loss are fp32 for every dtype.
    device: "meta" builds shapes only; `materialize` then gives them memory.
    tier, wire: of every parallel linear; see `pyruntime.ops`.
    seed: of the initial weights, which are the same full model for every tp (init.py); None leaves the
        parameters uninitialised, for a caller that fills them.
    keep_gathered: column linears keep their gathered input (T * D elements each) for the backward instead of
        gathering it again; None: where the group spans hosts.
    context: the ranks that share every sequence; None: this rank has it whole.
    recompute: which activations the backward pass computes again in place of keeping them, below. None of
        them changes a bit of what is computed.
    compile: where gradients are asked for, norms, rotary embedding and SwiGLU are what torch.compile makes of
        plain torch, in place of this project's kernels (`elementwise.py`); the loss is not. The same but for
        rounding.
    slices: causal slices of every sequence, of which one computes while the rows of another travel; see
        `slices.py`. Their linears keep their gathered input.
    z_loss: weight of the mean squared log-sum-exp of the logits, which the loss holds in training mode.
    part: what this rank holds of the model, in a pipeline; None: all of it. Where embedding and head are
        tied, a part with one of the two holds the weight, as `embed.weight`.

    Of a layer these elements are kept for a token of a forward pass, beside fp32 statistics (a number a row
    for each norm and each head)::

        recompute="none"        (4 D + (2 H + 2 G) d + 3 F) / P
        "selective"             (2 D + (2 H + 2 G) d + 2 F) / P
        "full"                  D / P, and of sliced sequences as much again, keys and values

    none: the stream before each norm and what each norm gives, q, k, v, attention's result, gate, up, and
    silu(gate) * up. selective leaves out what element-wise kernels make again of the rest, the norms' results
    and silu(gate) * up: no GEMM, no attention and no exchange runs twice. full keeps the stream before a
    layer and runs the layer again (Chen et al. 2016, arXiv 1604.06174), communication included. Where column
    linears keep their gathered input (keep_gathered, slices), what norms give is 2 D instead of 2 D / P, and
    selective keeps it: it would have to come again. Over y, D is D / Y.

    Raises ValueError where the group does not divide the heads or the feed-forward columns, or leaves a rank
    without features, for a wire of one rank alone, and for slices that nothing travels between or that cannot
    be; NoCompiler where torch.compile has none.
    """

    def __init__(
        self,
        config: LlamaConfig,
        group: Group | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        tier: str = "auto",
        wire: WireFormat = "same",
        seed: int | None = 0,
        keep_gathered: bool | None = None,
        context: Context | None = None,
        recompute: Recomputation = "none",
        compile: bool = False,
        slices: int = 1,
        z_loss: float = 0.0,
        part: ModelPart | None = None,
    ):
        super().__init__()
        recomputing.check(recompute)
        self.config, self.context, self.recompute, self.z_loss = config, context, recompute, z_loss
        self.part = ModelPart(tuple(range(config.num_hidden_layers)), True, True) if part is None else part
        self.group = TensorGroup.of(group)
        config.check_tp(self.group.size)
        if slices > 1 and self.group.y is not None:
            raise ValueError(f"slices={slices} of a model whose features are cut over y; leave it at 1.")
        self.slices = sliced.check(slices, self.group.size, context, keep_gathered)
        dtype = dtype or torch.get_default_dtype()
        # Built on meta, as the modules' own initialisation would draw every full tensor.
        place = {"group": self.group, "dtype": dtype, "device": "meta"}
        options = {**place, "tier": tier, "wire": wire}
        hidden, vocab = config.hidden_size, config.vocab_size
        if self.has_embedding:
            self.embed = VocabParallelEmbedding(vocab, hidden, **place)
        self.layers = nn.ModuleList()
        place_on = torch.device(device or torch.get_default_device())
        self.elementwise = compiled(place_on) if compile else KERNELS
        for number in self.part.layers:
            block = Block(config, options, keep_gathered, recompute == "selective", self.elementwise)
            self.layers.add_module(str(number), block)
        if self.part.head:
            self.norm = RMSNorm(hidden, config.rms_norm_eps, group=self.group, dtype=dtype, device="meta")
            self.head = ColumnParallelLinear(hidden, vocab, keep_gathered=keep_gathered, **options)
        self._tie()
        for name, module in self.named_modules():
            if isinstance(module, ParallelModule):
                module.label = name
        self._tables = torch.empty(2, 0)
        if place_on.type != "meta":
            self.materialize(place_on, seed)

    def materialize(self, device: torch.device | str, seed: int | None = 0) -> Llama:
        """Gives this rank's shards memory on `device`, and initial values unless seed is None."""
        self.to_empty(device=device)
        self._tie()
        if seed is not None:
            for shard in self.shards():
                init_shard(self.config, shard, seed)
        return self

    def forward(self, ids: Tensor, labels: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Mean cross-entropy in nats, or logits.

        ids: tokens [B, S], int64, the same on every rank.
        labels: [B, S] int64, `labels[b, s]` being the token to predict at position s (the one that follows
            `ids[b, s]`: the caller has shifted already). -100 is left out of the mean.
        documents: integers [B, S], of whole sequences whatever the context: tokens see those of their own
            document alone, a document being a run of one number. None: all before them.

        Returns the fp32 scalar loss, bitwise the same on every rank of `group` (0 where every label is left
        out); without labels the logits [B, S, V], gathered on every rank of it. With a `context`, ids and
        labels are this rank's shards of the sequences (`Context.shard`), and so are the logits; the loss is
        this rank's share, of which the mean over the context's ranks is the mean over all labels, as data
        parallelism over them makes it.
        """
        batch, seq = self._check_ids(ids)
        x = self.hidden(ids, documents=documents)
        logits = self.head(x, batch * seq)
        if labels is None:
            logits = gather_features(logits, self.group, self.config.vocab_size)
            if (rows := self._places(batch, seq)) is not None:
                logits = logits[rows.argsort()]
            return logits.view(batch, seq, -1)
        if labels.shape != ids.shape:
            raise ValueError(
                f"labels have shape {list(labels.shape)}, but ids {list(ids.shape)}; they must be equal."
            )
        return self.loss(logits, labels)

    def loss(self, logits: Tensor, labels: Tensor, count: Tensor | None = None) -> Tensor:
        """The loss, as `forward` returns it, of this rank's logits [T, V/P], which are overwritten.

        count: of the labels that the mean is over, where these are not all of them.
        """
        labels = self.in_rows(labels)
        losses = vocab_parallel_cross_entropy(
            logits,
            labels,
            self.group,
            vocab_start=self.head.vocab_start,
            vocab_size=self.config.vocab_size,
            ignore_index=IGNORE_INDEX,
            overwrite_logits=True,
            z_loss=self.z_loss if self.training else 0.0,
        )
        if count is None:
            count = (labels != IGNORE_INDEX).sum()
        if self.context is not None:
            count = self.context.sum(count.double().view(1))[0] / self.context.size
        return losses.sum() / count.clamp(min=1 if self.context is None else 1 / self.context.size).float()

    def hidden(
        self,
        ids: Tensor,
        start: int = 0,
        caches: Sequence[Cache] | None = None,
        *,
        whole: bool = False,
        documents: Tensor | None = None,
    ) -> Tensor:
        """The last norm's output [T/P, D], this rank's rows of T = B * S tokens. The ids follow the `start`
        tokens that the layers' caches hold. whole: neither a context nor slices cut the sequences."""
        batch, seq = self._check_ids(ids)
        whole = whole or caches is not None
        x = self.embed(ids.reshape(-1) if whole else self.in_rows(ids))
        return self.run(x, self.part.layers, batch, seq, start, caches, whole=whole, documents=documents)

    def run(
        self,
        x: Tensor,
        layers: Sequence[int],
        batch: int,
        seq: int,
        start: int = 0,
        caches: Sequence[Cache] | None = None,
        *,
        whole: bool = False,
        share: int | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """The residual stream [T/P, D] through some layers, and through the last norm where they are the last
        ones. seq: tokens of each sequence, which follow `start` earlier ones; this rank's, where there is a
        context. caches: one for each layer, of sequences that come slice by slice, and that slices inside the
        group do not cut. whole: nor does a context. share: this rank's tokens of a sequence, where it comes
        slice by slice; None: seq. documents: as in `forward`, of the
        whole sequences."""
        config = self.config
        context = None if whole else self.context
        end = start + seq if context is None else (share or seq) * context.size
        if end > config.max_position_embeddings:
            raise ValueError(
                f"The sequence reaches position {end}, but the model has max_position_embeddings="
                f"{config.max_position_embeddings}; use shorter sequences or raise that number."
            )
        cos, sin = self._rope(end, x.device)
        places: slice | Tensor = slice(start, end)
        if context is not None:
            places = context.positions(end)[start : start + seq].to(x.device)
            context = context.of_first(start + seq, share or seq)
        begin: Tensor | None = None
        prefixes: dict[int, Tensor] = {}
        cp = 1 if context is None else context.size
        total = (share or start + seq) * cp
        if documents is not None and documents.shape != (batch, total):
            raise ValueError(
                f"documents have shape {list(documents.shape)}; they must be {[batch, total]}, of whole "
                "sequences."
            )
        if documents is not None and context is None:
            begin = document_bounds(documents)[0][:, start:end].int().to(x.device)
        elif documents is not None and context is not None:
            # Each made once, as masks are found again by the tensor (`pyruntime.context.mask`).
            lengths = [start + each for each in accumulate(self._parts(seq) if caches is None else (seq,))]
            prefixes = {each: documents[:, : each * cp] for each in lengths}
        step = ForwardPass(
            batch,
            seq,
            config.num_attention_heads // self.group.size,
            config.num_key_value_heads // self.group.size,
            cos[places],
            sin[places],
            context,
            begin,
            prefixes,
        )
        norms = self.norm_weights(layers)
        if caches is None and not whole and len(parts := self._parts(seq)) > 1:
            if torch.compiler.is_compiling():
                raise ValueError(f"slices={self.slices} under torch.compile; build the model with slices=1.")
            blocks = [self.layer(number) for number in layers]
            return sliced.run(blocks, x, norms, step, parts, config.rms_norm_eps, self.recompute)
        backward = None if torch.compiler.is_compiling() or not is_heard() else BackwardRanges()
        if backward is not None and layers[0] == 0:
            backward.begin_at(x, "embed backward")
        normed = for_this_pass(self.elementwise).rms_norm(
            x, norms[0], config.rms_norm_eps, config.hidden_size, self.group.y
        )
        for index, number in enumerate(layers):
            cache = None if caches is None else caches[index]
            own = norms[2 * index : 2 * index + 3]
            following = own[2] if len(own) == 3 else None
            arguments = (normed, x, own[0], own[1], following, step, cache)
            if backward is None:
                normed, x = self._through(number, arguments)
                continue
            with marked(f"layers.{number}"):
                normed, x = self._through(number, arguments)
            backward.begin_at(normed.rows, f"layers.{number} backward")
        return normed.rows

    def _through(self, number: int, arguments: tuple) -> tuple[Normed, Tensor]:
        """A layer; in full recomputation its backward pass computes it anew."""
        layer = self.layer(number)
        if self.recompute == "full" and torch.is_grad_enabled():
            again = layer if torch.compiler.is_compiling() else _NormedOnce(layer, arguments[0])
            inputs = arguments if again is layer else arguments[1:]
            # Nothing in a layer is random.
            return checkpoint(again, *inputs, use_reentrant=False, preserve_rng_state=False)
        return layer(*arguments)

    def _parts(self, seq: int) -> tuple[int, ...]:
        return sliced.lengths(seq, self.slices, self.group.size, self.context)

    def _places(self, batch: int, seq: int) -> Tensor | None:
        """Which token stands in each row of what the ranks share, where they are not in order."""
        return None if self.slices == 1 else sliced.places(batch, self._parts(seq), self.group.size)

    def in_rows(self, tokens: Tensor) -> Tensor:
        """[B, S] -> [B * S], as rows are shared over the ranks."""
        rows = self._places(*tokens.shape)
        return tokens.reshape(-1) if rows is None else tokens.reshape(-1)[rows.to(tokens.device)]

    def layer(self, number: int) -> Block:
        """The layer of that number in the whole model."""
        return self.layers._modules[str(number)]

    def norm_weights(self, layers: Sequence[int]) -> Sequence[Tensor]:
        """Weights of the norms of some layers in the order of their use: attention and MLP of each, then the
        last norm where these are the last layers.

        Every rank applies them to its own tokens, so their gradients must be summed over the group. Stacked,
        that is one collective per backward pass instead of 2 L + 1.
        """
        of_layers = [self.layer(number) for number in layers]
        modules = [norm for layer in of_layers for norm in (layer.attention_norm, layer.mlp_norm)]
        if layers[-1] == self.config.num_hidden_layers - 1:
            modules.append(self.norm)
        weights = [norm.weight for norm in modules]
        weights = [weight.to_local() if isinstance(weight, CutTensor) else weight for weight in weights]
        if self.group.size == 1:
            return weights
        return ops.replicate_grad(torch.stack(weights), self.group.name).unbind()

    def shards(self) -> Iterator[TensorShard]:
        """Every tensor of a checkpoint that this part of the model has, in the order in which it is used; the
        same on every rank of the group. A tied head has no tensor of its own."""
        if self.has_embedding:
            yield from shards_of_model("embed", self.embed)
        for number in self.part.layers:
            yield from shards_of_layer(number, self.layer(number))
        if self.part.head:
            yield from shards_of_model("norm", self.norm)
            if not self.config.tie_word_embeddings:
                yield from shards_of_model("head", self.head)

    @property
    def stream_features(self) -> int:
        """Of the residual stream on this rank."""
        hidden, y = self.config.hidden_size, self.group.y
        if y is None:
            return hidden
        start, stop = shard_bounds(hidden, y.size, y.rank, "hidden_size")
        return stop - start

    @property
    def has_embedding(self) -> bool:
        """Whether the embedding's weight is here, be it for the head alone."""
        return self.part.embed or (self.part.head and self.config.tie_word_embeddings)

    def _tie(self) -> None:
        if self.config.tie_word_embeddings and self.part.head:
            self.head.weight = self.embed.weight

    def _rope(self, length: int, device: torch.device) -> Tensor:
        """cos and sin of at least `length` positions, [2, positions, head_dim], grown as sequences do."""
        if self._tables.shape[1] < length or self._tables.device != device:
            positions = 1 << (length - 1).bit_length()
            self._tables = torch.stack(rope_tables(self.config, positions, device))
        return self._tables

    def _check_ids(self, ids: Tensor) -> tuple[int, int]:
        if ids.dim() != 2 or ids.numel() == 0:
            raise ValueError(f"ids have shape {list(ids.shape)}; pass token sequences [B, S], not empty.")
        return ids.shape[0], ids.shape[1]
