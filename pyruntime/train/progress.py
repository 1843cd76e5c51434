"""The line that tells all of a step, rewritten on a terminal or printed now and then."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

from pyruntime.train.metrics import StepMetrics

BAR_WIDTH = 20


class Progress:
    """Shows the steps of a run on `stream`.

    mode: "bar" rewrites one line at most ten times a second, "lines" prints every `log_every` steps, "auto"
    is bar on a terminal and lines elsewhere, "off" prints nothing but `say`. Once nobody reads the stream any
    more (`train | head`), `on_closed` is called and nothing is written from then on.
    """

    def __init__(
        self,
        steps: int,
        mode: str,
        log_every: int,
        stream: TextIO | None = None,
        on_closed: Callable[[], None] = lambda: None,
    ):
        stream = stream or sys.stdout  # of now, not of when this file was imported
        self._on_closed, self._closed = on_closed, False
        self._steps, self._log_every, self._stream = steps, log_every, stream
        self._mode = ("bar" if stream.isatty() else "lines") if mode == "auto" else mode
        self._shown_at = 0.0
        self._open_line = False

    def show(self, metrics: StepMetrics) -> None:
        now = time.monotonic()
        last = metrics.step == self._steps
        if self._mode == "bar":
            if last or metrics.val_loss is not None or now - self._shown_at >= 0.1:
                self._shown_at = now
                self._rewrite_step(metrics)
        elif self._mode == "lines" and (
            last
            or metrics.val_loss is not None
            or metrics.skipped is not None
            or metrics.step % self._log_every == 0
            or metrics.step == 1
        ):
            self._write(describe(metrics, self._steps) + "\n")

    def say(self, text: str) -> None:
        """Prints a line of its own."""
        self._end_line()
        self._write(text + "\n")

    def _rewrite_step(self, metrics: StepMetrics) -> None:
        """The fullest form of a step that fits the terminal. One with a validation stays; where it does not
        fit with it, the validation has a line of its own."""
        columns = shutil.get_terminal_size().columns - 1
        line = describe(metrics, self._steps)
        drawn = f"{bar(metrics.step / self._steps)} {line}"
        narrow = len(line) > columns
        if narrow:
            forms = [describe_briefly(metrics, self._steps, label) for label in ("exposed", "exp")]
        else:
            forms = [drawn, line]
        shown = next((form for form in forms if len(form) <= columns), forms[-1])
        self._write("\r\x1b[K" + shown[:columns])
        self._open_line = True
        if metrics.val_loss is not None:
            self._end_line()
            if narrow:
                self._write(f"step {metrics.step}/{self._steps} | {validation(metrics)}\n")

    def _end_line(self) -> None:
        if self._open_line:
            self._write("\n")
            self._open_line = False

    def _write(self, text: str) -> None:
        if self._closed:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except BrokenPipeError:
            self._closed = True
            self._on_closed()


def describe(metrics: StepMetrics, steps: int) -> str:
    """One step in one line."""
    predicted = metrics.predicted_step_s
    parts = [
        f"step {metrics.step:>{len(str(steps))}}/{steps}",
        f"loss {metrics.loss:.4f}",
        f"norm {metrics.grad_norm:.3f}",
        f"lr {metrics.lr:.2e}",
        f"{metrics.tokens_per_second:,.0f} tok/s{_of_a_device(metrics)}",
        *([] if metrics.mfu is None else [f"MFU {metrics.mfu:.1%}"]),
        *([] if predicted is None else [f"step {metrics.step_time_s:.3g} s ({predicted:.3g} predicted)"]),
        *[each + _by_axis(metrics) for each in exposed(metrics, "exposed", 1)],
        f"{metrics.memory_bytes / 1e6:,.0f} MB",
        *([] if metrics.skipped is None else [f"skipped, {metrics.skipped} so far"]),
        *time_to_go(metrics),
    ]
    if metrics.val_loss is not None:
        parts.insert(2, validation(metrics))
    return " | ".join(parts)


def _of_a_device(metrics: StepMetrics) -> str:
    """Where there are several."""
    own = metrics.tokens_per_second_per_device
    return "" if own is None or own == metrics.tokens_per_second else f" ({own:,.0f} a rank)"


def _by_axis(metrics: StepMetrics) -> str:
    """The share of each axis, where there are several."""
    seconds = metrics.exposed_by_axis_s or {}
    shares = [f"{axis} {each / metrics.step_time_s:.1%}" for axis, each in seconds.items()]
    return f" ({', '.join(shares)})" if len(shares) > 1 else ""


def time_to_go(metrics: StepMetrics) -> list[str]:
    """Where it is known."""
    return [] if metrics.eta_s is None else [f"ETA {clock(metrics.eta_s)}"]


def describe_briefly(metrics: StepMetrics, steps: int, exposed_label: str) -> str:
    """One step without its validation, in a line for a terminal of 80 columns."""
    parts = [
        f"{metrics.step}/{steps} loss {metrics.loss:.3f} norm {metrics.grad_norm:.3g} lr {metrics.lr:.1e}",
        f"{metrics.tokens_per_second:.0f} tok/s",
        *exposed(metrics, exposed_label, 0),
        *([] if metrics.skipped is None else [f"skipped {metrics.skipped}"]),
        *time_to_go(metrics),
    ]
    return " ".join(parts)


def exposed(metrics: StepMetrics, label: str, digits: int) -> list[str]:
    """The share of exposed communication, where it is known."""
    if metrics.exposed_comm_s is None:
        return []
    return [f"{label} {metrics.exposed_comm_s / metrics.step_time_s:.{digits}%}"]


def validation(metrics: StepMetrics) -> str:
    sets = "".join(f", {name} {loss:.4f}" for name, loss in (metrics.val_losses or {}).items())
    return f"val {metrics.val_loss:.4f} ({metrics.val_loss_per_byte:.4f} nats/byte{sets})"


def bar(share: float) -> str:
    """A bar of which that share is filled."""
    filled = int(BAR_WIDTH * share)
    return f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}]"


def clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
