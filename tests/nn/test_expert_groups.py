"""Experts over groups of their own: on every folding of four ranks a step is that of one rank, for rows of
different numbers on every rank, and gradients are divided by the ranks of dp and cp."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import pyruntime
from pyruntime.comm import Runtime, process_group
from pyruntime.nn import ParallelExperts, Router
from pyruntime.nn.parameters import TensorGroup

D, WIDTH, EXPERTS, K = 12, 10, 7, 2
ROWS = (5, 3, 8, 1)
"""Rows of each data-parallel rank. Of one row over two tensor-parallel ranks, the second has none."""
LR = 0.5
FOLDINGS = {
    "dp4": (("dp", "tp"), (4, 1)),
    "tp4": (("tp",), (4,)),
    "dp2 tp2": (("dp", "tp"), (2, 2)),
    "cp2 tp2": (("cp", "tp"), (2, 2)),
    "dp2 cp2": (("dp", "cp", "tp"), (2, 2, 1)),
    "replicate2 dp2": (("dp_replicate", "dp_shard", "tp"), (2, 2, 1)),
    "pp2 dp2": (("pp", "dp", "tp"), (2, 2, 1)),
}
CASES = [
    ("dp4", 1, 1), ("dp4", 2, 3), ("dp4", 4, 2), ("tp4", 1, 3), ("tp4", 2, 1), ("dp2 tp2", 1, 3),
    ("dp2 tp2", 4, 1), ("cp2 tp2", 1, 2), ("cp2 tp2", 4, 0), ("dp2 cp2", 2, 3), ("dp2 cp2", 4, 3),
    ("replicate2 dp2", 2, 3), ("replicate2 dp2", 1, 1), ("pp2 dp2", 2, 2), ("dp2 tp2", 1, 0),
]  # fmt: skip
"""Folding, expert-parallel ranks, ZeRO stage."""


@functools.cache
def runtime_of(name: str, ep: int) -> Runtime:
    names, sizes = FOLDINGS[name]
    return Runtime(init_device_mesh("cpu", sizes, mesh_dim_names=names), ep=ep)


class Mixed(nn.Module):
    """A router and experts; of x [M, D], this rank's rows, it returns [M, D]."""

    def __init__(self, tp, ep):
        super().__init__()
        torch.manual_seed(4)
        self.router = Router(D, EXPERTS, K, group=tp, dtype=torch.float64)
        self.experts = ParallelExperts(EXPERTS, D, WIDTH, group=ep, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts(x, *self.router(x))


def batch(number: int) -> tuple[Tensor, Tensor]:
    """Rows of a data-parallel rank, and what they are compared with."""
    generator = torch.Generator().manual_seed(number)
    rows = ROWS[number % len(ROWS)]
    return tuple(torch.randn(rows, D, generator=generator, dtype=torch.float64) for _ in range(2))


def loss_of(y: Tensor, wanted: Tensor, rows: int) -> Tensor:
    """This rank's part of the mean loss of `rows` rows."""
    return (y - wanted).square().sum() / rows


def step_on_mesh(_group, name: str, ep: int, stage: int, count: int = 2) -> dict[str, object]:
    """Losses, norms and weights of some steps over a mesh, and the norm that a rank would give the job."""
    runtime = runtime_of(name, ep)
    model = Mixed(runtime.tp, runtime.ep)
    handle = pyruntime.shard(model, runtime.replicas, stage=stage, bucket_bytes=64)
    optimizer = handle.of_torch(torch.optim.SGD, lr=LR)
    data, found = runtime.replicas.rank, {"norms": [], "rows": []}
    for step in range(count):
        x, wanted = (each.tensor_split(runtime.tp.size)[runtime.tp.rank] for each in batch(4 * step + data))
        y = model(x)
        loss_of(y, wanted, len(batch(4 * step + data)[0])).backward()
        found["norms"].append(optimizer.step().grad_norm)
        found["rows"].append(y.detach())
    found["weights"] = {
        name: value.full_tensor() if isinstance(value, DTensor) else value.clone()
        for name, value in handle.state_dict().items()
    }
    handle.close()
    return found


def steps_of_one(group, data: int, count: int = 2) -> dict[str, object]:
    """The same of one rank that has the rows of all."""
    model = Mixed(group, group)
    found = {"norms": [], "rows": []}
    for step in range(count):
        model.zero_grad()
        rows = []
        for number in range(data):
            x, wanted = batch(4 * step + number)
            rows.append(model(x))
            (loss_of(rows[-1], wanted, len(x)) / data).backward()
        square = sum(float(p.grad.square().sum()) for p in model.parameters())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= LR * parameter.grad
        found["norms"].append(square**0.5)
        found["rows"].append([each.detach() for each in rows])
    found["weights"] = {name: p.detach().clone() for name, p in model.named_parameters()}
    return found


@pytest.fixture(scope="module")
def one_rank(ranks):
    return {data: ranks.run(steps_of_one, 1, data)[0] for data in (1, 2, 4)}


@pytest.mark.parametrize(("name", "ep", "stage"), CASES)
@pytest.mark.second_tier(
    but=["dp4-2-3", "tp4-1-3", "dp2 tp2-4-1", "cp2 tp2-1-2", "dp2 cp2-2-3", "replicate2 dp2-2-3"]
)
def test_a_step_is_that_of_one_rank(ranks, one_rank, name, ep, stage):
    names, sizes = FOLDINGS[name]
    of_axis = dict(zip(names, sizes, strict=True))
    tp, pp = of_axis["tp"], of_axis.get("pp", 1)
    data = 4 // tp // pp
    exact = one_rank[data]
    found = ranks.run(step_on_mesh, 4, name, ep, stage)
    for rank, of_rank in enumerate(found):
        assert of_rank["norms"] == pytest.approx(exact["norms"], rel=1e-12)
        place, part = rank // tp % data, rank % tp
        for rows, whole in zip(of_rank["rows"], exact["rows"], strict=True):
            torch.testing.assert_close(rows, whole[place].tensor_split(tp)[part], rtol=0, atol=1e-12)
        for key, value in exact["weights"].items():
            torch.testing.assert_close(of_rank["weights"][key], value, rtol=0, atol=1e-12, msg=key)
    again = ranks.run(step_on_mesh, 4, name, ep, stage)
    assert [each["norms"] for each in again] == [each["norms"] for each in found]


def groups_of(_group, name: str, ep: int) -> tuple[list[int], list[int], int]:
    import torch.distributed as dist

    runtime = runtime_of(name, ep)
    of_ep, of_edp = (dist.get_process_group_ranks(process_group(axis)) for axis in (runtime.ep, runtime.edp))
    return of_ep, of_edp, runtime.ep.rank


def test_neighbours_share_experts_and_the_others_hold_the_same(ranks):
    for rank, (of_ep, of_edp, place) in enumerate(ranks.run(groups_of, 4, "cp2 tp2", 4)):
        assert (of_ep, of_edp, place) == ([0, 1, 2, 3], [rank], rank)
    for rank, (of_ep, of_edp, _) in enumerate(ranks.run(groups_of, 4, "tp4", 2)):
        first = rank // 2 * 2
        assert (of_ep, of_edp) == ([first, first + 1], [rank % 2, rank % 2 + 2])
    for rank, (of_ep, of_edp, _) in enumerate(ranks.run(groups_of, 4, "pp2 dp2", 2)):
        first = rank // 2 * 2
        assert (of_ep, of_edp) == ([first, first + 1], [rank])


def by_default(_group):
    runtime = Runtime(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    return runtime.ep.mesh == runtime.tp.mesh, runtime.edp.mesh == runtime.dp.mesh, runtime.ep.copies


def test_by_default_they_lie_over_the_tensor_parallel_ranks(ranks):
    assert ranks.run(by_default, 4) == [(True, True, None)] * 4


def refused(_group):
    mesh, said = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), []
    for ep in (3, 8, 0):
        with pytest.raises(ValueError) as error:
            Runtime(mesh, ep=ep)
        said.append(str(error.value))
    runtime = runtime_of("dp2 tp2", 4)
    model = Mixed(runtime.tp, runtime.ep)
    with pytest.raises(ValueError) as error:
        pyruntime.shard(model, None)
    said.append(str(error.value))
    with pytest.raises(ValueError) as error:
        TensorGroup.of(runtime.ep).__reduce__()
    said.append(str(error.value))
    return said


def test_what_does_not_fit_is_refused(ranks):
    *numbers, alone, pickled = ranks.run(refused, 4)[0]
    for ep, said in zip((3, 8, 0), numbers, strict=True):
        assert said == (
            f"ep={ep} does not divide the ranks that share experts, tp=2 times dp * cp=2; use one of 1, 2, 4."
        )
    assert "average over 1 rank(s) of tp=2, 2 ranks in all" in alone
    assert "A model with experts over runtime.ep cannot be pickled" in pickled


def killed(_group):
    """Rank 3 dies in the experts' flight, which waits for rank 2; the others learn of it there, or in the
    sums over the ranks that hold the same experts."""
    runtime = runtime_of("dp4", 2)
    model = Mixed(runtime.tp, runtime.ep)
    handle = pyruntime.shard(model, runtime.replicas, stage=1, bucket_bytes=64)
    optimizer = handle.of_torch(torch.optim.SGD, lr=LR)
    rank = runtime.replicas.rank

    def step():
        model(batch(rank)[0]).square().sum().backward()
        optimizer.step()

    step()
    if rank == 3:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    elif rank == 2:
        time.sleep(1.0)
    start = time.monotonic()
    try:
        step()
        step()
    except pyruntime.PeerLost as error:
        return str(error), time.monotonic() - start
    return "no error", 0.0


def test_a_rank_killed_in_the_flight_of_experts_is_named_on_all_ranks(ranks):
    outcomes = ranks.launch(killed, 4)
    assert outcomes[3].exit_code == -signal.SIGKILL
    for rank in (0, 1, 2):
        message, seconds = outcomes[rank].value
        assert "rank 3" in message and "has ended" in message, message
        assert seconds < 10
