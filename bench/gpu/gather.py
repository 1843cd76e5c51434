"""Plays a gather in one process: the other ranks' rows come over a link, which may be throttled."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from ctypes import byref

import torch
from torch import Tensor

from bench.gpu.library import Library
from bench.gpu.problem import WORLD_SIZE as P
from bench.gpu.ranks import PIECES, Stopwatch, Workspaces, gather_shape, stream


class Gather:
    """Rank 0 of a gather. The other ranks' rows come over a link, from `source` [m, k] into its slot.

    `pause`: clock cycles that the link rests after each piece, to throttle it.
    """

    def __init__(self, library: Library, source: Tensor, x: Tensor, pause: int = 0) -> None:
        self.library, self.source, self.x, self.pause = library, source, x, pause
        self.m, self.k = x.shape
        self.chunk = self.m // P
        self.spaces = Workspaces(library, gather_shape(P, self.m, self.k, PIECES), str(x.device))
        self.slot = self.spaces.data(0, x.dtype, self.m, self.k)
        cuda = x.is_cuda
        self.streams = [torch.cuda.Stream(priority=-1) for _ in range(2)] if cuda else []
        self.views = [byref(view) for view in self.spaces.views]

    def pieces(self) -> Iterator[tuple[int, int, int, int]]:
        """Yields (peer, piece, first row, rows) in the order in which rank 0 needs them."""
        rows = self.chunk // PIECES
        for peer, piece in itertools.product(range(1, P), range(PIECES)):
            yield peer, piece, peer * self.chunk + piece * rows, rows

    def send(self, lanes: int) -> None:
        """Starts all puts of all peers, in turns on `lanes` streams, beside rank 0's stream."""
        streams = self.streams[:lanes]
        for one in streams:
            one.wait_stream(torch.cuda.current_stream())
        row_bytes = self.k * self.x.element_size()
        for number, (peer, piece, first, rows) in enumerate(self.pieces()):
            on = streams[number % lanes] if streams else None
            self.library.call(
                "put",
                self.views[peer],
                self.source.data_ptr() + first * row_bytes,
                rows * row_bytes,
                0,
                first * row_bytes,
                piece,
                1,
                on.cuda_stream if on else None,
            )
            if self.pause and on:
                with torch.cuda.stream(on):
                    torch.cuda._sleep(self.pause)
        if lanes > 1 and streams:
            streams[0].wait_stream(streams[1])
        for peer in range(1, P):
            self.library.call("end_puts", self.views[peer], streams[0].cuda_stream if streams else None)

    def finish(self) -> None:
        """Marks that rank 0 has read all; its stream then waits for its own puts."""
        self.library.call("finish", self.views[0], stream())
        if self.streams:
            torch.cuda.current_stream().wait_stream(self.streams[0])

    def fused(self, run: Callable[[], None], lanes: int) -> Callable[[], None]:
        def flight() -> None:
            self.send(lanes)
            run()
            self.finish()

        return flight

    def chunked(self, weight: Tensor, c: Tensor, by_piece: bool) -> Callable[[], None]:
        """Returns a flight with torch.matmul on each chunk, or each piece, as soon as it has arrived."""

        def flight() -> None:
            self.send(1)
            torch.matmul(self.x[: self.chunk], weight.t(), out=c[: self.chunk])
            for peer, piece, first, rows in self.pieces():
                last = piece == PIECES - 1
                if not by_piece and not last:
                    continue
                if not by_piece:  # one stream brings the pieces in order
                    first, rows = peer * self.chunk, self.chunk
                self.library.call("await", self.views[0], peer, piece, 1, stream())
                here = slice(first, first + rows)
                torch.matmul(self.slot[here], weight.t(), out=c[here])
            self.finish()

        return flight

    def puts_alone(self) -> None:
        """Runs a flight that reads nothing: the difference to `copy_all` is the cost of waits and signals."""
        self.send(1)
        self.finish()

    def copy_all(self) -> None:
        """Copies the same bytes in the fastest way, one copy; throttled: in the same pieces and rests."""
        if not self.pause:
            self.slot[self.chunk :].copy_(self.source[self.chunk :], non_blocking=True)
            return
        for _, _, first, rows in self.pieces():
            here = slice(first, first + rows)
            self.slot[here].copy_(self.source[here], non_blocking=True)
            torch.cuda._sleep(self.pause)


def calibrated_pause(gather: Gather, watch: Stopwatch, bytes_per_s: float) -> int:
    """Returns the cycles of rest after each piece that slow the copies to `bytes_per_s`."""
    count = sum(1 for _ in gather.pieces())
    sent = gather.x[gather.chunk :].numel() * gather.x.element_size()
    low, high = 1000, 100_000
    seconds = []
    for gather.pause in (low, high):
        seconds.append(watch.interleave({"copy": gather.copy_all}, 5)["copy"].median)
    per_cycle = (seconds[1] - seconds[0]) / (high - low)
    pause = low + (sent / bytes_per_s - seconds[0]) / per_cycle
    if pause < 1:
        raise RuntimeError(f"{count} copies alone take {seconds[0] * 1e6:.0f} us: no rest makes them faster.")
    return int(pause)
