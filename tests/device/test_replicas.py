"""Replicas on simulated devices, whose operations start late: the outer step has the CPU's bits, every
method is what it is on the CPU without the host waiting, and the trainer's meet, are saved, come and go."""

from __future__ import annotations

import itertools
import math
import os
import signal
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn

import pyruntime
from pyruntime.comm import Runtime
from pyruntime.nn.cut import memory_of
from pyruntime.ops.outer_step import outer_step_, squared_displacement, squared_gap
from pyruntime.replicas import (
    averaging,
    co2,
    diloco,
    local_sgd,
    outer_optimizer,
    overlapped_local_sgd,
    slowmo,
    streaming_diloco,
)
from pyruntime.train.config import RunConfig, mesh_of
from pyruntime.train.device import Device, check_device
from tests.cuda import build as kernels
from tests.device import sim
from tests.replicas import processes, test_members
from tests.train import jobs

pytestmark = pytest.mark.usefixtures("simulated")

PASSES = [
    {"lr": 0.9, "momentum": 0.3, "nesterov": False, "clip": 0.8, "pull": 1.0, "restarts": True},
    {"lr": 0.9, "momentum": 0.3, "nesterov": True, "clip": math.inf, "pull": 0.6, "restarts": False},
]
DTYPES = [
    (torch.float32, torch.float32, None),
    (torch.float32, torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16, None),
    (torch.float64, torch.float64, None),
]
"""Of x, of what travels and of the rounded copy."""
PARTS = [each for each in itertools.product([None, 0.4], [False, True], [False, True]) if any(each)]
"""step, pulls, launches"""


def compare_passes(group):
    sim.begin(delays=4)
    for settings, (dtype, travels_as, rounds_to) in itertools.product(PASSES, DTYPES):
        state = torch.float64 if dtype == torch.float64 else torch.float32
        z = torch.randn(5003, dtype=state)
        x, m = (z + 0.1 * torch.randn(5003)).to(dtype), torch.randn(5003, dtype=state)
        on_cpu = [x, z, m, torch.randn(5003).to(travels_as)]
        if rounds_to is not None:
            on_cpu.append(x.to(rounds_to))
        for step, pulls, launches in PARTS:
            found, expected = [each.to("sim") for each in on_cpu], [each.clone() for each in on_cpu]
            parts = {**settings, "pulls": pulls, "launches": launches}
            number = step and torch.tensor(step, dtype=torch.float64, device="sim")
            outer_step_(*found, step=number, **parts)
            outer_step_(*expected, step=step, **parts)
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one.cpu(), other), (settings, dtype, travels_as, step, pulls, launches)
        on_sim = [each.to("sim") for each in on_cpu]
        for function, which, numbers in (
            (squared_displacement, (1, 0), (settings["pull"] == 1,)),
            (squared_gap, (3, 2), (0.5, 0.9)),
        ):
            exact = function(*(on_cpu[i] for i in which), *numbers)
            square = function(*(on_sim[i] for i in which), *numbers)
            assert square.device.type == "sim" and square.item() == pytest.approx(exact, rel=1e-12)


def test_a_pass_has_the_bits_of_the_cpus(ranks):
    ranks.run(compare_passes, 1)


SIZES = {"0.weight": (7, 11), "1.weight": (4001,), "1.bias": ()}
METHODS = [
    co2(3, lr=0.9, momentum=0.4),
    local_sgd(4),
    slowmo(3, lr=0.8, momentum=0.6),
    diloco(4),
    overlapped_local_sgd(3, momentum=0.5),
    streaming_diloco(5, fragments=2, delay=2),
]
CASES = [*((method, torch.float32) for method in METHODS), (METHODS[0], torch.bfloat16)]
STEPS = 12


def model_of(number: int, dtype: torch.dtype, device: str) -> tuple[nn.Module, list[torch.Tensor]]:
    """Returns a model, and what each of its parameters of that replica is drawn to."""
    drawn, draw = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2 + number)
    module = nn.Module()
    layers = [nn.Module(), nn.Module()]
    module.layers = nn.ModuleList(layers)
    for name, size in SIZES.items():
        value = torch.randn(size, generator=drawn).to(dtype)
        layers[int(name[0])].register_parameter(name[2:], nn.Parameter(value.to(device)))
    return module, [torch.randn(size, generator=draw).to(dtype).to(device) for size in SIZES.values()]


def step_towards(module: nn.Module, goals) -> None:
    """Moves each parameter a tenth of its way."""
    with torch.no_grad():
        for parameter, goal in zip(module.parameters(), goals, strict=True):
            parameter.sub_(parameter - goal, alpha=0.1)


