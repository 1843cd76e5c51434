"""Causal slices of a sequence inside a tensor-parallel group: one slice's rows travel while another computes.

Slice c needs from other slices only the keys and values of slices <= c (TeraPipe, arXiv 2102.07988,
section 3.1), so each goes through the layers by itself. A layer has two halves of the same form::

    begin      send this rank's rows of the normalised stream    half 0: for qkv       half 1: for gate and up
    multiply   column linear on the gathered rows                qkv                   gate and up
    scatter    the next operator, and a row linear, sent         attention, out        silu(gate) * up, down
    finish     add the received sums to the stream, normalise it for the next half

Where a layer has experts, half 1 sends rows to them, and `scatter` is what they compute; with a shared expert
it does the above too.

If context ranks share the sequence, a slice has tokens of all of them. Its attention passes the keys of
slices <= c round the ring: those of slice c' travel C - c' times.

Number the pairs (half, slice) in order, with C slices. Between multiply and scatter of pair i, pair i - C / 2
is finished and its slice begins the next half. So the sums travel behind as much work as the rows after them.

Without tensor parallelism only rows of experts travel. Then slices go through layers two by two::

    attention 0, begin, attention 1, begin, experts 0, experts 1; next layer: finish, attention 0, begin, ...

So rows travel behind the attention or the experts of the other slice, sums behind its experts or attention.

The backward pass runs through the same order in reverse, as autograd does (csrc/ops/slices).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pyruntime.llama.attention import causal_attention
from pyruntime.llama.block import Block, head_norm_weights
from pyruntime.llama.elementwise import for_this_pass
from pyruntime.nn.sliced import (
    MOST_GATHERED_AGAIN,
    SlicedColumn,
    SlicedExperts,
    SlicedRouter,
    SlicedRow,
    SlicedScores,
)

if TYPE_CHECKING:
    from pyruntime.choices import Recomputation
    from pyruntime.context import Context
    from pyruntime.llama.block import ForwardPass
    from pyruntime.llama.elementwise import Elementwise
    from pyruntime.llama.expert_layer import MixtureOfExperts
    from pyruntime.nn import ColumnParallelLinear, RowParallelLinear

MOST = 4
"""Limit on slices: more would need more open flights than a group has slots."""
MOST_OF_LAYOUT = {"striped": MOST, "zigzag": 2, "contiguous": 1, "placed": 1}
"""Limit on slices by context layout. Each slice has tokens of every context rank and lies before the next;
a zigzag rank has one part in each half of a sequence."""


Kind = Literal["begin", "multiply", "scatter", "finish"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class SliceAction:
    """One step of one slice through half a layer; the kinds are in the module's docstring."""

    kind: Kind
    half: int
    part: int
    """The slice."""


