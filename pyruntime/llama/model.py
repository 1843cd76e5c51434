"""A Llama decoder with tensor-parallel linears. Its residual stream is cut by tokens over the same ranks.

With P ranks, T = B * S tokens, D channels, H query and G key/value heads of size d, F feed-forward columns,
V tokens::

    x [T/P, D] -> norm -> all_gather_matmul -> qkv [T, (H + 2 G) d / P] -> attention on H/P heads
               -> matmul_reduce_scatter -> + x -> norm -> all_gather_matmul -> gate, up [T, 2 F/P] ->
               silu(gate) * up -> matmul_reduce_scatter -> + x

Rows are cut as `torch.tensor_split` cuts T, so any B and S work. The head gives logits [T, V/P], which the
loss reads as they are; they are gathered only if the caller asks for logits.

With context parallelism S is this rank's share of the sequence. Only attention, the angles of the positions
and the number of labels then differ.

A group of two axes, x and y, is AxoNN's grid (docs/explanation/primitives.md): P above is the size of x, and
the stream is [T/X, D/Y]. Heads, feed-forward columns and vocabulary are cut only over x; the results of
column linears are summed over y.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pyruntime import ops
from pyruntime.choices import Recomputation, WireFormat
from pyruntime.comm.devices import put
from pyruntime.comm.ranges import BackwardRanges, is_heard, marked
from pyruntime.context import Context
from pyruntime.context.layouts import document_bounds
from pyruntime.llama import adapters
from pyruntime.llama import recompute as recomputing
from pyruntime.llama import slices as sliced
from pyruntime.llama.block import Block, Cache, ForwardPass, NormedOnce
from pyruntime.llama.config import LlamaConfig
from pyruntime.llama.elementwise import KERNELS, compiled, for_this_pass
from pyruntime.llama.expert_layer import MixtureOfExperts
from pyruntime.llama.init import init_adapter, init_shard
from pyruntime.llama.rope import rope_tables
from pyruntime.llama.tensor_shards import (
    TensorShard,
    shards_of_adapters,
    shards_of_layer,
    shards_of_model,
    tensor_cuts,
)
from pyruntime.nn import (
    ColumnParallelLinear,
    RMSNorm,
    RouterLosses,
    VocabParallelEmbedding,
)
from pyruntime.nn.chunked_head import chunk_rows, linear_token_losses
from pyruntime.nn.cut import CutTensor
from pyruntime.nn.gather import gather_features
from pyruntime.nn.head_loss import loss_of_input, losses_of_logits
from pyruntime.nn.low_rank import LoRA
from pyruntime.nn.module import ParallelModule
from pyruntime.nn.norm import Normed
from pyruntime.nn.parameters import Group, TensorGroup, shard_bounds

IGNORE_INDEX = -100  # the loss ignores labels of this value, as torch.nn.functional.cross_entropy does


@dataclasses.dataclass(frozen=True)
class ModelPart:
    """The part of a model that a rank of a pipeline has."""

    layers: tuple[int, ...]
    embed: bool
    head: bool
    """Whether it has the last norm and the head."""


class Llama(nn.Module):
    """The Llama of `config`, cut over `group`, which may be a mesh (x, y); None: this process only.

    dtype: dtype of parameters and activations. Statistics of norms, softmax and loss are always fp32.
    device: "meta" builds only shapes; `materialize` then gives them memory.
    tier, wire: options of every parallel linear; see `pyruntime.ops`.
    seed: seed of the initial weights, which are the same full model for every tp (init.py); None leaves the
        parameters uninitialised, for a caller that fills them.
    keep_gathered: column linears keep their gathered input (T * D elements each) for the backward pass
        instead of gathering it again; None: if the group spans hosts, and with slices unless
        recompute="selective" and there are two.
    context: the ranks that share every sequence; None: this rank has whole sequences.
    recompute: the activations that the backward pass computes again instead of keeping them, see below. The
        results are bitwise the same.
    compile: if gradients are enabled, norms, rotary embedding and SwiGLU run as compiled by torch.compile
        instead of this project's kernels (`elementwise.py`); the loss does not. Results differ by rounding.
    slices: causal slices of every sequence; one computes while the rows of another travel (`slices.py`).
    z_loss: weight of the mean squared log-sum-exp of the logits, added to the loss in training mode.
    part: the part of the model that this rank of a pipeline has; None: all of it. If embedding and head are
        tied, a part with one of the two has the weight, as `embed.weight`.
    router_losses: the losses that routers of experts add in training mode; None: none.
    lora: low-rank adapters of the layers' linears (`pyruntime.nn.low_rank`). Only they train, and column
        linears never keep their gathered input, whatever keep_gathered says. None: all weights train.

    experts: the ranks over which layers with experts (`config.mixture`) spread them, `runtime.ep`; None: the
        group (`pyruntime.nn.ParallelExperts`).
    tp_speeds: relative speeds of the group's ranks, which then hold heads, MLP features and vocabulary in
        proportion (`tensor_shards.py`). A weight's gradient, a checkpoint and the first weights are those of
        equal parts; sums over ranks differ by rounding. Empty: equal parts.

    For each token of a forward pass a layer keeps these numbers of elements, and fp32 statistics (one number
    a row for each norm and each head)::

        recompute="none"        (4 D + (2 H + 2 G) d + 3 F) / P
        "selective"             (2 D + (2 H + 2 G) d + 2 F) / P
        "full"                  D / P; with slices as much again, and keys and values

    none keeps the stream before each norm, each norm's result, q, k, v, attention's result, gate, up, and
    silu(gate) * up. selective does not keep the norms' results and silu(gate) * up, which element-wise
    kernels make again: no GEMM, attention or exchange runs twice. full keeps the stream before a layer and
    runs the layer again, communication included (Chen et al. 2016, arXiv 1604.06174). If column linears keep
    their gathered input (keep_gathered), the norms' results take 2 D instead of 2 D / P, and selective keeps
    them: they would have to travel again. With slices it keeps them too, of this rank's rows if they travel
    again; so it does with norms after (OLMo 2), for which the norms' inputs take the place of their results.
    With y, D becomes D / Y.

    Raises ValueError if the group does not divide the heads or the feed-forward columns, or it or the speeds
    leave a rank without features; for speeds of a model with experts or over y; for a wire without other
    ranks; for slices that are not possible (`slices.check`). Raises NoCompiler if torch.compile has no
    compiler.
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
        router_losses: RouterLosses | None = None,
        lora: LoRA | None = None,
        experts: Group | None = None,
        tp_speeds: Sequence[float] = (),
    ):
        super().__init__()
        recomputing.check(recompute)
        self.config, self.context, self.recompute, self.z_loss = config, context, recompute, z_loss
        self.part = ModelPart(tuple(range(config.num_hidden_layers)), True, True) if part is None else part
        self.router_losses = router_losses
        self.group = TensorGroup.of(group)
        self.experts_over = self.group if experts is None else TensorGroup.of(experts)
        self.cuts = tensor_cuts(config, self.group.size, tp_speeds, self.experts_over.size)
        if tp_speeds and self.group.y is not None:
            raise ValueError("Speeds cut over one axis, and the group has a second one; leave them out.")
        if self.group.y is not None and (config.mixture is not None or config.qk_norm):
            raise ValueError(
                "A model with experts or normalised heads takes no second axis of tensor parallelism; leave "
                "it out."
            )
        if slices > 1 and self.group.y is not None:
            raise ValueError(f"slices={slices} cannot be combined with features cut over y; leave it at 1.")
        over = 1 if config.mixture is None else self.experts_over.size
        self.slices = sliced.check(slices, self.group.size, over, context, keep_gathered)
        over_tp = self.experts_over.name == self.group.name
        why = config.why_no_slices(slices, self.group.size, over_tp=over_tp)
        if slices > 1 and why:
            raise ValueError(f"slices={slices} do not support {why}; leave it at 1.")
        self.lora = lora
        if lora is not None:
            adapters.check(lora, config, slices, self.group.y is not None)
            keep_gathered = False  # only a weight's gradient needs it
        keep_in_layers = keep_gathered
        if slices > 1 and keep_gathered is None and recompute != "selective":
            keep_in_layers = True
        dtype = dtype or torch.get_default_dtype()
        # Built on meta, because the modules' own initialisation would draw every full tensor.
        place = {"group": self.group, "dtype": dtype, "device": "meta"}
        options = {**place, "tier": tier, "wire": wire}
        hidden, vocab = config.hidden_size, config.vocab_size
        if self.has_embedding:
            self.embed = VocabParallelEmbedding(vocab, hidden, shares=self.cuts.vocabulary, **place)
        self.layers = nn.ModuleList()
        place_on = torch.device(device or torch.get_default_device())
        self.elementwise = compiled(place_on) if compile else KERNELS
        for number in self.part.layers:
            mixture = None
            if config.mixture is not None and config.mixture.has(number):
                mixture = MixtureOfExperts(
                    config.mixture, hidden, self.router_losses, options, self.experts_over
                )
            block = Block(
                config,
                options,
                keep_in_layers,
                recompute == "selective",
                self.elementwise,
                mixture,
                config.window_of(number),
                lora,
                self.cuts,
            )
            self.layers.add_module(str(number), block)
        if self.part.head:
            self.norm = RMSNorm(hidden, config.rms_norm_eps, group=self.group, dtype=dtype, device="meta")
            self.head = ColumnParallelLinear(
                hidden, vocab, keep_gathered=keep_gathered, shares=self.cuts.vocabulary, **options
            )
        self._tie()
        if lora is not None:
            adapters.train_only_adapters(self)
        for name, module in self.named_modules():
            if isinstance(module, ParallelModule):
                module.label = name
        self._tables = torch.empty(2, 0)
        if place_on.type != "meta":
            self.materialize(place_on, seed)

    def materialize(self, device: torch.device | str, seed: int | None = 0) -> Llama:
        """Gives this rank's shards memory on `device`, and initial values unless seed=None; adapters always
        get theirs. Returns self."""
        self.to_empty(device=device)
        self._tie()
        if seed is not None:
            for shard in self.shards():
                init_shard(self.config, shard, seed)
        for shard in self.adapter_shards():
            assert self.lora is not None
            init_adapter(shard, self.lora.seed)
        return self

    def forward(self, ids: Tensor, labels: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Returns the mean cross-entropy in nats, or without labels the logits.

        ids: tokens [B, S], int64, the same on every rank.
        labels: [B, S] int64; `labels[b, s]` is the token to predict at position s, the one after `ids[b, s]`:
            the caller shifts. The mean ignores labels of -100.
        documents: integers [B, S] of whole sequences, also with a context. Tokens see only their own
            document, which is a run of one number. None: tokens see all tokens before them.

        The loss is an fp32 scalar, bitwise the same on every rank of `group` (0 if all labels are ignored).
        The logits [B, S, V] are gathered on every rank of `group`. With a `context`, ids, labels and logits
        are this rank's shards of the sequences (`Context.shard`). The loss is then this rank's share: its
        mean over the context's ranks, as data parallelism over them takes it, is the mean over all labels.
        """
        batch, seq = self._check_ids(ids)
        if labels is not None and labels.shape != ids.shape:
            raise ValueError(
                f"labels have shape {list(labels.shape)}, but ids {list(ids.shape)}; they must be equal."
            )
        x = self.hidden(ids, documents=documents)
        if labels is None:
            logits = self.gather_logits(self.head(x, batch * seq))
            if (rows := self._places(batch, seq, logits.device)) is not None:
                logits = logits[rows.argsort()]
            return logits.view(batch, seq, -1)
        return self.loss(x, labels)

    def loss(self, x: Tensor, labels: Tensor, count: Tensor | None = None) -> Tensor:
        """Returns the loss, as `forward` does, of the last norm's output x [T/P, D], this rank's rows.

        count: number of labels that the mean is over, if these are not all of them.
        """
        labels = self.in_rows(labels)
        if count is None:
            count = (labels != IGNORE_INDEX).sum()
        if self.context is not None:
            count = self.context.sum(count.double().view(1))[0] / self.context.size
        count = count.clamp(min=1 if self.context is None else 1 / self.context.size).float()
        options: dict[str, Any] = {
            "ignore_index": IGNORE_INDEX,
            "z_loss": self.z_loss if self.training else 0.0,
        }
        if rows := self._rows_of_chunk(len(labels), x):
            weights = count.reciprocal().expand(len(labels))
            return loss_of_input(self.head, x, labels, token_weights=weights, chunk_rows=rows, **options)
        logits = self.head(x, len(labels))
        losses = losses_of_logits(self.head, logits, labels, overwrite_logits=True, **options)
        return losses.sum() / count

    def weighed_loss(self, x: Tensor, labels: Tensor, weigh: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns sum_i w_i loss_i over the rows of x, as `loss` takes them, fp32; w = weigh(loss), both [T]
        and in the order of `in_rows`, without gradients. Without the z-loss.

        Where the loss is computed by chunks, the head runs twice: for the losses, then for their sum.
        """
        labels = self.in_rows(labels)
        options: dict[str, Any] = {"ignore_index": IGNORE_INDEX}
        if rows := self._rows_of_chunk(len(labels), x):
            options["chunk_rows"] = rows
            losses = loss_of_input(self.head, x, labels, compute=linear_token_losses, **options)
            weights = weigh(losses)
            if not torch.is_grad_enabled():
                return (losses * weights).sum()
            return loss_of_input(self.head, x, labels, token_weights=weights, **options)
        logits = self.head(x, len(labels))
        losses = losses_of_logits(self.head, logits, labels, overwrite_logits=True, **options)
        return (losses * weigh(losses.detach())).sum()

    def _rows_of_chunk(self, rows: int, x: Tensor) -> int:
        """Returns how many rows' logits are in memory at once for a loss of so many rows of x; 0: all."""
        if torch.compiler.is_compiling() or self.group.y is not None:
            return 0
        # The same on all ranks, which exchange rows and statistics of the same chunks.
        width = max(self.cuts.vocabulary, default=self.config.vocab_size // self.group.size)
        return chunk_rows(rows, width * x.element_size(), x.device.type)

    def gather_logits(self, logits: Tensor) -> Tensor:
        """Gathers this rank's logits [..., V_r] into those of the whole vocabulary, on every rank."""
        return gather_features(logits, self.group, self.config.vocab_size, shares=self.cuts.vocabulary)

    def hidden(
        self,
        ids: Tensor,
        start: int = 0,
        caches: Sequence[Cache] | None = None,
        *,
        whole: bool = False,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Returns the last norm's output [T/P, D], this rank's rows of T = B * S tokens. The ids follow the
        `start` tokens in the layers' caches. whole: neither a context nor slices cut the sequences."""
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
        """Runs the residual stream [T/P, D] through `layers`, and through the last norm if these end with the
        last layer.

        seq: tokens of each sequence (of this rank, with a context), which follow `start` earlier ones.
        caches: one for each layer, for sequences that come slice by slice; slices inside the group then do
        not cut them. whole: no context cuts them either. share: this rank's tokens of a sequence that comes
        slice by slice; None: seq. documents: as in `forward`.
        """
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
            places = context.positions(end, x.device, documents)[start : start + seq]
            context = context.of_first(start + seq, share or seq)
        begin: Tensor | None = None
        prefixes: dict[int, Tensor] = {}
        cp = 1 if context is None else context.size
        total = (share or start + seq) * cp
        if documents is not None and documents.shape != (batch, total):
            raise ValueError(
                f"documents have shape {list(documents.shape)}; they must be {[batch, total]}, for whole "
                "sequences."
            )
        if documents is not None and context is None:
            begin = put(document_bounds(documents)[0][:, start:end].int(), x.device)
        elif documents is not None and context is not None:
            # Each is made once, because masks are cached by the tensor (`pyruntime.context.mask`).
            lengths = [start + each for each in accumulate(self._parts(seq) if caches is None else (seq,))]
            prefixes = {each: documents[:, : each * cp] for each in lengths}
        in_window = begin
        if context is None and config.sliding_window is not None and config.sliding_window < end:
            in_window = _begin_in_window(config.sliding_window, start, end, batch, begin, x.device)
        step = ForwardPass(
            batch,
            seq,
            self.key_value_heads * config.num_attention_heads // config.num_key_value_heads,
            self.key_value_heads,
            cos[places],
            sin[places],
            context,
            begin,
            in_window,
            prefixes,
        )
        norms = self.norm_weights(layers)
        if caches is None and not whole and len(parts := self._parts(seq)) > 1:
            if torch.compiler.is_compiling():
                raise ValueError(
                    f"slices={self.slices} do not run under torch.compile; build the model with slices=1."
                )
            blocks = [self.layer(number) for number in layers]
            return sliced.run(blocks, x, norms, step, parts, config.rms_norm_eps, self.recompute)
        backward = None if torch.compiler.is_compiling() or not is_heard() else BackwardRanges()
        if backward is not None and layers[0] == 0:
            backward.begin_at(x, "embed backward")
        normed = Normed(x, None)
        if not config.norms_after:
            normed = for_this_pass(self.elementwise).rms_norm(
                x, norms[0], config.rms_norm_eps, config.hidden_size, self.group.y
            )
        for index, number in enumerate(layers):
            cache = None if caches is None else caches[index]
            own = norms[2 * index : 2 * index + 3]
            is_last = number == config.num_hidden_layers - 1
            following = own[2] if len(own) == 3 and (is_last or not config.norms_after) else None
            arguments = (normed, x, own[0], own[1], following, step, cache)
            if backward is None:
                normed, x = self._through(number, arguments)
                continue
            with marked(f"layers.{number}"):
                normed, x = self._through(number, arguments)
            backward.begin_at(normed.rows, f"layers.{number} backward")
        return normed.rows

    def _through(self, number: int, arguments: tuple) -> tuple[Normed, Tensor]:
        """Runs a layer; with full recomputation its backward pass runs it again."""
        layer = self.layer(number)
        if self.recompute == "full" and torch.is_grad_enabled():
            again = layer if torch.compiler.is_compiling() else NormedOnce(layer, arguments[0])
            inputs = arguments if again is layer else arguments[1:]
            # Nothing in a layer is random.
            return checkpoint(again, *inputs, use_reentrant=False, preserve_rng_state=False)
        return layer(*arguments)

    def _parts(self, seq: int) -> tuple[int, ...]:
        return sliced.lengths(seq, self.slices, self.group.size, self.context)

    def _places(self, batch: int, seq: int, device: torch.device) -> Tensor | None:
        """Returns the token of each row that the ranks share, [B * S]; None if they are in order."""
        return None if self.slices == 1 else sliced.places(batch, self._parts(seq), self.group.size, device)

    def in_rows(self, tokens: Tensor) -> Tensor:
        """Returns `tokens` [B, S] as [B * S], in the order in which the ranks share the rows."""
        batch, seq = tokens.shape
        rows = self._places(batch, seq, tokens.device)
        return tokens.reshape(-1) if rows is None else tokens.reshape(-1)[rows]

    def layer(self, number: int) -> Block:
        """Returns the layer with that number in the whole model."""
        return self.layers._modules[str(number)]

    def norm_weights(self, layers: Sequence[int]) -> Sequence[Tensor]:
        """Returns the norm weights of `layers` in order of use: attention and MLP of each, then the last norm
        if these end with the last layer.

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
        """Yields the checkpoint tensors of this part of the model in order of use, the same on every rank of
        the group. A tied head has no tensor of its own."""
        if self.has_embedding:
            yield from shards_of_model("embed", self.embed)
        for number in self.part.layers:
            yield from shards_of_layer(number, self.layer(number))
        if self.part.head:
            yield from shards_of_model("norm", self.norm)
            if not self.config.tie_word_embeddings:
                yield from shards_of_model("head", self.head)

    def adapter_shards(self) -> Iterator[TensorShard]:
        """Yields the tensors of this part's adapters, as `shards` does. Names are those of the linears with
        ".lora_A.weight" and ".lora_B.weight"."""
        for number in self.part.layers:
            yield from shards_of_adapters(number, self.layer(number))

    @property
    def writes(self) -> bool:
        """Whether this is the rank that writes the whole model: rank 0 of its group and of its experts'."""
        return self.group.is_first and self.experts_over.is_first

    @property
    def stream_features(self) -> int:
        """Number of features of the residual stream on this rank."""
        hidden, y = self.config.hidden_size, self.group.y
        if y is None:
            return hidden
        start, stop = shard_bounds(hidden, y.size, y.rank, "hidden_size")
        return stop - start

    @property
    def key_value_heads(self) -> int:
        """Number of key/value heads on this rank."""
        return self.cuts.groups_of(self.config, self.group.size)[self.group.rank]

    @property
    def has_embedding(self) -> bool:
        """Whether this part has the embedding's weight, even if only for the head."""
        return self.part.embed or (self.part.head and self.config.tie_word_embeddings)

    def _tie(self) -> None:
        if self.config.tie_word_embeddings and self.part.head:
            self.head.weight = self.embed.weight

    def _rope(self, length: int, device: torch.device) -> Tensor:
        """Returns cos and sin of at least `length` positions, [2, positions, rotary_dim], cached."""
        if self._tables.shape[1] < length or self._tables.device != device:
            positions = 1 << (length - 1).bit_length()
            self._tables = torch.stack(rope_tables(self.config, positions, device))
        return self._tables

    def _check_ids(self, ids: Tensor) -> tuple[int, int]:
        if ids.dim() != 2 or ids.numel() == 0:
            raise ValueError(f"ids have shape {list(ids.shape)}; pass token sequences [B, S], not empty.")
        return ids.shape[0], ids.shape[1]


def _begin_in_window(
    window: int, start: int, end: int, batch: int, begin: Tensor | None, device: torch.device
) -> Tensor:
    """Returns the first key that the queries at start .. end - 1 see if each sees the last `window` keys up
    to its own, [batch, end - start] int32. begin: the first key that they see in their documents."""
    first = torch.arange(start, end, dtype=torch.int32, device=device).sub(window - 1).clamp(min=0)
    return first.expand(batch, -1) if begin is None else torch.maximum(begin, first)
