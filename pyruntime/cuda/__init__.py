"""The Python side of the kernels of csrc/cuda: whether they are built, and further tiles to try.

The ops call the kernels from C++ (csrc/transport/device, csrc/ops). docs/reference/support.md says what has
run.
"""

from pyruntime.cuda.library import CudaLibraryError, architectures_in, library_path, why_not

__all__ = ["CudaLibraryError", "architectures_in", "library_path", "why_not"]
