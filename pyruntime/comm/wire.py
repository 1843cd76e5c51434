"""The format in which rows travel: as they are, or rounded to fewer bytes.

Rounding a row again changes nothing, so a row that has travelled may go on from rank to rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyruntime.choices import WireFormat, check_value, values
from pyruntime.comm.core import _C


@dataclass(frozen=True)
class Wire:
    """The format in which rows [*, width] of `dtype` travel.

    Raises ValueError for a format that does not exist, for tensors that it cannot round, and for "fp8" on a
    device without its kernels.
    """

    format: WireFormat
    width: int
    dtype: torch.dtype
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        check_value("format", self.format, values(WireFormat))
        if self.format == "same":
            return
        if self.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(
                f"format={self.format!r} rounds float32, bfloat16 and float16, but rows are {self.dtype}; "
                'use "same".'
            )
        if self.format == "fp8" and (reason := _C.why_no_compression(str(self.device))):
            raise ValueError(f'format="fp8" cannot round rows on {self.device}: {reason}; or use "bf16".')

    @property
    def travels_as(self) -> torch.dtype:
        return {"same": self.dtype, "bf16": torch.bfloat16, "fp8": torch.uint8}[self.format]

    @property
    def travelling_width(self) -> int:
        """Elements of a row as it travels."""
        return _C.fp8_bytes(self.width) if self.format == "fp8" else self.width

    def write(self, rows: Tensor, to: Tensor) -> None:
        """Writes rows [n, width] as they travel into `to` [n, travelling_width]."""
        if self.format == "fp8":
            _C.pack_fp8(rows.contiguous(), to)
        else:
            to.copy_(rows)

    def read(self, travelled: Tensor, out: Tensor) -> None:
        """Reads rows that have `travelled`, [..., travelling_width], into `out` [..., width], whose rows may
        lie apart in all but its last two dimensions."""
        if self.format != "fp8":
            out.copy_(travelled)
        elif out.dim() == 2:
            _C.unpack_fp8(travelled.contiguous(), out)
        else:
            for some, to in zip(travelled, out, strict=True):
                self.read(some, to)

    def packed(self, x: Tensor) -> Tensor:
        """Returns x [..., width] as it travels, [..., travelling_width]; x itself for the format "same"."""
        if self.format == "same":
            return x
        rows = x.reshape(-1, self.width)
        travelled = torch.empty(len(rows), self.travelling_width, dtype=self.travels_as, device=x.device)
        self.write(rows, travelled)
        return travelled.view(*x.shape[:-1], self.travelling_width)

    def unpacked(self, travelled: Tensor) -> Tensor:
        """Returns the rows that were packed(), in their dtype."""
        if self.format == "same":
            return travelled
        rows = travelled.reshape(-1, self.travelling_width)
        out = torch.empty(len(rows), self.width, dtype=self.dtype, device=rows.device)
        self.read(rows, out)
        return out.view(*travelled.shape[:-1], self.width)
