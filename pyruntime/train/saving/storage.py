"""Reads checkpoint files on any mesh: torch.distributed.checkpoint plans which blocks a rank reads, this
module reads them.

torch's own format (FileSystemWriter, FileSystemReader) stores its index, and tensors by torch.save, as
pickles. These files hold none.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

from pyruntime.overlap import EntryKind
from pyruntime.overlap.record import entered
from pyruntime.train.saving.staging import BLOCKS, DTYPES, OFFSETS, SUFFIX

TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


class Reader:
    """Reads blocks of the safetensors files `names` in `folder`. release: called after every block, gives
    back memory that writing it took."""

    def __init__(self, folder: Path, names: Iterable[str], release: Callable[[], None] = lambda: None):
        self._folder, self._release = folder, release
        self._names = sorted(name for name in names if name.endswith(SUFFIX))
        self._files: dict[MetadataIndex, str] = {}
        self._metadata: Metadata | None = None

    def read_metadata(self) -> Metadata:
        """Returns what the files hold, from their headers, which are read once. Raises ValueError if blocks
        do not make up whole tensors, and what safetensors raises."""
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

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Copies the blocks in `plan` to this rank's tensors, which `planner` resolves."""
        begin = time.monotonic()
        size = sum(self._read(*each, planner) for each in self._by_file(plan))
        entered(EntryKind.READ, "checkpoint", "load", begin, size)
        entered(EntryKind.COPY, "checkpoint", "load", begin)  # by this thread

    def _by_file(self, plan: LoadPlan) -> Iterable[tuple[str, list[ReadItem]]]:
        found: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            found.setdefault(self._files[item.storage_index], []).append(item)
        return found.items()

    def _read(self, name: str, items: list[ReadItem], planner: LoadPlanner) -> int:
        """Reads `items` from one file; returns their bytes."""
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
                self._release()
        return size


def _check_whole(tensors: dict[str, TensorStorageMetadata]) -> None:
    """Raises ValueError if the blocks of a tensor leave a part of it out."""
    for name, each in tensors.items():
        held = sum(math.prod(chunk.sizes) for chunk in each.chunks)
        if held != math.prod(each.size):
            raise ValueError(f"its blocks of {name} hold {held} of {math.prod(each.size)} elements")
