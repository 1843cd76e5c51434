"""The ring's forward and backward pass: what travels is planned in `ways.py`; shapes as in `variants.py`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pyruntime.choices import WireFormat
from pyruntime.comm.ranges import marked
from pyruntime.comm.ring import Ring, Shift
from pyruntime.comm.wire import Wire
from pyruntime.context.block_attention import Backward, attend_block
from pyruntime.context.mask import Mask, SeenKeys
from pyruntime.context.ways import NONE, Tokens, Way
from pyruntime.ops.attention import nothing_seen

CLASS = "cp"
"""The class of all traffic of context parallelism."""
FIRST_KEYS = 0.25
"""Share of this rank's own keys that the ring's backward pass computes first; the rest comes last. Half as
many bytes (for bf16) travel during the first part as during the last."""


def ring_forward(
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
        attend_block(q, k, v, mask.of_rank(rank), scale, out, lse)
    for _ in range(1, rounds[0].size):
        for each in rounds:
            block = each.take()
            if block is not None:
                with marked("cp forward block of rank", str(block.owner)):
                    attend_block(q, block.keys, block.values, block.seen_keys(mask), scale, out, lse)
            each.done()
    return out, lse


def ring_backward(
    backward: Backward, k: Tensor, v: Tensor, group: str, agreement: int, mask: Mask, wire: WireFormat
) -> Tensor:
    """Returns dK and dV [2, B, S/P, G, d]. A first part of this rank's own keys hides the arrival of the
    others' K and V; the rest, computed last, hides the arrival of the sums of this rank's gradients."""
    own = backward.zeros((2, *k.shape))
    rounds, k, v = _rounds(group, agreement, k, v, mask, wire)
    rank, size = rounds[0].rank, rounds[0].size
    first = k.shape[1] if size == 1 else int(k.shape[1] * FIRST_KEYS)

    def own_keys(begin: int, end: int) -> None:
        if begin < end:
            seen = mask.of_rank(rank).after(begin)
            with marked("cp backward block of rank", str(rank)):
                backward.block(k[:, begin:end], v[:, begin:end], seen, own[:, :, begin:end])

    for each in rounds:
        each.start()
    own_keys(0, first)
    comes_back = rounds[0].way.comes_back
    sums = [_Return(each, group, agreement, own) if comes_back else _SumsRound(each, own) for each in rounds]
    for _ in range(1, size):
        for keys, gradients in zip(rounds, sums, strict=True):
            block = keys.take()
            room = gradients.room()
            if block is not None:
                with marked("cp backward block of rank", str(block.owner)):
                    backward.block(block.keys, block.values, block.seen_keys(mask), room.of(block.seen))
            keys.done()
            gradients.send()
    # The rest of the own keys, a part for each hop that sums have left.
    hops = max(each.hops for each in sums)
    ends = [first + (k.shape[1] - first) * part // hops for part in range(hops + 1)]
    for part, left in enumerate(range(hops, 0, -1)):
        for gradients in sums:
            gradients.begin_hop(left)
        own_keys(ends[part], ends[part + 1])
        for gradients in sums:
            gradients.end_hop(left)
    return own


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

    def seen_keys(self, mask: Mask) -> SeenKeys:
        return mask.of_rank(self.owner).after(self.seen[0])


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

    def add(self, shift: Shift, tokens: Tokens) -> None:
        """Adds the sums of these tokens when they have come."""
        with marked("cp take gradients"):
            if tokens != NONE:
                part = self.of(tokens)
                part.add_(shift.receive().view(part.shape))
            shift.finish()


class _SumsRound:
    """Passes the sums of dK and dV on along the way of their keys, a step behind: in turn room() and send(),
    then the one hop that is left, to the owner. own: this rank's dK and dV."""

    hops = 1

    def __init__(self, keys: _KeysRound, own: Tensor):
        self._keys, self._own = keys, own
        self._now: tuple[Shift, _Room, Tokens] | None = None
        self._before: tuple[Shift, Tokens] | None = None

    def room(self) -> _Room:
        """Returns zeros, into which this rank sums its gradients of the keys received last."""
        way, rank, distance = self._keys.way, self._keys.rank, self._keys.distance
        going = way.sums(self._keys.owner, distance)
        coming = way.sums(way.owner(rank, distance + 1), distance)
        shift = _shift(self._keys.ring, self._own[0], going, coming)
        room = _Room(_of_pair(shift.outgoing, self._own[0], going).zero_(), going)
        self._now = shift, room, coming
        return room

    def send(self) -> None:
        """Adds the received sums to this rank's part and sends the result on."""
        assert self._now is not None
        shift, room, coming = self._now
        if self._before is not None:
            room.add(*self._before)
        with marked("cp send gradients"):
            shift.send()
        self._before = shift, coming

    def begin_hop(self, left: int) -> None:
        """The sums are on their way already."""

    def end_hop(self, left: int) -> None:
        """Adds the other ranks' sums of this rank's gradients to its own."""
        if left == 1 and self._before is not None:
            _whole(self._own).add(*self._before)


class _Return:
    """Keeps this rank's sums of dK and dV for the keys that come on one way, and passes them back as the keys
    came, from the farthest ranks to the owners: room() and send() for each owner, then the hops. own: this
    rank's dK and dV."""

    def __init__(self, keys: _KeysRound, group: str, agreement: int, own: Tensor):
        self._keys, self._own = keys, own
        self._ring = Ring(group, CLASS, agreement, -keys.way.step)
        self._rooms: dict[int, _Room] = {}
        """Rooms by the distance of the keys' owner."""
        self._coming: tuple[Shift, Tokens] | None = None
        self.hops = max(1, keys.way.reach)

    def room(self) -> _Room:
        """Returns zeros for the sums of the keys received last, and of those that ranks further along see."""
        distance = self._keys.distance
        tokens = self._keys.way.seen_from(self._keys.owner, distance)
        shape = list(self._own.shape)
        shape[2] = tokens[1] - tokens[0]
        self._rooms[distance] = _Room(self._own.new_zeros(shape), tokens)
        return self._rooms[distance]

    def send(self) -> None:
        """Sends nothing before the ranks further along have computed their parts."""

    def begin_hop(self, left: int) -> None:
        """Sends the sums for the owner at distance `left` to the rank that is nearer to it, and begins to
        receive such from the rank further along."""
        way, rank, room = self._keys.way, self._keys.rank, self._rooms.pop(left)
        coming = way.seen_from(way.owner(rank, left - 1), left)
        with marked("cp send gradients"):
            shift = _shift(self._ring, self._own[0], room.tokens, coming)
            if room.tokens != NONE:
                _of_pair(shift.outgoing, self._own[0], room.tokens).copy_(room.sums)
            shift.send()
        self._coming = shift, coming

    def end_hop(self, left: int) -> None:
        """Adds the received sums, which are of the owner at one less than that distance, maybe this rank."""
        assert self._coming is not None
        room = _whole(self._own) if left == 1 else self._rooms[left - 1]
        room.add(*self._coming)


def _whole(own: Tensor) -> _Room:
    return _Room(own, (0, own.shape[2]))


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
