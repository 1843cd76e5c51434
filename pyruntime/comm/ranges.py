"""Marks what parallelism and the trainer do as named ranges, for torch.profiler and tools of NVTX.

NVIDIA Nsight Systems (`nsys profile`) and other tools of NVTX see the domain "pyruntime", on CPUs and GPUs,
through the package nvtx (the extra `nvtx`). While no tool listens, a range costs less than a microsecond."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd import _profiler_enabled

NOTHING = contextlib.nullcontext()


def marked(what: str, name: str = "") -> contextlib.AbstractContextManager:
    """Returns a range "WHAT NAME" if a tool listens."""
    return _range(f"{what} {name}".rstrip()) if is_heard() else NOTHING


def is_heard() -> bool:
    """Whether a tool listens to ranges."""
    return _profiler_enabled() or nvtx_domain() is not None


@functools.cache
def nvtx_domain() -> Any:
    """Returns the NVTX domain if a tool listens, which it does from a process's start or never; else None."""
    try:
        import nvtx
        from nvtx.nvtx import DummyDomain
    except ImportError:
        return None
    domain = nvtx.get_domain("pyruntime")
    return None if isinstance(domain, DummyDomain) else domain


class BackwardRanges:
    """Ranges of a backward pass, one after the other. Each begins when the gradient of a tensor is complete
    and ends when the next one begins; the last ends with the pass."""

    def __init__(self) -> None:
        self._open = contextlib.ExitStack()
        self._is_open = False

    def begin_at(self, tensor: torch.Tensor, label: str) -> None:
        """Begins the range `label` with the gradient of `tensor`, if it has one."""
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(lambda _: self._begin(label))

    def _begin(self, label: str) -> None:
        if not self._is_open:
            # Called by the thread that runs the pass; the ranges belong to it.
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
