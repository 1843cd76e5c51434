"""TensorBoard and W&B are sent what metrics.jsonl has."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import sys
import types

import pytest

from pyruntime.cli import main
from pyruntime.train.config import Output, RunConfig, Train
from pyruntime.train.errors import ConfigError
from pyruntime.train.metrics import StepMetrics
from pyruntime.train.watching.sinks import open_sinks, scalars

AXES = {"tp": 0.02, "dp": 0.01}


def step(number, **more):
    return StepMetrics(number, 5.0 / number, 1.25, 1e-3, 4000.0, 0.5, 0.03, 10**8, AXES, **more)


class Refused(Exception):
    pass


class Run:
    """As wandb.Run."""

    def __init__(self, options):
        self.options, self.logged, self.code = options, {}, None
        self.id = options["id"] or "made-1"

    def log(self, values, step):
        self.logged[step] = values

    def finish(self, exit_code):
        self.code = exit_code


@pytest.fixture
def wandb(monkeypatch):
    """In the place of the package: the runs that were started."""
    runs = []

    def init(**options):
        if options["project"] == "closed":
            raise Refused("api_key not configured (no-tty).\nmore")
        runs.append(Run(options))
        return runs[-1]

    module = types.ModuleType("wandb")
    module.init, module.Settings = init, dict
    module.errors = types.SimpleNamespace(Error=Refused)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return runs


def written(config, run_dir, steps, after=0):
    with contextlib.ExitStack() as held:
        sinks = open_sinks(config, run_dir, after, held)
        for metrics in steps:
            for sink in sinks:
                sink.write(metrics)
    return sinks


def test_the_record_is_numbers_by_name_without_what_is_not_finite():
    found = scalars(dataclasses.replace(step(2, mfu=0.5, val_losses={"a.txt": 1.5}), grad_norm=math.nan))
    assert found == {
        "loss": 2.5, "lr": 1e-3, "tokens_per_second": 4000.0, "step_time_s": 0.5, "exposed_comm_s": 0.03,
        "memory_bytes": 10**8, "exposed_by_axis_s/tp": 0.02, "exposed_by_axis_s/dp": 0.01, "mfu": 0.5,
        "val_losses/a.txt": 1.5,
    }  # fmt: skip


def test_tensorboard_shows_every_step_and_a_resumed_run_without_what_it_repeats(tmp_path):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = RunConfig(output=Output(tensorboard=True))
    written(config, tmp_path, [step(1), step(2), step(3)])
    written(config, tmp_path, [dataclasses.replace(step(3), loss=7.0), step(4)], after=2)
    found = accumulators.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(found.Tags()["scalars"]) == set(scalars(step(1)))
    assert [(event.step, event.value) for event in found.Scalars("loss")] == [
        (1, 5.0), (2, 2.5), (3, 7.0), (4, 1.25),
    ]  # fmt: skip
    assert [event.value for event in found.Scalars("exposed_by_axis_s/dp")] == pytest.approx([0.01] * 4)
    written(config, tmp_path, [dataclasses.replace(step(1), loss=9.0)])  # anew: nothing had been saved
    found = accumulators.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in found.Scalars("loss")] == [(1, 9.0)]


def test_wandb_goes_on_with_the_run_that_is_resumed(tmp_path, wandb):
    config = RunConfig(output=Output(wandb="llamas"), train=Train(steps=7))
    written(config, tmp_path / "", [step(1), step(2)])
    written(config, tmp_path / "", [step(3)], after=2)
    first, second = wandb
    assert first.options["project"] == "llamas" and first.options["name"] == tmp_path.name
    assert first.options["config"]["train"]["steps"] == 7 and first.options["dir"] == str(tmp_path)
    assert (first.options["id"], second.options["id"]) == (None, "made-1")
    assert first.logged == {1: scalars(step(1)), 2: scalars(step(2))} and list(second.logged) == [3]
    assert first.code == 0


def test_wandb_hears_that_a_run_has_failed(tmp_path, wandb):
    with pytest.raises(RuntimeError), contextlib.ExitStack() as held:
        open_sinks(RunConfig(output=Output(wandb="llamas")), tmp_path, 0, held)
        raise RuntimeError
    assert wandb[0].code == 1


def test_a_refusal_of_wandb_is_a_sentence(tmp_path, wandb):
    with pytest.raises(ConfigError) as refused:
        written(RunConfig(output=Output(wandb="closed")), tmp_path, [])
    assert str(refused.value) == (
        "output.wandb=closed: W&B refuses to start: api_key not configured (no-tty); log in (`wandb login`), "
        "or set WANDB_MODE=offline."
    )


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_named_before_anything_starts(monkeypatch, capsys, name):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "pyruntime.train.validate.watching.find_spec", lambda asked: None if asked == name else find(asked)
    )
    value = {"tensorboard": "true", "wandb": "llamas"}[name]
    assert main(["train", "--config", "tiny", f"--output.{name}", value, "--dry_run", "1"]) == 2
    assert capsys.readouterr().err == (
        f"pyruntime: output.{name} writes through the package {name}, which is not installed; install "
        f"pyruntime[{name}].\n"
    )
