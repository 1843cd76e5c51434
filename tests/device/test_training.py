"""The trainer learns on simulated devices, whose operations start late, what it learns on one CPU rank."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from pyruntime.comm import Runtime
from pyruntime.train.metrics import read
from pyruntime.train.run import run
from pyruntime.train.signals import StopRequest
from pyruntime.train.validate import check
from tests.cuda import build as kernels
from tests.device import sim
from tests.train import jobs

pytestmark = pytest.mark.usefixtures("simulated")

MIXTURE = {"experts": 7, "experts_per_token": 2, "expert_size": 40, "dense_layers": 1}
MESHES = {
    "tp": {"parallel": {"tp": 2}},
    "zero 3": {"parallel": {"tp": 1, "dp": 2, "zero": 3}},
    "cp": {"parallel": {"tp": 1, "cp": 2}},
    "zb-v": {
        "model": {"num_hidden_layers": 4},
        "parallel": {"tp": 1, "pp": 2},
        "pipeline": {"kind": "zb-v"},
    },
    "ulysses": {"parallel": {"tp": 1, "cp": 2}, "context": {"variant": "ulysses"}},
    "zero 0": {"parallel": {"tp": 1, "dp": 2, "zero": 0}},
    "zero 2": {"parallel": {"tp": 1, "dp": 2, "zero": 2}},
    "1f1b": {"parallel": {"tp": 1, "pp": 2}},
    "tp x dp": {"parallel": {"tp": 2, "dp": 2}},
    "tp x pp": {"parallel": {"tp": 2, "pp": 2}},
    "slices": {
        "parallel": {"tp": 2, "tp_slices": 2},
        "train": {"activation_checkpointing": "selective"},
    },
    "slices of experts": {
        "model": MIXTURE | {"qk_norm": True},
        "parallel": {"tp": 1, "dp": 2, "ep": 2, "tp_slices": 2},
        "train": {"activation_checkpointing": "selective", "balance_loss": 0.0},
    },
    "slices of tp and experts": {
        "model": MIXTURE | {"shared_expert_size": 48},
        "parallel": {"tp": 2, "dp": 2, "ep": 4, "tp_slices": 2},
        "train": {"balance_loss": 0.0},  # else the tokens of a micro-batch matter
    },
}
FIRST = ["tp", "zb-v"]


def train(group, config, device, delays):
    """Returns the loss and the gradient norm of each step."""
    if device != "cpu":
        sim.begin_rank(delays=delays)
        sim.use_kernels(kernels.LIBRARY)
    check(config, config_ranks(config))
    parallel = config.parallel
    axes = {name: getattr(parallel, name) for name in ("tp", "cp", "pp", "dp", "ep")}
    with Runtime.start(**axes, device=device) as runtime:
        folder = run(config, "job", runtime, StopRequest())
    return [(step["loss"], step["grad_norm"]) for step in read(folder / "metrics.jsonl")]


def config_ranks(config) -> int:
    parallel = config.parallel
    return (parallel.tp or 1) * parallel.cp * parallel.pp * parallel.dp


def job(folder: Path, **sections):
    config = jobs.job(folder, steps=3, val_every=3, batch_size=8, seq_len=32)
    for section, values in sections.items():
        config = jobs.changed(config, section, **values)
    return config


def learned(ranks, config, device: str, folder: str, delays: int = 0):
    config = jobs.changed(config, "output", run_dir=folder)
    outcomes = ranks.launch(train, config_ranks(config), config, device, delays, init=False, timeout=120.0)
    for rank in outcomes:
        assert rank.error is None, rank.error
    return torch.tensor(outcomes[0].value, dtype=torch.float64)


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.second_tier(*[name for name in MESHES if name not in FIRST])
def test_a_mesh_of_devices_learns_what_one_cpu_rank_learns(ranks, tmp_path, name):
    config = job(tmp_path, **MESHES[name])
    alone = jobs.changed(config, "parallel", tp=1, dp=1, cp=1, pp=1, ep=None, tp_slices=1)
    alone = jobs.changed(alone, "pipeline", kind="1f1b")
    expected = learned(ranks, alone, "cpu", str(tmp_path / "cpu"))
    found = learned(ranks, config, sim.DEVICE, str(tmp_path / "sim"), delays=len(name))
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=0)


@pytest.mark.second_tier
def test_delays_change_no_bit(ranks, tmp_path):
    config = job(tmp_path, **MESHES["zero 3"])
    first, second = (
        learned(ranks, config, sim.DEVICE, str(tmp_path / str(seed)), delays=seed) for seed in (1, 2)
    )
    assert torch.equal(first, second)


def counted(group, config):
    """Returns how often the host has waited for the device in a run, by what made it wait, and what it has
    put on streams, by name."""
    train(group, config, sim.DEVICE, 0)
    return Counter(sim.host_waits()), Counter(sim.launches())


def four_steps(ranks, config, folder: Path) -> tuple[Counter, Counter]:
    """Returns the same of rank 0 in four steady steps: what a run of eight has more than one of four. They
    write no sample, whose length differs from run to run."""
    runs = []
    for steps in (4, 8):
        again = jobs.changed(config, "train", steps=steps, val_every=0)
        again = jobs.changed(again, "output", run_dir=str(folder / str(steps)), sample_tokens=0)
        (rank, *_) = ranks.launch(counted, config_ranks(config), again, init=False, timeout=120.0)
        assert rank.error is None, rank.error
        runs.append(rank.value)
    (waits, launches), (more_waits, more_launches) = runs
    return more_waits - waits, more_launches - launches


def waits_of_steps(ranks, config, folder: Path) -> Counter:
    return four_steps(ranks, config, folder)[0]


ONCE_A_STEP = {"copy to host": 4}
"""The figures of four steps are read."""
PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "gpus.md"


@pytest.mark.second_tier
@pytest.mark.parametrize("name", ["tp", "zero 3", "cp", "zb-v", "ulysses"])
def test_a_steady_step_waits_once_for_its_figures_and_launches_what_the_page_says(ranks, tmp_path, name):
    waits, launches = four_steps(ranks, job(tmp_path, **MESHES[name]), tmp_path)
    assert waits == ONCE_A_STEP
    # Names in brackets are of the streams' own bookkeeping.
    found = [sum(count for what, count in launches.items() if what[0] != "(") / 4, launches["kernel"] / 4]
    (shown,) = re.findall(rf"^\| {name} \| ([\d,]+) \| ([\d,]+) \|$", PAGE.read_text(), re.MULTILINE)
    assert found == [int(each.replace(",", "")) for each in shown]
