"""Three variants of attention to the keys of all ranks, forward and backward.

ring            K and V travel round the ranks, half of a rank's tokens in each direction (`ways.py`); a rank
                computes one block while the next one travels. In the backward pass dK and dV follow one step
                behind: a rank adds its part to the received sum and sends it on; the owner's neighbour adds
                last. Where ranks see few keys of others, dK and dV go back as the keys came. Memory for a few
                times S / P tokens of K and V (arXiv 2310.01889, 2311.09431).
all_gather_kv   Gathers all of K and V first, then computes one block; dK and dV by reduce-scatter (Llama 3,
                arXiv 2407.21783, section 3.3.2). Memory for S tokens of K and V.
ulysses         All tokens of H / P heads instead of S / P tokens of all heads, by all-to-all (DeepSpeed-
                Ulysses, arXiv 2309.14509). P must divide the key/value heads.

For all input dtypes the sums out, log-sum-exp, dQ, dK and dV are fp32 (fp64 for fp64), also while dK and dV
travel. Every sum has a fixed order, so results are bitwise the same in every run.

Shapes: k and v [B, S/P, G, d]; q [B, n, H, d], of a rank's last n tokens; lse [B, H, n]. Blocks of the
sequence are computed by `pyruntime.ops.attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyruntime import ops
from pyruntime.choices import WireFormat
from pyruntime.comm import companion, process_group
from pyruntime.comm.all_to_all import AllToAll
from pyruntime.comm.ranges import marked
from pyruntime.comm.ring import Ring, Shift
from pyruntime.comm.wire import Wire
from pyruntime.context.agreement import agree
from pyruntime.context.mask import Mask, Run
from pyruntime.context.ways import NONE, Tokens, Way
from pyruntime.ops.attention import attention_block_, attention_block_backward_, nothing_seen

CLASS = "cp"
FIRST_KEYS = 0.25
"""Share of this rank's own keys that the ring's backward pass computes first; the rest comes last. Half as
many bytes (for bf16) travel during the first part as during the last."""


@dataclass(frozen=True)
class Attended:
    """The result of a forward pass."""

    out: Tensor
    """[B, n, H, d], in q's dtype."""
    lse: Tensor
    """Log-sum-exp of the scaled scores, for the queries that this rank computed."""
    kept: Tensor
    """Ulysses: Q, K and V after the all-to-all, so that the backward pass need not repeat it; else empty."""


def attend(
    variant: str, q: Tensor, k: Tensor, v: Tensor, group: str, mask: Mask, scale: float, wire: WireFormat
) -> Attended:
    """The forward pass of `variant`, which is not "auto". wire: only for the ring. Raises ValueError if the
    ranks' arguments differ."""
    agreement = agree(variant, q, k, group, mask, scale)
    if variant == "ring":
        out, lse = _ring(q, k, v, group, agreement, mask, scale, wire)
        return Attended(out.to(q.dtype), lse, q.new_empty(0))
    if variant == "all_gather_kv":
        keys, values = _gather(k, v, group, mask)
        out, lse = nothing_seen(q)
        _block(q, keys, values, mask.of_sequence(), scale, out, lse)
        return Attended(out.to(q.dtype), lse, q.new_empty(0))
    orders = (mask.order_of_queries, mask.order, mask.order)
    parts = [_to_heads(x, group, order) for x, order in zip((q, k, v), orders, strict=True)]
    kept = torch.cat([part.flatten(1, 2) for part in parts], dim=1)
    queries, keys, values = _split_heads(kept, q, k, group)
    out, lse = nothing_seen(queries)
    _block(queries, keys, values, mask.of_sequence(all_queries=True), scale, out, lse)
    return Attended(_to_tokens(out.to(q.dtype), group, mask.order_of_queries), lse, kept)


