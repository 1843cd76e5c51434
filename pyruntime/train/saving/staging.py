"""Copies one rank's part of a checkpoint into reused host memory, and writes it as one safetensors file.
What is too large for a copy is written from where it lies (`Unstaged`).

    8 bytes    the length n of the header, little-endian
    n bytes    the header, JSON: {name: {"dtype", "shape", "data_offsets"}}, blanks up to a multiple of 8
    the rest   the tensors one after the other, without gaps

(https://huggingface.co/docs/safetensors). A block of a tensor that is cut over ranks has the tensor's name.
Its offset is under "__metadata__", in the form of `torch.distributed.checkpoint.HuggingFaceStorageReader`, so
that torch can read these files too. torch's own writer is not used: it holds a rank's tensors three times,
and there is nothing to checksum before the file exists.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
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
"""Their names in safetensors."""
SUFFIX = ".safetensors"
BLOCKS, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
"""Keys under "__metadata__": {name: {OFFSETS: [...]}}, as text."""
AT_ONCE = 16 * 2**20
"""Bytes that are hashed, then written, in one call each, which frees the interpreter's lock."""
FLUSH_EVERY = 256 * 2**20
"""Bytes after which written data is flushed to the disk, so that no single flush takes long."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """A block of a tensor, which one rank writes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    """Its begin in the whole tensor, in elements."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Staging:
    """Host memory for `pieces`, laid out as their file is, and reused: a later checkpoint overwrites the one
    before. Page-locked if `device` is a GPU.

    Raises ValueError if two pieces have one name.
    """

    def __init__(self, pieces: Sequence[Piece], device: torch.device):
        self.pieces = self.order(pieces)
        names = [piece.name for piece in self.pieces]
        if len(set(names)) < len(names):
            raise ValueError(f"One file cannot hold two blocks of one name, found among {sorted(names)}.")
        self._device = device
        self._copied: torch.Event | None = None
        self.written = 0
        """Bytes of the file that `write` has written so far."""
        entries: dict[str, dict] = {}
        begin = 0
        for piece in self.pieces:
            end = begin + piece.nbytes
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
        self._allocate(begin)

    def _allocate(self, total: int) -> None:
        """Makes the memory of the copies."""
        is_on_host = self._device.type == "cpu"
        self._memory = torch.empty(total, dtype=torch.uint8, pin_memory=not is_on_host)
        parts = self._memory.split([piece.nbytes for piece in self.pieces])
        self._views = [
            part.view(piece.dtype).view(piece.shape) for part, piece in zip(parts, self.pieces, strict=True)
        ]

    @staticmethod
    def order(pieces: Sequence[Piece]) -> list[Piece]:
        """Returns the pieces in file order: the widest type first, so that each begins at a multiple of its
        element size."""
        return sorted(pieces, key=lambda piece: (-piece.dtype.itemsize, piece.name))

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies `tensors`, by the pieces' names. When it returns, CPU tensors may change; those on a GPU may
        be changed by later work on its current stream.

        Raises RuntimeError if a tensor's shape or dtype is not its piece's.
        """
        for view, tensor in zip(self._views, self._checked(tensors), strict=True):
            view.copy_(tensor, non_blocking=True)
        if self._device.type != "cpu":
            self._copied = torch.Event(self._device)
            self._copied.record()

    def _checked(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """Returns the tensors in the order of the pieces."""
        for piece in self.pieces:
            tensor = tensors[piece.name]
            if (tuple(tensor.shape), tensor.dtype) != (piece.shape, piece.dtype):  # copy_ would broadcast
                raise RuntimeError(
                    f"{piece.name} was to be saved as {list(piece.shape)} of {piece.dtype}, but it is "
                    f"{list(tensor.shape)} of {tensor.dtype}."
                )
        return [tensors[piece.name] for piece in self.pieces]

    def _parts(self) -> Iterator[memoryview]:
        """Yields the file's content after its header, AT_ONCE bytes or less at a time."""
        return _pieces_of(self._memory)

    def write(self, path: Path) -> Checksum:
        """Writes the file, flushes it to the disk, and returns the checksum of the memory's content. Any
        thread may call it, but `copy` must not run meanwhile. Raises OSError."""
        if self._copied is not None:
            self._copied.synchronize()
        self.written, digest = 0, hashlib.sha256()
        flushed = 0
        with open(path, "wb", buffering=0, opener=without_links) as file:
            for part in itertools.chain([memoryview(self._header)], self._parts()):
                if self.written >= flushed + FLUSH_EVERY:
                    os.fsync(file.fileno())
                    flushed = self.written
                digest.update(part)
                while len(part):  # a disk that becomes full takes only a part
                    taken = file.write(part)
                    self.written += taken
                    part = part[taken:]
            os.fsync(file.fileno())
        return Checksum(self.written, digest.hexdigest())


class Unstaged(Staging):
    """A Staging without copies: `write` reads the tensors that `copy` got, which must not change before it
    returns. They lie on the host. release: called after every part, gives back memory that reading took."""

    def __init__(self, pieces: Sequence[Piece], release: Callable[[], None]):
        self._release, self._tensors = release, [torch.empty(0)]
        super().__init__(pieces, torch.device("cpu"))

    def _allocate(self, total: int) -> None:
        pass

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = self._checked(tensors)

    def _parts(self) -> Iterator[memoryview]:
        for tensor in self._tensors:
            for part in _pieces_of(tensor.detach().contiguous().view(-1).view(torch.uint8)):
                yield part
                self._release()
        self._tensors = []


def _pieces_of(memory: Tensor) -> Iterator[memoryview]:
    content = memoryview(memory.numpy())
    for at in range(0, len(content), AT_ONCE):
        yield content[at : at + AT_ONCE]
