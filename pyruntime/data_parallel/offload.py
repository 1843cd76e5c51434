"""Optimizer states outside the memory of the rows' device: CPU ranks' in a file, devices' in host memory.

A state is a tensor over the file (mapped), or over page-locked memory, for all code but the update: state
dicts, checkpoints, writes. The update takes a run of at most `Offload.run_bytes` of each state at a time into
a ring of buffers::

    read ahead            runs in the order in which the last steps took them
    update                the kernels of resident states, element by element: the same bits
    written behind        if the update changed them

So a rank holds RING runs in place of its states. The file has no name: it ends with the process.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import shutil
import tempfile
import threading
import time
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyruntime.comm.core import _C
from pyruntime.data_parallel.update import Own, PartState, Resident, Run
from pyruntime.ops.attention import statistics_dtype
from pyruntime.overlap import EntryKind
from pyruntime.overlap.record import entered

AHEAD = 2
"""Runs that are read before the update asks for them."""
RING = AHEAD + 2
"""Buffers: those ahead, that in use, and that being written."""
ARRAYS = 3
"""Most states of an element: two moments and a master."""
SMALL = 64
"""States below this part of a run, such as those of norms, stay resident."""
PAGE = mmap.PAGESIZE
KEPT_DIRTY = 4
"""Runs that the page cache may still hold after they were written: a disk takes a while."""


class OffloadError(RuntimeError):
    """The optimizer states that lie elsewhere cannot be read or written."""


@dataclass(frozen=True)
class Offload:
    """Keeps optimizer states outside the memory of the rows' device.

    folder: CPU ranks: folder of the file that has this rank's states, best on a local disk; it is made if it
        is not there. Devices keep them in host memory.
    deadline_s: seconds that the disk may take for one run.
    run_bytes: bytes of each state of a run, a multiple of 64; a rank holds 12 times as many.
    """

    folder: str
    deadline_s: float = 120.0
    run_bytes: int = 4 << 20

    def __post_init__(self) -> None:
        if self.run_bytes < SMALL or self.run_bytes % SMALL:
            raise ValueError(f"run_bytes={self.run_bytes} is no multiple of {SMALL}; use 1 to 16 MiB.")


@dataclass(eq=False)
class _Piece:
    """A run of the elements of one state's arrays: where it lies while no update has it."""

    state: PartState
    low: int
    high: int
    arrays: list[Tensor]
    written: Any = None
    """The Future, or the event, of its last write."""

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.arrays)


@dataclass(eq=False)
class _Buffer:
    """Memory for one run's arrays, uint8 [ARRAYS, bytes]."""

    memory: Tensor
    ready: Any = None
    """The Future, or the event, of the read into it."""
    asked: int = 0
    """The point of a device's stream at which that began, if a ledger is on."""
    free: Any = None
    """The Future, or the event, after which it may be read into."""

    def arrays(self, piece: _Piece) -> list[Tensor]:
        return [
            row[: each.nbytes].view(each.dtype) for row, each in zip(self.memory, piece.arrays, strict=False)
        ]


