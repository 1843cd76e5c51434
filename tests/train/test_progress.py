"""What the user sees of a step."""

import io
import re

import pytest

from pyruntime.train.metrics import StepMetrics
from pyruntime.train.progress import Progress, clock, describe


class Terminal(io.StringIO):
    def isatty(self):
        return True


def step(number, **more):
    return StepMetrics(number, 2.5, 1.25, 1e-3, 4096.4, 0.5, 0.025, 2 * 10**8, **more)


def test_one_line_tells_all_of_a_step():
    line = describe(step(20, eta_s=75.0), steps=300)
    assert line == (
        "step  20/300 | loss 2.5000 | norm 1.250 | lr 1.00e-03 | 4,096 tok/s | exposed 5.0% | 200 MB | ETA "
        "1:15"
    )
    measured = describe(step(20, val_loss=2.25, val_loss_per_byte=1.125), steps=300)
    assert "val 2.2500 (1.1250 nats/byte)" in measured


def test_of_several_ranks_and_axes_a_line_tells_the_parts():
    compared = step(
        20,
        exposed_by_axis_s={"tp": 0.02, "dp": 0.005},
        tokens_per_second_per_device=1024.1,
        mfu=0.375,
        predicted_step_s=0.4375,
        eta_s=3661.0,
    )
    assert describe(compared, steps=300) == (
        "step  20/300 | loss 2.5000 | norm 1.250 | lr 1.00e-03 | 4,096 tok/s (1,024 a rank) | MFU 37.5% | "
        "step 0.5 s (0.438 predicted) | exposed 5.0% (tp 4.0%, dp 1.0%) | 200 MB | ETA 1:01:01"
    )


def test_a_line_tells_the_load_of_the_worst_layer():
    loads = {"expert_imbalance": {"1": 1.5, "2": 1.25}, "rank_imbalance": {"1": 1.0, "2": 1.125}}
    loads |= {"router_entropy": {"1": 2.0, "2": 1.75}, "balance_loss": 1.0625, "router_z_loss": 7.5}
    told = "busiest expert 1.50x, rank 1.12x, entropy 1.75, balance 1.062, z 7.5 | 200 MB"
    assert told in describe(step(20, **loads), steps=300)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3661, "1:01:01")]
)
def test_time_to_go_is_a_clock(seconds, text):
    assert clock(seconds) == text


def test_lines_come_now_and_then_where_there_is_no_terminal():
    out = io.StringIO()
    progress = Progress(25, "auto", 10, out)
    for number in range(1, 26):
        skipped = 3 if number == 13 else None
        val_loss = 1.0 if number == 7 else None
        progress.show(step(number, val_loss=val_loss, val_loss_per_byte=1.0, skipped=skipped))
    lines = out.getvalue().splitlines()
    assert [int(line.split("/")[0].split()[1]) for line in lines] == [1, 7, 10, 13, 20, 25]
    assert "skipped, 3 so far" in lines[3] and not any("skipped" in line for line in lines[:3])
    assert "\r" not in out.getvalue()


def test_a_terminal_gets_one_line_that_is_rewritten(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    out = Terminal()
    progress = Progress(25, "auto", 10, out)
    for number in range(1, 26):
        progress.show(step(number))
    progress.say("done")
    assert out.getvalue().endswith("\ndone\n") and out.getvalue().count("\n") == 2
    assert "[####################] step 25/25" in out.getvalue()


@pytest.mark.parametrize(
    ("number", "steps", "values"),
    [
        (20, 300, (2.5, 1.25, 1e-3, 4096.4, 0.5, 0.025)),
        (1, 100_000, (10.8765, 123.456, 1e-10, 654321.9, 0.38, 0.37)),
    ],
)
def test_80_columns_hold_all_that_matters(monkeypatch, number, steps, values):
    monkeypatch.setenv("COLUMNS", "80")
    out = Terminal()
    Progress(steps, "bar", 10, out).show(
        StepMetrics(number, *values, 2 * 10**8, val_loss=2.25, val_loss_per_byte=1.125, eta_s=3661.0)
    )
    drawn, said = out.getvalue().removeprefix("\r\x1b[K").splitlines()
    assert len(drawn) < 80 and len(said) < 80
    loss, norm, lr, speed = values[:4]
    pattern = (
        rf"{number}/{steps} loss {loss:.3f} norm {norm:.3g} lr {lr:.1e} {speed:.0f} tok/s exp(osed)? \d+% "
        r"ETA [\d:]+"
    )
    assert re.fullmatch(pattern, drawn), drawn
    assert said == f"step {number}/{steps} | val 2.2500 (1.1250 nats/byte)"


def test_nothing_is_written_once_nobody_reads():
    class Pipe(Terminal):
        def flush(self):
            raise BrokenPipeError

    called = []
    progress = Progress(3, "lines", 1, Pipe(), on_closed=lambda: called.append(True))
    progress.say("one")
    progress.show(step(1))
    assert called == [True]


def test_off_shows_no_step():
    out = io.StringIO()
    Progress(3, "off", 1, out).show(step(1))
    assert out.getvalue() == ""
