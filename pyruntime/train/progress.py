"""Shows each step as one line, rewritten on a terminal or printed at intervals."""

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

    mode: "bar" rewrites one line at most ten times a second; "lines" prints every `log_every` steps; "auto"
    is bar on a terminal and lines elsewhere; "off" prints only `say`. When the stream's reader has gone
    (`train | head`), calls `on_closed` and writes nothing more.
    """

    def __init__(
        self,
        steps: int,
        mode: str,
        log_every: int,
        stream: TextIO | None = None,
        on_closed: Callable[[], None] = lambda: None,
    ):
        stream = stream or sys.stdout  # looked up here, since it may change after the import
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
        """Writes the fullest form of a step that fits the terminal. A step with a validation stays; if it
        does not fit, the validation gets a line of its own."""
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
    """Formats one step as one line."""
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
        *_of_experts(metrics),
        *_of_rewards(metrics),
        f"{metrics.memory_bytes / 1e6:,.0f} MB",
        *([] if metrics.skipped is None else [f"skipped, {metrics.skipped} so far"]),
        *time_to_go(metrics),
    ]
    if metrics.val_loss is not None:
        parts.insert(2, validation(metrics))
    return " | ".join(parts)


def _of_a_device(metrics: StepMetrics) -> str:
    own = metrics.tokens_per_second_per_device
    return "" if own is None or own == metrics.tokens_per_second else f" ({own:,.0f} a rank)"


def _by_axis(metrics: StepMetrics) -> str:
    """Formats the share of each axis, if there are several."""
    seconds = metrics.exposed_by_axis_s or {}
    shares = [f"{axis} {each / metrics.step_time_s:.1%}" for axis, each in seconds.items()]
    return f" ({', '.join(shares)})" if len(shares) > 1 else ""


def _of_experts(metrics: StepMetrics) -> list[str]:
    """Formats the load of experts in the layer where it is largest, and the least entropy."""
    of_experts, of_ranks, entropy = metrics.expert_imbalance, metrics.rank_imbalance, metrics.router_entropy
    if not (of_experts and of_ranks and entropy):
        return []
    return [
        f"busiest expert {max(of_experts.values()):.2f}x, rank {max(of_ranks.values()):.2f}x, "
        f"entropy {min(entropy.values()):.2f}, balance {metrics.balance_loss:.3f}, "
        f"z {metrics.router_z_loss:.3g}"
    ]


def _of_rewards(metrics: StepMetrics) -> list[str]:
    """Formats the rewards of answers."""
    if metrics.rewards_margins is None:
        return []
    return [
        f"rewards {metrics.rewards_chosen:+.3f} {metrics.rewards_rejected:+.3f}, margin "
        f"{metrics.rewards_margins:.3f}, accuracy {metrics.rewards_accuracies:.0%}"
    ]


def time_to_go(metrics: StepMetrics) -> list[str]:
    return [] if metrics.eta_s is None else [f"ETA {clock(metrics.eta_s)}"]


def describe_briefly(metrics: StepMetrics, steps: int, exposed_label: str) -> str:
    """Formats one step, without its validation, for a terminal of 80 columns."""
    parts = [
        f"{metrics.step}/{steps} loss {metrics.loss:.3f} norm {metrics.grad_norm:.3g} lr {metrics.lr:.1e}",
        f"{metrics.tokens_per_second:.0f} tok/s",
        *exposed(metrics, exposed_label, 0),
        *([] if metrics.skipped is None else [f"skipped {metrics.skipped}"]),
        *time_to_go(metrics),
    ]
    return " ".join(parts)


def exposed(metrics: StepMetrics, label: str, digits: int) -> list[str]:
    """Formats the share of exposed communication; empty if it is not known."""
    if metrics.exposed_comm_s is None:
        return []
    return [f"{label} {metrics.exposed_comm_s / metrics.step_time_s:.{digits}%}"]


def validation(metrics: StepMetrics) -> str:
    sets = "".join(f", {name} {loss:.4f}" for name, loss in (metrics.val_losses or {}).items())
    if metrics.val_rewards is not None:
        of_text = f"accuracy {metrics.val_rewards['accuracies']:.0%}"
    else:
        of_text = f"{metrics.val_loss_per_byte:.4f} nats/byte"
    return f"val {metrics.val_loss:.4f} ({of_text}{sets})"


def bar(share: float) -> str:
    """Draws a bar filled to `share`."""
    filled = int(BAR_WIDTH * share)
    return f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}]"


def clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
