"""Muon: a matrix steps along its orthogonalized momentum, which needs the whole matrix.

A rank has rows of a matrix, or of its tensor-parallel shard, and their momentum. One rank owns the matrix and
orthogonalizes it. It gets the rows over the ranks that share states, then over the tensor-parallel ranks; the
result goes back the same way::

    rows [r, c] -> shard [R, c] on ranks (owner, 0..T-1) -> matrix [M, N] on rank (owner, owner)
    rows of O   <- shard of O                             <- O = Newton-Schulz(matrix)

Every rank owns matrices of about as much work. If the step before was not clipped, a bucket's matrices leave
as soon as its gradient is reduced, during the backward pass. Owners multiply them in the waits of that pass
and of the step's exchanges, as weight gradients are (csrc/ops/newton_schulz.h); on devices on a stream of its
own. step() needs the directions, so it multiplies the rest while those of others arrive. A step that is
clipped after all begins anew with the factor; momentum and weights have not changed.

Of experts, a rank has rows of a stack of matrices. It orthogonalizes those itself that it has whole; they do
not travel.

On devices the host waits for nothing: a factor that is a tensor there is not read.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from pyruntime.comm.core import _C
from pyruntime.comm.ranges import marked
from pyruntime.data_parallel.axes import Axes, FlightAxis
from pyruntime.data_parallel.buckets import Bucket
from pyruntime.data_parallel.pieces import Gathering, MatrixCut, Scattering, Wholes
from pyruntime.data_parallel.update import Own, PartState

LIKE_ADAMW = 0.2
"""Root mean square of AdamW's step over its rate (Liu et al. 2025, arXiv 2502.16982, section 2.2)."""
PLACE = 3
"""Place within traffic class dp, after gradients, weights and what replicas exchange."""
MOST = 2
"""Flights under way at once: an owner multiplies matrices that left two buckets before."""

T = TypeVar("T")
U = TypeVar("U")
V = TypeVar("V")


