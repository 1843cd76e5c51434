"""pyruntime/clock: ranks that do not do the same wait for each other's messages in virtual time."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pyruntime.clock import mirrors, programs, step_account
from pyruntime.clock.mirrors import ProgramPlace, mirrored
from pyruntime.comm import group_name, group_rank
from pyruntime.comm.ring import Ring
from pyruntime.pipeline import make_schedule
from pyruntime.pipeline.executor import Pipeline

OF_MESSAGES = {
    "gemm": 10.0,
    **dict.fromkeys(("put", "message inside a host", "message between hosts"), 3.0),
    **dict.fromkeys(("latency inside a host", "latency between hosts"), 1.0),
}
Spent = list[tuple[float, float, int, str]]


def of_programs(group, axis: str, program: str, gpus_per_host: int, size: int) -> list[Spent]:
    """Ranks that differ, whose host takes no time and whose only work are GEMMs of 10 seconds. A message
    takes 3 seconds, and arrives 1 second later."""

    def run(place: ProgramPlace) -> Spent:
        core = mirrors.begin(lambda kind, sizes: OF_MESSAGES.get(kind, 0.0), 2**30)
        with mirrored({axis: size, "tp": 1}, place) as runtime:
            return globals()[program](core, getattr(runtime, axis))

    return programs.run(run, mirrors.places({axis: size, "tp": 1}), gpus_per_host)


def begin_together(core, group) -> float:
    """Returns the moment at which both ranks begin, with devices that have nothing left to do."""
    torch.accelerator.synchronize()
    core.meet_on_host(group_name(group), 0.0)
    core.take_spans()
    core.keep_spans(True)
    return core.host_time()


def spent_since(core, begun: float) -> Spent:
    spans = core.take_spans()
    return [
        (begin - begun, end - begun, how, what.rpartition(" of ")[0] or what)
        for stream, begin, end, how, what, _ in spans
        if stream == step_account.COMPUTING and end > begun
    ]


def pipeline(core, group) -> Spent:
    stage = torch.nn.Linear(8, 8, bias=False, device="sim")
    x = torch.empty(4, 8, device="sim")
    schedule, rank = make_schedule("1f1b", 2, 2), group_rank(group)
    run = Pipeline(schedule, {rank: stage}, group, shapes=[(4, 8)], dtype=x.dtype, device=x.device)
    begun = begin_together(core, group)
    run.step([[x], [x]], lambda y, *_: y.sum())
    return spent_since(core, begun)


def ring(core, group) -> Spent:
    x = torch.empty(8, 8, device="sim")
    around = Ring(group, "cp")
    for work in (0, 1 + group_rank(group)):  # the first makes the workspaces
        begun = begin_together(core, group)
        for _ in range(work):
            x @ x
        shift = around.shift(4, 4, 8, torch.float32, x.device)
        shift.send()
        shift.receive()
        shift.finish()
    return spent_since(core, begun)


def swaps(core, group) -> Spent:
    """Ranks 0 and 1 swap rows, then 1 and 2, each pair in one call. Rank r has r (r + 1) / 2 GEMMs before."""
    own, of_torch = group_rank(group), group.mesh.get_group()
    begun = begin_together(core, group)
    x, rows = torch.empty(8, 8, device="sim"), torch.empty(2, 8, 8, device="sim")
    for _ in range(own * (own + 1) // 2):
        x @ x
    for pair in ((0, 1), (1, 2)):
        if own in pair:
            peer = sum(pair) - own
            calls = ((dist.isend, rows[0]), (dist.irecv, rows[1]))
            for work in dist.batch_isend_irecv(
                [dist.P2POp(call, each, group=of_torch, group_peer=peer) for call, each in calls]
            ):
                work.wait()
    return spent_since(core, begun)


def crossing(core, group) -> None:
    """Both ranks ask for the other one's rows before they send theirs, on one stream."""
    rows, peer, of_torch = torch.empty(8, 8, device="sim"), 1 - group_rank(group), group.mesh.get_group()
    asked = dist.irecv(rows, group=of_torch, group_src=peer)
    dist.isend(rows, group=of_torch, group_dst=peer)
    asked.wait()


def run_programs(ranks, axis: str, program: str, gpus_per_host: int, size: int = 2) -> list[Spent]:
    (outcome,) = ranks.launch(of_programs, 1, axis, program, gpus_per_host, size, init=False)
    assert outcome.error is None, outcome.error
    return outcome.value


def gemms(spent: Spent) -> list[tuple[float, float]]:
    return [(begin, end) for begin, end, _, what in spent if what in ("aten::mm", "aten::addmm")]


def waits(spent: Spent) -> list[tuple[float, float, str]]:
    return [(begin, end, what) for begin, end, how, what in spent if how == step_account.WAIT]


BUBBLE = step_account.WORK_OF_ANOTHER


@pytest.mark.usefixtures("simulated")
class TestRanksThatDiffer:
    def test_a_pipeline_of_two_stages_waits_for_work_and_for_rows(self, ranks):
        # Stage 0 multiplies once forward and once backward, stage 1 twice backward. Stage 1 has the rows of
        # the first micro-batch at 14 and its gradient at 44, which is there at 48; the second's at 74 and 78.
        first, second = run_programs(ranks, "pp", "pipeline", 2)
        assert gemms(first) == [(0, 10), (10, 20), (48, 58), (78, 88)]
        assert waits(first) == [(20, 44, BUBBLE), (44, 48, "rows"), (58, 74, BUBBLE), (74, 78, "rows")]
        assert gemms(second) == [(14, 24), (24, 34), (34, 44), (44, 54), (54, 64), (64, 74)]
        assert waits(second) == [(0, 10, BUBBLE), (10, 14, "rows")]

    def test_between_hosts_rows_leave_when_they_are_asked_for(self, ranks):
        # The second micro-batch's rows are ready at 20, and asked for at 44.
        first, second = run_programs(ranks, "pp", "pipeline", 1)
        assert gemms(first) == [(0, 10), (10, 20), (48, 58), (82, 92)]
        assert gemms(second) == [(14, 24), (24, 34), (34, 44), (48, 58), (58, 68), (68, 78)]
        assert waits(second) == [(0, 10, BUBBLE), (10, 14, "rows"), (44, 48, "rows")]

    @pytest.mark.parametrize("gpus_per_host", [2, 1])
    def test_a_ring_of_two_waits_for_the_slower_one(self, ranks, gpus_per_host):
        first, second = run_programs(ranks, "cp", "ring", gpus_per_host)
        assert waits(first) == [(10, 20, BUBBLE), (20, 24, "rows")]
        # Between hosts, what the first one sends at 10 is asked for at 20.
        assert waits(second) == ([] if gpus_per_host == 2 else [(20, 24, "rows")])

    def test_a_call_of_messages_waits_for_its_own_ends_only(self, ranks):
        # Rank 1 is ready at 10, and rank 2 at 30, when 0 and 1 have long swapped their rows.
        first, second, third = run_programs(ranks, "pp", "swaps", 8, size=3)
        assert waits(first) == [(0, 10, BUBBLE), (10, 14, "rows")]
        assert waits(second) == [(10, 14, "rows"), (14, 30, BUBBLE), (30, 34, "rows")]
        assert waits(third) == [(30, 34, "rows")]

    def test_ranks_that_wait_for_each_other_are_told(self, ranks):
        (outcome,) = ranks.launch(of_programs, 1, "pp", "crossing", 8, 2, init=False)
        assert "wait for each other" in str(outcome.error)
        assert "Two ranks must send and receive in the same order." in str(outcome.error)