def steps_of(outer, module: nn.Module, goals, steps: int, tau: int):
    """Returns the parameters after every step and in the end, and the host's waits in the rounds after the
    first."""
    found, counts = [], goals[0].device.type != "cpu"
    for step in range(steps):
        if step == tau and counts:
            sim.reset_counts()
        step_towards(module, goals)
        outer.step()
        found += [parameter.detach().clone() for parameter in module.parameters()]
    waits = sim.host_waits() if counts else {}
    outer.finish()
    return found + [parameter.detach() for parameter in module.parameters()], waits


def walk(runtime, method, dtype, device):
    """Returns the parameters after every step and in the end, the penalty, and the host's waits in the
    rounds after the first."""
    module, goals = model_of(runtime.rank, dtype, device)
    with patch.object(averaging, "RUN_BYTES", 1024):
        outer = pyruntime.OuterOptimizer(module, runtime.dp, method)
    found, waits = steps_of(outer, module, goals, STEPS, method.tau)
    outer.close()
    return [each.cpu() for each in found], outer.last_penalty, waits


def measured(runtime, device):
    """Returns tau, which the first round measures, and the parameters in the end."""
    module, goals = model_of(runtime.rank, torch.float32, device)
    outer = pyruntime.OuterOptimizer(module, runtime.dp, co2())
    for _ in range(outer_optimizer.MEASURED_STEPS + 2):
        step_towards(module, goals)
        outer.step()
    outer.finish()
    return outer.tau, [parameter.detach().cpu() for parameter in module.parameters()]


def walks(group, device, delays):
    if device == "sim":
        sim.begin_rank(delays=delays)
        sim.use_kernels(kernels.LIBRARY)
    with Runtime.start(tp=1, dp=2, device=device) as runtime, patch.object(averaging, "MOST_QUEUED", 3):
        return [walk(runtime, *each, device) for each in CASES], measured(runtime, device)


def outcomes(ranks, function, world, *arguments, timeout=120.0) -> list:
    found = ranks.launch(function, world, *arguments, init=False, timeout=timeout)
    for rank in found:
        assert rank.error is None and rank.exit_code == 0, (rank.error, rank.output)
    return [rank.value for rank in found]


def test_every_method_is_that_of_cpu_ranks_and_the_host_waits_for_nothing(ranks):
    expected = outcomes(ranks, walks, 2, "cpu", 0)
    found = outcomes(ranks, walks, 2, "sim", 6)
    for (rank, _), (known, _) in zip(found, expected, strict=True):
        for (values, penalty, waits), (others, other, _), case in zip(rank, known, CASES, strict=True):
            assert not waits, (case, waits)
            assert penalty == pytest.approx(other, rel=1e-9), case
            unlike = [i for i, pair in enumerate(zip(values, others, strict=True)) if not torch.equal(*pair)]
            assert not unlike, (case, unlike)
    (tau, parameters), (others, the_same) = found[0][1], found[1][1]
    assert tau == others >= 1 and all(map(torch.equal, parameters, the_same))


def train(group, config, device, delays, saved=None):
    """Returns the loss, the gradient norm and the validation's loss of each step, and the weights in the
    end; of a run that goes on from `saved`."""
    if device == "sim":
        sim.begin_rank(delays=delays)
        sim.use_kernels(kernels.LIBRARY)
    mesh = mesh_of(config, int(os.environ["WORLD_SIZE"]))
    with Runtime.start(**vars(mesh), device=device) as runtime:
        check_device(config, Device(runtime.device))
        made = jobs.trainer_over(runtime, config)
        if saved:
            made.resume(saved)
        return ended(made)


def ended(made):
    steps = [(step.loss, step.grad_norm, step.val_loss or 0.0) for step in made.fit()]
    weights = [memory_of(parameter).detach().cpu() for parameter in made.model.parameters()]
    made.close()
    return steps, weights


CO2 = {"method": "co2", "tau": 2, "outer_momentum": 0.3}
RUNS = {
    "co2": (2, CO2, {"dp": 2}),
    "diloco with zero 1 inside": (
        4,
        {"method": "diloco", "tau": 2},
        {"dp": 4, "dp_replicate": 2, "zero": 1},
    ),
    "co2 with tp": (4, CO2, {"dp": 2, "tp": 2}),
    "streaming_diloco": (
        2,
        {"method": "streaming_diloco", "tau": 4, "fragments": 2, "delay": 1},
        {"dp": 2},
    ),
}
SAVED = 3
"""The step of a checkpoint, in the midst of a round."""


