"""Sums over replicas, taken beside the training steps that follow.

begin(tensor)    it will be summed over the ranks, in place, in runs that leave one after the other
pump()           takes what has come and lets go what there is room for; waits for nobody
wait(tensor)     it holds the sums

Runs may travel packed (packing.py). What is summed is a snapshot: nobody else reads or writes the tensor in
between, least of all a training step. Runs travel in the class of data parallelism, behind its gradients and
weights, two at a time. They begin in one order on all ranks, but at moments of each rank's own
(`FlightAxis`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from pyruntime import comm
from pyruntime.comm.core import _C
from pyruntime.comm.ranges import marked
from pyruntime.data_parallel.axes import MOST_ANY_TIME, PLACES, Flight, FlightAxis
from pyruntime.data_parallel.compression import Compression
from pyruntime.data_parallel.compression.packets import PackedSum
from pyruntime.replicas import packing

WIDTH = 64
"""Elements of a line; the tensors are as many lines."""
RUN_BYTES = 4 << 20
OUTER = 2
"""Place within the class dp: after gradients (0) and weights (1)."""


class Sums(Protocol):
    """What takes the sums of an `OuterOptimizer`: `Averaging`, or where replicas come and go
    `pyruntime.replicas.Member`."""

    size: int
    """Replicas whose displacements the sum is of that was waited for last."""
    rank: int
    """Of this replica among them, where that is the same as long as the run lasts; else 0."""

    @property
    def is_busy(self) -> bool: ...

    def begin(self, tensor: Tensor) -> None: ...

    def pump(self) -> None: ...

    def wait(self, tensor: Tensor) -> None: ...

    def used(self, tensor: Tensor, scale: float | None) -> None:
        """The sums in `tensor` are going to be an outer step, with them times `scale`; None: they are of
        nobody, and it is none."""

    def stats(self) -> tuple[float, int]:
        """Since the start, seconds in which this thread did nothing but wait for other replicas, copy and
        sum, and bytes that came from them."""

    def close(self) -> None: ...


class _Run:
    """Part of a tensor, which is summed in one flight."""

    then: Flight | None = None
    """No other has to land."""

    def __init__(self, lines: Tensor, axis: FlightAxis):
        self._lines = lines
        axis.make_room()
        count, device = len(lines), str(lines.device)
        scatter = _C.LineScatter(axis.name, count, WIDTH, lines.dtype, device, True)
        for index, (begin, rows) in enumerate(scatter.chunks()):
            scatter.part(index).copy_(lines[begin : begin + rows])
            scatter.publish(index)
        self._scatter: _C.LineScatter | None = scatter
        self._is_reduced = False
        axis.add(self)

    def advance(self) -> None:
        if self._scatter is None:
            return
        if not self._is_reduced and self._scatter.parts_have_come():
            self._scatter.reduce()
            self._is_reduced = True
        if self._is_reduced and self._scatter.sums_have_come():
            self.complete()

    def has_landed(self) -> bool:
        return self._scatter is None

    def complete(self) -> None:
        if self._scatter is not None:
            with marked("outer sum"):
                self._lines.copy_(self._scatter.finish())
            self._scatter = None

    def drop(self) -> None:
        self._scatter = None


class Averaging:
    """Sums over the ranks of `mesh`, which all make it alike, and call its methods alike but for pump().

    sizes: [(elements, dtype)] of the tensors that will be summed. compression: how they travel but for their
    last line; None: as they are. Raises ValueError where they cannot, CommTimeout and PeerLost, as its
    methods do.
    """

    def __init__(
        self,
        mesh: DeviceMesh | None,
        sizes: Sequence[tuple[int, torch.dtype]],
        compression: Compression | None = None,
    ):
        self._axis = axis = FlightAxis(None) if mesh is None else FlightAxis.of(mesh, OUTER, MOST_ANY_TIME)
        self.size, self.rank, self.name = axis.size, axis.rank, axis.name
        self._waiting: deque[tuple[Tensor, Tensor]] = deque()
        """Lines of a tensor that are still to leave, and the tensor."""
        self._last: dict[int, _Run | PackedSum] = {}
        """Of every tensor that has begun to leave, by its id, the run that left last."""
        self._has_failed = False
        self._run_bytes = RUN_BYTES
        self._packer: packing.Packer | None = None
        self._lost: dict[int, Tensor] = {}
        """Of every tensor, by its id."""
        if compression is not None:
            packing.check(compression, {dtype for _, dtype in sizes}, axis.size)
        if axis.size > 1:
            axis.turn_to(self)
            self._claim(sizes, compression)

    def _claim(self, sizes: Sequence[tuple[int, torch.dtype]], compression: Compression | None) -> None:
        """Every place gets its memory here, where all ranks meet: later they begin at different moments. What
        chunks of a smaller run are aligned to may add to it, so nearly the largest count too."""
        packs = compression is not None
        runs = {
            (len(lines), dtype)
            for elements, dtype in sizes
            for lines in self._cut(torch.empty(elements, dtype=dtype, device="meta"), packs)
        }
        if compression is not None:
            lengths = [lines * WIDTH for lines, _ in runs]
            self._packer = packing.Packer(compression, self._axis, lengths, WIDTH)
        most = max((lines * dtype.itemsize for lines, dtype in runs), default=0)
        for lines, dtype in sorted(runs, key=str):
            if lines * dtype.itemsize > 0.9 * most:
                nothing = torch.zeros(lines, WIDTH, dtype=dtype)
                for _ in range(PLACES):
                    if self._packer is None:
                        _Run(nothing, self._axis)
                    else:
                        self._packer.begin(nothing.view(-1), None, None)
                self._axis.complete_all()

    def begin(self, tensor: Tensor) -> None:
        """tensor: 1-D, contiguous, of whole lines."""
        if self.size == 1:
            return
        self._axis.turn_to(self)
        self._axis.held = self
        self._waiting.extend((lines, tensor) for lines in self._cut(tensor, self._packer is not None))
        self.pump()

    @property
    def is_busy(self) -> bool:
        """Whether something is on its way that nobody has waited for."""
        return self._axis.held is self

    @torch.no_grad()
    def pump(self) -> None:
        if not self.is_busy:
            return
        self._axis.take_what_has_come(but=0)
        while self._waiting and self._axis.has_room():
            self._begin_next()

    def _begin_next(self) -> None:
        lines, tensor = self._waiting.popleft()
        if self._packer is None:
            self._last[id(tensor)] = _Run(lines, self._axis)
            return
        lost = self.lost_of(tensor)
        assert lost is not None
        begin = lines.storage_offset() - tensor.storage_offset()
        end = begin + lines.numel()
        last = tensor[-WIDTH:] if end == len(tensor) - WIDTH else None
        self._last[id(tensor)] = self._packer.begin(lines.view(-1), lost[begin:end], last)

    def lost_of(self, tensor: Tensor) -> Tensor | None:
        """What packing has lost of that tensor's values, fp32, flat, in memory that stays; None where they
        travel as they are."""
        if self._packer is not None and id(tensor) not in self._lost:
            self._lost[id(tensor)] = torch.zeros(len(tensor) - WIDTH)
        return self._lost.get(id(tensor))

    @torch.no_grad()
    def wait(self, tensor: Tensor) -> None:
        if self._has_failed:
            raise RuntimeError(
                "What was on its way between replicas is lost, because their group failed or was closed; "
                "make a new OuterOptimizer, on every rank."
            )
        while any(each is tensor for _, each in self._waiting):
            self._begin_next()
        if id(tensor) in self._last:
            run = self._last.pop(id(tensor))
            self._axis.complete_up_to(run)
            if run.then is not None:
                self._axis.complete_up_to(run.then)
        self._rest()

    def used(self, tensor: Tensor, scale: float | None) -> None:
        """Nobody comes who would have to know."""

    def settle(self) -> None:
        while self._waiting:
            self._begin_next()
        self._axis.complete_all()
        self._last.clear()
        self._rest()

    def end_turn(self) -> None:
        self.settle()

    def forget_turn(self) -> None:
        self._has_failed = True
        self._waiting.clear()
        self._last.clear()

    def _rest(self) -> None:
        if not self._waiting and not self._last and self.is_busy:
            self._axis.held = None

    def close(self) -> None:
        """Nothing is under way any more."""
        if self.is_busy:
            self.settle()

    def stats(self) -> tuple[float, int]:
        """As `Sums` has it."""
        if self.size == 1:
            return 0.0, 0
        found = [comm.stats(self.name)]
        if self._packer is not None:
            found += self._packer.channels.stats()
        return sum(each.waiting_s + each.moving_s for each in found), sum(each.bytes for each in found)

    def _cut(self, tensor: Tensor, packs: bool) -> list[Tensor]:
        """Its lines [*, WIDTH], in runs that are alike but for one line; where they are packed, but for the
        last one, which goes beside."""
        lines = tensor.view(-1, WIDTH)
        return list(lines[: -1 if packs else None].tensor_split(max(1, -(-tensor.nbytes // self._run_bytes))))
