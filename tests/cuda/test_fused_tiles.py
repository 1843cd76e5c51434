"""Tiles of the fused kernels by name, in the host dialect: products are right in any, tiles are each rank's
own affair, and auto takes what was tuned."""

from __future__ import annotations

import ctypes

import pytest
import torch

from pyruntime import comm, ops
from pyruntime.comm import group_rank, group_size
from pyruntime.comm.core import _C
from pyruntime.tuning.apply import use
from pyruntime.tuning.cache import Choice, Key, Place
from pyruntime.tuning.linears import RankLinear
from pyruntime.tuning.measure import Problem, measure
from tests.cuda import build
from tests.cuda.test_chunked import on_device
from tests.cuda.test_fused_tier import always_chunked, integers_case
from tests.ops.test_primitives import column_case, row_case

pytestmark = [pytest.mark.usefixtures("host_kernels"), pytest.mark.second_tier]

NAMES = ("small", "large")
NUMBERS = {"small": 0, "large": 1}
"""As launchers.h has them."""


@pytest.fixture(scope="module")
def recorder(host_kernels, tmp_path_factory) -> str:
    """The library of kernels behind one that writes down which tiles are asked for."""
    return build.stand_before_library("recorded_calls", tmp_path_factory.mktemp("recorder"))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("tiles", NAMES)
@pytest.mark.parametrize("rows", [1, 41, 270])
def test_products_are_right_by_any_tiles(ranks, world, tiles, rows):
    seed, tier = int(torch.randint(2**31, ())), f"fused:{tiles}"
    for dtype in (torch.bfloat16, torch.float16):
        ranks.run(on_device, world, column_case, seed, rows, 0, 7, 24, dtype, tier, True, True, False)
        ranks.run(on_device, world, row_case, seed, rows, 0, 136, 11, dtype, tier, True)


def tiles_in_turn(rank, call):
    return ("fused:small", "fused:large", "fused", "chunked")[(rank + call) % 4]


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_may_take_different_tiles_and_get_the_same_bits(ranks, world):
    expected = ranks.run(on_device, world, integers_case, always_chunked, 8)
    for mine, theirs in zip(
        ranks.run(on_device, world, integers_case, tiles_in_turn, 8), expected, strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def asked_of_the_kernels(group, recorder, tiers):
    """Tiles that the kernels of both ops, forward and backward, were asked for, by tier."""
    _C.use_device_library("cpu", recorder)
    comm.close(group)
    comm.configure(group, transport="device")
    recorded = ctypes.CDLL(recorder).recorded_tiles
    found = {}
    try:
        for tier in tiers:
            x = torch.ones(6, 16).bfloat16().requires_grad_()
            weight = torch.ones(24, 16).bfloat16().requires_grad_()
            y = ops.all_gather_matmul(x, weight, group, rows=6 * group_size(group), tier=tier)
            forward = recorded(0)
            y.sum().backward()  # a scatter
            found[tier] = [forward, recorded(1)]
            z = ops.matmul_reduce_scatter(y.detach(), weight.detach().t(), group, tier=tier)
            assert (y == 16).all() and (z == 16 * 24 * group_size(group)).all()
            found[tier].append(recorded(1))
    finally:
        comm.close(group)
        _C.use_device_library("cpu", str(build.LIBRARY))
    return found


def test_names_reach_the_kernels(ranks, recorder):
    for found in ranks.run(asked_of_the_kernels, 2, recorder, ["fused:large", "fused:small", "fused"]):
        assert found == {"fused:large": [1, 1, 1], "fused:small": [0, 0, 0], "fused": [0, 0, 0]}


def tuned(group, recorder, mine):
    """What auto says and asks of the kernel, where each rank was handed tiles of its own."""
    _C.use_device_library("cpu", recorder)
    comm.close(group)
    comm.configure(group, transport="device")
    rows, tiles = 12, mine[group_rank(group)]
    key = Key("all_gather_matmul", rows, 24, 16, "bfloat16", "cpu")
    times = {"fused": 0.002, f"fused:{tiles}": 0.001}
    place = Place("any", group.size(), "symmetric memory and copy engines", "any")

    def told():
        return ops.tier_of("all_gather_matmul", rows, 24, 16, torch.bfloat16, group)

    try:
        ops.all_gather(torch.ones(1, 8).bfloat16(), group)
        use({place: {key: Choice.of(f"fused:{tiles}", times, 5, "2026-11-22")}})
        before = told()
        x = torch.ones(rows // group.size(), 16).bfloat16()
        assert (ops.all_gather_matmul(x, torch.ones(24, 16).bfloat16(), group, rows=rows) == 16).all()
        return before, told(), ctypes.CDLL(recorder).recorded_tiles(0)
    finally:
        use({})
        comm.close(group)
        _C.use_device_library("cpu", str(build.LIBRARY))


@pytest.mark.parametrize("mine", [["large", "large"], ["small", "large"]])
def test_auto_takes_the_tuned_tiles(ranks, recorder, mine):
    for tiles, (before, after, asked) in zip(mine, ranks.run(tuned, 2, recorder, mine), strict=True):
        said = f"tuned: fused 2 ms, fused:{tiles} 1 ms on 2026-11-22; tiles: {tiles}"
        assert before == after == ("fused", said)
        assert asked == NUMBERS[tiles]


def test_tuned_tiles_that_are_not_here_are_left_alone(ranks, recorder):
    for before, after, _ in ranks.run(tuned, 2, recorder, ["sm90-large", "sm90-large"]):
        assert before == after and after[0] == "chunked" and after[1].startswith("chunked is the rule")


def refused(group, tier):
    x, weight = torch.ones(4, 16).bfloat16(), torch.ones(24, 16).bfloat16()
    ops.matmul_reduce_scatter(x, weight, group, tier=tier)


@pytest.mark.parametrize(
    ("tier", "sentence"),
    [
        ("fused:sm90-large", "but tiles here are small, large; use tier='auto' or 'fused'."),
        ("fused:huge", "but tiles here are small, large; use tier='auto' or 'fused'."),
        ("fused:", "tier='fused:' is no tier"),
        ("chunked:large", "tier='chunked:large' is no tier"),
        ("chunked:2", "the number of chunks is no choice where they travel by symmetric memory and copy"),
    ],
)
def test_names_that_are_none_are_refused_in_a_sentence(ranks, tier, sentence):
    for error in ranks.run(on_device, 2, refused, tier, expect_errors=True):
        assert isinstance(error, ValueError) and sentence in str(error), str(error)


def measured(group, dtype):
    linear = RankLinear("down", "matmul_reduce_scatter", 50, 16, 24)
    problem = Problem(linear, group, dtype, torch.device("cpu"), group)
    return [measure(problem, when, 3, 60.0) for when in ("forward", "backward")]


def test_tiles_that_the_rule_does_not_take_are_measured(ranks):
    first, second = ranks.run(on_device, 2, measured, torch.bfloat16)
    assert first == second
    for one in first:
        assert set(one.tiers) == {"unfused", "chunked", "fused", "fused:large"} and one.best in one.tiers
    for one in ranks.run(on_device, 2, measured, torch.float32)[0]:
        assert set(one.tiers) == {"unfused", "chunked"}
