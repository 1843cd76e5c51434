"""What parallelism and the trainer do, as ranges by name for who listens: torch.profiler, and tools of NVTX.

NVIDIA Nsight Systems (`nsys profile`) and other tools of NVTX hear the domain "pyruntime", on CPUs and GPUs
alike, through the package nvtx (the extra `nvtx`). While nobody listens a range costs less than a
microsecond."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd import _profiler_enabled

NOTHING = contextlib.nullcontext()


def marked(what: str, name: str = "") -> contextlib.AbstractContextManager:
    """A range "WHAT NAME" while somebody listens."""
    return _range(f"{what} {name}".rstrip()) if is_heard() else NOTHING


def is_heard() -> bool:
    """Whether somebody listens to ranges."""
    return _profiler_enabled() or nvtx_domain() is not None


@functools.cache
def nvtx_domain() -> Any:
    """The NVTX domain where a tool listens to it, else None: tools are there from a process's start on, or
    never."""
    try:
        import nvtx
        from nvtx.nvtx import DummyDomain
    except ImportError:
        return None
    domain = nvtx.get_domain("pyruntime")
    return None if isinstance(domain, DummyDomain) else domain


class BackwardRanges:
    """Ranges of a backward pass, one after the other: each from the moment when the gradient of a tensor is
    complete until the next one begins, the last until the pass ends."""

    def __init__(self) -> None:
        self._open = contextlib.ExitStack()
        self._is_open = False

    def begin_at(self, tensor: torch.Tensor, label: str) -> None:
        """The range `label` begins with the gradient of `tensor`, unless that has none."""
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(lambda _: self._begin(label))

    def _begin(self, label: str) -> None:
        if not self._is_open:
            # Called by the thread that takes the pass, to which ranges belong.
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        self._end()
        self._is_open = True
        self._open.enter_context(marked(label))

    def _end(self) -> None:
        self._is_open = False
        self._open.close()


@contextlib.contextmanager
def _range(label: str) -> Iterator[None]:
    domain = nvtx_domain()
    recorded = torch.profiler.record_function(label) if _profiler_enabled() else NOTHING
    if domain is not None:
        domain.push_range(message=label)
    try:
        with recorded:
            yield
    finally:
        if domain is not None:
            domain.pop_range()