def order(halves: int, slices: int, *, attention_travels: bool = True) -> Iterator[SliceAction]:
    """Yields the order in which one thread takes `slices` through `halves` halves of layers; the same on all
    ranks. attention_travels: whether rows of the first half of a layer are sent."""
    if not attention_travels:
        yield from _two_by_two(halves // 2, slices)
        return
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


def _two_by_two(layers: int, slices: int) -> Iterator[SliceAction]:
    """`order` where only rows of second halves travel."""

    def action(kind: Kind, half: int, number: int) -> SliceAction:
        layer, part = divmod(number, slices)
        return SliceAction(kind, 2 * layer + half, part)

    count = layers * slices
    for first in range(0, count, 2):
        pair = range(first, min(first + 2, count))
        for number in pair:
            if number >= 2:
                yield action("finish", 1, number - 2)
            for kind in KINDS:
                yield action(kind, 0, number)
            yield action("begin", 1, number)
        if len(pair) == 1:  # before its backward begins, that of this one is over: so slots suffice
            yield action("finish", 1, first - 1)
        for number in pair:
            yield action("multiply", 1, number)
            yield action("scatter", 1, number)
    for number in pair:
        yield action("finish", 1, number)


def check(slices: int, ranks: int, experts: int, context: Context | None, keep_gathered: bool | None) -> int:
    """Returns `slices`. Raises ValueError if a model cannot have that many. ranks, experts: the sizes of the
    tensor-parallel group and of the group over which experts lie, 1 without experts."""
    if not 1 <= slices <= MOST:
        raise ValueError(f"slices={slices}; use 1 to {MOST}.")
    if slices == 1:
        return slices
    if ranks == experts == 1:
        raise ValueError(
            f"slices={slices} hide nothing without tensor parallelism or experts over several ranks; leave "
            "it at 1."
        )
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


class _Half(Protocol):
    """Half a layer in one forward pass: what each slice does in the steps of the module's docstring."""

    def begin(self, part: int, x: Tensor) -> None:
        """Takes this rank's rows of the normalised stream."""

    def multiply(self, part: int) -> None: ...

    def scatter(self, part: int) -> None: ...

    def end(self, part: int) -> Tensor:
        """Returns what `finish` adds to this rank's rows of the stream."""


class _Attention:
    """The first half of a layer."""

    def __init__(
        self,
        block: Block,
        step: ForwardPass,
        parts: Sequence[int],
        head_norms: Sequence[Tensor],
        between: Elementwise,
    ):
        self._block, self._step, self._parts, self._between = block, step, parts, between
        self._head_norms = head_norms
        rows = [step.batch * part for part in parts]
        self._qkv, self._out = SlicedColumn(block.qkv, rows), SlicedRow(block.out, rows)
        self._made: dict[int, Tensor] = {}
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def begin(self, part: int, x: Tensor) -> None:
        self._qkv.begin(part, x)

    def multiply(self, part: int) -> None:
        self._made[part] = self._qkv.end(part)

    def scatter(self, part: int) -> None:
        self._out.begin(part, self._attended(part, self._made.pop(part)))

    def end(self, part: int) -> Tensor:
        return self._out.end(part)

    def _attended(self, part: int, qkv: Tensor) -> Tensor:
        block, step, seq = self._block, self._step, self._parts[part]
        start = sum(self._parts[:part])
        cos, sin = step.cos[start : start + seq], step.sin[start : start + seq]
        context, window = step.context, block.window
        if block.has_head_norms:
            qkv = block.with_normed_heads(qkv, step, self._between, self._head_norms)
        q, k, v = self._between.rope(
            qkv, cos, sin, step.batch, seq, step.heads, step.key_value_heads, overwrite_qkv=context is None
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


class _Network:
    """A column linear, silu(gate) * up, and a row linear. Its product is computed `Block.again`."""

    def __init__(
        self,
        block: Block,
        gate_up: ColumnParallelLinear,
        down: RowParallelLinear,
        rows: Sequence[int],
        between: Elementwise,
    ):
        self._again, self._swiglu = block.again, between.swiglu
        self._gate_up, self._down = SlicedColumn(gate_up, rows), SlicedRow(down, rows)
        self._made: dict[int, Tensor] = {}

    def begin(self, part: int, x: Tensor) -> None:
        self._gate_up.begin(part, x)

    def multiply(self, part: int) -> None:
        self._made[part] = self._gate_up.end(part)

    def scatter(self, part: int) -> None:
        made = self._made.pop(part)
        product = self._swiglu(made)
        with self._again(product, self._swiglu, made):
            self._down.begin(part, product)

    def end(self, part: int) -> Tensor:
        return self._down.end(part)


class _Mixture:
    """Experts in the place of a network, and the network that all rows go to beside them, if there is one."""

    def __init__(self, block: Block, mixture: MixtureOfExperts, rows: Sequence[int], between: Elementwise):
        self._router = SlicedRouter(mixture.router, len(rows))
        self._experts = SlicedExperts(mixture.experts, mixture.rows_of_slices(rows))
        self._shared = self._gate = None
        if mixture.has_shared:
            linears = mixture.shared_gate_up, mixture.shared_down
            self._shared = _Network(block, *linears, rows, between)
        if mixture.has_shared_gate:
            self._gate = SlicedScores(mixture.shared_gate)
        self._gates: dict[int, Tensor] = {}

    def begin(self, part: int, x: Tensor) -> None:
        self._experts.begin(part, x, self._router.route(part, x))
        if self._gate is not None:
            self._gates[part] = self._gate.of(x).sigmoid()
        if self._shared is not None:
            self._shared.begin(part, x)

    def multiply(self, part: int) -> None:
        self._experts.multiply(part)
        if self._shared is not None:
            self._shared.multiply(part)

    def scatter(self, part: int) -> None:
        self._experts.scatter(part)
        if self._shared is not None:
            self._shared.scatter(part)

    def end(self, part: int) -> Tensor:
        y = self._experts.end(part)
        if self._shared is None:
            return y
        shared = self._shared.end(part)
        return y + (self._gates.pop(part).to(y.dtype) * shared if part in self._gates else shared)


def _halves(
    block: Block, step: ForwardPass, parts: Sequence[int], head_norms: Sequence[Tensor]
) -> tuple[_Half, _Half]:
    between, rows = for_this_pass(block.elementwise), [step.batch * part for part in parts]
    if block.mixture is None:
        network: _Half = _Network(block, block.gate_up, block.down, rows, between)
    else:
        network = _Mixture(block, block.mixture, rows, between)
    return _Attention(block, step, parts, head_norms, between), network


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
    slices, between = len(parts), for_this_pass(blocks[0].elementwise)
    normed, streams = list(state[:slices]), list(state[slices:])
    # Before any slice begins, so that their gradients are summed when no flight is open.
    head_norms = head_norm_weights(blocks)
    halves = [
        half
        for block, weights in zip(blocks, head_norms, strict=True)
        for half in _halves(block, step, parts, weights)
    ]
    for action in order(len(halves), slices, attention_travels=blocks[0].qkv.group.size > 1):
        half, part = halves[action.half], action.part
        if action.kind == "begin":
            half.begin(part, normed[part])
        elif action.kind == "multiply":
            half.multiply(part)
        elif action.kind == "scatter":
            half.scatter(part)
        else:
            y = half.end(part)
            if action.half < len(norms):
                normed[part], streams[part] = between.of_sum(y, streams[part], norms[action.half], eps)
            else:
                normed[part] = streams[part] = streams[part] + y
    return (*normed, *streams)
