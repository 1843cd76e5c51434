"""Training on a device: what is refused, what is said, and steps whose figures are read later."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from pyruntime.cli.train import run
from pyruntime.comm.core import _C
from pyruntime.nn.cut import memory_of
from pyruntime.train.config import Comm, DataParallel, Optimizer, Parallel, RunConfig, Train
from pyruntime.train.device import Device, check_device, peak_flops_of
from pyruntime.train.errors import ConfigError, TrainingError
from pyruntime.train.figures import LateFigures
from pyruntime.train.signals import StopRequest
from pyruntime.train.validate import check
from tests.train import jobs

CUDA = Device(torch.device("cuda", 0))


def test_the_peak_of_a_device_goes_by_its_name_and_is_not_guessed():
    assert peak_flops_of("NVIDIA H200") == 989e12
    assert peak_flops_of("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops_of("NVIDIA H100 PCIe") == 756e12
    assert peak_flops_of("NVIDIA A100-SXM4-40GB") == 312e12
    assert peak_flops_of("NVIDIA L40S") == 362e12
    assert peak_flops_of("NVIDIA GeForce RTX 4090") is None


@pytest.mark.parametrize(
    ("name", "units", "flop_in_a_cycle", "clock"),
    [
        ("AMD Instinct MI250X", 110, 1024, 1.7e9),  # of one die
        ("AMD Instinct MI300X", 304, 2048, 2.1e9),
        ("AMD Instinct MI300X OAM", 304, 2048, 2.1e9),
        ("AMD Instinct MI325X", 304, 2048, 2.1e9),
        ("AMD Instinct MI355X", 256, 4096, 2.4e9),
    ],
)
def test_peaks_of_amd_are_what_their_units_and_clocks_make(name, units, flop_in_a_cycle, clock):
    assert peak_flops_of(name) == pytest.approx(units * flop_in_a_cycle * clock, rel=1e-3)
    assert Device().peak_flops("bf16") is None


def test_what_devices_cannot_do_is_refused_by_name():
    stochastic = RunConfig(optimizer=Optimizer(rounding="stochastic"))
    for device in (CUDA, Device()):
        check_device(stochastic, device)
    check(dataclasses.replace(stochastic, train=Train(device="cuda")), 1)
    check_device(RunConfig(data_parallel=DataParallel(method="co2", compression="quantize")), CUDA)
    around = RunConfig(comm=Comm(rings=("0-1-2",)), parallel=Parallel(tp=3))
    check_device(around, CUDA)
    with pytest.raises(ConfigError, match=r"comm.rings=\['0-1-2'\] is for GPUs of one host, and this is cpu"):
        check_device(around, Device())
    with pytest.raises(ConfigError, match=r"train.device must be one of auto, cpu, cuda, found tpu"):
        check(RunConfig(train=Train(device="tpu")), 1)  # type: ignore[arg-type]


def test_gpus_of_several_hosts_need_no_kernels(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setattr(_C, "why_no_device_library", lambda device: "the CUDA kernels are not built")
    for axes in ({"cp": 2}, {"pp": 2}, {"tp": 8, "dp": 2}):
        check_device(RunConfig(parallel=Parallel(**axes)), CUDA)


def test_chunks_of_one_host_need_the_kernels(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    reason = "the CUDA kernels are not built"
    monkeypatch.setattr(_C, "why_no_device_library", lambda device: reason)  # they may be here
    with pytest.raises(ConfigError) as refused:
        check_device(RunConfig(parallel=Parallel(dp=2)), CUDA)
    assert str(refused.value) == f"parallel.dp=2 on GPUs: {reason}."
    check_device(RunConfig(parallel=Parallel(tp=2)), CUDA)


@pytest.fixture
def config(tmp_path):
    made = jobs.job(tmp_path, steps=9, val_every=6)
    made = jobs.changed(made, "output", log_every=4)
    jobs.prepare(made)
    return made


@dataclasses.dataclass
class Outcome:
    metrics: list[tuple]
    """Step, loss, norm, learning rate and validation loss of each."""
    known: list[int]
    """How many steps' figures were known after each."""
    weights: dict[str, torch.Tensor]
    error: str


