"""Causal slices of a sequence inside a tensor-parallel group: one slice's rows travel while another computes.

Slice c needs from other slices only the keys and values of slices <= c (TeraPipe, arXiv 2102.07988,
section 3.1), so each goes through the layers by itself. A layer has two halves of the same form::

    begin      send this rank's rows of the normalised stream    half 0: for qkv       half 1: for gate and up
    multiply   column linear on the gathered rows                qkv                   gate and up
    scatter    the next operator, and a row linear, sent         attention, out        silu(gate) * up, down
    finish     add the received sums to the stream, normalise it for the next half

If context ranks share the sequence, a slice has tokens of all of them. Its attention passes the keys of
slices <= c round the ring: those of slice c' travel C - c' times.

Number the pairs (half, slice) in order, with C slices. Between multiply and scatter of pair i, pair i - C / 2
is finished and its slice begins the next half. So the sums travel behind as much work as the rows after them.
The backward pass runs through the same order in reverse, as autograd does (csrc/ops/sliced_linears.cpp).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pyruntime.llama.attention import causal_attention
from pyruntime.llama.elementwise import for_this_pass
from pyruntime.nn.sliced import MOST_GATHERED_AGAIN, SlicedColumn, SlicedRow

if TYPE_CHECKING:
    from pyruntime.choices import Recomputation
    from pyruntime.context import Context
    from pyruntime.llama.block import Block, ForwardPass

MOST = 4
"""Limit on slices: more would need more open flights than a group has slots."""
MOST_OF_LAYOUT = {"striped": MOST, "zigzag": 2, "contiguous": 1, "placed": 1}
"""Limit on slices by context layout. Each slice has tokens of every context rank and lies before the next;
a zigzag rank has one part in each half of a sequence."""


@dataclass(frozen=True)
class SliceAction:
    """One step of one slice through half a layer; the kinds are in the module's docstring."""

    kind: Literal["begin", "multiply", "scatter", "finish"]
    half: int
    part: int
    """The slice."""