def job(folder: Path, data_parallel: dict, parallel: dict) -> RunConfig:
    config = jobs.job(folder, steps=5, val_every=0, batch_size=8, micro_batch_size=2, seq_len=32)
    config = jobs.changed(config, "model", num_hidden_layers=2)
    config = jobs.changed(config, "data_parallel", **data_parallel)
    return jobs.changed(config, "parallel", **{"tp": 1, **parallel})


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.second_tier(but=["co2"])
def test_replicas_learn_what_cpu_ranks_learn(ranks, tmp_path, name):
    world, *settings = RUNS[name]
    config = job(tmp_path, *settings)
    jobs.prepare(config)
    found = [
        outcomes(ranks, train, world, config, device, delays)[0][0]
        for device, delays in (("cpu", 0), ("sim", len(name)))
    ]
    for expected, steps in zip(*found, strict=True):
        assert steps == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize("name", ["co2", "diloco with zero 1 inside"])
@pytest.mark.second_tier
def test_a_run_goes_on_bitwise_from_the_midst_of_a_round(ranks, tmp_path, name):
    world, *settings = RUNS[name]
    config = jobs.changed(job(tmp_path, *settings), "checkpoint", every_steps=SAVED)
    saved = jobs.prepare(config) / "checkpoints" / f"step-{SAVED:06}"
    whole = outcomes(ranks, train, world, config, "sim", 7)
    again = outcomes(ranks, train, world, config, "sim", 8, saved)
    for (steps, weights), (others, the_same) in zip(whole, again, strict=True):
        assert steps[SAVED:] == others
        assert all(map(torch.equal, weights, the_same))


COME_AND_GO = [(co2(processes.TAU, lr=0.9, momentum=0.4), "tells done"), (diloco(processes.TAU), "sums")]


@pytest.mark.parametrize(("method", "moment"), COME_AND_GO, ids=["co2", "diloco"])
@pytest.mark.second_tier("diloco")
def test_a_replica_that_is_killed_leaves_and_one_comes_in_its_place(ranks, tmp_path, method, moment):
    """What is left of them computes what its definition says of the rounds that counted."""
    deaths, rounds = {1: (moment, 2 if moment == "tells done" else 9)}, test_members.ROUNDS
    with processes.service(tmp_path, 3) as address:
        found = ranks.launch(
            processes.replica, 4, tmp_path, address, method, rounds, deaths, (3,), signal.SIGKILL, "sim",
            init=False, timeout=120.0,
        )  # fmt: skip
    assert found[1].exit_code == -signal.SIGKILL
    of_rounds = test_members.check(tmp_path, found, method, [0, 2, 3])
    assert len(of_rounds[-1]) == 3 and found[3].value[1] < rounds


def member(group, config, folder):
    """One of three jobs of one rank. The second one dies in its second round; then the third one starts."""
    number = int(os.environ["RANK"])
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    if number == 1:
        processes.die_at("tells arrived", 2, lambda: os.kill(os.getpid(), signal.SIGKILL))
    while number == 2 and '"lost"' not in (folder / "record").read_text():
        time.sleep(0.1)
    sim.begin(delays=number + 1)
    sim.register_collectives()
    sim.use_kernels(kernels.LIBRARY)
    config = jobs.changed(config, "output", run_dir=str(folder / str(number)))
    with Runtime.start(device="sim") as runtime:
        made = jobs.trainer_over(runtime, config)
        assert made.join()
        return ended(made)


@pytest.mark.second_tier
@pytest.mark.parametrize("method", ["co2", "diloco"])
def test_jobs_on_devices_that_come_and_go_end_with_one_model(ranks, tmp_path, method):
    with processes.service(tmp_path, 2, quorum=2) as address:
        config = job(tmp_path, {"method": method, "tau": 2, "members": address}, {})
        config = jobs.changed(config, "train", steps=8)
        jobs.prepare(config)
        found = ranks.launch(member, 3, config, tmp_path, init=False, timeout=180.0)
        for rank in (found[0], found[2]):
            assert rank.error is None, rank.output
    assert found[1].exit_code == -signal.SIGKILL
    (steps, weights), (later, the_same) = found[0].value, found[2].value
    assert len(steps) == 8 > len(later) > 0
    assert all(map(torch.equal, weights, the_same))
    counted = [block for blocks in processes.shares(tmp_path) for block in blocks.values()]
    assert len(processes.shares(tmp_path)) == 4 and len(set(counted)) == len(counted)
