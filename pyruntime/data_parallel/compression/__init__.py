"""Gradients that travel in fewer bytes: quantised, the largest values alone, or of low rank, with error
feedback; and how many bytes each matrix takes (docs/explanation/data-parallel.md)."""

from pyruntime.data_parallel.compression.allocation import allocate
from pyruntime.data_parallel.compression.settings import Compression

__all__ = ["Compression", "allocate"]
