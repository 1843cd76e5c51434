"""Causal slices of a sequence inside a tensor-parallel group: one slice's rows travel while another computes.

Slice c needs keys and values of slices <= c and nothing else of other slices (TeraPipe, arXiv 2102.07988,
section 3.1), so each goes through the layers by itself. A layer has two halves of one form::

    begin      this rank's rows of the normalised stream leave   half 0: of qkv        half 1: of gate and up
    multiply   column linear on what came                        qkv                   gate and up
    scatter    what follows, and a row linear, whose parts leave attention, out        silu(gate) * up, down
    finish     the sums have come: added to the stream, normalised for the half that follows

With C slices, (half, slice) number i has number i - C / 2 finished and the half after that begun between its
own multiply and scatter: sums have travelled under as much work as the rows that follow them will. The
backward pass runs backwards through the same order, as autograd does (csrc/ops/sliced_linears.cpp).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pyruntime.llama.attention import causal_attention
from pyruntime.nn.sliced import SlicedColumn, SlicedRow
from pyruntime.ops.layers import add_rms_norm, apply_rope_qkv, rms_norm, swiglu

if TYPE_CHECKING:
    from pyruntime.llama.model import Block, Step

MOST = 4
"""More would need more flights under way than a group has slots."""


@dataclass(frozen=True)
class Action:
    """What one thread does next."""

    kind: Literal["begin", "multiply", "scatter", "finish"]
    half: int
    part: int
    """The slice."""


def order(halves: int, slices: int) -> Iterator[Action]:
    """In which one thread goes through `halves` halves of layers with so many slices; the same on all
    ranks."""
    count, ahead = halves * slices, slices - slices // 2

    def prepare(number: int) -> Iterator[Action]:
        half, part = divmod(number, slices)
        if half > 0:
            yield Action("finish", half - 1, part)
        if half < halves:
            yield Action("begin", half, part)

    for number in range(ahead):
        yield from prepare(number)
    for number in range(count):
        yield Action("multiply", *divmod(number, slices))
        yield from prepare(number + ahead)
        yield Action("scatter", *divmod(number, slices))
    for number in range(count + ahead, count + slices):
        yield from prepare(number)


def check(slices: int, ranks: int, context: object, keep_gathered: bool | None) -> int:
    """`slices`. Raises ValueError where a model cannot have so many."""
    if not 1 <= slices <= MOST:
        raise ValueError(f"slices={slices}; use 1 to {MOST}.")
    if slices == 1:
        return slices
    if ranks == 1:
        raise ValueError(f"slices={slices} without tensor parallelism, where nothing travels; leave it at 1.")
    if context is not None:
        raise ValueError(
            f"slices={slices} with context parallelism, whose ranks do not hold sequences from their "
            "beginning; use one of them."
        )
    if keep_gathered is False:
        raise ValueError(f"slices={slices} keep their gathered input; leave keep_gathered out.")
    return slices


def lengths(seq: int, slices: int, ranks: int) -> tuple[int, ...]:
    """Tokens of each slice of a sequence: all but the last are multiples of the ranks, so that a rank's rows
    of all slices are as many as of the whole. Fewer slices where there are too few tokens."""
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

    def __init__(self, block: Block, step: Step, parts: Sequence[int]):
        self._block, self._step, self._parts = block, step, parts
        self.columns = SlicedColumn(block.qkv), SlicedColumn(block.gate_up)
        self.rows = SlicedRow(block.out), SlicedRow(block.down)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def middle(self, half: int, part: int, y: Tensor) -> Tensor:
        """Between the two linears of a half."""
        if half == 1:
            return swiglu(y)
        step, seq = self._step, self._parts[part]
        start = sum(self._parts[:part])
        cos, sin = step.cos[start : start + seq], step.sin[start : start + seq]
        q, k, v = apply_rope_qkv(
            y, cos, sin, step.batch, seq, step.heads, step.key_value_heads, overwrite_qkv=True
        )
        self._keys.append(k)
        self._values.append(v)
        if part > 0:
            k, v = torch.cat(self._keys, 2), torch.cat(self._values, 2)
        return causal_attention(q, k, v).transpose(1, 2).reshape(step.batch * seq, -1)


def run(
    blocks: Sequence[Block],
    x: Tensor,
    norms: Sequence[Tensor],
    step: Step,
    parts: Sequence[int],
    eps: float,
    recompute: bool,
) -> Tensor:
    """The residual stream [T/P, D] through some layers, as `Llama.run`. x, and what is returned: this rank's
    rows of each slice behind each other, see `places`."""
    ranks, rank = blocks[0].qkv.group.size, blocks[0].qkv.group.rank
    counts = [len(torch.arange(step.batch * seq).tensor_split(ranks)[rank]) for seq in parts]
    streams = x.split(counts)
    normed = [rms_norm(stream, norms[0], eps) for stream in streams]
    if not (recompute and torch.is_grad_enabled()):
        return torch.cat(_flow(blocks, norms[1:], step, parts, eps, *normed, *streams)[: len(parts)])
    state = (*normed, *streams)
    for index, block in enumerate(blocks):
        own = norms[2 * index + 1 : 2 * index + 3]
        # Stopped early, the second forward pass would leave flights that are under way. Nothing is random.
        state = checkpoint(
            _flow, [block], own, step, parts, eps, *state,
            use_reentrant=False, preserve_rng_state=False, early_stop=False,
        )  # fmt: skip
    return torch.cat(state[: len(parts)])


def _flow(
    blocks: Sequence[Block],
    norms: Sequence[Tensor],
    step: Step,
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
            layer.rows[half].begin(part, layer.middle(half, part, between.pop(part)))
        else:
            y = layer.rows[half].end(part)
            if action.half < len(norms):
                normed[part], streams[part] = add_rms_norm(y, streams[part], norms[action.half], eps)
            else:
                normed[part] = streams[part] = streams[part] + y
    return (*normed, *streams)