def trained(group, config: RunConfig, late: bool, poison_at: int = 0) -> Outcome:
    """poison_at: from that step on a gradient is NaN."""
    made = jobs.trainer(group, config)
    if late:
        made._figures = LateFigures(Device(), made._figures._load)
    take, outcome = made._train_step, Outcome([], [], {}, "")

    def noted(step):
        if step == poison_at:
            made.model.norm.weight.register_hook(lambda grad: grad * float("nan"))
        found = take(step)
        outcome.known.append(len(found[0]))
        return found

    made._train_step = noted
    try:
        for m in made.fit():
            outcome.metrics.append((m.step, m.loss, m.grad_norm, m.lr, m.val_loss))
    except TrainingError as failure:
        outcome.error = str(failure)
    outcome.weights = weights_of(made)
    return outcome


def after(group, config: RunConfig, steps: int) -> dict[str, torch.Tensor]:
    """The weights after so many steps."""
    made = jobs.trainer(group, config)
    made._figures = LateFigures(Device(), made._figures._load)
    for step in range(1, steps + 1):
        made._train_step(step)
    return weights_of(made)


def weights_of(trainer) -> dict[str, torch.Tensor]:
    return {name: memory_of(parameter).clone() for name, parameter in trainer.model.named_parameters()}


def test_figures_that_are_read_later_are_those_that_are_read_at_once(ranks, config):
    (at_once,) = ranks.run(trained, 1, config, False)
    (later,) = ranks.run(trained, 1, config, True)
    assert at_once.known == [1] * 9
    assert later.known == [1, 0, 0, 3, 0, 2, 0, 2, 1]  # log_every=4, val_every=6, the first and the last step
    assert [figures[0] for figures in later.metrics] == list(range(1, 10))
    for mine, theirs in zip(later.metrics, at_once.metrics, strict=True):
        assert mine[:4] == pytest.approx(theirs[:4], rel=1e-6)
        assert (mine[4] is None) == (theirs[4] is None)
        assert theirs[4] is None or mine[4] == pytest.approx(theirs[4], rel=1e-6)
    for name, weight in at_once.weights.items():
        torch.testing.assert_close(later.weights[name], weight, rtol=1e-5, atol=1e-6)


def test_a_step_that_is_not_finite_ends_the_run_with_the_weights_before_it(ranks, config):
    """Step 7 is poisoned, which is known after step 8: that has updated nothing either."""
    config = jobs.changed(config, "train", val_every=0)
    (outcome,) = ranks.run(trained, 1, config, True, 7)
    assert outcome.error.startswith("Step 7: the loss is") and "with the weights of step 6" in outcome.error
    assert outcome.known == [1, 0, 0, 3, 0, 0, 0, 3]  # the one that is not finite among them
    assert [figures[0] for figures in outcome.metrics] == [1, 2, 3, 4, 5, 6]
    (expected,) = ranks.run(after, 1, config, 6)
    for name, weight in outcome.weights.items():
        assert torch.equal(weight, expected[name]), name


def test_rings_of_a_configuration_are_those_of_the_tensor_parallel_group(monkeypatch):
    """As `python -m pyruntime train` starts a rank; here without GPUs, and no further than the training."""
    asked, trained = [], []
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr("pyruntime.train.device.check_device", lambda config, device: None)
    monkeypatch.setattr("pyruntime.comm.configure", lambda group, *, rings: asked.append((group.size, rings)))
    monkeypatch.setattr("pyruntime.train.run.run", lambda config, name, runtime, stop: trained.append(config))
    for rings in ((), ("0",)):
        run(RunConfig(comm=Comm(rings=rings), train=Train(device="cpu")), "name", 1, StopRequest())
    assert asked == [(1, [[0]])] and len(trained) == 2
