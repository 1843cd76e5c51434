"""The library of kernels: where it lies, and what keeps it from being used."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path


class CudaLibraryError(RuntimeError):
    """What a kernel needs is not here, or the device refused it."""


def library_path() -> Path:
    """Where the build puts the kernels for this torch's kind of GPU."""
    import torch

    kind = "hip" if torch.version.hip else "cuda"
    return Path(__file__).resolve().parent.parent / f"libpyruntime_{kind}.so"


def architectures_in(library: Path) -> list[str]:
    """The GPUs of AMD that a built library has kernels for."""
    return sorted(
        {name.decode() for name in re.findall(rb"amdgcn-amd-amdhsa--(gfx\w+)", library.read_bytes())}
    )


def why_not() -> str:
    """A sentence that says why the kernels cannot be used here; empty where they can."""
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
    if not torch.cuda.is_available():
        return "torch sees no GPU."
    if rocm:
        found = torch.cuda.get_device_properties().gcnArchName.partition(":")[0]
        built = architectures_in(path)
        if found not in built:
            return (
                f"the GPU is {found}, and the kernels were built for {', '.join(built)}; run "
                f"`PYTORCH_ROCM_ARCH={found} make hip`."
            )
        return ""
    if torch.cuda.get_device_capability() < (8, 0):
        return "the GPU's compute capability is below 8.0."
    return ""
