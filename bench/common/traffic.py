"""Sends unrelated traffic beside a computation, to measure the best that a machine can do under that load.

If the cores that multiply also run the network stack, max(T_g, T_c) cannot be reached. The loaded limit is
the time of the same computation without exchange, while an equal number of unrelated bytes is sent, until
both are finished.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

PIECE_BYTES = 1 << 20
PROBE_BYTES = 8 << 20  # to measure the headers' share
COUNTED = 4  # runs whose bytes are counted together, as bytes of one may leave during the next


def bytes_out() -> int:
    """Returns the bytes that have left through this host's interfaces except the loopback."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    rows = (line.split(":") for line in lines)
    return sum(int(figures.split()[8]) for name, figures in rows if name.strip() != "lo")


def sent_by(work: Callable[[], object]) -> int:
    """Returns the bytes that leave this host in a run of `work`, the mean over runs and ranks. Collective."""
    dist.barrier()
    before = bytes_out()
    for _ in range(COUNTED):
        work()
    dist.barrier()
    sent = torch.tensor(float(bytes_out() - before), dtype=torch.float64)
    dist.all_reduce(sent)
    return int(sent) // dist.get_world_size() // COUNTED


def pieces(nbytes: int) -> list[torch.Tensor]:
    """Returns buffers of `nbytes` in all, with every page touched."""
    sizes = [min(PIECE_BYTES, nbytes - begin) for begin in range(0, nbytes, PIECE_BYTES)]
    return [torch.zeros(size, dtype=torch.uint8) for size in sizes]


class Traffic:
    """Sends `nbytes` from every host to the next one, and receives as many from the one before; headers and
    acknowledgements count, as in `sent_by`. One rank a host. All ranks make and use it together."""

    def __init__(self, nbytes: int) -> None:
        self._out = torch.randint(256, (PIECE_BYTES,), dtype=torch.uint8)
        probe = min(nbytes, PROBE_BYTES)
        self._pieces = pieces(probe)
        self._pieces = pieces(nbytes * probe // sent_by(self.alone))

    def alone(self) -> None:
        """Sends and receives all bytes, without computation."""
        self.beside(lambda: None)()

    def beside(self, work: Callable[[], object]) -> Callable[[], None]:
        """Returns a function that runs `work`, which exchanges nothing, beside the traffic until both end."""

        def run() -> None:
            rank, ranks = dist.get_rank(), dist.get_world_size()
            here, there = (rank - 1) % ranks, (rank + 1) % ranks
            moves = [dist.irecv(piece, here, tag=tag) for tag, piece in enumerate(self._pieces)]
            moves += [dist.isend(self._out[: len(p)], there, tag=tag) for tag, p in enumerate(self._pieces)]
            work()
            for move in moves:
                if move is not None:
                    move.wait()

        return run
