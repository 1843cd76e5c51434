"""Sends gradients in fewer bytes: quantised, only the largest values, or of low rank, with error feedback;
and plans how many bytes each matrix takes (docs/explanation/data-parallel.md)."""

from pyruntime.data_parallel.compression.allocation import allocate
from pyruntime.data_parallel.compression.settings import Compression

__all__ = ["Compression", "allocate"]
