"""Reads and writes shards: the tokens of some documents in one file, and where each document ends.

    offset              what                                                        type
    0                   "PYRTOKEN"                                                  8 bytes
    8                   version of the format, bytes of a token (1, 2, 4)           2 uint32
    16                  tokens T, rows R and columns C of the index                 3 uint64
    40                  BLAKE2b of the tokenizer's fingerprint                      32 bytes
    72                  BLAKE2b of tokens and index                                 32 bytes
    104                 BLAKE2b of the header up to here                            16 bytes
    120                 BLAKE2b of index and blocks                                 8 bytes
    128                 tokens                                                      T unsigned integers
    128 + T, up to 8    index, column by column                                     C x R int64
    behind it           BLAKE2b of each 64 KiB of tokens                            8 bytes each

All little-endian. In a shard for training the columns are `ENDS`: one row for each document, with the tokens
and the bytes of text of all documents up to its end, separators included.

In a shard of conversations there is a third column, their targets: the tokens that are learned. Each stored
integer is then twice the token, plus 1 if it is a target, so that the mask is where the token is and is
copied, cut and checked with it. A conversation without a target has a row and no tokens. The first token of
a conversation is never a target. All tokens of text are targets, and it is stored without this.

A shard appears under its name when it is complete and on the disk. Opening one reads its header, its index
and `SAMPLED` blocks of tokens, with the first and the last, and compares them with their digests. That always
finds a shard that was cut off, another file, and a damaged index; damaged tokens only in those blocks.
`TokenShard.check` reads all of it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import struct
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from pyruntime.train import disk

MAGIC, VERSION = b"PYRTOKEN", 2
HEADER = struct.Struct("<8sIIQQQ32s32s")
HEADER_BYTES = 128
ENDS = ("tokens", "bytes", "targets")
READ_BYTES = 2**20
BLOCK_BYTES = 2**16
BLOCK_DIGEST = 8
SAMPLED = 8
"""Blocks of tokens that are compared when a shard is opened."""
PARTIAL = ".partial"


class DamagedShard(ValueError):
    """A damaged file; the message ends a sentence."""


def mark_of(fingerprint: bytes) -> bytes:
    """Returns the 32 bytes that a shard stores of a tokenizer's fingerprint."""
    return hashlib.blake2b(fingerprint, digest_size=32).digest()


def dtype_of(vocab_size: int) -> np.dtype:
    """Returns the smallest type that holds every token: uint8, uint16 or uint32."""
    return np.min_scalar_type(vocab_size - 1)


class ShardWriter:
    """Writes a shard, token by token, in memory that does not grow with it. Raises OSError."""

    def __init__(self, path: Path, dtype: np.dtype, fingerprint: bytes):
        self._path, self._dtype, self._mark = path, dtype, mark_of(fingerprint)
        # A unique name: an orphaned process may still be writing the same shard.
        self._partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}{PARTIAL}")
        self._file: BinaryIO = open(self._partial, "wb")  # noqa: SIM115 - closed by publish or discard
        self._file.write(bytes(HEADER_BYTES))
        self._digest = hashlib.blake2b(digest_size=32)
        self._blocks: list[bytes] = []
        self._block = bytearray()
        self.tokens = 0
        """Tokens written so far."""

    def write(self, ids: np.ndarray) -> None:
        """Appends tokens [n]."""
        content = ids.astype(self._dtype, copy=False).tobytes()
        self._digest.update(content)
        self._file.write(content)
        self.tokens += len(ids)
        self._block += content
        while len(self._block) >= BLOCK_BYTES:
            self._blocks.append(_digest_of(bytes(self._block[:BLOCK_BYTES]), BLOCK_DIGEST))
            del self._block[:BLOCK_BYTES]

    def publish(self, index: Sequence[np.ndarray]) -> None:
        """Writes the index, columns [R] of int64, and renames the file to its final name."""
        padding = bytes(-self.tokens * self._dtype.itemsize % 8)
        if self._block:
            self._blocks.append(_digest_of(bytes(self._block), BLOCK_DIGEST))
        tail = b"".join(np.ascontiguousarray(column, dtype="<i8").tobytes() for column in index)
        tail += b"".join(self._blocks)
        for part in (padding, tail):
            self._digest.update(part)
            self._file.write(part)
        head = HEADER.pack(
            MAGIC,
            VERSION,
            self._dtype.itemsize,
            self.tokens,
            len(index[0]),
            len(index),
            self._mark,
            self._digest.digest(),
        )
        self._file.seek(0)
        self._file.write(head + _digest_of(head) + _digest_of(tail, BLOCK_DIGEST))
        self._file.close()
        disk.flush(self._partial)
        self._partial.replace(self._path)
        disk.flush(self._path.parent)

    def discard(self) -> None:
        """Removes the partial file, unless it was published."""
        self._file.close()
        self._partial.unlink(missing_ok=True)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()