def order(halves: int, slices: int) -> Iterator[SliceAction]:
    """Yields the order in which one thread takes `slices` through `halves` halves of layers; the same on all
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
    """Returns `slices`. Raises ValueError if a model cannot have that many."""
    if not 1 <= slices <= MOST:
        raise ValueError(f"slices={slices}; use 1 to {MOST}.")
    if slices == 1:
        return slices
    if ranks == 1:
        raise ValueError(f"slices={slices} hide nothing without tensor parallelism; leave it at 1.")
    if context is not None and context.size > 1 and slices > MOST_OF_LAYOUT[context.layout]:
        raise ValueError(
            f"slices={slices} are too many with context ranks and layout={context.layout!r}, which allows at "
            f"most {MOST_OF_LAYOUT[context.layout]}: each must lie before the next on all ranks; use "
            "layout='striped', or fewer slices."
        )
    if keep_gathered is False and slices > MOST_GATHERED_AGAIN:
        raise ValueError(
            f"slices={slices} need keep_gathered; do not pass keep_gathered=False with more than "
            f"{MOST_GATHERED_AGAIN}."
        )
    return slices


def lengths(seq: int, slices: int, ranks: int, context: Context | None = None) -> tuple[int, ...]:
    """Returns the tokens of each slice of a sequence, with fewer slices if there are too few tokens. All but
    the last are multiples of `ranks`, so that a rank has as many rows as without slices.

    context: the ranks that share the sequence; seq is this rank's share. Raises ValueError if the slices of
    all context ranks cannot lie one before the other.
    """
    if slices > 1 and context is not None and context.size > 1 and context.layout == "zigzag":
        if seq % (2 * ranks):
            unit = 2 * ranks * context.size
            raise ValueError(
                f"The zigzag layout over {context.size} context ranks cuts sequences into 2 slices of "
                f"{ranks} tensor-parallel ranks only if {unit} divides the tokens, not {seq * context.size}; "
                f"use {-(-seq * context.size // unit) * unit} tokens, or layout='striped'."
            )
        return (seq // 2, seq // 2)
    units = seq // ranks
    slices = max(1, min(slices, units))
    found = [ranks * (units // slices + (part < units % slices)) for part in range(slices)]
    found[-1] += seq % ranks
    return tuple(found)


@lru_cache(maxsize=64)
def places(batch: int, parts: tuple[int, ...], ranks: int, device: torch.device | str = "cpu") -> Tensor:
    """Returns the token of each row, [B * S], where every rank has its rows of the first slice, then those of
    the next."""
    tokens = torch.arange(batch * sum(parts), device=device).view(batch, -1).split(list(parts), 1)
    shares = [part.reshape(-1).tensor_split(ranks) for part in tokens]
    return torch.cat([share[rank] for rank in range(ranks) for share in shares])


class _Layer:
    """One layer in one forward pass."""

    def __init__(self, block: Block, step: ForwardPass, parts: Sequence[int]):
        self._block, self._step, self._parts = block, step, parts
        self.elementwise = for_this_pass(block.elementwise)
        rows = [step.batch * part for part in parts]
        self.columns = SlicedColumn(block.qkv, rows), SlicedColumn(block.gate_up, rows)
        self.rows = SlicedRow(block.out, rows), SlicedRow(block.down, rows)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def middle(self, half: int, part: int, y: Tensor) -> Tensor:
        """Computes what lies between the two linears of a half: attention, or silu(gate) * up."""
        if half == 1:
            return self.elementwise.swiglu(y)
        step, seq = self._step, self._parts[part]
        start = sum(self._parts[:part])
        cos, sin = step.cos[start : start + seq], step.sin[start : start + seq]
        context, window = step.context, self._block.window
        q, k, v = self.elementwise.rope(
            y, cos, sin, step.batch, seq, step.heads, step.key_value_heads, overwrite_qkv=context is None
        )
        self._keys.append(k)
        self._values.append(v)
        if part > 0:
            k, v = torch.cat(self._keys, 2), torch.cat(self._values, 2)
        if context is None:
            begin = step.begin_of(window)
            begin = None if begin is None else begin[:, start : start + seq]
            attended = causal_attention(q, k, v, begin).transpose(1, 2)
        else:
            context = context.of_first(k.shape[2], step.seq)
            q, k, v = (each.transpose(1, 2) for each in (q, k, v))
            attended = context.attention(q, k, v, step.documents_of(k.shape[1]), window)
        return attended.reshape(step.batch * seq, -1)

    def again(self, half: int, rows: Tensor, y: Tensor) -> contextlib.AbstractContextManager[None]:
        """`Block.again` for `rows`, the result of `middle` on y. Norms' results are kept, gathered."""
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
    """Runs the residual stream [T/P, D] through `blocks`, as `Llama.run` does. x and the result are this
    rank's rows of the first slice, then those of the next, as in `places`."""
    ranks, rank = blocks[0].qkv.group.size, blocks[0].qkv.group.rank
    counts = [len(torch.arange(step.batch * seq).tensor_split(ranks)[rank]) for seq in parts]
    streams = x.split(counts)
    normed = [for_this_pass(blocks[0].elementwise).of_norm(stream, norms[0], eps) for stream in streams]
    if recompute != "full" or not torch.is_grad_enabled():
        return torch.cat(_flow(blocks, norms[1:], step, parts, eps, *normed, *streams)[: len(parts)])
    state = (*normed, *streams)
    for index, block in enumerate(blocks):
        own = norms[2 * index + 1 : 2 * index + 3]
        # With early_stop the second forward pass would leave flights open. Nothing in a layer is random.
        state = checkpoint(
            _flow_again, [block], own, step, parts, eps, *state,
            use_reentrant=False, preserve_rng_state=False, early_stop=False,
        )  # fmt: skip
    return torch.cat(state[: len(parts)])


class _Unpacked(torch.autograd.Function):
    """Identity whose backward pass first unpacks a saved tensor, which makes `checkpoint` recompute."""

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
    """`_flow`, but recomputed before its backward pass opens a flight: both together would need more slots
    than a group has. In a pipeline nothing else at the end of a stage unpacks a tensor."""
    return _Unpacked.apply(*_flow(*arguments))


def _flow(
    blocks: Sequence[Block],
    norms: Sequence[Tensor],
    step: ForwardPass,
    parts: Sequence[int],
    eps: float,
    *state: Tensor,
) -> tuple[Tensor, ...]:
    """state: the normalised stream of each slice, then the stream of each. Returns both for the next layer;
    without the norm of that layer, both are the stream."""
    slices = len(parts)
    normed, streams = list(state[:slices]), list(state[slices:])
    layers = [_Layer(block, step, parts) for block in blocks]
    between: dict[int, Tensor] = {}
    for action in order(2 * len(blocks), slices):
        layer, half = layers[action.half // 2], action.half % 2
        part = action.part
        if action.kind == "begin":
            layer.columns[half].begin(part, normed[part])
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
