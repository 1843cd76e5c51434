"""Sums over replicas, taken beside the training steps that follow.

begin(tensor)    starts to sum the tensor over the ranks, in place, in runs that leave one after the other
pump()           receives what has arrived and sends what there is room for; never waits
wait(tensor)     returns when the tensor holds the sums

On a device the runs are sums on a stream of their own, which waits for the other ranks; `wait` makes the
current stream wait for it, and the host waits for nothing.

Runs may travel packed (packing.py). The tensor is a snapshot: nobody else, least of all a training step,
reads or writes it in between. Runs travel in the traffic class of data parallelism, behind its gradients and
weights, two at a time. They begin in one order on all ranks, but each rank begins when it likes
(`FlightAxis`).
"""

from __future__ import annotations

import contextlib
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

CPU = torch.device("cpu")
WIDTH = 64
"""Elements of a line; each tensor is a whole number of lines."""
RUN_BYTES = 4 << 20
MOST_QUEUED = 16
"""Runs that a device's stream has at once: enough to keep it busy between two calls of `pump`, and fewer than
would make the host wait for a place in its queue."""
OUTER = 2
"""Position within traffic class dp: after gradients (0) and weights (1)."""


class Sums(Protocol):
    """Takes the sums of an `OuterOptimizer`: `Averaging`, or `pyruntime.replicas.member.Member` if replicas
    come and go."""

    size: int
    """Replicas in the last sum that was waited for."""
    rank: int
    """Number of this replica among them if it is fixed for the whole run; else 0."""

    @property
    def is_busy(self) -> bool: ...

    def begin(self, tensor: Tensor) -> None: ...

    def pump(self) -> None: ...

    def wait(self, tensor: Tensor) -> None: ...

    def used(self, tensor: Tensor, scale: float | Tensor | None) -> None:
        """Announces the outer step that uses the sums in `tensor` times `scale`; None: nobody contributed, so
        no step is taken."""

    def stats(self) -> tuple[float, int]:
        """Returns two totals since the start: seconds in which this thread only waited for other replicas,
        copied or summed, and bytes received from them."""

    def close(self) -> None: ...


class _Run:
    """Part of a tensor, summed in one flight."""

    then: Flight | None = None
    """No other flight has to land."""

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


class _Queued:
    """Part of a tensor, whose sum the current stream takes: all of it is queued at once.

    run: the flight that began last."""

    then: Flight | None = None

    def __init__(self, run: _Run | PackedSum, axis: FlightAxis, device: torch.device):
        axis.complete_latest(run)
        if run.then is not None:
            axis.complete_latest(run.then)
        self.event = torch.Event(device)
        self.event.record()
        axis.add(self)

    def advance(self) -> None:
        """Does nothing: the stream goes on by itself."""

    def has_landed(self) -> bool:
        return self.event.query()

    def complete(self) -> None:
        """Does nothing: who needs the sums waits for `event`."""

    def drop(self) -> None:
        """Does nothing: the stream comes to its end by itself."""


