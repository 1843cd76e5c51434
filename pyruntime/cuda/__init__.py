"""The kernels of csrc/cuda from Python: the library that nvcc makes, loaded at run time, and functions that
take tensors of one rank. For benchmarks and tests; the ops call the library from C++ (csrc/transport).

docs/cuda.md says what has run where.
"""

from pyruntime.cuda.kernels import Kernels
from pyruntime.cuda.library import CudaLibraryError, Library, library_path, why_not

__all__ = ["CudaLibraryError", "Kernels", "Library", "library_path", "why_not"]
