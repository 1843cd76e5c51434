"""Files of a distributed checkpoint, which ranks may read and write for as long as they live.

torch.distributed.checkpoint ends its reading and its writing with a collective, which the deadline bounds.
So the ranks meet before it: a rank whose disk is slow is waited for, and one that is stopped is not.
"""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from pyruntime.comm.meeting import meet


class PatientWriter(FileSystemWriter):
    """Writes to `folder`; `doing` begins the sentence of an error."""

    def __init__(self, folder: Path, group: dist.ProcessGroup, doing: str):
        super().__init__(str(folder))
        self._ranks, self._doing = group, doing

    def write_data(self, plan, planner):
        try:
            written = super().write_data(plan, planner)
            written.wait()
            return written
        finally:  # a rank that fails is no slower
            meet(self._ranks, self._doing)


class PatientReader(FileSystemReader):
    """Reads from `folder`; `doing` begins the sentence of an error."""

    def __init__(self, folder: Path, group: dist.ProcessGroup, doing: str):
        super().__init__(str(folder))
        self._ranks, self._doing = group, doing

    def read_data(self, plan, planner):
        try:
            read = super().read_data(plan, planner)
            read.wait()
            return read
        finally:
            meet(self._ranks, self._doing)
