"""Tells the other ranks that an exception has ended a forward pass on this one.

A program that catches the exception and goes on with the next batch is a pass behind the others, whose shapes
are the same. Nothing is sent for that: when ranks begin an op, they compare the count of such passes too. So
the first op after it is refused on all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from pyruntime.comm.core import _C


class ForwardWatch:
    """Hooks of a module that call `note` if an exception ends its forward pass, unless the job has failed,
    which all ranks know. Code that torch.compile has made is not watched. Copies of the module share them."""

    def __init__(self, module: nn.Module, note: Callable[[], None]):
        self._note = note
        self._handled: list[BaseException | None] = []
        """The exception that was being handled when each running pass began: a handler may run a pass."""
        self.hooks: list[RemovableHandle] = [
            module.register_forward_pre_hook(self._enter, prepend=True),
            module.register_forward_hook(self._leave, always_call=True),
        ]

    def __deepcopy__(self, _: dict) -> ForwardWatch:
        """Returns itself: a copy of the module has the same groups."""
        return self

    def _enter(self, *_: object) -> None:
        if not torch.compiler.is_compiling():
            self._handled.append(sys.exception())

    def _leave(self, *_: object) -> None:
        if torch.compiler.is_compiling() or not self._handled:
            return
        error, before = sys.exception(), self._handled.pop()
        if error is None or error is before or self._handled:
            return
        try:
            _C.raise_if_failed()
        except Exception:  # all ranks have this one already, and the pass ends by the caller's own
            return
        self._note()


class NotePasses:
    """Notes a failed pass in the groups of these names."""

    def __init__(self, *groups: str):
        self._groups = groups

    def __call__(self) -> None:
        for group in self._groups:
            _C.note_failed_pass(group)
