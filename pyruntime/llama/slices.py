"""Causal slices of a sequence inside a tensor-parallel group: one slice's rows travel while another computes.

Slice c needs keys and values of slices <= c and nothing else of other slices (TeraPipe, arXiv 2102.07988,
section 3.1), so each goes through the layers by itself. A layer has two halves of one form::

    begin      this rank's rows of the normalised stream leave   half 0: of qkv        half 1: of gate and up
    multiply   column linear on what came                        qkv                   gate and up
    scatter    what follows, and a row linear, whose parts leave attention, out        silu(gate) * up, down
    finish     the sums have come: added to the stream, normalised for the half that follows

Where context ranks share the sequence, a slice has tokens of all of them, and its attention passes the keys
of slices <= c round the ring: those of slice c' travel C - c' times.

With C slices, (half, slice) number i has number i - C / 2 finished and the half after that begun between its
own multiply and scatter: sums have travelled under as much work as the rows that follow them will. The
backward pass runs backwards through the same order, as autograd does (csrc/ops/sliced_linears.cpp).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pyruntime.llama.attention import causal_attention
from pyruntime.llama.elementwise import for_this_pass
from pyruntime.nn.sliced import SlicedColumn, SlicedRow

if TYPE_CHECKING:
    from pyruntime.choices import Recomputation
    from pyruntime.context import Context
    from pyruntime.llama.model import Block, ForwardPass

MOST = 4
"""More would need more flights under way than a group has slots."""
MOST_OF_LAYOUT = {"striped": MOST, "zigzag": 2, "contiguous": 1}
"""Slices, each of which has tokens of every context rank and lies before the next: zigzag ranks have one part
in either half of a sequence."""


@dataclass(frozen=True)
class SliceAction:
    """What one thread does next."""

    kind: Literal["begin", "multiply", "scatter", "finish"]
    half: int
    part: int
    """The slice."""


def order(halves: int, slices: int) -> Iterator[SliceAction]:
    """In which one thread goes through `halves` halves of layers with so many slices; the same on all
    ranks."""
    count, ahead = halves * slices, slices - slices // 2

    def prepare(number: int) -> Iterator[SliceAction]:
        half, part = divmod(number, slices)
        if half > 0:
            yield SliceAction("finish", half - 1, part)
        if half < halves:
            yield SliceAction("begin", half, part)

    for number in range(ahead):
        yield from prepare(number)
    for number in range(count):
        yield SliceAction("multiply", *divmod(number, slices))
        yield from prepare(number + ahead)
        yield SliceAction("scatter", *divmod(number, slices))
    for number in range(count + ahead, count + slices):
        yield from prepare(number)


def check(slices: int, ranks: int, context: Context | None, keep_gathered: bool | None) -> int:
    """`slices`. Raises ValueError where a model cannot have so many."""
    if not 1 <= slices <= MOST:
        raise ValueError(f"slices={slices}; use 1 to {MOST}.")
    if slices == 1:
        return slices
    if ranks == 1:
        raise ValueError(f"slices={slices} without tensor parallelism, where nothing travels; leave it at 1.")
    if context is not None and context.size > 1 and slices > MOST_OF_LAYOUT[context.layout]:
        raise ValueError(
            f"slices={slices} of sequences that are cut over context ranks by layout={context.layout!r}, "
            f"which has at most {MOST_OF_LAYOUT[context.layout]}, each before the next on all ranks; use "
            "layout='striped', or fewer slices."
        )
    if keep_gathered is False:
        raise ValueError(f"slices={slices} keep their gathered input; leave keep_gathered out.")
    return slices


def lengths(seq: int, slices: int, ranks: int, context: Context | None = None) -> tuple[int, ...]:
    """Tokens of each slice of a sequence: all but the last are multiples of the ranks, so that a rank's rows
    of all slices are as many as of the whole. Fewer slices where there are too few tokens.

    context: of the ranks that share the sequence, of which seq is this rank's share: the slices of all come
    one before the other. Raises ValueError where they cannot.
    """
    if slices > 1 and context is not None and context.size > 1 and context.layout == "zigzag":
        if seq % (2 * ranks):
            unit = 2 * ranks * context.size
            raise ValueError(
                f"The zigzag layout over {context.size} context ranks cuts sequences into 2 slices of "
                f"{ranks} tensor-parallel ranks where {unit} divides their tokens, not {seq * context.size}; "
                f"use {-(-seq * context.size // unit) * unit} tokens, or layout='striped'."
            )
        return (seq // 2, seq // 2)
    units = seq // ranks
    slices = max(1, min(slices, units))
    found = [ranks * (units // slices + (part < units % slices)) for part in range(slices)]
    found[-1] += seq % ranks
    return tuple(found)


def places(batch: int, parts: Sequence[int], ranks: int) -> Tensor:
    """[B * S]: which token stands in each row, where every rank has its rows of the first slice, then those
    of the next."""
    tokens = torch.arange(batch * sum(parts)).view(batch, -1).split(list(parts), 1)
    shares = [part.reshape(-1).tensor_split(ranks) for part in tokens]
    return torch.cat([share[rank] for rank in range(ranks) for share in shares])


class _Layer:
    """One layer in one forward pass."""

    def __init__(self, block: Block, step: ForwardPass, parts: Sequence[int]):
        self._block, self._step, self._parts = block, step, parts
        self.elementwise = for_this_pass(block.elementwise)
        self.columns = SlicedColumn(block.qkv), SlicedColumn(block.gate_up)
        self.rows = SlicedRow(block.out), SlicedRow(block.down)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def middle(self, half: int, part: int, y: Tensor) -> Tensor:
        """Between the two linears of a half."""
        if half == 1:
            return self.elementwise.swiglu(y)
        step, seq = self._step, self._parts[part]
        start = sum(self._parts[:part])
        cos, sin = step.cos[start : start + seq], step.sin[start : start + seq]
        context = step.context
        q, k, v = self.elementwise.rope(
            y, cos, sin, step.batch, seq, step.heads, step.key_value_heads, overwrite_qkv=context is None
        )
        self._keys.append(k)
        self._values.append(v)
        if part > 0:
            k, v = torch.cat(self._keys, 2), torch.cat(self._values, 2)
        if context is None:
            begin = None if step.begin is None else step.begin[:, start : start + seq]
            attended = causal_attention(q, k, v, begin).transpose(1, 2)
        else:
            context = context.of_first(k.shape[2], step.seq)
            q, k, v = (each.transpose(1, 2) for each in (q, k, v))
            attended = context.attention(q, k, v, step.documents_of(k.shape[1]))
        return attended.reshape(step.batch * seq, -1)

    def again(self, half: int, rows: Tensor, y: Tensor) -> contextlib.AbstractContextManager[None]:
        """Of what `middle` made of y: see `Block.again`. Norms' results are kept gathered."""
        return self._block.again(rows, self.elementwise.swiglu, y) if half == 1 else contextlib.nullcontext()


