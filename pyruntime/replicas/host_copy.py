"""Copies of tensors in the host's memory, which a thread beside the training steps may read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def host_memory_like(tensor: Tensor) -> Tensor:
    """Returns new memory on the host for a copy of the tensor, page-locked if that is on a device."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type != "cpu")


class HostCopy:
    """Copies of tensors of one device as the current stream has them now. What that stream does later may
    change them; the caller waits for nothing.

    into: memory for the copies, by default new. Nobody may write there until `take` has returned.
    """

    def __init__(self, tensors: Sequence[Tensor], into: Sequence[Tensor] | None = None):
        self._copies = [host_memory_like(each) for each in tensors] if into is None else into
        for copy, tensor in zip(self._copies, tensors, strict=True):
            copy.copy_(tensor.detach(), non_blocking=True)
        devices = {each.device for each in tensors if each.device.type != "cpu"}
        self._event = torch.Event(devices.pop()) if devices else None
        if self._event is not None:
            self._event.record()

    def is_there(self) -> bool:
        """Whether `take` would not wait."""
        return self._event is None or self._event.query()

    def take(self) -> Sequence[Tensor]:
        """Waits for the copies, in whatever thread, and returns them."""
        if self._event is not None and not self._event.query():
            self._event.synchronize()
        return self._copies
