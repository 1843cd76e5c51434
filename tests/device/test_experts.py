"""Experts on devices that are late are the definition in fp64, and gate all their rows in one launch. Rows
that go only to the ranks that need them make the bits of rows that go to all."""

from __future__ import annotations

import pytest
import torch

from pyruntime import comm
from pyruntime.comm import Runtime
from pyruntime.comm.core import _C
from pyruntime.ops.experts import SWIGLU
from tests.cuda import build as kernels
from tests.device import sim
from tests.ops import test_experts as of_experts
from tests.ops.test_experts import LLAMA4, case, operands, run

pytestmark = pytest.mark.usefixtures("simulated")

FORMS = {"swiglu": {"form": SWIGLU}, "gpt_oss": {}, "llama4": {"form": LLAMA4}}
"""Of GPT-OSS the operands say it, which have biases."""


def compare(group, kind: str) -> None:
    _, size = sim.begin_rank(delays=6)
    sim.use_kernels(kernels.LIBRARY)
    with Runtime.start(tp=size, device=sim.DEVICE) as runtime:
        options = FORMS[kind] | {"device": sim.DEVICE}
        for seed, (rows, routing, dtype) in enumerate(
            [(37, "random", torch.float32), (9, "one expert", torch.float32), (41, "random", torch.bfloat16)]
        ):
            case(runtime.tp, seed, rows, 7, 2, routing, dtype, options, kind == "gpt_oss")


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.second_tier("llama4")
def test_experts_on_devices_are_the_definition(ranks, kind):
    for rank in ranks.launch(compare, 2, kind, init=False):
        assert rank.error is None, rank.error


def operations(group, dtype: torch.dtype) -> dict[str, int]:
    """The launches of a forward and a backward pass."""
    sim.begin_rank()
    sim.use_kernels(kernels.LIBRARY)
    with Runtime.start(device=sim.DEVICE) as runtime:
        given = operands(3, 19, 7, 2, "random", torch.bfloat16)
        sim.reset_counts()
        run(runtime.tp, given, dtype, device=sim.DEVICE)
        return sim.launches()


def test_rows_are_sorted_gated_and_summed_by_kernels_but_in_float64(ranks):
    of_chain = {"aten::sigmoid", "aten::mul", "aten::sum"}
    kernels_of = {}
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        (rank,) = ranks.launch(operations, 1, dtype, init=False)
        assert rank.error is None, rank.error
        assert of_chain & set(rank.value) == (of_chain if dtype == torch.float64 else set())
        kernels_of[dtype] = rank.value.get("kernel", 0)
    each_way = 3 + 1 + 1
    assert kernels_of[torch.bfloat16] == kernels_of[torch.float32] == 2 * each_way
    assert kernels_of[torch.float64] == 0


def compare_in_one_launch(group) -> dict[str, int]:
    _, size = sim.begin_rank(delays=6)
    sim.use_kernels(kernels.LIBRARY)
    _C.set_multiplies_groups(sim.DEVICE, True)
    of_experts.WIDTH = 32  # rows of all matrices begin at multiples of 16 bytes
    with Runtime.start(tp=size, device=sim.DEVICE) as runtime:
        options = {"form": SWIGLU, "device": sim.DEVICE}
        for seed, (rows, routing, form) in enumerate(
            [(37, "random", SWIGLU), (9, "one expert", SWIGLU), (41, "random", LLAMA4), (1, "random", SWIGLU)]
        ):
            case(runtime.tp, seed, rows, 7, 2, routing, torch.bfloat16, options | {"form": form})
        sim.reset_counts()
        run(runtime.tp, operands(3, 19, 7, 2, "random", torch.bfloat16), torch.bfloat16, **options)
        return sim.launches()


def test_one_launch_multiplies_for_all_experts_of_a_rank(ranks):
    for rank in ranks.launch(compare_in_one_launch, 2, init=False):
        assert rank.error is None, rank.error
        assert rank.value.get("aten::_grouped_mm") == 6  # two matrices: forward, dX, dW
        assert not {"aten::mm", "aten::bmm", "aten::addmm"} & set(rank.value)


NAMES = ("y", "dx", "dp", "dgate_up", "ddown", "dgate_up_bias", "ddown_bias")


def compare_forms(group, hosts: int, experts: int, form: str) -> None:
    """A rank's rows of experts with rows dealt and, by tier "unfused", gathered."""
    _, size = sim.begin_rank(delays=7)
    sim.use_kernels(kernels.LIBRARY)
    with Runtime.start(tp=size, device=sim.DEVICE) as runtime:
        if (
            hosts > 1
        ):  # by rails of several ranks, but few bytes go straight, and sums have the order of ranks
            comm.configure(runtime.tp, hosts=[f"host {rank * hosts // size}" for rank in range(size)])
        for seed, (rows, kind, dtype) in enumerate(
            [
                (43, "random", torch.float32),
                (44, "random", torch.bfloat16),
                (size - 1, "random", torch.bfloat16),
                (21, "one expert", torch.float32),
                (21, "few experts", torch.bfloat16),
            ]
        ):
            given = operands(seed, rows, experts, 2, kind, dtype, form == "gpt_oss")
            if kind == "random":
                given[1][::3, 0] = -1
            found, came = [], []
            for tier in ("auto", "unfused", "auto"):
                before = comm.stats(runtime.tp).bytes
                options = FORMS[form] | {"device": sim.DEVICE, "tier": tier, "rows": rows}
                found.append(run(runtime.tp, given, dtype, **options))
                came.append(comm.stats(runtime.tp).bytes - before)
            for name, dealt, gathered, again in zip(NAMES, *found, strict=False):
                assert torch.equal(dealt, gathered), (name, rows, kind)
                assert torch.equal(dealt, again), (name, rows, kind)
            assert rows < 40 or came[0] < came[1], came


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.second_tier(but=["swiglu-4-1", "swiglu-2-2"])
def test_dealt_rows_make_the_bits_of_gathered_ones(ranks, hosts, world, form):
    outcomes = ranks.launch(compare_forms, world, hosts, 8 * world - 1, form, init=False, timeout=240.0)
    for rank in outcomes:
        assert rank.error is None, rank.error