def run(
    blocks: Sequence[Block],
    x: Tensor,
    norms: Sequence[Tensor],
    step: ForwardPass,
    parts: Sequence[int],
    eps: float,
    recompute: Recomputation,
) -> Tensor:
    """The residual stream [T/P, D] through some layers, as `Llama.run`. x, and what is returned: this rank's
    rows of each slice behind each other, see `places`."""
    ranks, rank = blocks[0].qkv.group.size, blocks[0].qkv.group.rank
    counts = [len(torch.arange(step.batch * seq).tensor_split(ranks)[rank]) for seq in parts]
    streams = x.split(counts)
    normed = [for_this_pass(blocks[0].elementwise).of_norm(stream, norms[0], eps) for stream in streams]
    if recompute != "full" or not torch.is_grad_enabled():
        return torch.cat(_flow(blocks, norms[1:], step, parts, eps, *normed, *streams)[: len(parts)])
    state = (*normed, *streams)
    for index, block in enumerate(blocks):
        own = norms[2 * index + 1 : 2 * index + 3]
        # Stopped early, the second forward pass would leave flights that are under way. Nothing is random.
        state = checkpoint(
            _flow_again, [block], own, step, parts, eps, *state,
            use_reentrant=False, preserve_rng_state=False, early_stop=False,
        )  # fmt: skip
    return torch.cat(state[: len(parts)])


class _Unpacked(torch.autograd.Function):
    """The same tensors. Their gradients wait until a saved tensor has been unpacked."""

    @staticmethod
    def forward(ctx, *state: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(state[0])
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in state)

    @staticmethod
    def backward(ctx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        return grads


def _flow_again(*arguments: Any) -> tuple[Tensor, ...]:
    """`_flow`, which is computed again before its backward pass has any flight under way: both together would
    need more slots than a group has. In a pipeline nothing else at the end of a stage unpacks a tensor."""
    return _Unpacked.apply(*_flow(*arguments))


def _flow(
    blocks: Sequence[Block],
    norms: Sequence[Tensor],
    step: ForwardPass,
    parts: Sequence[int],
    eps: float,
    *state: Tensor,
) -> tuple[Tensor, ...]:
    """`state`: normalised stream of each slice, then the streams themselves; returns both for the layer that
    follows. Without a norm of that layer, both are the stream."""
    slices = len(parts)
    normed, streams = list(state[:slices]), list(state[slices:])
    layers = [_Layer(block, step, parts) for block in blocks]
    between: dict[int, Tensor] = {}
    for action in order(2 * len(blocks), slices):
        layer, half = layers[action.half // 2], action.half % 2
        part = action.part
        if action.kind == "begin":
            layer.columns[half].begin(part, normed[part], step.batch * parts[part])
        elif action.kind == "multiply":
            between[part] = layer.columns[half].end(part)
        elif action.kind == "scatter":
            y = between.pop(part)
            rows = layer.middle(half, part, y)
            with layer.again(half, rows, y):
                layer.rows[half].begin(part, rows)
        else:
            y = layer.rows[half].end(part)
            if action.half < len(norms):
                normed[part], streams[part] = layer.elementwise.of_sum(
                    y, streams[part], norms[action.half], eps
                )
            else:
                normed[part] = streams[part] = streams[part] + y
    return (*normed, *streams)
