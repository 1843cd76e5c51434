"""Muon on simulated devices takes the steps that it takes on CPU ranks, and the host does not wait for it."""

from __future__ import annotations

import math

import pytest
import torch

import pyruntime
from pyruntime.comm import Runtime
from pyruntime.data_parallel import Muon
from tests.cuda import build as kernels
from tests.data_parallel.test_muon import LR, Layer
from tests.device import sim
from tests.device.test_training import MESHES, ONCE_A_STEP, job, learned, waits_of_steps
from tests.train import jobs

pytestmark = pytest.mark.usefixtures("simulated")
STEPS = 3


def begin(device: str, delays: int) -> None:
    if device != "cpu":
        sim.begin_rank(delays=delays)
        sim.use_kernels(kernels.LIBRARY)


def stepped(group, device, mesh, stage, dtype, max_norm, delays):
    """Whole weights and states after steps along the same gradients on every rank, and how many buckets'
    matrices left before the norm of the last step was known."""
    begin(device, delays)
    with Runtime.start(**mesh, device=device) as runtime:
        model = Layer(runtime.tp, dtype, runtime.device)
        handle = pyruntime.shard(model, runtime.dp, stage=stage, bucket_bytes=1)
        optimizer = handle.adamw(lr=LR, max_norm=max_norm, muon=Muon(list(model.parameters())))
        for step in range(STEPS):
            model(step).backward()
            square = optimizer.squared_norm()
            early = len(optimizer._muon._under_way)
            square = pyruntime.ops.all_gather_stats(square.view(1).cpu(), runtime.world)
            optimizer.step(float(square.sum().sqrt()))
        state = {**handle.state_dict(), **optimizer.state_dict()}
        whole = {
            name: (value.full_tensor() if hasattr(value, "full_tensor") else value.clone()).cpu()
            for name, value in state.items()
        }
        handle.close()
    return whole, early


@pytest.mark.parametrize(
    ("mesh", "stage", "dtype", "max_norm"),
    [
        ({"tp": 2, "dp": 2}, 1, torch.bfloat16, 1e9),
        ({"tp": 2, "dp": 2}, 3, torch.float32, 1e9),
        ({"tp": 1, "dp": 2}, 3, torch.bfloat16, 0.5),
        ({"tp": 2, "dp": 1}, 1, torch.float32, 0.5),
    ],
)
@pytest.mark.second_tier(but=["mesh0-1-dtype0-1000000000.0"])
def test_devices_take_bitwise_the_steps_of_one_cpu_rank(ranks, mesh, stage, dtype, max_norm):
    """Given the same gradients, whose sums are exact."""
    (alone,) = ranks.launch(stepped, 1, "cpu", {"tp": 1}, 1, dtype, max_norm, 0, init=False)
    outcomes = ranks.launch(
        stepped, math.prod(mesh.values()), sim.DEVICE, mesh, stage, dtype, max_norm, 7, init=False
    )
    for rank in (alone, *outcomes):
        assert rank.error is None, rank.error
    expected, early = alone.value
    assert any(name.startswith("momentum.") for name in expected) and (early > 0) == (max_norm > 1)
    for rank in outcomes:
        found, left = rank.value
        assert found.keys() == expected.keys() and (left > 0) == (max_norm > 1)
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


def told_late(group):
    """One device, whose norms the host does not read: weights and states after steps, and after one more
    whose norm is not finite; and how often the host waited in the last two."""
    begin(sim.DEVICE, 5)
    with Runtime.start(tp=1, device=sim.DEVICE) as runtime:
        model = Layer(None, torch.bfloat16, runtime.device)
        handle = pyruntime.shard(model, None)
        optimizer = handle.adamw(lr=LR, max_norm=1e9, muon=Muon(list(model.parameters())))
        found = []
        for step in range(STEPS + 1):
            sim.reset_counts()
            model(step % STEPS).backward()
            norm = optimizer.squared_norm().sqrt()
            optimizer.step(norm if step < STEPS else norm.masked_fill(norm > 0, math.nan))
            waits = sim.host_waits()
            if step + 1 >= STEPS:
                state = {**handle.state_dict(), **optimizer.state_dict()}
                found.append({name: value.cpu().clone() for name, value in state.items()})
                assert not waits, waits
        handle.close()
    return found


def test_a_factor_on_the_device_is_not_read_and_if_it_is_not_finite_nothing_changes(ranks):
    (alone,) = ranks.launch(stepped, 1, "cpu", {"tp": 1}, 1, torch.bfloat16, 1e9, 0, init=False)
    (late,) = ranks.launch(told_late, 1, init=False)
    for rank in (alone, late):
        assert rank.error is None, rank.error
    for found in late.value:
        for name, value in alone.value[0].items():
            assert name.startswith("steps.") or torch.equal(found[name], value), name


@pytest.mark.parametrize("name", ["tp x dp", "zero 3", "alone"])
@pytest.mark.second_tier
def test_the_trainer_learns_with_it_what_one_cpu_rank_learns(ranks, tmp_path, name):
    config = jobs.changed(job(tmp_path, **({"alone": {}} | MESHES)[name]), "optimizer", name="muon")
    alone = jobs.changed(config, "parallel", tp=1, dp=1)
    expected = learned(ranks, alone, "cpu", str(tmp_path / "cpu"))
    found = learned(ranks, config, sim.DEVICE, str(tmp_path / "sim"), delays=11)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=0)


@pytest.mark.second_tier
def test_a_steady_step_waits_for_the_device_at_most_once(ranks, tmp_path):
    config = jobs.changed(job(tmp_path, **MESHES["zero 3"]), "optimizer", name="muon", clip_grad_norm=0.0)
    assert waits_of_steps(ranks, config, tmp_path) == ONCE_A_STEP
