"""bench/clock_cpu: a step in virtual time, as one thread does it, and the table's two numbers."""

from __future__ import annotations

import pytest

from bench import clock_cpu
from bench.clock_cpu import CpuMachine, on_one_thread
from pyruntime.clock.simulated_step import Program
from pyruntime.clock.step_account import HOST, WAIT, WORK, of_step


def program(*spans) -> Program:
    end = max(span[2] for span in spans)
    return Program({}, of_step(spans, 0.0, end, {}), 0, 0, 1, 1.0, None, frozenset(), spans)


def test_other_streams_work_while_the_computing_one_waits_or_later():
    own = (
        (0, 0.0, 4.0, WORK, "aten::mm", ""),
        (0, 4.0, 6.0, WAIT, "rows of 7", ""),
        (0, 6.0, 7.0, HOST, "", ""),
    )
    beside = (5, 1.0, 3.0, WORK, "reduce", ""), (5, 3.0, 5.0, WORK, "reduce", ""), (5, 5.0, 7.0, WAIT, "", "")
    assert on_one_thread(program(*own)) == 7.0
    # Of the other stream's 4 seconds 3 are beside work of the computing one.
    assert on_one_thread(program(*own, *beside)) == 10.0


def test_what_launches_take_is_such_that_steps_of_one_rank_take_as_long_as_measured(monkeypatch):
    of_config = {"dim256": (10, 0.5), "dim1024": (20, 8.0)}  # launches, and seconds of a copy

    def virtual_step(config, mesh, machine):
        launches, copy = of_config[config]
        each = machine.seconds("memory", [1]) + machine.seconds("gemm", [1, 1, 1])
        assert (mesh, each) == (clock_cpu.ONE_RANK, machine.factor * 2.0 + 3.0)
        spans = [(0, 0.0, 1.0 + machine.factor * copy, WORK, "", "")]
        begin = spans[0][2]
        spans += [(0, begin + i * 1e-9, begin + (i + 1) * 1e-9, WORK, "", "") for i in range(launches - 1)]
        return (program(*spans),)

    monkeypatch.setattr(clock_cpu, "virtual_step", virtual_step)
    known = {("memory", (1,)): 2.0, ("gemm", (1, 1, 1)): 3.0}
    factor, launch = clock_cpu.beside_the_table(
        known, [1.0 + 1.5 * 0.5 + 10 * 0.25, 1.0 + 1.5 * 8.0 + 20 * 0.25]
    )
    assert (factor, launch) == (pytest.approx(1.5, rel=1e-6), pytest.approx(0.25, rel=1e-6))
    with pytest.raises(ValueError, match="other programs have slowed some of the steps of one rank"):
        clock_cpu.beside_the_table(known, [10.0, 1.5])


def test_bytes_within_a_launch_cost_no_launch():
    machine = CpuMachine({("memory", (8,)): 2.0}, factor=3.0, launch=0.5)
    assert machine.seconds("memory", [8]) == machine.seconds("copy to host", [8]) == 6.5
    assert machine.seconds("bytes", [8]) == 6.0
    assert machine.seconds("put", [8]) == 0.0
