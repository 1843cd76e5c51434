"""Finds the library of GPU kernels, or says why it cannot be used."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path


class CudaLibraryError(RuntimeError):
    """Raised if something that a kernel needs is missing, or if the device refuses the kernel."""


def library_path() -> Path:
    """Returns the path where the build puts the kernels for this torch's kind of GPU."""
    import torch

    kind = "hip" if torch.version.hip else "cuda"
    return Path(__file__).resolve().parent.parent / f"libpyruntime_{kind}.so"


def architectures_in(library: Path) -> list[str]:
    """Returns the AMD GPUs for which a built library has kernels, as gfx names."""
    return sorted(
        {name.decode() for name in re.findall(rb"amdgcn-amd-amdhsa--(gfx\w+)", library.read_bytes())}
    )


def why_not() -> str:
    """Returns a sentence that says why the kernels cannot be used here; empty if they can."""
    import torch

    path, rocm = library_path(), bool(torch.version.hip)
    kernels, target, compiler = ("HIP", "hip", "hipcc") if rocm else ("CUDA", "cuda", "nvcc")
    if not path.exists():
        return f"{path.name} was not built: run `make {target}` where {compiler} is."
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        return f"the {kernels} kernels could not be loaded: {error}; run `make {target}`."
    if not torch.version.cuda and not rocm:
        return "this torch is built without CUDA."
    from pyruntime.cuda import cards

    if not cards.count():
        return "torch sees no GPU."
    found = cards.architecture()
    if rocm:
        built = architectures_in(path)
        if found not in built:
            return (
                f"the GPU is {found}, but the kernels were built for {', '.join(built)}; run "
                f"`PYTORCH_ROCM_ARCH={found} make hip`."
            )
        return ""
    if float(found) < 8:
        return "the GPU's compute capability is below 8.0."
    return ""