class Averaging:
    """Sums over the ranks of `mesh`. All ranks construct it with the same arguments and make the same calls,
    except pump().

    sizes: [(elements, dtype)] of the tensors to sum, all on `device`. compression: packs all but their last
    line; None: they travel unpacked. Raises ValueError where compression cannot apply; CommTimeout and
    PeerLost, as its methods do.
    """

    def __init__(
        self,
        mesh: DeviceMesh | None,
        sizes: Sequence[tuple[int, torch.dtype]],
        compression: Compression | None = None,
        device: torch.device = CPU,
    ):
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        most = MOST_ANY_TIME if self._stream is None else MOST_QUEUED
        self._axis = axis = FlightAxis(None) if mesh is None else FlightAxis.of(mesh, OUTER, most)
        self.size, self.rank, self.name = axis.size, axis.rank, axis.name
        self._waiting: deque[tuple[Tensor, Tensor]] = deque()
        """Lines of a tensor that have not left yet, and the tensor."""
        self._last: dict[int, _Run | _Queued | PackedSum] = {}
        """The run that left last, by the tensor's id."""
        self._has_failed = False
        self._run_bytes = RUN_BYTES
        self._packer: packing.Packer | None = None
        self._lost: dict[int, Tensor] = {}
        """Values that packing has lost, by the tensor's id."""
        if compression is not None:
            packing.check(compression, {dtype for _, dtype in sizes}, axis.size, device)
        if axis.size > 1:
            axis.turn_to(self)
            with self._beside():
                self._claim(sizes, compression, device)

    def _beside(self) -> contextlib.AbstractContextManager:
        """Makes the stream of the sums the current one, on a device."""
        return contextlib.nullcontext() if self._stream is None else self._stream

    def _claim(
        self,
        sizes: Sequence[tuple[int, torch.dtype]],
        compression: Compression | None,
        device: torch.device,
    ) -> None:
        """Allocates the memory of every place now, while all ranks meet; later they begin at different
        moments. Aligned chunks of a slightly smaller run may need more, so those are tried too."""
        packs = compression is not None
        runs = {
            (len(lines), dtype)
            for elements, dtype in sizes
            for lines in self._cut(torch.empty(elements, dtype=dtype, device="meta"), packs)
        }
        if compression is not None:
            lengths = [lines * WIDTH for lines, _ in runs]
            self._packer = packing.Packer(compression, self._axis, lengths, WIDTH, device)
        most = max((lines * dtype.itemsize for lines, dtype in runs), default=0)
        for lines, dtype in sorted(runs, key=str):
            if lines * dtype.itemsize > 0.9 * most:
                nothing = torch.zeros(lines, WIDTH, dtype=dtype, device=device)
                for _ in range(PLACES):
                    if self._packer is None:
                        _Run(nothing, self._axis)
                    else:
                        self._packer.begin(nothing.view(-1), None, None)
                self._axis.complete_all()

    def begin(self, tensor: Tensor) -> None:
        """tensor: 1-D, contiguous, a whole number of lines."""
        if self.size == 1:
            return
        self._axis.turn_to(self)
        self._axis.held = self
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream(tensor.device))
            tensor.record_stream(self._stream)
        self._waiting.extend((lines, tensor) for lines in self._cut(tensor, self._packer is not None))
        self.pump()

    @property
    def is_busy(self) -> bool:
        """Whether a sum is under way that nobody has waited for."""
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
        with self._beside():
            run = self._begun(lines, tensor)
            queues = self._stream is not None
            self._last[id(tensor)] = _Queued(run, self._axis, tensor.device) if queues else run

    def _begun(self, lines: Tensor, tensor: Tensor) -> _Run | PackedSum:
        if self._packer is None:
            return _Run(lines, self._axis)
        lost = self.lost_of(tensor)
        assert lost is not None
        begin = lines.storage_offset() - tensor.storage_offset()
        end = begin + lines.numel()
        last = tensor[-WIDTH:] if end == len(tensor) - WIDTH else None
        return self._packer.begin(lines.view(-1), lost[begin:end], last)

    def lost_of(self, tensor: Tensor) -> Tensor | None:
        """Returns what packing has lost of the tensor's values: fp32, flat, always the same memory. None if
        they travel unpacked."""
        if self._packer is not None and id(tensor) not in self._lost:
            self._lost[id(tensor)] = lost = torch.zeros(len(tensor) - WIDTH, device=tensor.device)
            if self._stream is not None:
                lost.record_stream(self._stream)
        return self._lost.get(id(tensor))

    @torch.no_grad()
    def wait(self, tensor: Tensor) -> None:
        if self._has_failed:
            raise RuntimeError(
                "Displacements under way between replicas are lost: their group failed or was closed; make a "
                "new OuterOptimizer on every rank."
            )
        while any(each is tensor for _, each in self._waiting):
            self._begin_next()
        if id(tensor) in self._last:
            run = self._last.pop(id(tensor))
            self._axis.complete_up_to(run)
            if run.then is not None:
                self._axis.complete_up_to(run.then)
            if isinstance(run, _Queued):
                torch.accelerator.current_stream(tensor.device).wait_event(run.event)
        self._rest()

    def used(self, tensor: Tensor, scale: float | Tensor | None) -> None:
        """Does nothing: the replicas are fixed, so no newcomer has to learn of the step."""

    def settle(self) -> None:
        while self._waiting:
            self._begin_next()
        self._axis.complete_all()
        if self._stream is None:
            self._last.clear()
        self._rest()

    def end_turn(self) -> None:
        self.settle()

    def forget_turn(self) -> None:
        self._has_failed = True
        self._waiting.clear()
        self._last.clear()

    def _rest(self) -> None:
        is_begun = not self._waiting and (self._stream is not None or not self._last)
        if is_begun and self.is_busy:
            self._axis.held = None

    def close(self) -> None:
        """Completes the sums under way."""
        if self.is_busy:
            self.settle()

    def stats(self) -> tuple[float, int]:
        """Returns the totals that `Sums` describes."""
        if self.size == 1:
            return 0.0, 0
        found = [comm.stats(self.name)]
        if self._packer is not None:
            found += self._packer.mail.stats()
        return sum(each.waiting_s + each.moving_s for each in found), sum(each.bytes for each in found)

    def _cut(self, tensor: Tensor, packs: bool) -> list[Tensor]:
        """Returns lines [*, WIDTH] of the tensor, in runs of equal length up to one line. Packed tensors
        leave out their last line, which travels beside."""
        lines = tensor.view(-1, WIDTH)
        return list(lines[: -1 if packs else None].tensor_split(max(1, -(-tensor.nbytes // self._run_bytes))))
