"""On devices a step that is taken ahead of its norm is the step after it, bit by bit, and the host does not
wait for a bucket."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import pyruntime
from pyruntime.comm import Runtime
from pyruntime.data_parallel.weight_gathers import AHEAD_ONE_OF
from tests.cuda import build as kernels
from tests.data_parallel import cases
from tests.data_parallel.test_ahead import BUCKET, NO_CLIPPING, Watch, barrier, states_of
from tests.device import sim

pytestmark = pytest.mark.usefixtures("simulated")
STEPS = 5


class Model(cases.Model):
    """The model asks the host's ids which linears it uses, so that it does not wait for its device."""

    def forward(self, ids, labels):
        self.steady = self.always or bool(ids[0, 0] % 2)
        return super().forward(ids.to(sim.DEVICE), labels.to(sim.DEVICE))


def made(runtime, stage, *, is_steady=True, rounding="nearest", **options):
    torch.manual_seed(3)
    whole = Model(False, is_steady)
    for layer in whole.layers:  # torch's kernel of LayerNorm for the CPU keeps its statistics in other dtypes
        layer.norm = nn.RMSNorm(cases.WIDTH)
    whole = whole.to(torch.bfloat16).to(sim.DEVICE)
    whole.always = is_steady
    handle = pyruntime.shard(whole, runtime.dp, stage=stage, bucket_bytes=BUCKET)
    return whole, handle, handle.adamw(lr=1e-2, rounding=rounding, **options)


def stepped(runtime, stage, poisoned=(), **options):
    """Reports, and after every step all weights and states; waits of the host in the last step. poisoned:
    steps with a NaN on the last rank."""
    whole, handle, optimizer = made(runtime, stage, **options)
    reports, states, waits = [], [], 0
    for number, (ids, labels) in enumerate(cases.batches(STEPS, runtime.sizes.dp)):
        sim.reset_counts()
        mine = slice(runtime.coordinate.dp, runtime.coordinate.dp + 1)
        loss = whole(ids[mine], labels[mine])
        if number in poisoned and runtime.coordinate.dp == runtime.sizes.dp - 1:
            loss = loss * math.nan
        copied = sum(sim.host_waits().values())  # of the batch
        loss.backward()
        report = optimizer.step()
        waits = sum(sim.host_waits().values()) - copied
        reports.append(f"{report.grad_norm} {report.skipped}")
        states.append({name: each.cpu() for name, each in states_of(whole, handle, optimizer).items()})
    handle.close()
    return reports, states, waits


def check(runtime, stage, **options):
    """Returns how often weights left ahead, how often steps were taken back, and the waits of a step."""
    with barrier():
        reports, states, _ = stepped(runtime, stage, **options)
    watch = Watch()
    with watch.around():
        found = stepped(runtime, stage, **options)
    assert found[0] == reports
    for step, (one, other) in enumerate(zip(found[1], states, strict=True)):
        for name, tensor in other.items():
            assert torch.equal(one[name], tensor), f"{name} after step {step}"
    return watch.ahead, watch.taken_back, found[2]


def usual(runtime, stage):
    ahead, taken_back, waits = check(runtime, stage, max_norm=NO_CLIPPING, nonfinite="skip")
    assert (ahead > 8 * (STEPS - 3)) == (stage < 3) and taken_back == 0
    assert waits <= 2 + 2 * (stage == 3)  # for the norm, and for the marks
    _, handle, _ = made(runtime, stage)
    buckets = len(handle._weights)
    handle.close()
    # Of the four behind the first three, two leave in the forward pass.
    assert AHEAD_ONE_OF == 3 and ahead <= (buckets - 2) * (STEPS - 1)


def other_parameters(runtime, stage):
    """Some parameters get a gradient in some steps only."""
    assert check(runtime, stage, is_steady=False, max_norm=NO_CLIPPING, nonfinite="skip")[1] > 0


def not_finite(runtime, stage):
    options = {"max_norm": NO_CLIPPING, "nonfinite": "skip", "rounding": "stochastic"}
    assert check(runtime, stage, poisoned=(3,), **options)[1] == 1


def clipped(runtime, stage):
    with barrier():
        reports = stepped(runtime, stage, max_norm=NO_CLIPPING, nonfinite="skip")[0]
    norms = sorted(float(each.split()[0]) for each in reports)
    assert check(runtime, stage, max_norm=norms[STEPS // 2], nonfinite="skip")[1] > 0


def without_norm(runtime, stage):
    ahead, taken_back, waits = check(runtime, stage, max_norm=0.0, nonfinite="ignore")
    assert (ahead > 8 * (STEPS - 3)) == (stage < 3) and taken_back == 0 and waits <= 1 + 2 * (stage == 3)


def compare(group, stage, cases_of):
    sim.begin_rank(delays=stage)
    sim.use_kernels(kernels.LIBRARY)
    with Runtime.start(dp=2, device=sim.DEVICE) as runtime:
        for case in cases_of:
            globals()[case](runtime, stage)


FIRST, REST = ("usual", "other_parameters"), ("not_finite", "clipped", "without_norm")


@pytest.mark.parametrize(("stage", "cases_of"), [(2, FIRST), (2, REST), (3, FIRST), (3, REST)])
@pytest.mark.second_tier(but=["2-cases_of0"])
def test_a_step_ahead_is_bitwise_the_step_after_its_norm(ranks, stage, cases_of):
    for rank in ranks.launch(compare, 2, stage, cases_of, init=False, timeout=120.0):
        assert rank.error is None, rank.error
