"""The all-to-all of a process group: every rank sends rows to every rank."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from pyruntime.comm.core import _C
from pyruntime.comm.exchange import first_line
from pyruntime.comm.groups import Group, deadline, group_name, process_group


class AllToAll:
    """An exchange under way: `sent` [rows, ...] holds rows for each rank, by rank, `rows_to[r]` of them for
    rank r, and `rows_from[r]` come from it. All ranks of the group begin their exchanges in one order.

    account: the companion that counts it. On a device the current stream waits, and the host does not.
    Raises CommTimeout and PeerLost, as `wait` does."""

    def __init__(
        self, group: Group, account: str, sent: Tensor, rows_to: Sequence[int], rows_from: Sequence[int]
    ):
        self._group, self._account, self._begin = group, account, time.monotonic()
        self._sent, own = sent.contiguous(), process_group(group)
        self._received = sent.new_empty(sum(rows_from), *sent.shape[1:])
        self._from_others = sum(rows_from) - rows_from[dist.get_rank(own)]
        with self._named():
            self._work = dist.all_to_all_single(
                self._received, self._sent, list(rows_from), list(rows_to), group=own, async_op=True
            )

    def wait(self) -> Tensor:
        """Returns the rows of all ranks, by rank."""
        with self._named():
            if self._sent.device.type == "cpu":
                self._work.wait(timedelta(seconds=deadline(self._group)))
            else:
                self._work.wait()  # with a time the host would wait for NCCL
        row_bytes = self._received.nbytes // max(1, len(self._received))
        _C.count_all_to_all(self._account, self._from_others * row_bytes, self._begin)
        return self._received

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # gloo's
            name = group_name(self._group)
            _C.raise_for_missing(name, f"all_to_all of group '{name}'", first_line(error))
