"""A Runtime is closed and started again in the same process, as often as one likes, and leaves nothing."""

from __future__ import annotations

import gc
import os
import socket
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import pyruntime
from pyruntime.comm import Axis
from pyruntime.nn import ColumnParallelLinear

CYCLES, WARM = 25, 5


def held() -> dict[str, int]:
    """Descriptors, threads and memory maps of this process."""
    gc.collect()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "maps": len(Path("/proc/self/maps").read_text().splitlines()),
    }


def cycles_case(_, transport: str, port: int | None, cycles: int):
    """What the process holds after WARM openings and after all; with a `port`, rank 0 serves the store."""
    if port is not None:
        os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    found = []
    for cycle in range(cycles):
        with pyruntime.Runtime.start(deadline_s=60) as runtime:
            pyruntime.comm.configure(runtime.tp, transport=transport)
            x = torch.full((2 - runtime.rank, 4), cycle + 1.0)
            total = pyruntime.all_gather_matmul(x, torch.ones(3, 4), runtime.tp)
            assert torch.equal(total, torch.full((3, 3), 4.0 * (cycle + 1)))
        if cycle + 1 in (WARM, cycles):
            found.append(held())
    return found


def costs_of_peers_case(_):
    """The peers that have cost something at the beginning and at the end of each of two jobs."""
    found = []
    for _ in range(2):
        with pyruntime.Runtime.start(deadline_s=60) as runtime:
            begun = list(pyruntime.comm.peers())
            for late in (0, 0.2):  # the second time rank 0 waits for rank 1
                time.sleep(late * runtime.rank)
                pyruntime.all_reduce(torch.ones(4), runtime.tp)
            found.append((begun, list(pyruntime.comm.peers())))
    return found


def test_what_peers_have_cost_ends_with_the_job(ranks):
    """The groups of the next job may have the same names and other ranks."""
    outcomes = ranks.launch(costs_of_peers_case, 2, init=False)
    for rank in outcomes:
        assert rank.error is None, rank.output
        assert [begun for begun, _ in rank.value] == [[], []]
    assert [ended for _, ended in outcomes[0].value] == [[("tp", 1)]] * 2


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.parametrize(("transport", "of_rank_0"), [("symmetric_memory", False), ("process_group", True)])
@pytest.mark.second_tier("process_group-True")
def test_a_runtime_opens_and_closes_without_end(ranks, transport, of_rank_0):
    port = free_port() if of_rank_0 else None
    for rank in ranks.launch(cycles_case, 2, transport, port, CYCLES, init=False, timeout=150):
        assert rank.error is None, rank.output
        early, late = rank.value
        assert late["descriptors"] <= early["descriptors"], (early, late)
        assert late["threads"] <= early["threads"], (early, late)
        # The C library's own arenas come and go.
        assert late["maps"] <= early["maps"] + 4, (early, late)


def late_case(_):
    """Rank 1 misses the first opening, and both meet in the second."""
    try:
        with pyruntime.Runtime.start(deadline_s=1.0 if os.environ["RANK"] == "0" else 30.0):
            return "met at once"
    except pyruntime.CommError:
        pass
    with pyruntime.Runtime.start(deadline_s=60) as runtime:
        return pyruntime.all_reduce(torch.ones(2), runtime.tp).tolist()


def held_up_case(_):
    import time

    if os.environ["RANK"] == "1":
        time.sleep(2.0)
    return late_case(_)


def test_ranks_that_missed_each_other_meet_in_the_next_opening(ranks):
    assert [rank.value for rank in ranks.launch(held_up_case, 2, init=False)] == [[2.0, 2.0]] * 2


def counted_apart_case(_):
    """The launchers of two hosts have counted restarts differently; rank 1 was started and lost once more."""
    rank = os.environ["RANK"]
    os.environ |= {"TORCHELASTIC_RESTART_COUNT": rank, "TORCHELASTIC_RUN_ID": "apart"}
    if rank == "1":
        with pytest.raises(pyruntime.CommTimeout, match="rank 1 waiting for rank 0"):
            pyruntime.Runtime.start(deadline_s=0.2)
    else:
        time.sleep(3.0)
    with pyruntime.Runtime.start(deadline_s=20) as runtime:
        return pyruntime.all_reduce(torch.ones(2), runtime.tp).tolist()


