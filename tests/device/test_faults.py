"""Each wait for an event in the product is left out once, and each note that a stream uses memory; the
numbers or a sentence tell."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from pyruntime.comm import Runtime
from pyruntime.nn import ColumnParallelLinear, RowParallelLinear
from pyruntime.replicas import averaging, co2, streaming_diloco
from tests.cuda import build as kernels
from tests.device import sim
from tests.device.test_muon import stepped
from tests.device.test_replicas import walk

pytestmark = [pytest.mark.usefixtures("simulated"), pytest.mark.second_tier]
STEPS, SEEDS = 3, 6


def pass_through(runtime, dtype, tier):
    """Returns what a few passes of a block of linears gave, of other values in each."""
    torch.manual_seed(5)
    ranks = runtime.sizes.tp
    options = {"bias": False, "group": runtime.tp, "tier": tier, "dtype": dtype, "device": runtime.device}
    first, second = ColumnParallelLinear(64, 96, **options), RowParallelLinear(96, 64, **options)
    found = []
    for _ in range(STEPS):
        x = torch.randn(24 * ranks, 64).chunk(ranks)[runtime.rank]
        x = x.to(dtype).to(runtime.device).requires_grad_()
        y = second(torch.relu(first(x)))
        y.square().mean().backward()
        found += [y.detach().cpu(), x.grad.cpu()]
    return [*found, *(layer.weight.grad.to_local().cpu() for layer in (first, second))]


def linears(deadline_s):
    with Runtime.start(tp=2, device="sim", deadline_s=deadline_s) as runtime:
        tiers = (torch.float32, "chunked"), (torch.bfloat16, "fused")
        return [value for tier in tiers for value in pass_through(runtime, *tier)]


def muon(deadline_s):
    whole, _ = stepped(None, "sim", {"tp": 1, "dp": 2}, 1, torch.bfloat16, 1e9, 0)
    return list(whole.values())


def let_go(runtime):
    """Returns memory taken and written while sums of a tensor are under way that nobody holds any more."""
    lines, device = 500, runtime.device
    sums = averaging.Averaging(runtime.dp.mesh, [(lines * averaging.WIDTH, torch.float32)], device=device)
    found = []
    for step in range(STEPS):
        sums.begin(torch.full((lines * averaging.WIDTH,), float(step), device=device))
        found += [torch.full((lines * averaging.WIDTH,), -1.0, device=device) for _ in range(3)]
        sums.close()
    torch.accelerator.synchronize()
    return [value.cpu() for value in found]


def replicas(deadline_s):
    methods = co2(3, lr=0.9, momentum=0.4), streaming_diloco(5, fragments=2, delay=2)
    with (
        Runtime.start(tp=1, dp=2, device="sim", deadline_s=deadline_s) as runtime,
        patch.object(averaging, "MOST_QUEUED", 3),
    ):
        stepped = [value for each in methods for value in walk(runtime, each, torch.float32, "sim")[0]]
        return stepped + let_go(runtime)


PROGRAMS = {"linears": linears, "muon": muon, "replicas": replicas}


def results(group, program, delays, dropped):
    """Returns what the program gave, and the places of the product that asked for an order."""
    sim.begin_rank(delays=delays)
    sim.use_kernels(kernels.LIBRARY)
    sim.drop(dropped)
    # A fault may end in a wait without end; what is sound must not fail because the machine is busy.
    found = PROGRAMS[program](60 if dropped is None else 10)
    return found, sim.asked()


def finding(ranks, program, place, expected) -> str:
    """Returns how the results of some seed differ, or what failed there; "" where nothing did."""
    for delays in range(1, SEEDS + 1):
        outcomes = ranks.launch(results, 2, program, delays, place, init=False, timeout=120.0)
        for rank, known in zip(outcomes, expected, strict=True):
            if rank.error is not None or rank.exit_code:
                return f"delays {delays}: exit code {rank.exit_code}, {rank.error}"
            pairs = enumerate(zip(rank.value[0], known, strict=True))
            unlike = [i for i, pair in pairs if not torch.equal(*pair)]
            if unlike:
                return f"delays {delays}: other values in results {unlike} of {len(known)}"
    return ""


@pytest.mark.parametrize(("program", "most_unfound"), [("linears", 2), ("muon", 1), ("replicas", 0)])
def test_a_wait_without_which_data_is_wrong_is_found(ranks, program, most_unfound):
    """Of the places in the core two order data, of gathers and of scatters. The other two change no result of
    a run in which nothing fails. One orders the look at the failure record. The other is before a slot is
    used again, which the flags imply that every flight of two ranks waits for."""
    outcomes = ranks.launch(results, 2, program, 0, None, init=False)
    for rank in outcomes:
        assert rank.error is None, rank.error
    expected = [rank.value[0] for rank in outcomes]
    places = [place for place in outcomes[0].value[1] if program == "linears" or not place.startswith("core")]
    assert finding(ranks, program, None, expected) == ""
    found = {place: finding(ranks, program, place, expected) for place in places}
    for place, how in found.items():
        print(f"{place}: {' '.join(how.split())[:160] or 'not found'}")
    unfound = [place for place, how in found.items() if not how]
    assert places and len(unfound) <= most_unfound, found
