"""bench/clock_cpu: a step in virtual time, as one thread does it, and the table's two numbers."""

from __future__ import annotations

import pytest

from bench import clock_cpu
from bench.clock_cpu import CpuMachine, on_one_thread
from pyruntime.clock.simulated_step import Program
from pyruntime.clock.step_account import HOST, WAIT, WORK, of_step


def program(*spans, works=()) -> Program:
    end = max(span[2] for span in spans)
    return Program({}, of_step(spans, 0.0, end, {}), 0, 0, 1, 1.0, None, frozenset(works), spans)


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


def test_steps_of_one_rank_set_what_is_not_in_the_table(monkeypatch):
    launches = {"tiny": 10, "dim256": 20, "dim1024": 40}

    def virtual_step(config, mesh, machine):
        each = machine.seconds("gemm", [1, 1, 1])  # a launch, half as many on two ranks
        count = launches[config] // clock_cpu.MESHES[mesh][0]
        spans = [(0, i * each, (i + 1) * each, WORK, "gemm", "") for i in range(count)]
        return (program(*spans, works={("gemm", (1, 1, 1))}),)

    def real_steps(config, mesh, hosts, folder):
        ranks = clock_cpu.MESHES[mesh][0]
        work = {"tiny": 0.01, "dim256": 0.02, "dim1024": 0.005}[config]  # by itself 0.01
        return launches[config] / ranks * (work + 0.001) * (1.0 if ranks == 1 else 1.25)

    monkeypatch.setattr(clock_cpu, "virtual_step", virtual_step)
    monkeypatch.setattr(clock_cpu, "real_steps", real_steps)
    monkeypatch.setattr(clock_cpu, "works_s", lambda works: dict.fromkeys(works, 0.01))
    dense = ["dim256", "dim1024"]
    found = clock_cpu.compare(1, ["tp 2"], dense, 1)
    assert [(each["config"], each["mesh"]) for each in found] == [("dim256", "tp 2"), ("dim1024", "tp 2")]
    assert [each["launch_s"] for each in found] == pytest.approx([0.001, 0.001])
    assert [each["slower"] for each in found] == pytest.approx([2.0, 0.5])
    assert [each["ratio"] for each in found] == pytest.approx([0.8, 0.8])
    monkeypatch.setattr(clock_cpu, "real_steps", lambda config, *_: 1e-3 * (config == "dim256") + 1e-6)
    with pytest.raises(ValueError, match="other programs have slowed it"):
        clock_cpu.compare(1, ["tp 2"], dense, 1)


def test_bytes_within_a_launch_cost_no_launch():
    machine = CpuMachine({("memory", (8,)): 2.0}, slower=3.0, launch=0.5)
    assert machine.seconds("memory", [8]) == machine.seconds("copy to host", [8]) == 6.5
    assert machine.seconds("bytes", [8]) == 6.0
    assert machine.seconds("put", [8]) == 0.0


def test_messages_between_hosts_take_the_time_of_their_link():
    machine = CpuMachine({}, hosts=2)
    assert machine.cluster.gpus_per_node == 1
    assert machine.seconds("message between hosts", [119_550_858]) == pytest.approx(1.0, rel=1e-3)
    assert machine.seconds("latency between hosts", []) == machine.exchanged(2) / 2 > 0
    assert machine.exchanged(1) == 0


def test_experts_are_compared_on_meshes_of_theirs():
    assert clock_cpu.compared("experts256", clock_cpu.TWO) == ["ZeRO 1", "ep 2"]
    assert "ep 2" not in clock_cpu.compared("dim256", clock_cpu.TWO)
