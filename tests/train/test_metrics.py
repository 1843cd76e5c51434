"""Every step leaves one line, and resuming drops the lines that are repeated."""

import dataclasses
import json
import math
import mmap
import os
from pathlib import Path

import pytest

from pyruntime.train.errors import ConfigError
from pyruntime.train.metrics import FILE_NAME, MetricsFile, StepMetrics, peak_memory_bytes, read

REQUIRED = {
    "step", "loss", "grad_norm", "lr", "tokens_per_second", "step_time_s", "exposed_comm_s", "memory_bytes",
}  # fmt: skip


def step(number, **more):
    return StepMetrics(number, 2.5, 1.25, 1e-3, 4000.0, 0.5, 0.03125, 10**8, **more)


def test_a_step_is_one_object_with_the_promised_keys(tmp_path):
    with MetricsFile(tmp_path) as file:
        file.write(step(1))
        file.write(step(2, val_loss=2.25, val_loss_per_byte=1.5))
        lines = (tmp_path / FILE_NAME).read_text().splitlines()  # while it is open: nothing waits in a buffer
    first, second = map(json.loads, lines)
    assert set(first) == REQUIRED
    assert set(second) == REQUIRED | {"val_loss", "val_loss_per_byte"}
    assert (second["step"], second["loss"], second["val_loss"]) == (2, 2.5, 2.25)
    assert second["memory_bytes"] == 10**8


def test_resuming_keeps_the_steps_before_and_survives_a_torn_line(tmp_path):
    with MetricsFile(tmp_path) as file:
        for number in range(1, 6):
            file.write(step(number))
    with open(tmp_path / FILE_NAME, "a") as torn:
        torn.write('{"step": 6, "lo')
    with MetricsFile(tmp_path, resume_at=3) as file:
        file.write(step(4))
    assert [line["step"] for line in read(tmp_path / FILE_NAME)] == [1, 2, 3, 4]


def test_peak_memory_holds_what_was_touched_though_it_is_free_again():
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    piece, pieces = bytes(2**20), 200
    size = pieces * len(piece)
    with mmap.mmap(-1, size) as block:  # not from the heap, which may have as much to reuse
        for _ in range(pieces):
            block.write(piece)
    assert peak_memory_bytes() >= resident + 0.9 * size


def test_figures_that_are_not_finite_are_null_where_a_step_was_skipped(tmp_path):
    with MetricsFile(tmp_path) as file:
        file.write(dataclasses.replace(step(1), loss=math.nan, grad_norm=math.inf, skipped=1))
        file.write(step(2))
    lines = read(tmp_path / FILE_NAME)
    assert (lines[0]["loss"], lines[0]["grad_norm"], lines[0]["skipped"]) == (None, None, 1)
    assert lines[1]["loss"] == 2.5
    with MetricsFile(tmp_path) as file:
        file.write(dataclasses.replace(step(1), val_loss=math.inf))
        file.write(step(2))
    assert [line.get("val_loss", 0) for line in read(tmp_path / FILE_NAME)] == [None, 0]
    (tmp_path / FILE_NAME).write_text('{"step": 1, "loss": null}\n{"step": 2, "loss": 1.0}\n')
    with pytest.raises(ConfigError, match="line 1 is damaged"):
        read(tmp_path / FILE_NAME)