@dataclass(frozen=True)
class Muon:
    """The parameters that Muon updates in place of AdamW (Jordan 2024, kellerjordan.github.io/posts/muon; the
    factor of the step: Liu et al. 2025, arXiv 2502.16982, equation 4)::

        M = momentum M + (1 - momentum) G         O = Newton-Schulz(momentum M + (1 - momentum) G)
        W = W (1 - lr decay) - lr 0.2 sqrt(max(m, n)) O             of W [m, n]

    That is torch.optim.Muon with adjust_lr_fn="match_rms_adamw", except that moments and masters are fp32 and
    Newton-Schulz has the weights' dtype. The parts of merged parameters (q, k, v) are separate matrices.

    matrices: of hidden layers. Leave embeddings, heads and what is no matrix to AdamW.
    momentum: decay of the gradient's running mean in a step.
    stacks: parameters [E, m, n] of experts, and how many matrices of equal size follow each other in m: 2 for
        gate and up, 1 for one matrix. Each expert's are separate.
    """

    matrices: Sequence[nn.Parameter] = ()
    momentum: float = 0.95
    stacks: Mapping[nn.Parameter, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Matrix:
    """The layout of a matrix over the ranks: this rank has rows of its tensor-parallel rank's part."""

    shape: tuple[int, int]
    """Shape of the whole matrix."""
    over_shard: MatrixCut
    over_tp: MatrixCut | None
    """The cut over tensor-parallel ranks; None: each of them has it whole."""
    tp_group: str
    tp_rank: int

    @classmethod
    def of(cls, state: PartState, shards: int) -> Matrix:
        part, parameter = state.part, state.parameter
        local = (part.rows, parameter.shape[1])
        layout = getattr(parameter, "tp_layout", None)
        if layout is not None and layout.dim_y is not None:
            raise ValueError(
                f"{part.key} is cut over two axes of tensor parallelism ({layout.group}), and Muon supports "
                "only one; leave it to AdamW."
            )
        if layout is None or layout.dim is None or layout.group.size == 1:
            return cls(local, MatrixCut(local, 0, shards), None, "", 0)
        whole = next(each.shape for each in layout.parts if f".{part.key}".endswith(f".{each.key}"))
        rows, columns = whole
        over_tp = MatrixCut((rows, columns), layout.dim, layout.group.size)
        return cls(whole, MatrixCut(local, 0, shards), over_tp, layout.group.name, layout.group.rank)

    @classmethod
    def of_stack(cls, state: PartState, parts: int) -> tuple[Matrix, ...]:
        """Returns the matrices of a stack of experts, `parts` of each expert, as they follow each other.

        Raises ValueError if these are not of equal size."""
        _, rows, columns = state.part.shape
        if rows % parts:
            raise ValueError(
                f"{state.part.key} has {rows} rows an expert, not {parts} matrices of equal size."
            )
        shape, every, shards = (rows // parts, columns), state.part.rows, state.axes.shard.size
        firsts = range(0, every, shape[0])
        return tuple(cls(shape, MatrixCut(shape, 0, shards, every, first), None, "", 0) for first in firsts)

    @property
    def work(self) -> int:
        """Multiplications of one step of Newton-Schulz."""
        n, k = sorted(self.shape)
        return 2 * n * n * k + n**3


Owner: TypeAlias = tuple[int, int]
"""The owner's rank among those that share states, and its tensor-parallel rank."""


def owners(matrices: Sequence[Matrix]) -> list[Owner]:
    """Returns the owner of each matrix, the same on every rank: the largest first, each to the rank with the
    least work so far, of the ranks that share states only to the one that has it whole, if there is one. If a
    matrix is not cut over tensor-parallel ranks, each of these owns it for itself."""
    load: dict[tuple[str, Owner], int] = {}
    found: dict[int, Owner] = {}
    for index in sorted(range(len(matrices)), key=lambda index: (-matrices[index].work, index)):
        matrix = matrices[index]
        tp_ranks = 1 if matrix.over_tp is None else matrix.over_tp.size
        holder, group = matrix.over_shard.holder, matrix.tp_group
        shards = range(matrix.over_shard.size) if holder is None else [holder]
        ranks = [(tp, shard) for tp in range(tp_ranks) for shard in shards]
        tp, shard = min(ranks, key=lambda rank: (load.get((group, (rank[1], rank[0])), 0), rank))
        found[index] = shard, tp
        load[group, (shard, tp)] = load.get((group, (shard, tp)), 0) + matrix.work
    return [found[index] for index in range(len(matrices))]


@dataclass
class _UnderWay:
    """Matrices of one bucket that are under way. Numbers count those of all parts."""

    own: Own
    """Parts that Muon updates."""
    scale: float | Tensor
    products: dict[int, Callable[[], Tensor]] = field(default_factory=dict)
    """Calls that return the directions of this rank's matrices, by number."""
    shards: dict[int, Tensor] = field(default_factory=dict)
    """The parts of directions that this rank has so far, to scatter or to step along, by number."""
    flights: list[tuple[FlightAxis, Scattering, list[int]]] = field(default_factory=list)
    """Directions that come over an axis, and the numbers of their matrices."""
    got: set[int] = field(default_factory=set)
    """Ids of the states with a gradient, which step."""

    def __post_init__(self) -> None:
        self.matrices = [matrix for state, _ in self.own for matrix in state.matrices]
        holders = [matrix.over_shard.holder for matrix in self.matrices]
        self.whole = [number for number, holder in enumerate(holders) if holder is not None]
        """Numbers of the matrices that one rank has whole, over the ranks that share states."""
        self.split = [number for number, holder in enumerate(holders) if holder is None]
        """Numbers of the others."""


class _Products:
    """Multiplies Newton-Schulz of matrices on `device`; unless that is the CPU, on a stream beside the
    caller's."""

    def __init__(self, device: torch.device):
        self._stream = None if device.type == "cpu" else torch.Stream(device)

    def begin(self, matrix: Tensor) -> Callable[[], Tensor]:
        """Begins with a matrix that nobody writes into any more. The returned function returns the result,
        ready for the stream that is current then."""
        stream = self._stream
        if stream is None:
            return _C.NewtonSchulz(matrix).finish
        stream.wait_stream(torch.accelerator.current_stream(stream.device))
        with stream:
            product = _C.NewtonSchulz(matrix)
        matrix.record_stream(stream)
        done = stream.record_event()

        def finish() -> Tensor:
            caller, result = torch.accelerator.current_stream(stream.device), product.finish()
            caller.wait_event(done)
            result.record_stream(caller)
            return result

        return finish


Directions: TypeAlias = list[tuple[PartState, Tensor, float | Tensor, Tensor]]
"""A part, this rank's rows of its summed gradient, the factor of these, and the rows of the direction."""


class MuonUpdate:
    """Muon's arithmetic on this rank's rows. states: those of all parts, by id of the bucket; those with
    `matrices` are Muon's. Every rank makes it alike and calls its methods alike. They raise CommTimeout and
    PeerLost."""

    def __init__(self, states: Mapping[int, Sequence[PartState]], momentum: float):
        self._momentum = momentum
        of_muon = {key: [each for each in own if each.matrices] for key, own in states.items()}
        self._buckets = [key for key, own in of_muon.items() if own]
        every = [each for own in of_muon.values() for each in own]
        self._products = _Products(every[0].rows.device if every else torch.device("cpu"))
        self._owner: dict[int, Owner] = {}
        """By id of the matrix."""
        self._shard: dict[Axes, FlightAxis] = {}
        """The axes over which states are cut, by those of the bucket."""
        for axes in dict.fromkeys(each.axes for each in every):
            of_axes = [matrix for each in every if each.axes == axes for matrix in each.matrices]
            self._owner.update(zip(map(id, of_axes), owners(of_axes), strict=True))
            mesh = axes.shard.mesh
            self._shard[axes] = FlightAxis(None) if mesh is None else FlightAxis.of(mesh, PLACE, MOST)
        self._tp: dict[str, FlightAxis] = {}
        for state in every:
            if (name := state.matrices[0].tp_group) not in ("", *self._tp):
                mesh = state.parameter.tp_layout.group.mesh(state.rows.device.type)
                self._tp[name] = FlightAxis.of(mesh, PLACE, MOST)
        self._under_way: dict[int, _UnderWay] = {}

    def has(self, bucket: Bucket) -> bool:
        """Whether Muon updates some of the bucket's parameters."""
        return id(bucket) in self._buckets

    def __bool__(self) -> bool:
        return bool(self._buckets)

    # -- to the owners

    def begin(self, bucket: int, gradients: Own, scale: float | Tensor) -> None:
        """Sends the matrices of a bucket (by its id) to their owners, made of `gradients`, summed over all
        ranks, times `scale`."""
        own = [each for each in gradients if each[0].matrices]
        if not own:
            return
        way, axis = _UnderWay(own, scale), self._shard[own[0][0].axes]
        self._under_way[bucket] = way
        pieces: list[Tensor] = []
        for state, rows in own:
            counts = [matrix.over_shard.piece(axis.rank)[0] for matrix in state.matrices]
            pieces += self._nesterov(state, rows, scale).split(counts)
        held = [way.matrices[number].over_shard.holder == axis.rank for number in way.whole]
        wholes = [pieces[number] if here else None for number, here in zip(way.whole, held, strict=True)]
        self._begin_over_tp(way, way.whole, wholes)
        if way.split:
            cuts = [way.matrices[number].over_shard for number in way.split]
            wanted = [self._owner_of(way, number)[0] == axis.rank for number in way.split]
            some = [pieces[number] for number in way.split]
            Gathering(axis, cuts, some, wanted, partial(self._begin_over_tp, way, way.split))

    def _owner_of(self, way: _UnderWay, number: int) -> Owner:
        return self._owner[id(way.matrices[number])]

    def _begin_over_tp(self, way: _UnderWay, numbers: Sequence[int], shards: Wholes) -> None:
        shard_of = {number: shard for number, shard in zip(numbers, shards, strict=True) if shard is not None}
        for name, here in _by_tp_group(way, list(shard_of)).items():
            pieces = [shard_of[number] for number in here]
            if not name:
                self._multiply(way, here, list(pieces))
            else:
                cuts = [cut for number in here if (cut := way.matrices[number].over_tp) is not None]
                wanted = [self._owner_of(way, number)[1] == self._tp[name].rank for number in here]
                Gathering(self._tp[name], cuts, pieces, wanted, partial(self._multiply, way, here))

    def _multiply(self, way: _UnderWay, numbers: Sequence[int], wholes: Wholes) -> None:
        for number, whole in zip(numbers, wholes, strict=True):
            if whole is not None:
                way.products[number] = self._products.begin(whole)

    def _nesterov(self, state: PartState, rows: Tensor, scale: float | Tensor) -> Tensor:
        """Returns this rank's rows of what is orthogonalized, in the weights' dtype. Each operation rounds by
        itself, so that no bit depends on an element's place in the rows."""
        with marked("dp momentum"):
            momentum = state.moments["momentum"]
            new = rows.to(momentum.dtype) * ((1 - self._momentum) * scale)
            ahead = (momentum * self._momentum).add_(new).mul_(self._momentum).add_(new)
            return ahead.to(state.rows.dtype)

    # -- back from the owners

    def settle(self, gradients: Mapping[int, Own], scale: float | Tensor) -> None:
        """Makes the step count, with these gradients by bucket and that factor: matrices that left with
        another, or not at all, leave now. If the factor, a tensor, is NaN, the step changes nothing."""
        if isinstance(scale, Tensor):
            scale = scale.double()
        if isinstance(scale, Tensor) or any(way.scale != scale for way in self._under_way.values()):
            self.forget()
        for bucket in self._buckets:
            own = gradients.get(bucket, [])
            if bucket not in self._under_way:
                self.begin(bucket, own, scale)
            if bucket in self._under_way:
                self._under_way[bucket].got = {id(state) for state, _ in own}
        self.bring()

    def forget(self) -> None:
        """Forgets what is under way: the step does not count, or not with this factor."""
        self.bring()
        self._under_way.clear()

    def bring(self) -> None:
        """Brings what has begun to its owner, where it can be multiplied under waits."""
        for axis in (*self._shard.values(), *self._tp.values()):  # completing the first begins others
            axis.complete_all()

    def directions(self, buckets: Iterable[Bucket]) -> Iterator[tuple[Bucket, Directions]]:
        """Yields each bucket with the directions of its matrices, while the next ones' are on their way."""
        over_tp = _overlapped(buckets, self._scatter_over_tp, _landed)
        return _overlapped(over_tp, self._scatter_over_shard, self._collected)

    def _scatter_over_tp(self, bucket: Bucket) -> tuple[Bucket, _UnderWay]:
        way = self._under_way.pop(id(bucket), None) or _UnderWay([], 1.0)
        rank = bucket.axes.shard.rank
        own = [n for n in range(len(way.matrices)) if self._owner_of(way, n)[0] == rank]
        for name, here in _by_tp_group(way, own).items():
            wholes = [way.products[n]() if n in way.products else None for n in here]
            if not name:
                way.shards.update((n, w) for n, w in zip(here, wholes, strict=True) if w is not None)
            else:
                cuts = [cut for n in here if (cut := way.matrices[n].over_tp) is not None]
                way.flights.append((self._tp[name], _scattering(self._tp[name], cuts, wholes, way), here))
        way.products.clear()
        return bucket, way

    def _scatter_over_shard(self, one: tuple[Bucket, _UnderWay]) -> tuple[Bucket, _UnderWay]:
        bucket, way = one
        if way.split:
            axis = self._shard[bucket.axes]
            cuts = [way.matrices[number].over_shard for number in way.split]
            wholes = [way.shards.get(number) for number in way.split]
            way.flights.append((axis, _scattering(axis, cuts, wholes, way), way.split))
        return bucket, way

    def _collected(self, one: tuple[Bucket, _UnderWay]) -> tuple[Bucket, Directions]:
        bucket, way = _landed(one)
        result, first = [], 0
        for state, rows in way.own:
            numbers = range(first, first + len(state.matrices))
            pieces = [way.shards[number] for number in numbers if number in way.shards] or [state.rows[:0]]
            first = numbers.stop
            if id(state) in way.got:
                result.append((state, rows, way.scale, torch.cat(pieces) if pieces[1:] else pieces[0]))
        return bucket, result

    @torch.no_grad()
    def update(self, directions: Directions, lr: float) -> None:
        """Takes the step of momentum, masters and rows."""
        for state, gradient, scale, direction in directions:
            with marked("dp update"):
                momentum = state.moments["momentum"]
                weights = state.master if state.has_master else state.rows
                before = [momentum.clone(), weights.clone()] if isinstance(scale, Tensor) else []
                new = gradient.to(momentum.dtype) * ((1 - self._momentum) * scale)
                momentum.mul_(self._momentum).add_(new)
                factor = lr * LIKE_ADAMW * math.sqrt(max(state.matrices[0].shape))
                weights.mul_(1 - lr * state.decay).sub_(direction.to(weights.dtype) * factor)
                if isinstance(scale, Tensor):
                    for tensor, old in zip((momentum, weights), before, strict=True):
                        tensor.copy_(torch.where(scale.isnan(), old, tensor))
                if state.has_master:
                    state.rows.copy_(weights)
                state.steps += 1


def _by_tp_group(way: _UnderWay, numbers: Sequence[int]) -> dict[str, list[int]]:
    """Returns these matrices' numbers by the group that they are cut over, the same on its ranks."""
    groups: dict[str, list[int]] = {}
    for number in numbers:
        groups.setdefault(way.matrices[number].tp_group, []).append(number)
    return groups


def _scattering(axis: FlightAxis, cuts: Sequence[MatrixCut], wholes: Wholes, way: _UnderWay) -> Scattering:
    rows = way.own[0][0].rows
    return Scattering(axis, cuts, wholes, rows.dtype, str(rows.device))


def _landed(one: tuple[Bucket, _UnderWay]) -> tuple[Bucket, _UnderWay]:
    """Waits for what is being scattered over an axis."""
    _, way = one
    for axis, flight, numbers in way.flights:
        axis.complete_up_to(flight)
        way.shards.update(zip(numbers, flight.pieces, strict=True))
    way.flights = []
    return one


def _overlapped(items: Iterable[T], begin: Callable[[T], U], end: Callable[[U], V]) -> Iterator[V]:
    """Ends each item, in turn, when the one after it has begun."""
    begun: deque[U] = deque()
    for item in items:
        begun.append(begin(item))
        if len(begun) > 1:
            yield end(begun.popleft())
    while begun:
        yield end(begun.popleft())