class Offloaded(Resident):
    """States that lie elsewhere. Made by `offloaded`; `add` is told of every state."""

    def __init__(self, offload: Offload, device: torch.device):
        self._offload, self._device = offload, device
        self._pieces: dict[int, list[_Piece]] = {}
        """By id of the state."""
        self._free: deque[_Buffer] = deque()
        self._coming: dict[_Piece, _Buffer] = {}
        self._last: _Piece | None = None
        self._next: dict[_Piece, _Piece] = {}
        """The run that was taken after each, when it was taken last."""
        self.nbytes = 0
        """Bytes that lie elsewhere."""

    def zeros(self, rows: Tensor) -> Tensor:
        dtype = statistics_dtype(rows)
        if rows.numel() * dtype.itemsize < self._offload.run_bytes // SMALL:
            return super().zeros(rows)
        self.nbytes += rows.numel() * dtype.itemsize
        return self._new(rows.numel(), dtype).view(rows.shape)

    def add(self, state: PartState) -> None:
        """Takes a state whose tensors `zeros` made."""
        arrays = [*state.moments.values(), *([state.master] if state.has_master else [])]
        first = arrays[0]
        if first.nbytes < self._offload.run_bytes // SMALL:
            return
        flat, step = [each.view(-1) for each in arrays], self._offload.run_bytes // first.itemsize
        self._pieces[id(state)] = [
            _Piece(state, low, min(low + step, len(flat[0])), [each[low : low + step] for each in flat])
            for low in range(0, len(flat[0]), step)
        ]

    def runs(self, gradients: Own, writes: bool = True) -> Iterator[list[Run]]:
        here = [Run.of(*each) for each in gradients if id(each[0]) not in self._pieces]
        if here:
            yield here
        for state, gradient in gradients:
            for piece in self._pieces.get(id(state), ()):
                buffer = self._take(piece)
                try:
                    yield [_run(piece, buffer, gradient)]
                    if writes:
                        self._write(piece, buffer)
                finally:  # also if the update has failed
                    buffer.free = piece.written if writes else self._used()
                    self._free.append(buffer)

    def _take(self, piece: _Piece) -> _Buffer:
        """Returns a buffer with the run, once it is there; begins to read the next ones."""
        if not self._free and not self._coming:
            self._make_buffers()
        if piece not in self._coming:
            self._forget()
            self._begin(piece)
        buffer = self._coming.pop(piece)
        if self._last is not None:
            self._next[self._last] = piece
        self._last = coming = piece
        while len(self._coming) < AHEAD:
            following = self._next.get(coming)
            if following is None or following is piece or following in self._coming:
                break
            self._begin(following)
            coming = following
        self._await(piece, buffer)
        return buffer

    def _begin(self, piece: _Piece) -> None:
        buffer = self._free.popleft()
        self._read(piece, buffer)
        self._coming[piece] = buffer

    def _forget(self) -> None:
        """Forgets what was read ahead."""
        for buffer in self._coming.values():
            buffer.free = buffer.ready
            self._free.append(buffer)
        self._coming.clear()

    def _make_buffers(self) -> None:
        most = max(each.nbytes for some in self._pieces.values() for each in some[0].arrays)
        self._free.extend(_Buffer(self._memory(most)) for _ in range(RING))

    def _memory(self, most: int) -> Tensor:
        """Returns memory for a buffer of arrays of at most so many bytes."""
        return torch.empty((ARRAYS, most), dtype=torch.uint8, device=self._device)

    def settle(self) -> None:
        self._forget()
        self._finish()

    @abstractmethod
    def _new(self, count: int, dtype: torch.dtype) -> Tensor:
        """Returns zeros where states lie."""

    @abstractmethod
    def _read(self, piece: _Piece, buffer: _Buffer) -> None:
        """Begins to read a run, once its last write has ended and the buffer is free."""

    @abstractmethod
    def _await(self, piece: _Piece, buffer: _Buffer) -> None:
        """Waits until the run is in the buffer."""

    @abstractmethod
    def _write(self, piece: _Piece, buffer: _Buffer) -> None:
        """Begins to write a run."""

    @abstractmethod
    def _used(self) -> Any:
        """Returns what ends when the update has used the buffer."""

    @abstractmethod
    def _finish(self) -> None:
        """Waits until nothing is being read or written."""


def _run(piece: _Piece, buffer: _Buffer, gradient: Tensor) -> Run:
    def cut(tensor: Tensor) -> Tensor:
        return tensor.reshape(-1)[piece.low : piece.high]

    state, (exp_avg, exp_avg_sq, *masters) = piece.state, buffer.arrays(piece)
    return Run(
        state,
        state.rows.view(-1)[piece.low : piece.high],
        cut(gradient),
        exp_avg,
        exp_avg_sq,
        masters[0] if masters else state.master,
        None if state.ahead is None else state.ahead.view(-1)[piece.low : piece.high],
        None if state.behind is None else cut(state.behind[0]),
        state.first + piece.low,
    )


def offloaded(offload: Offload, device: torch.device) -> Offloaded:
    """Returns the home of states of rows on `device`. Raises OffloadError if the file cannot be made."""
    return InFile(offload) if device.type == "cpu" else OnHost(offload, device)


# -- devices


