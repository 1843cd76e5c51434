"""The kernels of csrc/cuda from Python: the library that nvcc makes, loaded at run time, and functions that
take tensors.

Nothing here is chosen by the primitives yet (`pyruntime.all_gather_matmul` on a GPU is `unfused`):
docs/cuda.md says what has run where.
"""

from pyruntime.cuda.group import FusedGroup
from pyruntime.cuda.kernels import Kernels
from pyruntime.cuda.library import CudaLibraryError, Library, library_path, why_not

__all__ = ["CudaLibraryError", "FusedGroup", "Kernels", "Library", "library_path", "why_not"]
