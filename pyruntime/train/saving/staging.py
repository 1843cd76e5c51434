"""What one rank writes of a checkpoint: copied into memory that is kept, then written as one safetensors
file.

    8 bytes    the length n of the header, little-endian
    n bytes    the header, JSON: {name: {"dtype", "shape", "data_offsets"}}, blanks up to a multiple of 8
    the rest   the tensors one after the other, without gaps

(https://huggingface.co/docs/safetensors). A block of a tensor that is cut over ranks stands under the
tensor's name, and where it begins in it under "__metadata__", in the words of
`torch.distributed.checkpoint.HuggingFaceStorageReader`: torch reads these files too. torch's own writer of
them holds a rank's tensors three times and has nothing to checksum until the file is there, so it is not
used.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from pyruntime.train.disk import without_links
from pyruntime.train.manifest import Checksum

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""As safetensors names them."""
SUFFIX = ".safetensors"
BLOCKS, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
"""Under "__metadata__": {name: {OFFSETS: [...]}}, as text."""
AT_ONCE = 16 * 2**20
"""Bytes that are hashed and written between two looks at the interpreter's lock."""
FLUSH_EVERY = 256 * 2**20
"""Bytes after which what was written is brought to the disk, so that no one flush takes long."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """A block of a tensor, which one rank writes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    """Where it begins in the whole tensor."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Staging:
    """Memory on the host for `pieces`, laid out as their file is, and kept: a later checkpoint is copied to
    where the one before was. Page-locked where they are on a CUDA `device`.

    Raises ValueError for two pieces of one name.
    """

    def __init__(self, pieces: Sequence[Piece], device: torch.device):
        self.pieces = self.order(pieces)
        names = [piece.name for piece in self.pieces]
        if len(set(names)) < len(names):
            raise ValueError(f"One file cannot hold two blocks of one name, found among {sorted(names)}.")
        self._is_cuda = device.type == "cuda"
        total = sum(piece.nbytes for piece in self.pieces)
        self._memory = torch.empty(total, dtype=torch.uint8, pin_memory=self._is_cuda)
        self._views: list[Tensor] = []
        self._copied: torch.cuda.Event | None = None
        self.written = 0
        """Bytes of the file of `write` so far."""
        entries: dict[str, dict] = {}
        begin = 0
        for piece in self.pieces:
            end = begin + piece.nbytes
            self._views.append(self._memory[begin:end].view(piece.dtype).view(piece.shape))
            entries[piece.name] = {
                "dtype": DTYPES[piece.dtype],
                "shape": list(piece.shape),
                "data_offsets": [begin, end],
            }
            begin = end
        blocks = {piece.name: {OFFSETS: list(piece.offsets)} for piece in self.pieces}
        about = {"__metadata__": {BLOCKS: json.dumps(blocks), "format": "pt"}}
        header = json.dumps(about | entries, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        self._header = len(header).to_bytes(8, "little") + header

    @staticmethod
    def order(pieces: Sequence[Piece]) -> list[Piece]:
        """As they stand in the file: the widest first, so that each begins at a multiple of its element's
        size."""
        return sorted(pieces, key=lambda piece: (-piece.dtype.itemsize, piece.name))

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes what `tensors`, by the pieces' names, hold now. Those on the CPU may change when it returns;
        those on a device by what is put on its current stream afterwards.

        Raises RuntimeError where one has another shape or dtype than its piece.
        """
        for piece, view in zip(self.pieces, self._views, strict=True):
            tensor = tensors[piece.name]
            if (tuple(tensor.shape), tensor.dtype) != (piece.shape, piece.dtype):  # copy_ would broadcast
                raise RuntimeError(
                    f"{piece.name} was to be saved as {list(piece.shape)} of {piece.dtype} and is "
                    f"{list(tensor.shape)} of {tensor.dtype}."
                )
            view.copy_(tensor, non_blocking=True)
        if self._is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def write(self, path: Path) -> Checksum:
        """Writes the file, which is on the disk when it returns; its checksum is that of what was in memory.
        Any thread may call it, while nobody calls `copy`. Raises OSError."""
        if self._copied is not None:
            self._copied.synchronize()
        self.written, digest = 0, hashlib.sha256()
        content = memoryview(self._memory.numpy())
        parts = [content[at : at + AT_ONCE] for at in range(0, len(content), AT_ONCE)]
        flushed = 0
        with open(path, "wb", buffering=0, opener=without_links) as file:
            for part in (memoryview(self._header), *parts):
                if self.written >= flushed + FLUSH_EVERY:
                    os.fsync(file.fileno())
                    flushed = self.written
                digest.update(part)
                while len(part):  # a disk that becomes full takes a part
                    taken = file.write(part)
                    self.written += taken
                    part = part[taken:]
            os.fsync(file.fileno())
        return Checksum(self.written, digest.hexdigest())