class OnHost(Offloaded):
    """States of a device's rows in page-locked host memory. The host waits for no copy."""

    def __init__(self, offload: Offload, device: torch.device):
        super().__init__(offload, device)
        self._in, self._out = torch.Stream(device), torch.Stream(device)

    def _new(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(count, dtype=dtype, pin_memory=True)

    def _memory(self, most: int) -> Tensor:
        with self._in:  # freed, it is no other stream's while a copy into it may be under way
            return super()._memory(most)

    def _read(self, piece: _Piece, buffer: _Buffer) -> None:
        for before in (piece.written, buffer.free):
            if before is not None:
                self._in.wait_event(before)
        with self._in:
            for there, here in zip(piece.arrays, buffer.arrays(piece), strict=True):
                here.copy_(there, non_blocking=True)
        buffer.ready, buffer.asked = self._in.record_event(), _C.stream_clock_mark()

    def _await(self, piece: _Piece, buffer: _Buffer) -> None:
        begin = _C.stream_clock_mark()
        torch.accelerator.current_stream(self._device).wait_event(buffer.ready)
        end = _C.stream_clock_mark()
        if min(buffer.asked, begin, end) > 0:  # a ledger has points of the stream in place of times
            entered(EntryKind.WAIT, "offload", "states", -begin, end=-end)
            entered(EntryKind.READ, "offload", "states", -buffer.asked, piece.nbytes, end=-end)

    def _write(self, piece: _Piece, buffer: _Buffer) -> None:
        self._out.wait_event(self._used())
        with self._out:
            for there, here in zip(piece.arrays, buffer.arrays(piece), strict=True):
                there.copy_(here, non_blocking=True)
        piece.written, point = self._out.record_event(), _C.stream_clock_mark()
        if point > 0:
            entered(EntryKind.SENT, "offload", "states", -point, piece.nbytes, end=-point)

    def _used(self) -> torch.Event:
        return torch.accelerator.current_stream(self._device).record_event()

    def _finish(self) -> None:
        self._in.synchronize()
        self._out.synchronize()


# -- CPU ranks


class _Worker:
    """A thread that does one job after the other, and ends with its last reference."""

    def __init__(self, name: str):
        self._jobs: queue.SimpleQueue[tuple[Future, Callable[[], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=_work, args=(self._jobs,), daemon=True, name=name).start()
        weakref.finalize(self, self._jobs.put, None)

    def begin(self, job: Callable[[], Any]) -> Future:
        result: Future = Future()
        self._jobs.put((result, job))
        return result


def _work(jobs: queue.SimpleQueue) -> None:
    while (job := jobs.get()) is not None:
        result, work = job
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)
        del job, result, work  # may be the last references


@dataclass
class _Mapped:
    """Pages of the file that are a tensor's memory."""

    pages: mmap.mmap
    begin: int
    """Offset in the file."""
    address: int


class InFile(Offloaded):
    """States in a file of the rank, without a name, so that it ends with the process."""

    is_in_file = True

    def __init__(self, offload: Offload):
        super().__init__(offload, torch.device("cpu"))
        self._mapped: list[_Mapped] = []
        self._end = 0
        self._is_mapped = False
        """Whether pages of the file may be in this process's memory beside the buffers."""
        self._offsets: dict[_Piece, list[int]] = {}
        with self._refusal_told():
            self._file = _File(offload.folder)
        self._reader, self._writer = _Worker("pyr-states-read"), _Worker("pyr-states-write")
        self._writing: deque[Future] = deque()

    def _new(self, count: int, dtype: torch.dtype) -> Tensor:
        size = -(-count * dtype.itemsize // PAGE) * PAGE
        with self._refusal_told():
            os.posix_fallocate(self._file.number, self._end, size)  # no write finds the disk full later
            pages = mmap.mmap(self._file.number, size, offset=self._end)
        tensor = torch.frombuffer(pages, dtype=dtype, count=count)
        self._mapped.append(_Mapped(pages, self._end, tensor.data_ptr()))
        self._end += size
        self._is_mapped = True
        return tensor

    def add(self, state: PartState) -> None:
        super().add(state)
        begins = {each.address: each.begin for each in self._mapped}
        for piece in self._pieces.get(id(state), ()):
            self._offsets[piece] = [
                begins[each.untyped_storage().data_ptr()] + each.storage_offset() * each.itemsize
                for each in piece.arrays
            ]
        self.release()

    def release(self) -> None:
        for each in self._mapped:
            each.pages.madvise(mmap.MADV_DONTNEED)
        self._is_mapped = False

    def _read(self, piece: _Piece, buffer: _Buffer) -> None:
        if self._is_mapped:
            self.release()
        before = [each for each in (piece.written, buffer.free) if each is not None]
        file, offsets = self._file, self._offsets[piece]
        arrays = [each.numpy().data for each in buffer.arrays(piece)]
        buffer.ready = self._reader.begin(lambda: file.read(before, arrays, offsets))

    def _await(self, piece: _Piece, buffer: _Buffer) -> None:
        begin, is_there = time.monotonic(), buffer.ready.done()
        read = self._result(buffer.ready, "read")
        if not is_there:
            entered(EntryKind.WAIT, "offload", "states", begin)
        entered(EntryKind.READ, "offload", "states", read.begin, piece.nbytes, end=read.end)
        while self._writing and self._writing[0].done():
            self._wrote(self._writing.popleft())

    def _write(self, piece: _Piece, buffer: _Buffer) -> None:
        file, offsets = self._file, self._offsets[piece]
        arrays = [each.numpy().data for each in buffer.arrays(piece)]
        piece.written = self._writer.begin(lambda: file.write(arrays, offsets))
        self._writing.append(piece.written)

    def _wrote(self, written: Future) -> None:
        done = self._result(written, "written")
        entered(EntryKind.SENT, "offload", "states", done.begin, done.nbytes, end=done.end)

    def _used(self) -> None:
        return None

    def _finish(self) -> None:
        for buffer in self._free:
            for ends in (buffer.ready, buffer.free):
                if ends is not None:
                    self._result(ends, "read")
        while self._writing:
            self._wrote(self._writing.popleft())
        self._is_mapped = True

    def _result(self, future: Future, done: str) -> _Done:
        folder, deadline = self._offload.folder, self._offload.deadline_s
        try:
            return future.result(timeout=deadline)
        except TimeoutError as error:
            raise OffloadError(
                f"Optimizer states in {folder} were not {done} in {deadline:g} s; name a folder on a "
                "faster disk, or a longer deadline."
            ) from error
        except OSError as error:
            raise OffloadError(
                f"Optimizer states in {folder} could not be {done}: {error.strerror}; name a folder on "
                "another disk."
            ) from error

    @contextlib.contextmanager
    def _refusal_told(self) -> Iterator[None]:
        """Raises OffloadError in place of an OSError of the block: no file can be made, or it has no room."""
        try:
            yield
        except OSError as error:
            there = os.path.abspath(self._offload.folder)
            while not os.path.isdir(there):
                there = os.path.dirname(there)
            free = shutil.disk_usage(there).free / 1e6
            raise OffloadError(
                f"Optimizer states ({self.nbytes / 1e6:,.0f} MB so far) cannot be kept in "
                f"{self._offload.folder}: {error.strerror} ({free:,.0f} MB are free there); name another "
                "folder, or free room."
            ) from error


@dataclass(frozen=True)
class _Done:
    """Seconds of time.monotonic in which bytes were read or written."""

    begin: float
    end: float
    nbytes: int


class _File:
    """Reads and writes runs, and leaves nothing of them in the page cache. Closed with its last reference,
    which a job may have."""

    def __init__(self, folder: str):
        os.makedirs(folder, exist_ok=True)
        self.number, name = tempfile.mkstemp(prefix="states-", dir=folder)
        weakref.finalize(self, os.close, self.number)
        os.unlink(name)
        self._dirty: deque[tuple[int, int]] = deque()

    def read(self, before: list[Future], arrays: list[memoryview], offsets: list[int]) -> _Done:
        for each in before:
            each.result()
        begin = time.monotonic()
        for array, offset in zip(arrays, offsets, strict=True):
            _all_of(os.preadv, self.number, array, offset)
            os.posix_fadvise(self.number, offset, array.nbytes, os.POSIX_FADV_DONTNEED)
        return _Done(begin, time.monotonic(), sum(each.nbytes for each in arrays))

    def write(self, arrays: list[memoryview], offsets: list[int]) -> _Done:
        begin = time.monotonic()
        for array, offset in zip(arrays, offsets, strict=True):
            _all_of(os.pwritev, self.number, array, offset)
            os.posix_fadvise(self.number, offset, array.nbytes, os.POSIX_FADV_DONTNEED)  # begins to flush
            self._dirty.append((offset, array.nbytes))
        while len(self._dirty) > KEPT_DIRTY * ARRAYS:
            os.posix_fadvise(self.number, *self._dirty.popleft(), os.POSIX_FADV_DONTNEED)
        return _Done(begin, time.monotonic(), sum(each.nbytes for each in arrays))


def _all_of(transfer: Callable[..., int], file: int, array: memoryview, offset: int) -> None:
    """Reads or writes a whole array, however little the system takes at once."""
    rest = array.cast("B")
    while len(rest):
        moved = transfer(file, [rest], offset)
        if moved == 0:
            raise OSError(0, "the file has ended, so another program has cut it")
        rest, offset = rest[moved:], offset + moved
