"""pyruntime/clock: virtual time follows the order of streams, events and links; a step's account closes."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pyruntime
from pyruntime.cli import main
from pyruntime.cli import train as cli
from pyruntime.cli.arguments import take_count, take_option
from pyruntime.cli.simulate import keep
from pyruntime.clock import device_build, machine_model, mirrors, simulated_step, step_account
from pyruntime.clock.mirrors import mirrored
from pyruntime.nn import RowParallelLinear
from pyruntime.nn.sliced import SlicedRow
from pyruntime.plan.gemm_model import LARGE
from pyruntime.train.errors import ConfigError
from pyruntime.train.planned import planned, predicted
from pyruntime.train.resolved import check

CALL, WORK, EVENT = 1.0, 10.0, 0.25


def of_round_numbers(kind: str, sizes: list[int]) -> float:
    """A machine on which every launch takes 10 seconds, and a transfer one for each byte."""
    return {"call": CALL, "event": EVENT, "memory": WORK}.get(kind) or float(sizes[0])


def in_virtual_time(group, program: str) -> object:
    core = mirrors.begin(of_round_numbers, 2**30)
    core.keep_spans(True)
    return globals()[program](core)


def of_four_ranks(group, program: str) -> object:
    """A machine whose host takes no time, and whose only work are GEMMs of 4 seconds, transfers of 7, which
    arrive 2 seconds later, and sums beside GEMMs, of 3, which take a third of the multiprocessors."""
    seconds = {"gemm": 4.0, "put": 7.0, "store": 7.0, "latency inside a host": 2.0, "multiprocessors": 132.0}
    seconds |= {"memory beside": 3.0, "multiprocessors of blocks": 44.0}
    core = mirrors.begin(lambda kind, sizes: seconds.get(kind, 0.0), 2**30)
    with mirrored({"tp": 4}) as runtime:
        run = globals()[program]
        run(runtime.tp)  # makes the workspace
        torch.accelerator.synchronize()
        begun = core.host_time()
        core.keep_spans(True)
        run(runtime.tp)
        spans = [each for each in core.take_spans() if each[0] == step_account.COMPUTING]
    return [
        (begin - begun, end - begun, how, what.partition(" of ")[0]) for _, begin, end, how, what, _ in spans
    ]


def gather(group) -> None:
    x, weight = torch.empty(2, 8, device="sim"), torch.empty(16, 8, device="sim")
    pyruntime.all_gather_matmul(x, weight, group, rows=8)


def scatter(group) -> None:
    x, weight = torch.empty(8, 8, device="sim"), torch.empty(16, 8, device="sim")
    pyruntime.matmul_reduce_scatter(x, weight, group)


def two_streams(core):
    first, second = torch.Stream("sim:0"), torch.Stream("sim:0")
    x = torch.empty(8, device="sim")
    with first:
        x.zero_()  # asked at 1, done at 11
        x.zero_()  # asked at 2, done at 21
        event = first.record_event()  # asked at 2.25
    with second:
        second.wait_event(event)  # asked at 2.5, until 21
        x.zero_()  # asked at 3.5, done at 31
    before = core.host_time()
    second.synchronize()
    spans = [
        (stream == second.stream_id, begin, end, how) for stream, begin, end, how, *_ in core.take_spans()
    ]
    return before, core.host_time(), spans


def one_link(core):
    first, second = torch.Stream("sim:0"), torch.Stream("sim:0")
    return core.transfer(first, 100), core.transfer(second, 50), core.transfer(first, 10)


def a_gap(core):
    """The third transfer is asked for last, between what the second one leaves."""
    first, second, third = (torch.Stream("sim:0") for _ in range(3))
    with second:
        torch.empty(8, device="sim").zero_()  # until 11
    return core.transfer(first, 5), core.transfer(second, 50), core.transfer(third, 2)


def the_host(core):
    x = torch.empty(8, device="sim")
    x.zero_()
    value = x[0].item()  # the host waits until 11
    x.zero_()
    return value, core.host_time(), [(begin, end, how) for _, begin, end, how, *_ in core.take_spans()]


def values(core):
    refused = []
    for read in (torch.Tensor.nonzero, lambda x: x.long().tolist()):
        with pytest.raises(NotImplementedError) as caught:
            read(torch.empty(8, device="sim"))
        refused.append(str(caught.value))
    return refused


@torch.no_grad()
def scatter_of_two_slices(group) -> None:
    linear = RowParallelLinear(32, 16, group=group, bias=False, device="sim")
    sliced = SlicedRow(linear, (8, 8))
    for part in range(2):
        sliced.begin(part, torch.empty(8, 8, device="sim"))
    for part in range(2):
        sliced.end(part)


def fused_gather(group) -> None:
    x, weight = (torch.empty(rows, 8, device="sim", dtype=torch.bfloat16) for rows in (2, 16))
    pyruntime.all_gather_matmul(x, weight, group, rows=8, tier="fused")


def fused_scatter(group) -> None:
    x, weight = (torch.empty(rows, 8, device="sim", dtype=torch.bfloat16) for rows in (8, 16))
    pyruntime.matmul_reduce_scatter(x, weight, group, tier="fused")


def run(ranks, program: str, within=in_virtual_time) -> object:
    (outcome,) = ranks.launch(within, 1, program, init=False)
    assert outcome.error is None, outcome.error
    return outcome.value


@pytest.mark.usefixtures("simulated")
class TestPrograms:
    def test_a_stream_that_waits_for_an_event_goes_on_after_it(self, ranks):
        before, after, spans = run(ranks, "two_streams")
        assert before == 3.5
        assert after == 31.0
        assert spans == [
            (False, 0.0, 1.0, step_account.HOST),
            (False, 1.0, 11.0, step_account.WORK),
            (False, 11.0, 21.0, step_account.WORK),
            (True, 0.0, 2.5, step_account.HOST),
            (True, 2.5, 21.0, step_account.WAIT),
            (True, 21.0, 31.0, step_account.WORK),
        ]

    def test_a_link_carries_one_transfer_at_a_time(self, ranks):
        # Asked at 1, 2 and 3: the second waits for the link, the third for its own stream and for the link.
        assert run(ranks, "one_link") == (101.0, 151.0, 161.0)

    def test_a_transfer_takes_a_gap_that_others_leave_on_a_link(self, ranks):
        # Asked at 2, 3 and 4: the second one's stream is busy until 11, and the first ends at 7.
        assert run(ranks, "a_gap") == (7.0, 61.0, 9.0)

    def test_the_host_that_waits_for_a_value_gets_a_zero_and_leaves_the_device_idle(self, ranks):
        value, host, spans = run(ranks, "the_host")
        assert value == 0.0
        assert host == 12.0
        assert spans == [
            (0.0, 1.0, step_account.HOST),
            (1.0, 11.0, step_account.WORK),
            (11.0, 12.0, step_account.HOST),
            (12.0, 22.0, step_account.WORK),
        ]

    def test_what_depends_on_values_is_refused(self, ranks):
        shapes, integers = run(ranks, "values")
        assert "nonzero gives as much as the values say, and in virtual time" in shapes
        assert "The host reads integers of a device, shape [8], and in virtual time" in integers

    def test_rows_are_multiplied_as_they_arrive(self, ranks):
        # Three puts end at 7, 14 and 21, and the peers' rows are here 2 seconds later.
        waits = [(4.0, 9.0), (13.0, 16.0), (20.0, 23.0)]
        work = [(0.0, 4.0), (9.0, 13.0), (16.0, 20.0), (23.0, 27.0)]
        found = run(ranks, "gather", of_four_ranks)
        assert [(begin, end) for begin, end, how, _ in found if how == step_account.WAIT] == waits
        assert [(begin, end) for begin, end, _, what in found if what == "aten::mm"] == work
        assert {what for _, _, how, what in found if how == step_account.WAIT} == {"rows"}

    def test_parts_leave_as_they_are_multiplied(self, ranks):
        # Parts are ready at 4, 8 and 12 and leave until 11, 18 and 25; the rank's own are ready at 16.
        found = run(ranks, "scatter", of_four_ranks)
        assert [(begin, end) for begin, end, _, what in found if what == "aten::mm"] == [
            (0.0, 4.0), (4.0, 8.0), (8.0, 12.0), (12.0, 16.0)
        ]  # fmt: skip
        waits = [(begin, end) for begin, end, how, _ in found if how == step_account.WAIT]
        assert (waits[0][0], waits[-1][1]) == (16.0, 27.0)

    def test_parts_of_slices_are_summed_beside_gemms(self, ranks):
        # The first slice's parts leave from 4 on, the last one arrives at 27; the second one's at 48.
        found = run(ranks, "scatter_of_two_slices", of_four_ranks)
        assert [(begin, end, what) for begin, end, how, what in found if how == step_account.WORK] == [
            (0.0, 4.0, "aten::mm"), (4.0, 5.0, "reduce"), (5.0, 9.0, "aten::mm"), (9.0, 10.0, "reduce")
        ]  # fmt: skip
        waits = [(begin, end) for begin, end, how, _ in found if how == step_account.WAIT]
        assert waits == [(10.0, 30.0), (30.0, 51.0)]

    def test_a_fused_kernel_waits_for_rows_itself(self, ranks):
        # A quarter of its 4 seconds for each rank's rows.
        found = run(ranks, "fused_gather", of_four_ranks)
        assert [(begin, end, how) for begin, end, how, _ in found] == [
            (0.0, 1.0, step_account.WORK), (1.0, 9.0, step_account.WAIT), (9.0, 10.0, step_account.WORK),
            (10.0, 16.0, step_account.WAIT), (16.0, 17.0, step_account.WORK), (17.0, 23.0, step_account.WAIT),
            (23.0, 24.0, step_account.WORK),
        ]  # fmt: skip

    def test_a_fused_kernel_sends_parts_itself(self, ranks):
        # Parts are ready at 1, 2 and 3 and leave until 8, 15 and 22; its own are ready at 4.
        found = run(ranks, "fused_scatter", of_four_ranks)
        work = [(begin, end) for begin, end, how, _ in found if how == step_account.WORK]
        assert work == [(0.0, 1.0), (1.0, 2.0), (2.0, 3.0), (3.0, 4.0)]
        assert found[-1][:3] == (4.0, 24.0, step_account.WAIT)


FLAGS = ["--config", "tiny", "--train.batch_size", "4", "--train.micro_batch_size", "2"]


def a_step(group, flags: list[str], gpus: int) -> simulated_step.Simulated:
    config, _ = cli.read([*FLAGS, *flags], gpus)
    return simulated_step.simulate(config, machine_model.find("h100"), gpus)


def step_of(ranks, *flags: str, gpus: int = 2) -> simulated_step.Simulated:
    (outcome,) = ranks.launch(a_step, 1, list(flags), gpus, init=False, timeout=120.0)
    assert outcome.error is None, outcome.error
    return outcome.value


def refused_step(ranks, *flags: str, gpus: int) -> str:
    (outcome,) = ranks.launch(a_step, 1, list(flags), gpus, init=False, timeout=120.0)
    return str(outcome.error)


@pytest.mark.usefixtures("simulated")
def test_a_step_of_the_trainer_closes_and_is_the_same_in_every_run(ranks):
    one, again = (step_of(ranks, "--parallel.tp", "2") for _ in range(2))
    assert one.record() == again.record()
    parts = sum(one.account.computing.values()), one.account.exposed, one.account.host
    assert sum(parts) == pytest.approx(one.account.step, rel=1e-9)
    assert min(parts) > 0
    assert one.memory_bytes > one.workspace_bytes > 0


@pytest.mark.usefixtures("simulated")
def test_a_second_axis_of_tensor_parallelism_is_waited_for(ranks):
    rows = "--model.hidden_size=1024 --model.intermediate_size=4096 --train.seq_len=1024 --train.dtype=bf16"
    flags = [each for flag in rows.split() for each in flag.split("=")]
    found = step_of(ranks, "--parallel.tp", "{x=1,y=4}", *flags, gpus=4)
    assert step_account.by(found.account.exposed_waits, 0).keys() == {"tp_y"}


@pytest.mark.usefixtures("simulated")
def test_a_step_of_zero_3_waits_for_another_stream_or_not_at_all(ranks):
    found = step_of(ranks, "--parallel.tp", "1", "--parallel.dp", "2", "--parallel.zero", "3")
    assert step_account.by(found.account.waits, 0).keys() <= {step_account.OTHER_STREAM, "dp"}
    assert found.account.exposed > 0
    assert found.workspace_bytes > 0


@pytest.mark.usefixtures("simulated")
def test_meshes_without_a_model_are_refused(ranks):
    replicas = "--parallel.tp", "1", "--parallel.dp", "4", "--parallel.dp_replicate", "2"
    rows = "--train.batch_size", "8"
    assert "dp_replicate=2 has no model in virtual time" in refused_step(ranks, *replicas, *rows, gpus=4)
    by_speed = "--parallel.tp", "2", "--parallel.tp_speeds", "1", "0.5"
    assert "in virtual time tensor-parallel ranks do the same" in refused_step(ranks, *by_speed, gpus=2)
    routed = (
        "--parallel.tp",
        "1",
        "--parallel.dp",
        "2",
        "--parallel.pp",
        "2",
        "--pipeline.speeds",
        "1 0.5 1 1",
    )
    alike = "in virtual time data-parallel ranks do the same"
    assert alike in refused_step(ranks, *routed[:-1], *routed[-1].split(), *rows, gpus=4)
    dealt = "--parallel.tp", "1", "--parallel.dp", "2", "--train.micro_batches", "3", "1"
    assert alike in refused_step(ranks, *dealt, *rows, gpus=2)
    assert "parallel.tp=1" in refused_step(ranks, "--parallel.tp", "1", gpus=2)


EXPERTS = "--model.experts", "8", "--model.experts_per_token", "2", "--model.expert_size", "64"


@pytest.mark.usefixtures("simulated")
def test_experts_take_equal_shares_of_the_rows(ranks):
    mesh = "--parallel.tp", "1", "--parallel.dp", "4", "--parallel.ep", "2", "--parallel.zero", "1"
    found = step_of(ranks, *mesh, *EXPERTS, "--train.batch_size", "8", gpus=4)
    rows = 2 * 2 * 2 * 128  # of two ranks, two experts each
    gemms = [sizes for kind, sizes in found.programs[0].works if kind == "gemm"]
    of_gate_up = {sizes[0] for sizes in gemms if sizes[1] == 2 * 64}
    assert of_gate_up == {rows // 8}


@pytest.mark.usefixtures("simulated")
@pytest.mark.second_tier("tp=1 dp=4 ep=4")
@pytest.mark.parametrize("mesh", ["tp=2 dp=2", "tp=1 dp=4 ep=4"])
def test_the_planner_expects_what_the_clock_finds_of_experts(ranks, mesh):
    # The launches of attention and norms are not counted: the shapes are large enough to do without.
    shape = "--model.hidden_size=2048 --model.num_attention_heads=16 --model.num_key_value_heads=4"
    experts = "--model.experts=32 --model.experts_per_token=8 --model.expert_size=768"
    rows = "--train.seq_len=4096 --train.micro_batch_size=2 --train.batch_size=8 --train.dtype=bf16"
    axes = " ".join(f"--parallel.{axis}" for axis in mesh.split())
    flags = [each for flag in f"{axes} {shape} {experts} {rows}".split() for each in flag.split("=")]
    found = step_of(ranks, *flags, gpus=4)
    assert found.planned_s == pytest.approx(found.account.step, rel=0.15)


@pytest.mark.usefixtures("simulated")
def test_a_step_that_does_not_fit_is_refused_in_a_sentence(ranks):
    large = "--model.hidden_size", "8192", "--model.num_hidden_layers", "80"
    found = refused_step(ranks, "--parallel.tp", "1", "--parallel.dp", "2", *large, gpus=2)
    assert "The step does not fit in a GPU's memory" in found
    assert "parallel.zero" in found


@pytest.mark.usefixtures("simulated")
@pytest.mark.second_tier("zb-h1")
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_step_of_a_pipeline_closes_on_every_stage(ranks, schedule):
    found = step_of(ranks, "--parallel.pp", "2", "--pipeline.kind", schedule)
    assert [each.at for each in found.programs] == [{"pp": 0, "cp": 0}, {"pp": 1, "cp": 0}]
    steps = {each.account.step for each in found.programs}
    assert len(steps) == 1
    assert all(each.account.bubble > 0 for each in found.programs)


@pytest.mark.usefixtures("simulated")
@pytest.mark.second_tier
def test_a_step_that_skips_stages_takes_two_thirds_and_as_long_as_planned(ranks):
    shape = "--model.preset=llama3-8b --model.num_hidden_layers=8"
    rows = "--train.seq_len=2048 --train.micro_batch_size=1 --train.batch_size=8 --train.dtype=bf16"
    axes = "--parallel.tp=1 --parallel.dp=1 --parallel.pp=4"
    flags = [each for flag in f"{axes} {shape} {rows}".split() for each in flag.split("=")]
    skipping, whole = (step_of(ranks, *flags, "--pipeline.skip", skip, gpus=4) for skip in ("1", "0"))
    assert skipping.account.step <= 0.68 * whole.account.step
    assert skipping.planned_s == pytest.approx(skipping.account.step, rel=0.05)


@pytest.mark.usefixtures("simulated")
@pytest.mark.second_tier
def test_a_step_over_two_hosts_waits_longer_than_over_one(ranks):
    of_dp = "--parallel.tp", "1", "--parallel.dp", "16", "--parallel.zero", "3", "--train.batch_size", "32"
    far = step_of(ranks, *of_dp, gpus=16)
    near = step_of(ranks, *of_dp[:3], "8", *of_dp[4:-1], "16", gpus=8)
    assert sum(far.account.waits.values()) > sum(near.account.waits.values())
    assert step_account.by(far.account.waits, 1)["numbers"] == pytest.approx(
        machine_model.find("h100").exchanged(2)
    )


@pytest.mark.usefixtures("simulated")
@pytest.mark.second_tier
def test_a_step_of_a_ring_closes_on_every_rank(ranks):
    found = step_of(ranks, "--parallel.tp", "1", "--parallel.cp", "2", "--parallel.zero", "3")
    assert [each.at for each in found.programs] == [{"pp": 0, "cp": 0}, {"pp": 0, "cp": 1}]
    assert {each[0] for each in found.account.waits} <= {"cp", "dp", "all", step_account.OTHER_STREAM}


@pytest.mark.usefixtures("simulated")
def test_the_command_keeps_a_line_a_command_and_the_streams_of_the_step(tmp_path):
    kept, trace = tmp_path / "kept.json", tmp_path / "trace.json"
    command = [sys.executable, "-m", "pyruntime", "simulate", *FLAGS, "--gpus", "2", "--json", str(kept)]
    for more in (["--parallel.tp", "2"], ["--parallel.tp", "2", "--trace", str(trace)]):
        done = subprocess.run([*command, *more], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    (line,) = json.loads(kept.read_text())["results"]
    assert line["command"] == f"{shlex.join(FLAGS[:2])} --gpus 2 {shlex.join(FLAGS[2:])} --parallel.tp 2"
    events = json.loads(trace.read_text())["traceEvents"]
    on_stream = [each["dur"] * 1e-6 for each in events if each.get("tid") == "computing"]
    assert sum(on_stream) == pytest.approx(line["step_s"] - line["host_s"])
    assert f"{line['step_s']:.4g} s, {line['tokens']} tokens" in done.stdout


def test_what_a_first_run_needs_is_said(tmp_path, monkeypatch, capsys):
    assert main(["simulate", *FLAGS]) == 2
    monkeypatch.setenv("CXX", "no-compiler")
    with pytest.raises(ValueError, match=r"no compiler 'no-compiler' was found; install g\+\+"):
        device_build.build()
    monkeypatch.setattr(device_build, "SOURCES", tmp_path)
    with pytest.raises(ValueError, match="is not there; install pyruntime again"):
        device_build.build()
    assert "simulate needs the number of GPUs, --gpus N" in capsys.readouterr().err


def test_a_file_that_cannot_be_kept_is_refused_before_the_step(tmp_path, capsys):
    for option in ("json", "trace"):
        path = tmp_path / "missing" / "file"
        assert main(["simulate", *FLAGS, "--gpus", "1", f"--{option}", str(path)]) == 2
        assert f"--{option}: the folder of {path} is not there" in capsys.readouterr().err
    for other in ("no JSON", "[1]", '{"results": [{}]}'):
        (tmp_path / "kept").write_text(other)
        with pytest.raises(ConfigError, match=r"--json: .*kept is no file of simulate: "):
            keep(tmp_path / "kept", {"command": "mine"})
        assert (tmp_path / "kept").read_text() == other


RECORDED = json.loads((Path(__file__).parents[2] / "bench/results/planning/clock.json").read_text())[
    "results"
]


@pytest.mark.parametrize("line", RECORDED, ids=lambda line: line["command"])
def test_the_planner_expects_what_the_clock_has_found(line):
    gpus, flags = take_count(shlex.split(line["command"]), "gpus")
    _, flags = take_option(flags, "machine")
    config, _ = cli.read(flags, gpus)
    planned_s = predicted(*planned(check(config, gpus), machine_model.find(line["machine"]).cluster)).total
    assert planned_s == pytest.approx(line["step_s"], rel=0.15)


def test_a_step_is_what_its_spans_are():
    spans = [
        (0, 0.0, 4.0, step_account.WORK, "aten::mm", "layers.*.w"),
        (0, 4.0, 5.0, step_account.WAIT, "rows of 7 (tp)", "layers.*.w: all_gather_matmul"),
        (0, 5.0, 5.5, step_account.WORK, "await", ""),
        (0, 5.5, 9.0, step_account.HOST, "the host", ""),
        (3, 0.0, 9.0, step_account.WORK, "aten::mm", "on another stream"),
        (0, 9.0, 12.0, step_account.WORK, "aten::mm", "after the step"),
    ]
    found = step_account.of_step(spans, 1.0, 9.0, {"7": "tp"})
    assert (found.step, found.exposed, found.host) == (8.0, 1.5, 3.5)
    assert found.computing == {("aten::mm", "layers.*.w"): 3.0}
    assert found.waits == {("tp", "rows", "layers.*.w: all_gather_matmul"): 1.0}


def test_spans_with_holes_are_no_account():
    spans = [(0, 0.0, 1.0, step_account.WORK, "a", ""), (0, 2.0, 3.0, step_account.WORK, "b", "")]
    with pytest.raises(ValueError, match=r"cover 2\.0 s of a step of 3\.0 s"):
        step_account.of_step(spans, 0.0, 3.0, {})


def test_a_large_gemm_reaches_the_efficiency_of_the_cluster():
    h100 = machine_model.find("h100")
    n = LARGE
    reached = 2 * n**3 / h100.gemms.seconds(n, n, n) / h100.cluster.peak_flops
    assert reached == pytest.approx(h100.cluster.efficiency, rel=0.01)


def test_gemms_that_fill_fewer_multiprocessors_are_slower():
    h100 = machine_model.find("h100")

    def rate(m: int, n: int, k: int) -> float:
        return m * n * k / h100.gemms.seconds(m, n, k)

    assert rate(1024, 768, 4096) < 0.6 * rate(8192, 768, 4096)
    assert rate(8192, 768, 4096) < 0.8 * rate(8192, 4096, 4096)
    assert h100.gemms.seconds(8192, 768, 4096) < 8 * h100.gemms.seconds(1024, 768, 4096)
    # 12 x 11 tiles of 128 x 256 are one wave; one column more is a second.
    assert h100.gemms.seconds(1536, 2816 + 1, 8192) > 1.2 * h100.gemms.seconds(1536, 2816, 8192)


def test_work_without_a_model_is_refused():
    h100 = machine_model.find("h100")
    with pytest.raises(ValueError, match=r"'teleport' has no model on h100; models: call, event"):
        h100.seconds("teleport", [1])
    with pytest.raises(ValueError, match=r"There is no machine 'b200'; there are: a100, h100, h100-500w"):
        machine_model.find("b200")