def test_ranks_meet_whatever_their_launchers_have_counted(ranks):
    assert [rank.value for rank in ranks.launch(counted_apart_case, 2, init=False)] == [[2.0, 2.0]] * 2


def dtensor_case(_):
    """Threads of this process that are left, by name, after a DTensor was used and the Runtime was closed."""
    with pyruntime.Runtime.start(deadline_s=60) as runtime:
        whole = DTensor.from_local(torch.ones(2, 4), runtime.tp.mesh, [Shard(0)]).full_tensor()
        assert whole.shape == (4, 4)
    gc.collect()
    return [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]


def test_no_thread_of_gloo_outlives_a_runtime(ranks):
    """One that frees a tensor while Python ends aborts the process."""
    for rank in ranks.launch(dtensor_case, 2, init=False):
        assert rank.error is None, rank.output
        assert not [name for name in rank.value if "gloo" in name], rank.value


def after_the_end_case(_):
    with pyruntime.Runtime.start(deadline_s=60) as runtime:
        layer = ColumnParallelLinear(4, 6, group=runtime.tp)
        layer(torch.ones(2, 4))
    for use in (
        lambda: layer(torch.ones(2, 4)),
        lambda: pyruntime.all_gather_matmul(torch.ones(2, 4), torch.ones(3, 4), "rows"),
    ):
        with pytest.raises(ValueError, match=r"^No process group has the name '\w+'\. If there was one, its"):
            use()


def test_a_layer_that_outlives_its_runtime_says_so(ranks):
    for rank in ranks.launch(after_the_end_case, 2, init=False):
        assert rank.error is None, rank.output


def trained(runtime) -> list[torch.Tensor]:
    """Two models that share the ranks, one cut over them and sharded with data parallelism the other, after
    a step each with their passes interleaved, and attention over all tokens, which the ranks agree on."""
    torch.manual_seed(0)
    cut = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    cut = pyruntime.parallelize(cut, runtime.tp, {"0": "column", "2": "row"})
    model = nn.Linear(4, 4)
    handle = pyruntime.shard(model, runtime.tp)
    optimizers = [torch.optim.SGD(cut.parameters(), lr=0.1), handle.of_torch(torch.optim.SGD, lr=0.1)]
    x = torch.randn(6, 4)
    for _ in range(2):
        losses = [each(x).square().mean() for each in (cut, model)]
        for loss in losses:
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    q = torch.randn(1, 4, 2, 4)
    attended = pyruntime.ring_attention(q, q, q, runtime.tp, variant="all_gather_kv")
    return [attended, cut(x).detach(), model(x).detach()]


def two_runtimes_case(_, folder: Path):
    """What was found out about the groups of one Runtime does not pass for those of the next, which may have
    their names; and nothing keeps them."""
    found, groups = [], []
    for _ in range(2):
        with pyruntime.Runtime.start(deadline_s=60) as runtime:
            groups.append((weakref.ref(runtime.tp.group), runtime.tp.group.group_name))
            found.append(trained(runtime))
        del runtime
        gc.collect()
    (first, name), (second, again) = groups
    assert name == again and first() is None and second() is None
    return found


def without_a_runtime_case(_, folder: Path):
    found = []
    for cycle in range(2):
        store = dist.FileStore(str(folder / f"store-{cycle}"), 2)
        dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=2)
        mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu", mesh_dim_names=("tp",))
        found.append(trained(SimpleNamespace(tp=Axis("tp", mesh))))
        dist.destroy_process_group()
    return found


@pytest.mark.parametrize("case", [two_runtimes_case, without_a_runtime_case])
def test_two_models_train_alike_over_groups_that_are_made_again(ranks, case, tmp_path):
    for rank in ranks.launch(case, 2, tmp_path, init=False):
        assert rank.error is None, rank.output
        first, second = rank.value
        assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
