"""Groups open their workspaces on symmetric memory that finds and meets the peers as torch's does on CUDA."""

import os

import pytest
import torch
import torch.distributed as dist

from pyruntime import comm, ops
from pyruntime.comm import CommTimeout, companion, group_name, group_rank, group_size
from pyruntime.comm.core import _C
from tests.cuda import build
from tests.cuda.cuda_like import cuda_like
from tests.ops.test_primitives import column_case, row_case
from tests.transports import take

pytestmark = pytest.mark.usefixtures("host_kernels", "cuda_like_memory")


def opened_anew(group, transport, so_far=0):
    """Closes the group and opens it on such memory."""
    if transport == "device":
        _C.use_device_library("cpu", str(build.LIBRARY))
    comm.close(group)
    with cuda_like(so_far) as library:
        take(group, transport)
        column_case(group, 3, 41, 0, 7, 9, torch.float32, "chunked", False, True, False)
        row_case(group, 4, 41, 0, 6, 11, torch.bfloat16, "chunked", True)
        met = library.cuda_like_exchanges() - so_far
    comm.close(group)
    return met


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("transport", ["device", "symmetric_memory"])
@pytest.mark.second_tier("device-2")
def test_workspaces_are_found_by_the_name_of_a_process_group(ranks, world, transport):
    assert min(ranks.run(opened_anew, world, transport)) > 0


def test_hosts_of_several_ranks_have_a_group_each(ranks):
    assert min(ranks.run(opened_anew, 4, "hierarchical")) > 0


def with_another_past(group, transport):
    return opened_anew(group, transport, so_far=7 * group_rank(group))


@pytest.mark.parametrize("transport", ["device", "symmetric_memory"])
def test_ranks_that_met_others_before_meet(ranks, transport):
    """torch counts the exchanges of a process in all of its groups together."""
    assert min(ranks.run(with_another_past, 3, transport)) > 0


def edges(group):
    """Edges of a ring share the group's store, and a rank is in two of them."""
    _C.use_device_library("cpu", str(build.LIBRARY))
    comm.close(group)
    take(group, "device")
    rank, size = group_rank(group), group_size(group)
    found = []
    with cuda_like():
        for first in range(size - 1):
            if rank in (first, first + 1):
                name = companion(group, "dp", (first, first + 1)).name
                found.append(ops.all_gather(torch.full((2, 3), float(rank)), name)[:, 0].tolist())
        everyone = ops.all_gather(torch.full((1, 3), float(rank)), group)[:, 0].tolist()
    comm.close(group)
    return found, everyone


def test_edges_of_one_group_do_not_hear_each_other(ranks):
    ends = [[0.0, 0.0, 1.0, 1.0], [1.0, 1.0, 2.0, 2.0], [2.0, 2.0, 3.0, 3.0]]
    expected = [ends[:1], ends[:2], ends[1:], ends[2:]]
    assert ranks.run(edges, 4) == [(found, [0.0, 1.0, 2.0, 3.0]) for found in expected]


def left_alone(group):
    """Rank 1 grows no workspace: the other waits for it in torch's own exchange."""
    _C.use_device_library("cpu", str(build.LIBRARY))
    with cuda_like():
        take(group, "device")
        ops.all_gather(torch.ones(2, 3), group)
        comm.set_deadline(group, 0.5)
        if group_rank(group) == 0:
            with pytest.raises(CommTimeout, match=r"rank 1 .*did not come within 0\.5.* s"):
                ops.all_gather(torch.ones(1 << 16, 3), group, rows=2 << 16)
    dist.barrier(group)


def test_a_wait_in_the_exchange_ends_at_the_deadline(ranks):
    assert [outcome.error for outcome in ranks.launch(left_alone, 2)] == [None, None]


def names_of_workspaces(group, most):
    """Of those that rank 0 of the group may have named: what torch's registry knows."""
    pid = [os.getpid()]
    dist.broadcast_object_list(pid, group_src=0, group=group)
    known = []
    for number in range(most):
        name = f"{group_name(group)}/{pid[0]}.{number}/host0"
        try:
            dist.distributed_c10d._resolve_process_group(name)
            known.append(name)
        except (RuntimeError, ValueError):
            pass
    return known


def many_openings(group, times):
    open_files = []
    for time in range(times):
        comm.close(group)
        ops.all_gather(torch.ones(1, 3), group)
        if time in (9, times - 1):
            open_files.append(len(os.listdir("/proc/self/fd")))
    while_open = names_of_workspaces(group, 10 * times)
    comm.close(group)
    return while_open, names_of_workspaces(group, 10 * times), open_files, _C.symmetric_memory_bytes()


@pytest.mark.second_tier
def test_what_is_opened_200_times_leaves_one_group_and_then_none(ranks):
    for outcome in ranks.launch(many_openings, 2, 200):
        assert outcome.error is None, outcome.error
        while_open, after, (early, late), held = outcome.value
        assert len(while_open) == 1 and after == [] and early == late and held == 0


def destroyed(group):
    """What users destroy is theirs: other groups go on, and all can be destroyed with workspaces open."""
    half = dist.new_group([0, 1])
    for each in (group, half):
        assert ops.all_gather(torch.ones(2, 3), each).sum() == 12
    dist.destroy_process_group(half)
    assert ops.all_gather(torch.ones(50_000, 3), group).sum() == 300_000  # a larger workspace
    dist.destroy_process_group()


def test_groups_of_users_are_destroyed_as_ever(ranks):
    for outcome in ranks.launch(destroyed, 2):
        assert outcome.error is None and outcome.exit_code == 0, outcome
        assert "Warning" not in outcome.output and "terminate" not in outcome.output, outcome.output
