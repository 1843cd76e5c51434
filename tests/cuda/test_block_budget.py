"""Fused kernels that would crowd a device, through the ops: auto takes the chunked tier and says so, a named
tier waits. What shares a device with what is tests/cpp/transport/device/test_block_budget.cpp."""

from __future__ import annotations

import ctypes

import pytest
import torch

from pyruntime import comm, ops
from pyruntime.comm import group_size
from pyruntime.comm.core import _C
from pyruntime.tuning.apply import use
from pyruntime.tuning.cache import Choice, Key, Place
from tests.cuda import build

pytestmark = [pytest.mark.usefixtures("host_kernels"), pytest.mark.second_tier]

ROWS, N, K = 12, 24, 16


@pytest.fixture(scope="module")
def pretender(host_kernels, tmp_path_factory) -> str:
    """The library of kernels behind one that pretends to capture graphs."""
    return build.stand_before_library("pretended_capture", tmp_path_factory.mktemp("pretender"))


def beside_a_graph(group, pretender):
    """(tier and why, fused kernels launched) after calls before, in and after a graph, and of a group that is
    opened anew."""
    _C.use_device_library("cpu", pretender)
    comm.close(group)
    comm.configure(group, transport="device")
    shim = ctypes.CDLL(pretender)
    x = torch.ones(ROWS // group_size(group), K).bfloat16()
    weight = torch.ones(N, K).bfloat16()
    steps = []

    def call(tier, captured=False):
        before = shim.fused_gathers()
        shim.pretend_capture(int(captured))
        try:
            assert (ops.all_gather_matmul(x, weight, group, rows=ROWS, tier=tier) == K).all()
        finally:
            shim.pretend_capture(0)
        told = ops.tier_of("all_gather_matmul", ROWS, N, K, torch.bfloat16, group, tier)
        steps.append((*told, shim.fused_gathers() - before))

    place = Place("any", group.size(), "symmetric memory and copy engines", "any")
    key = Key("all_gather_matmul", ROWS, N, K, "bfloat16", "cpu")
    try:
        ops.all_gather(torch.ones(1, 8).bfloat16(), group)
        use({place: {key: Choice.of("fused", {"fused": 0.001, "chunked": 0.002}, 5, "2026-11-22")}})
        call("auto")
        call("fused", captured=True)
        call("auto")
        call("auto")
        call("auto", captured=True)
        call("fused")
        comm.close(group)
        comm.configure(group, transport="device")
        ops.all_gather(torch.ones(1, 8).bfloat16(), group)
        call("auto")
        return steps
    finally:
        use({})
        comm.close(group)
        _C.use_device_library("cpu", str(build.LIBRARY))


def test_auto_leaves_the_fused_tier_to_graphs_that_hold_the_device_and_says_so(ranks, pretender):
    tuned = "tuned: chunked 2 ms, fused 1 ms on 2026-11-22"
    crowded = (
        "took the chunked tier: of the 2 blocks of fused kernels that cpu has room for at one time, "
        "2 are held by captured graphs, which may be replayed at any time"
    )
    for steps in ranks.run(beside_a_graph, 2, pretender):
        assert steps == [
            ("fused", tuned, 1),
            ("fused", "tier='fused' was asked for", 1),  # captured, and held from here on
            ("fused", f"{tuned}; 1 call {crowded}", 0),
            ("fused", f"{tuned}; 2 calls {crowded}", 0),
            ("fused", f"{tuned}; 2 calls {crowded}", 1),  # of that graph, or one on its stream
            ("fused", "tier='fused' was asked for", 1),
            ("fused", tuned, 1),  # the graph is gone with its group
        ]