def attend_backward(
    variant: str,
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    done: Attended,
    group: str,
    mask: Mask,
    scale: float,
    wire: WireFormat,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dq, dk and dv for the forward pass `done`, in fp32 (fp64 for fp64)."""
    agreement = agree(variant, q, k, group, mask, scale)
    delta = (grad_out.to(done.lse.dtype) * done.out).sum(-1)  # [B, n, H]
    if variant == "ulysses":
        queries, keys, values = _split_heads(done.kept, q, k, group)
        delta = _to_heads(delta.unsqueeze(-1), group, mask.order_of_queries).squeeze(-1)
        grad_out = _to_heads(grad_out, group, mask.order_of_queries)
        backward = _Backward(grad_out, queries, delta.transpose(1, 2).contiguous(), done.lse, scale)
        dkv = backward.zeros((2, *keys.shape))
        backward.block(keys, values, mask.of_sequence(all_queries=True), dkv)
        dq = _to_tokens(backward.dq, group, mask.order_of_queries)
        dk, dv = (_to_tokens(each, group, mask.order) for each in dkv)
        return dq, dk, dv
    backward = _Backward(grad_out, q, delta.transpose(1, 2).contiguous(), done.lse, scale)
    if variant == "ring":
        dkv = _ring_backward(backward, k, v, group, agreement, mask, wire)
    else:
        keys, values = _gather(k, v, group, mask)
        whole = backward.zeros((2, *keys.shape))
        backward.block(keys, values, mask.of_sequence(), whole)
        dkv = _scatter(whole, group, mask)
    return backward.dq, dkv[0], dkv[1]


# -- one block


def _block(q: Tensor, k: Tensor, v: Tensor, run: Run, scale: float, out: Tensor, lse: Tensor) -> None:
    begin, end = _of_batch(run, q)
    attention_block_(_heads(q), _heads(k), _heads(v), begin, end, _heads(out), lse, scale)


class _Backward:
    """The backward pass of this rank's queries, block by block of keys."""

    def __init__(self, grad_out: Tensor, q: Tensor, delta: Tensor, lse: Tensor, scale: float):
        self._grad_out, self._q, self._delta, self._lse, self._scale = grad_out, q, delta, lse, scale
        self.dq = self.zeros(q.shape)

    def zeros(self, shape: Sequence[int]) -> Tensor:
        return torch.zeros(shape, dtype=self._lse.dtype, device=self._lse.device)

    def block(self, k: Tensor, v: Tensor, run: Run, dkv: Tensor) -> None:
        """Adds the part of these keys to dq, and the part of the queries to dkv [2, B, keys, G, d]."""
        begin, end = _of_batch(run, self._q)
        attention_block_backward_(
            _heads(self._grad_out),
            _heads(self._q),
            _heads(k),
            _heads(v),
            begin,
            end,
            self._delta,
            self._lse,
            _heads(self.dq),
            _heads(dkv[0]),
            _heads(dkv[1]),
            self._scale,
        )


def _heads(tokens: Tensor) -> Tensor:
    """Returns [B, heads, S, d] for [B, S, heads, d]."""
    return tokens.transpose(1, 2)


def _of_batch(run: Run, q: Tensor) -> tuple[Tensor, Tensor]:
    begin, end = (x.expand(len(q), -1) for x in run)
    return begin, end


# -- ring


def _ring(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: str,
    agreement: int,
    mask: Mask,
    scale: float,
    wire: WireFormat,
) -> tuple[Tensor, Tensor]:
    out, lse = nothing_seen(q)
    rounds, k, v = _rounds(group, agreement, k, v, mask, wire)
    rank = rounds[0].rank
    for each in rounds:
        each.start()
    with marked("cp forward block of rank", str(rank)):
        _block(q, k, v, mask.of_rank(rank), scale, out, lse)
    for _ in range(1, rounds[0].size):
        for each in rounds:
            block = each.take()
            if block is not None:
                with marked("cp forward block of rank", str(block.owner)):
                    _block(q, block.keys, block.values, block.run(mask), scale, out, lse)
            each.done()
    return out, lse


def _ring_backward(
    backward: _Backward, k: Tensor, v: Tensor, group: str, agreement: int, mask: Mask, wire: WireFormat
) -> Tensor:
    """Returns dK and dV [2, B, S/P, G, d]. A first part of this rank's own keys hides the arrival of the
    others' K and V; the rest, computed last, hides the arrival of the sums of this rank's gradients."""
    own = backward.zeros((2, *k.shape))
    rounds, k, v = _rounds(group, agreement, k, v, mask, wire)
    rank, size = rounds[0].rank, rounds[0].size
    first = k.shape[1] if size == 1 else int(k.shape[1] * FIRST_KEYS)

    def own_keys(begin: int, end: int) -> None:
        if begin < end:
            first_key, last_key = mask.of_rank(rank)
            seen = (first_key - begin, last_key - begin) if begin else (first_key, last_key)
            with marked("cp backward block of rank", str(rank)):
                backward.block(k[:, begin:end], v[:, begin:end], seen, own[:, :, begin:end])

    for each in rounds:
        each.start()
    own_keys(0, first)
    if rounds[0].way.comes_back:
        _sums_there_and_back(backward, rounds, group, agreement, mask, own, own_keys, first)
        return own
    sums = [_SumsRound(each, own) for each in rounds]
    for _ in range(1, size):
        for keys, gradients in zip(rounds, sums, strict=True):
            block = keys.take()
            room = gradients.room()
            if block is not None:
                with marked("cp backward block of rank", str(block.owner)):
                    backward.block(block.keys, block.values, block.run(mask), room.of(block.seen))
            keys.done()
            gradients.send()
    own_keys(first, k.shape[1])
    for gradients in sums:
        gradients.come_home(own)
    return own


def _sums_there_and_back(
    backward: _Backward,
    rounds: Sequence[_KeysRound],
    group: str,
    agreement: int,
    mask: Mask,
    own: Tensor,
    own_keys: Callable[[int, int], None],
    first: int,
) -> None:
    """Adds to `own` what all ranks have of it. The rest of this rank's own keys, from `first` on, is computed
    in parts while sums travel, from the farthest ranks to the owners."""
    returns = [_Return(each, group, agreement, own) for each in rounds]
    reach = max(each.way.reach for each in rounds)
    for _ in range(1, rounds[0].size):
        for keys, gradients in zip(rounds, returns, strict=True):
            block = keys.take()
            room = gradients.room()
            if block is not None:
                with marked("cp backward block of rank", str(block.owner)):
                    backward.block(block.keys, block.values, block.run(mask), room.of(block.seen))
            keys.done()
    ends = [first + (own.shape[2] - first) * part // max(1, reach) for part in range(max(1, reach) + 1)]
    for part, distance in enumerate(range(reach, 0, -1)):
        for gradients in returns:
            gradients.send(distance)
        own_keys(ends[part], ends[part + 1])
        for gradients in returns:
            gradients.add(distance, own)
    if reach == 0:
        own_keys(*ends)


def _rounds(
    group: str, agreement: int, k: Tensor, v: Tensor, mask: Mask, wire: WireFormat
) -> tuple[list[_KeysRound], Tensor, Tensor]:
    """Returns a round for each way, and K and V rounded as all ranks read them."""
    travel = Wire(wire, k.shape[-1], k.dtype, k.device)
    sent = travel.packed(k), travel.packed(v)
    rounds = [_KeysRound(Ring(group, CLASS, agreement, way.step), way, sent, travel) for way in mask.ways]
    return rounds, travel.unpacked(sent[0]), travel.unpacked(sent[1])


@dataclass(frozen=True)
class _Block:
    """Keys and values of another rank that this one sees, [B, n, G, d]; valid until the round's done()."""

    owner: int
    seen: Tokens
    keys: Tensor
    values: Tensor

    def run(self, mask: Mask) -> Run:
        begin, end = mask.of_rank(self.owner)
        return begin - self.seen[0], end - self.seen[0]


class _KeysRound:
    """Passes K and V of all ranks round the ring on one way: start(), then take() and done() for each rank.

    own: this rank's K and V in the format of `wire`; ranks pass on the received bytes unchanged."""

    def __init__(self, ring: Ring, way: Way, own: tuple[Tensor, Tensor], wire: Wire):
        self.rank, self.size, self.way = ring.rank, ring.size, way
        self.ring, self._own, self._wire = ring, own, wire
        self.distance = 0
        """Distance of the owner of the last received block."""
        self._current: Shift | None = None
        self._next: Shift | None = None

    @property
    def owner(self) -> int:
        return self.way.owner(self.rank, self.distance)

    def start(self) -> None:
        """Sends this rank's own K and V."""
        self._pass_on(self._own, (0, self._own[0].shape[1]))
        self.done()

    def take(self) -> _Block | None:
        """Receives the block of the next owner and passes it on, so that it travels while this rank computes
        with it. Returns the keys that this rank sees; None if it sees none."""
        self.distance += 1
        tokens = self.way.keys(self.owner, self.distance)
        assert self._current is not None
        with marked("cp take keys"):
            k, v = _of_pair(self._current.receive(), self._own[0], tokens)
        self._pass_on((k, v), tokens)
        seen = self.way.seen(self.rank, self.owner)
        if seen == NONE:
            return None
        keys, values = (self._wire.unpacked(_of_tokens(each, seen, tokens)) for each in (k, v))
        return _Block(self.owner, seen, keys, values)

    def _pass_on(self, kv: tuple[Tensor, Tensor], tokens: Tokens) -> None:
        """Sends on the part of `kv`, which has these tokens, that ranks further along need."""
        distance = self.distance + 1
        if distance == self.size:
            return
        going = self.way.keys(self.owner, distance)
        coming = self.way.keys(self.way.owner(self.rank, distance), distance)
        with marked("cp send keys"):
            self._next = _shift(self.ring, self._own[0], going, coming)
            if going != NONE:
                for room, own in zip(_of_pair(self._next.outgoing, self._own[0], going), kv, strict=True):
                    room.copy_(_of_tokens(own, going, tokens))
            self._next.send()

    def done(self) -> None:
        if self._current is not None:
            self._current.finish()
        self._current, self._next = self._next, None


@dataclass(frozen=True)
class _Room:
    """Memory [2, B, n, G, d] where the gradients of the keys of `tokens` are summed."""

    sums: Tensor
    tokens: Tokens

    def of(self, tokens: Tokens) -> Tensor:
        return _of_tokens(self.sums, tokens, self.tokens)


class _SumsRound:
    """Passes the sums of dK and dV along the way of their keys, a step behind: in turn room() and send()."""

    def __init__(self, keys: _KeysRound, own: Tensor):
        self._keys, self._like = keys, own[0]
        self._now: tuple[Shift, _Room, Tokens] | None = None
        self._before: tuple[Shift, Tokens] | None = None

    def room(self) -> _Room:
        """Returns zeros, into which this rank sums its gradients of the keys received last."""
        way, rank, distance = self._keys.way, self._keys.rank, self._keys.distance
        going = way.sums(self._keys.owner, distance)
        coming = way.sums(way.owner(rank, distance + 1), distance)
        shift = _shift(self._keys.ring, self._like, going, coming)
        room = _Room(_of_pair(shift.outgoing, self._like, going).zero_(), going)
        self._now = shift, room, coming
        return room

    def send(self) -> None:
        """Adds the received sums to this rank's part and sends the result on."""
        assert self._now is not None
        shift, room, coming = self._now
        self._add(room)
        with marked("cp send gradients"):
            shift.send()
        self._before = shift, coming

    def come_home(self, own: Tensor) -> None:
        """Adds the other ranks' sums of this rank's gradients to `own`."""
        self._add(_Room(own, (0, own.shape[2])))

    def _add(self, room: _Room) -> None:
        if self._before is None:
            return
        shift, tokens = self._before
        with marked("cp take gradients"):
            if tokens != NONE:
                part = room.of(tokens)
                part.add_(shift.receive().view(part.shape))
            shift.finish()


class _Return:
    """Keeps this rank's sums of dK and dV for the keys that come on one way, and passes them back to their
    owners: room() after each take(), then for each distance, the largest first, send() and add()."""

    def __init__(self, keys: _KeysRound, group: str, agreement: int, own: Tensor):
        self._keys, self._own = keys, own
        self._ring = Ring(group, CLASS, agreement, -keys.way.step)
        self._rooms: dict[int, _Room] = {}
        self._coming: tuple[Shift, Tokens] | None = None

    def room(self) -> _Room:
        """Returns zeros for the sums of the keys received last, and of those that ranks further along see."""
        distance = self._keys.distance
        tokens = self._keys.way.seen_from(self._keys.owner, distance)
        shape = list(self._own.shape)
        shape[2] = tokens[1] - tokens[0]
        self._rooms[distance] = _Room(self._own.new_zeros(shape), tokens)
        return self._rooms[distance]

    def send(self, distance: int) -> None:
        """Sends the sums for the owner at that distance to the rank that is nearer to it, and begins to
        receive such from the rank further along."""
        way, rank, room = self._keys.way, self._keys.rank, self._rooms.pop(distance)
        coming = way.seen_from(way.owner(rank, distance - 1), distance)
        with marked("cp send gradients"):
            shift = _shift(self._ring, self._own[0], room.tokens, coming)
            if room.tokens != NONE:
                _of_pair(shift.outgoing, self._own[0], room.tokens).copy_(room.sums)
            shift.send()
        self._coming = shift, coming

    def add(self, distance: int, own: Tensor) -> None:
        """Adds the received sums, which are of the owner at one less than that distance, maybe this rank."""
        assert self._coming is not None
        shift, tokens = self._coming
        with marked("cp take gradients"):
            if tokens != NONE:
                whole = _Room(own, (0, own.shape[2])) if distance == 1 else self._rooms[distance - 1]
                part = whole.of(tokens)
                part.add_(shift.receive().view(part.shape))
            shift.finish()


def _shift(ring: Ring, like: Tensor, going: Tokens, coming: Tokens) -> Shift:
    """Returns a shift that sends and receives a pair of tensors [B, n, G, d] like `like`, of these tokens."""
    batch, _, heads, width = like.shape
    outgoing, incoming = (2 * batch * heads * (end - begin) for begin, end in (going, coming))
    return ring.shift(outgoing, incoming, width, like.dtype, like.device)


def _of_pair(rows: Tensor, like: Tensor, tokens: Tokens) -> Tensor:
    """Returns the rows of a shift as [2, B, n, G, d]."""
    batch, _, heads, width = like.shape
    return rows.view(2, batch, tokens[1] - tokens[0], heads, width)


def _of_tokens(x: Tensor, wanted: Tokens, held: Tokens) -> Tensor:
    """Returns the tokens `wanted` of x [..., n, G, d], which has the tokens `held`."""
    return x[..., wanted[0] - held[0] : wanted[1] - held[0], :, :]


# -- all-gather of K and V


def _gather(k: Tensor, v: Tensor, group: str, mask: Mask) -> tuple[Tensor, Tensor]:
    """Returns K and V of all ranks in the order of the sequence, [B, S, G, d] each."""
    ranks = len(mask.positions)
    own = torch.stack((k, v))
    if ranks > 1:
        rows = ops.all_gather(own.flatten(0, -2), _companion(group), rows=ranks * own[..., 0].numel())
        own = rows.view(ranks, *own.shape).movedim(0, 2).flatten(2, 3)
    keys, values = own.index_select(2, mask.order)
    return keys, values


def _scatter(dkv: Tensor, group: str, mask: Mask) -> Tensor:
    """Sums dkv [2, B, S, G, d] over ranks; returns this rank's dK and dV [2, B, S/P, G, d]."""
    ranks, share = mask.positions.shape
    by_rank = dkv.index_select(2, mask.places)
    if ranks == 1:
        return by_rank
    rows = by_rank.unflatten(2, (ranks, share)).movedim(2, 0).flatten(0, -2)
    own = ops.reduce_scatter(rows, _companion(group))
    return own.view(*dkv.shape[:2], share, *dkv.shape[3:])


def _companion(group: str) -> str:
    return companion(group, CLASS).name


# -- heads instead of tokens


def _to_heads(x: Tensor, group: str, order: Tensor) -> Tensor:
    """Exchanges [B, n, H, d] for [B, n P, H/P, d]: this rank's heads of the tokens of all ranks, in sequence
    order. order: `Mask.order` or `Mask.order_of_queries`."""
    ranks = process_group(group).size()
    by_rank = x.unflatten(2, (ranks, x.shape[2] // ranks)).movedim(2, 0)
    tokens = _all_to_all(by_rank, group).movedim(0, 1).flatten(1, 2)
    return tokens.index_select(1, order)


def _to_tokens(x: Tensor, group: str, order: Tensor) -> Tensor:
    """Exchanges [B, n P, H/P, d] for [B, n, H, d], all heads of this rank's tokens: reverses `_to_heads`."""
    ranks = process_group(group).size()
    joined = torch.empty_like(x).index_copy_(1, order, x)
    by_rank = joined.unflatten(1, (ranks, x.shape[1] // ranks)).movedim(1, 0)
    return _all_to_all(by_rank, group).movedim(0, 2).flatten(2, 3).contiguous()


def _split_heads(joined: Tensor, q: Tensor, k: Tensor, group: str) -> tuple[Tensor, Tensor, Tensor]:
    """Splits [B, tokens * heads, d] into the queries, keys and values [B, tokens, heads, d] joined in it."""
    ranks = process_group(group).size()
    sizes = [x.shape[1] * x.shape[2] for x in (q, k, k)]
    queries, keys, values = (
        part.unflatten(1, (x.shape[1] * ranks, x.shape[2] // ranks))
        for part, x in zip(joined.split(sizes, dim=1), (q, k, k), strict=True)
    )
    return queries, keys, values


def _all_to_all(by_rank: Tensor, group: str) -> Tensor:
    """Sends by_rank[r] to each rank r; returns what each rank sent, [P, ...]. Not overlapped."""
    sent = by_rank.contiguous()
    if len(sent) == 1:
        return sent
    ones = [1] * len(sent)
    return AllToAll(group, _companion(group), sent, ones, ones).wait()
