"""Workspaces on GPUs of AMD: memory of our own, here by a pretended HIP runtime on the CPU's memory."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist

from pyruntime import comm, ops
from pyruntime.comm import CommTimeout, PeerLost, group_rank, group_size
from pyruntime.comm.core import _C
from tests.cuda import build
from tests.ops.test_primitives import column_case, row_case
from tests.transports import take

pytestmark = [pytest.mark.usefixtures("host_kernels"), pytest.mark.second_tier]


@pytest.fixture(scope="module")
def kernels(host_kernels) -> str:
    return build.on_pretended_hip()


def held(kernels: str) -> tuple[int, int]:
    """Memory of this process's own in the pretended runtime, and that of others which it has open."""
    runtime = ctypes.CDLL(os.path.join(os.path.dirname(kernels), "libamdhip64.so.0"))
    return runtime.pretended_hip_own(), runtime.pretended_hip_opened()


def opened_anew(group, kernels, case=None, *arguments):
    """What `case` returns on a group whose workspaces are such memory, and what this rank holds before it
    closes the group."""
    comm.close(group)
    _C.use_device_library("cpu", kernels)
    try:
        take(group, "device")
        result = case(group, *arguments)
        return result, held(kernels)
    finally:
        comm.close(group)
        _C.use_device_library("cpu", str(build.LIBRARY))


def all_cases(group):
    for tier in ("chunked", "fused"):
        column_case(group, 3, 41, 0, 7, 24, torch.bfloat16, tier, False, True, False)
        row_case(group, 4, 41, 0, 136, 11, torch.bfloat16, tier, True)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_primitives_equal_exact_products(ranks, kernels, world):
    for _, (own, opened) in ranks.run(opened_anew, world, kernels, all_cases):
        assert own > 0 and opened == own * (world - 1)


def bits(group):
    generator = torch.Generator().manual_seed(group_rank(group))
    x = torch.randn(19, 24, generator=generator, dtype=torch.float32)
    weight = torch.randn(16, 24, generator=generator)
    y = ops.all_gather_matmul(x, weight, group, tier="chunked")
    return y, ops.matmul_reduce_scatter(y, weight.T.contiguous(), group, tier="chunked")


def with_torchs_memory(group):
    comm.close(group)
    _C.use_device_library("cpu", str(build.LIBRARY))
    take(group, "device")
    return bits(group)


def test_the_memory_changes_no_bit(ranks, kernels):
    here = [result for result, _ in ranks.run(opened_anew, 3, kernels, bits)]
    for ours, torchs in zip(here, ranks.run(with_torchs_memory, 3), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, torchs, strict=True))


def many_openings(group, kernels, times):
    """The pretended runtime ends a process that frees what a peer has open."""
    _C.use_device_library("cpu", kernels)
    owned = []
    for call in range(times):
        take(group, "device")
        assert ops.all_gather(torch.ones(3, 5), group).sum() == 15 * group_size(group)
        owned.append(held(kernels)[0])
        if group_rank(group) == call % 3:
            time.sleep(0.02)  # so that another rank closes first, each time another one
        comm.close(group)
    dist.barrier(group)
    take(group, "device")  # the next allocation gives back what was open elsewhere
    ops.all_gather(torch.ones(1, 2), group)
    return max(owned), held(kernels), _C.symmetric_memory_bytes()


def test_what_peers_have_closed_is_given_back(ranks, kernels):
    for outcome in ranks.launch(many_openings, 3, kernels, 60):
        assert outcome.error is None and outcome.exit_code == 0, outcome
        most, (own, opened), pages = outcome.value
        assert most <= 3 and own == 1 and opened == 2 and 0 < pages < 4096


def left_alone(group, kernels):
    _C.use_device_library("cpu", kernels)
    take(group, "device")
    ops.all_gather(torch.ones(2, 3), group)
    comm.set_deadline(group, 0.5)
    if group_rank(group) == 0:
        with pytest.raises(CommTimeout, match=r"rank 1 \(.*\) did not come within 0\.5"):
            ops.all_gather(torch.ones(1 << 16, 3), group, rows=2 << 16)
    dist.barrier(group)


def test_a_rank_that_does_not_come_ends_the_wait_at_the_deadline(ranks, kernels):
    assert [outcome.error for outcome in ranks.launch(left_alone, 2, kernels)] == [None, None]


SIZES = (
    r"rendezvous: rank \d \(process \d+ on \S+\) brings \d+ bytes of GPU memory and rank \d \(process \d+ on "
    r"\S+\) brings \d+; symmetric memory has the same size on every rank"
)


def of_unequal_size(group, kernels):
    """Ranks that disagree about rows whose slots are larger than the least ones."""
    _C.use_device_library("cpu", kernels)
    take(group, "device")
    comm.set_deadline(group, 20.0)
    x = torch.ones(64, 512 + 1024 * group_rank(group))
    with pytest.raises(ValueError, match=SIZES):
        ops.all_gather(x, group, rows=128)
    dist.barrier(group)


def test_ranks_that_bring_unequal_sizes_are_told(ranks, kernels):
    assert [outcome.error for outcome in ranks.launch(of_unequal_size, 2, kernels)] == [None, None]


def refused(group, kernels):
    """Only one rank's runtime refuses; what it had opened before is closed, and the other runs into the
    deadline."""
    _C.use_device_library("cpu", kernels)
    runtime = ctypes.CDLL(os.path.join(os.path.dirname(kernels), "libamdhip64.so.0"))
    take(group, "device")
    comm.set_deadline(group, 1.0)
    runtime.pretended_hip_refuse_opens(group_rank(group) == 2)
    error = None
    try:
        ops.all_gather(torch.ones(2, 3), group)
        ops.all_gather(torch.ones(2, 3), group)
    except (RuntimeError, CommTimeout, PeerLost) as raised:
        error = f"{type(raised).__name__}: {raised}"
    dist.barrier(group)
    return error, held(kernels)[1]


def test_a_handle_that_cannot_be_opened_is_named(ranks, kernels):
    outcomes = ranks.launch(refused, 3, kernels)
    assert all(outcome.exit_code == 0 for outcome in outcomes), outcomes
    error, opened = outcomes[2].value
    assert re.search(
        r"hipIpcOpenMemHandle of the memory of rank 0 \(process \d+ on \S+\) failed: hipErrorInvalidRes",
        error,
    ), error
    assert opened == 0


def killed(group, kernels):
    """A peer that died has closed nothing, so nobody frees what it had open."""
    _C.use_device_library("cpu", kernels)
    take(group, "device")
    ops.all_gather(torch.ones(2, 3), group)
    dist.barrier(group)
    if group_rank(group) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.3)
    comm.close(group)
    gc.collect()
    return held(kernels)


def test_memory_that_a_dead_peer_had_open_is_kept(ranks, kernels):
    alive, dead = ranks.launch(killed, 2, kernels)
    assert dead.exit_code == -signal.SIGKILL
    assert alive.exit_code == 0 and alive.value == (1, 0), alive


def two_runtimes(group, first, second):
    _C.use_device_library("cpu", first)
    with pytest.raises(
        RuntimeError, match=r"two HIP runtimes, .*so\.\d and .*so\.\d, and the kernels need torch"
    ):
        _C.use_device_library("cpu", second)
    _C.use_device_library("cpu", first)


def test_kernels_that_bring_a_hip_runtime_of_their_own_are_refused(ranks, kernels, tmp_path):
    (outcome,) = ranks.launch(two_runtimes, 1, kernels, build.on_pretended_hip(tmp_path, version=1))
    assert outcome.error is None, outcome.error
