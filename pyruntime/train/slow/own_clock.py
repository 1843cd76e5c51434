"""A clock of this rank's own work, on the CPU or on a device."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from pyruntime import comm
from pyruntime.comm.core import _C


class Moment(NamedTuple):
    """A moment of this rank's work; `OwnClock.read` says when it was."""

    point: int
    """Seconds of the device's stream; 0 on the CPU."""
    host_s: float
    """Seconds on the CPU; on a device minus those in which the host had waited for peers."""


Span = tuple[Moment, Moment]


class OwnClock:
    """A clock that stands still while this rank waits for peers. On the CPU also while it copies or sums
    received data.

    On a device it is a clock of the current stream's work. A moment is marked by an event and read when the
    device has come there, so the host does not wait. The host itself waits for peers only where its stream
    has no work. There is one clock for each process: make it where no other stream is watched, and close it.
    """

    def __init__(self, device: torch.device):
        self._is_on_cpu = device.type == "cpu"
        self._is_open = not self._is_on_cpu
        if self._is_open:
            _C.stream_clock_start(str(device))

    def now(self) -> Moment:
        """Marks the moment."""
        if self._is_on_cpu:
            return Moment(0, time.perf_counter() - comm.exposed_s())
        return Moment(_C.stream_clock_mark(), -comm.waiting_on_host_s())

    def has_passed(self, moment: Moment) -> bool:
        """Whether the moment can be read without waiting."""
        return self._is_on_cpu or _C.stream_clock_has_passed(moment.point)

    def read(self, moments: Sequence[Moment]) -> list[float]:
        """Returns the seconds of each moment; NaN for one of too long ago. Waits until the device has come
        to all of them."""
        if self._is_on_cpu:
            return [moment.host_s for moment in moments]
        found = _C.stream_clock_read([moment.point for moment in moments])
        return [at - waited + moment.host_s for (at, waited), moment in zip(found, moments, strict=True)]

    def seconds(self, spans: Sequence[Span]) -> float:
        """Returns the seconds of these spans together."""
        read = self.read([moment for span in spans for moment in span])
        return sum(read[1::2]) - sum(read[::2])

    def close(self) -> None:
        """Stops it. May be called again."""
        if self._is_open:
            self._is_open = False
            _C.stream_clock_stop()


@dataclasses.dataclass
class PassSpans:
    """The work of a rank in one step, if work may move."""

    passes: list[Span] = dataclasses.field(default_factory=list)
    """All forward and backward passes."""
    layers: list[Span] = dataclasses.field(default_factory=list)
    """Forward passes in layers; without a pipeline all passes."""
    rest: list[Span] = dataclasses.field(default_factory=list)
    """Forward passes in embedding, norm, head and loss."""
    weight: float = 1.0
    """How often as long as others a layer computes, since some passes run twice."""

    def layer_seconds(self, clock: OwnClock) -> float:
        """Returns the seconds of `passes` on layers. Their share is that of the forward passes: backward
        passes take twice as long for layers and for the rest."""
        own, layers = clock.seconds(self.passes), self.weight * clock.seconds(self.layers)
        return own * layers / (layers + clock.seconds(self.rest)) if own > 0 else 0.0