def _digest_of(content: bytes, size: int = 16) -> bytes:
    return hashlib.blake2b(content, digest_size=size).digest()


@dataclasses.dataclass(frozen=True)
class TokenShard:
    """A shard on the disk, mapped into memory and not read."""

    path: Path
    tokens: np.ndarray
    """[T], read-only."""
    index: np.ndarray
    """[C, R] int64, read-only."""
    mark: bytes
    """Mark of the tokenizer; see `mark_of`."""
    digest: bytes
    """Digest of tokens, index and blocks."""

    @property
    def is_chat(self) -> bool:
        """Whether a shard for training is of conversations."""
        return len(self.index) == len(ENDS)

    @classmethod
    def open(cls, path: Path) -> TokenShard:
        """Maps a shard. Raises DamagedShard if the file is no shard, or not a complete one."""
        try:
            with open(path, "rb") as file:
                head = file.read(HEADER_BYTES)
                size = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise DamagedShard(f"it cannot be read: {error.strerror}") from error
        if len(head) < HEADER_BYTES or head[:8] != MAGIC:
            raise DamagedShard("it is no shard of tokens")
        fields, ending = head[: HEADER.size], head[HEADER.size : HEADER.size + 16]
        _, version, itemsize, tokens, rows, columns, mark, digest = HEADER.unpack(fields)
        if _digest_of(fields) != ending:
            raise DamagedShard("its header is not what was written")
        if version != VERSION:
            raise DamagedShard(f"its format is version {version}, and this program reads {VERSION}")
        begin = -(-(HEADER_BYTES + tokens * itemsize) // 8) * 8
        blocks = -(-tokens * itemsize // BLOCK_BYTES)
        expected = begin + 8 * rows * columns + BLOCK_DIGEST * blocks
        if size != expected:
            raise DamagedShard(f"it has {size} bytes and was written with {expected}")
        _check_parts(path, head[HEADER.size + 16 :], begin, tokens * itemsize, blocks)
        dtype = np.dtype(f"<u{itemsize}")
        return cls(
            path,
            _mapped(path, dtype, HEADER_BYTES, (tokens,)),
            _mapped(path, np.dtype("<i8"), begin, (columns, rows)),
            mark,
            digest,
        )

    def check(self) -> None:
        """Reads the whole shard. Raises DamagedShard if it is not what was written."""
        digest = hashlib.blake2b(digest_size=32)
        with open(self.path, "rb") as file:
            file.seek(HEADER_BYTES)
            while block := file.read(READ_BYTES):
                digest.update(block)
        if digest.digest() != self.digest:
            raise DamagedShard("its content is not what was written (BLAKE2b)")


def _check_parts(path: Path, tail_digest: bytes, begin: int, token_bytes: int, blocks: int) -> None:
    """Raises DamagedShard if the index, a block's digest, or a sampled block is not what was written."""
    with open(path, "rb") as file:
        file.seek(begin)
        found = hashlib.blake2b(digest_size=BLOCK_DIGEST)
        while part := file.read(READ_BYTES):
            found.update(part)
        if found.digest() != tail_digest:
            raise DamagedShard("its index is not what was written (BLAKE2b)")
        file.seek(-BLOCK_DIGEST * blocks, os.SEEK_END)
        digests = file.read()
        for block in sorted({round(at * (blocks - 1) / (SAMPLED - 1)) for at in range(SAMPLED) if blocks}):
            file.seek(HEADER_BYTES + block * BLOCK_BYTES)
            content = file.read(min(BLOCK_BYTES, token_bytes - block * BLOCK_BYTES))
            wanted = digests[block * BLOCK_DIGEST : (block + 1) * BLOCK_DIGEST]
            if _digest_of(content, BLOCK_DIGEST) != wanted:
                raise DamagedShard(f"its tokens are not what was written (BLAKE2b of block {block})")


def _mapped(path: Path, dtype: np.dtype, offset: int, shape: tuple[int, ...]) -> np.ndarray:
    if 0 in shape:  # numpy cannot map an empty array
        return np.empty(shape, dtype)
    return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=shape)
