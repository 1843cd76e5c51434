"""Loads the C++ core once: its operators, the CPU symmetric memory, and the exception types of both."""

import atexit
import logging
import os
import threading
from pathlib import Path

import torch  # the core links against torch's libraries, which must be loaded first

from pyruntime.comm.errors import CommError, CommTimeout, PeerLost

_BUILT_WITH = Path(__file__).parent.parent / "torch_version.txt"
"""The version of torch that the core was built with; setup.py writes it beside the core."""

# Checked before the core is loaded: in another torch the functions that it calls may have other arguments.
if _BUILT_WITH.exists() and (_built_with := _BUILT_WITH.read_text().strip()) != str(torch.__version__):
    raise ImportError(
        f"pyruntime was built with torch {_built_with} and found torch {torch.__version__}: install that "
        "one, or build pyruntime again with this one."
    )
try:
    from pyruntime import _C
except ImportError as error:
    raise ImportError(
        f"pyruntime's C++ core cannot be loaded here ({error}). In a source folder run `make build`, or "
        "leave that folder if pyruntime is installed."
    ) from error

_C.register_errors(CommError, CommTimeout, PeerLost)
_C.set_torch_is_for_rocm(torch.version.hip is not None)
_C.report_to(logging.getLogger("pyruntime").warning)


def _name_of_thread(number: int) -> str:
    if number == os.getpid():  # after a fork Python does not know the main thread's number
        return f"thread {number} ({threading.main_thread().name})"
    names = [thread.name for thread in threading.enumerate() if thread.native_id == number]
    return f"thread {number} ({names[0]})" if names else f"thread {number}"


_C.set_thread_namer(_name_of_thread)


@atexit.register
def _leave() -> None:
    """Passes on what others still wait for, and then ends the core's threads before Python ends."""
    _C.leave_groups()
    _C.leave_job()


def keep_freed_memory() -> bool:
    """Makes glibc keep freed buffers (mallopt: mmap, trim and top-pad thresholds), so that a training step
    reuses pages instead of faulting in new ones. It holds for the whole process and is worth 5 to 15 % of a
    step. Returns False, with nothing changed, if the C library is another one.
    """
    return _C.keep_freed_memory()


def symmetric_memory_bytes() -> int:
    """Returns the bytes of CPU symmetric memory that this process has allocated and still holds."""
    return _C.symmetric_memory_bytes()
