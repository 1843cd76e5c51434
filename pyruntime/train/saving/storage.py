"""What torch.distributed.checkpoint is told about storage: it says who writes which block of which tensor,
and which blocks a rank reads at another mesh; the files are ours.

torch's own format (FileSystemWriter, FileSystemReader) keeps its index as a pickle and its tensors in
torch.save's, which is one too. Nothing here is.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, WriteItem
from torch.futures import Future

from pyruntime.comm.exchange import barrier
from pyruntime.overlap import Kind
from pyruntime.overlap.record import entered
from pyruntime.train.saving.staging import BLOCKS, DTYPES, OFFSETS, SUFFIX, Piece

TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


def _done(value: Any) -> Future:
    future: Future = Future()
    future.set_result(value)
    return future


class PlanTaker(StorageWriter):
    """Given to `dcp.save`, which then writes nothing: `items` are what this rank is to write, each replica
    of a block by one rank."""

    def __init__(self) -> None:
        self.items: list[WriteItem] = []

    @property
    def pieces(self) -> list[Piece]:
        """The items as blocks of their file."""
        found = []
        for item in self.items:
            data = item.tensor_data
            assert data is not None  # tensors alone are saved
            chunk = data.chunk
            found.append(
                Piece(item.index.fqn, data.properties.dtype, tuple(chunk.sizes), tuple(chunk.offsets))
            )
        return found

    def write_data(self, plan: SavePlan, planner: Any) -> Future:
        # An empty block (fewer rows than ranks) is none.
        self.items = [
            item for item in plan.items if item.tensor_data is None or math.prod(item.tensor_data.chunk.sizes)
        ]
        return _done([])

    def finish(self, metadata: Metadata, results: list) -> None:
        """The manifest is written when the files are there."""

    def reset(self, checkpoint_id: Any = None) -> None:
        """There is nothing to reset."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """There is nothing to set up."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class Reader(StorageReader):
    """Reads blocks of the safetensors files `names` in `folder`; `doing` begins the sentence of an error.

    Ranks may read for as long as they live. torch.distributed.checkpoint ends its reading with a collective,
    which the deadline bounds. So the ranks meet before it: a rank whose disk is slow is waited for, and one
    that is stopped is not.
    """

    def __init__(self, folder: Path, names: Iterable[str], group: dist.ProcessGroup, doing: str):
        self._folder, self._group, self._doing = folder, group, doing
        self._names = sorted(name for name in names if name.endswith(SUFFIX))
        self._files: dict[MetadataIndex, str] = {}
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the files hold, by their headers, which are read once.

        Raises ValueError where blocks do not make up whole tensors, and what safetensors raises."""
        if self._metadata is None:
            tensors: dict[str, TensorStorageMetadata] = {}
            for name in self._names:
                with safe_open(self._folder / name, framework="pt") as opened:
                    begins = json.loads((opened.metadata() or {}).get(BLOCKS, "{}"))
                    for key in opened.keys():  # noqa: SIM118 - no mapping
                        block = opened.get_slice(key)
                        self._add(tensors, name, key, block, begins[key][OFFSETS])
            _check_whole(tensors)
            self._metadata = Metadata(tensors)
        return self._metadata

    def _add(
        self, tensors: dict[str, TensorStorageMetadata], file: str, key: str, block: Any, begins: list[int]
    ) -> None:
        shape, dtype = block.get_shape(), TORCH_DTYPES[block.get_dtype()]
        if len(begins) != len(shape) or not all(type(begin) is int and begin >= 0 for begin in begins):
            raise ValueError(f"{file} says of {key} that its block begins at {begins}")
        ends = [begin + length for begin, length in zip(begins, shape, strict=True)]
        known = tensors.setdefault(
            key, TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(ends), [])
        )
        if known.properties.dtype != dtype or len(known.size) != len(ends):
            raise ValueError(f"{file} holds a block of {key} that does not fit the others")
        known.size = torch.Size(map(max, known.size, ends))
        known.chunks.append(ChunkStorageMetadata(torch.Size(begins), torch.Size(shape)))
        self._files[MetadataIndex(key, begins)] = file

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future:
        begin = time.monotonic()
        try:
            size = sum(self._read(*each, planner) for each in self._by_file(plan))
            entered(Kind.READ, "checkpoint", "load", begin, size)
            entered(Kind.COPY, "checkpoint", "load", begin)  # by this thread
        finally:  # a rank that fails is no slower
            barrier(self._group, self._doing)
        return _done(None)

    def _by_file(self, plan: LoadPlan) -> Iterable[tuple[str, list[ReadItem]]]:
        found: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            found.setdefault(self._files[item.storage_index], []).append(item)
        return found.items()

    def _read(self, name: str, items: list[ReadItem], planner: LoadPlanner) -> int:
        """Returns the bytes of what was read of that file."""
        size = 0
        with safe_open(self._folder / name, framework="pt") as opened:
            for item in items:
                block = opened.get_slice(item.storage_index.fqn)
                if list(item.lengths) == list(block.get_shape()):
                    tensor = opened.get_tensor(item.storage_index.fqn)
                else:
                    ends = zip(item.storage_offsets, item.lengths, strict=True)
                    tensor = block[tuple(slice(begin, begin + length) for begin, length in ends)]
                target = planner.resolve_tensor(item).detach()
                if target.shape != tensor.shape:
                    raise ValueError(f"{name} holds a block of {item.storage_index.fqn} of another shape")
                target.copy_(tensor)
                planner.commit_tensor(item, target)
                size += tensor.nbytes
        return size

    def reset(self, checkpoint_id: Any = None) -> None:
        """A reader is of one folder."""

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """read_metadata() has."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def _check_whole(tensors: dict[str, TensorStorageMetadata]) -> None:
    """Raises ValueError where the blocks of a tensor leave some of it out."""
    for name, each in tensors.items():
        held = sum(math.prod(chunk.sizes) for chunk in each.chunks)
        if held != math.prod(each.size):
            raise ValueError(f"its blocks of {name} hold {held} of {math.prod(each.size)} elements")
