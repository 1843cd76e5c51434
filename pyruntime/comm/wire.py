"""What rows travel as: as they are, or rounded to fewer bytes.

Rounding a row again changes nothing, so what has travelled once may go on from rank to rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyruntime.choices import WireFormat, check_value, values
from pyruntime.comm.core import _C


@dataclass(frozen=True)
class Wire:
    """How rows [*, width] of `dtype` travel.

    Raises ValueError for a format that there is not, and for tensors that it cannot round.
    """

    format: WireFormat
    width: int
    dtype: torch.dtype
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        check_value("format", self.format, values(WireFormat))
        if self.format == "same":
            return
        floats = (torch.float32, torch.bfloat16, torch.float16)
        if self.dtype not in floats or torch.device(self.device).type != "cpu":
            raise ValueError(
                f"format={self.format!r} rounds float32, bfloat16 and float16 on the CPU, and rows are "
                f'{self.dtype} on {self.device}; use "same".'
            )

    @property
    def travels_as(self) -> torch.dtype:
        return {"same": self.dtype, "bf16": torch.bfloat16, "fp8": torch.uint8}[self.format]

    @property
    def travelling_width(self) -> int:
        """Elements of a row as it travels."""
        return _C.fp8_bytes(self.width) if self.format == "fp8" else self.width

    def write(self, rows: Tensor, to: Tensor) -> None:
        """to [n, travelling_width] = rows [n, width] as they travel."""
        if self.format == "fp8":
            _C.pack_fp8(rows.contiguous(), to)
        else:
            to.copy_(rows)

    def read(self, travelled: Tensor, out: Tensor) -> None:
        """out [n, width] = what was written as `travelled`."""
        if self.format == "fp8":
            _C.unpack_fp8(travelled.contiguous(), out)
        else:
            out.copy_(travelled)

    def packed(self, x: Tensor) -> Tensor:
        """x [..., width] as it travels, [..., travelling_width]; itself where that is as it is."""
        if self.format == "same":
            return x
        rows = x.reshape(-1, self.width)
        travelled = torch.empty(len(rows), self.travelling_width, dtype=self.travels_as)
        self.write(rows, travelled)
        return travelled.view(*x.shape[:-1], self.travelling_width)

    def unpacked(self, travelled: Tensor) -> Tensor:
        """The inverse of packed(), of the dtype."""
        if self.format == "same":
            return travelled
        rows = travelled.reshape(-1, self.travelling_width)
        out = torch.empty(len(rows), self.width, dtype=self.dtype)
        self.read(rows, out)
        return out.view(*travelled.shape[:-1], self.width)
