"""The benchmark of validation losses: which runs are still to be made, and what it says of others."""

from __future__ import annotations

import json

import pytest

from bench.data_parallel import quality
from bench.data_parallel.quality import ADAMW, METHODS, SWEEP
from pyruntime.train import validate
from pyruntime.train.config import tokens_per_step


def result(seed: int, name: str, loss: float, penalty: float = 1.0) -> dict:
    return {"seed": seed, "name": name, "val_loss": loss, "penalty": penalty}


def test_runs_are_made_seed_by_seed_and_none_twice():
    names, sweep = ["CO2 12", ADAMW], next(iter(SWEEP))
    assert list(quality.runs([*names, sweep], 2, [])) == [
        (0, "CO2 12"), (0, ADAMW), (0, sweep), (1, "CO2 12"), (1, ADAMW),
    ]  # fmt: skip
    found = [result(0, "CO2 12", 2.0), result(1, ADAMW, 2.0)]
    assert list(quality.runs(names, 2, found)) == [(0, ADAMW), (1, "CO2 12")]


@pytest.mark.parametrize("name", METHODS | SWEEP)
def test_every_method_is_a_run_of_as_many_tokens(name):
    config = quality.config_of(name, 1, 1488)
    validate.check(config, world_size=quality.RANKS)
    assert config.train.steps * tokens_per_step(config) >= 3e6
    assert config.train == quality.config_of(ADAMW, 1, 1488).train


def test_losses_are_compared_with_those_of_the_same_seed():
    found = [
        result(0, "CO2 12", 2.2, penalty=1.5),
        result(0, ADAMW, 2.0),
        result(1, "CO2 12", 2.0, penalty=1.7),
        result(1, ADAMW, 2.0),
        result(2, "CO2 12", 2.4, penalty=1.6),
    ]
    first, second = quality.summary(found)
    assert first["name"] == ADAMW and first["seeds"] == 2 and first["over"] == [0.0, 0.0]
    assert second["over"] == pytest.approx([0.1, 0.0])
    assert [second[name] for name in ("val_loss", "half_range", "penalty")] == pytest.approx([2.2, 0.2, 1.6])


def test_runs_of_another_length_are_not_mixed(tmp_path):
    path = tmp_path / "quality.json"
    assert quality.read(path, 96) == []
    path.write_text(json.dumps({"settings": {"steps": 96}, "results": [result(0, ADAMW, 2.0)]}))
    assert quality.read(path, 96) == [result(0, ADAMW, 2.0)]
    with pytest.raises(SystemExit, match="holds runs of 96 steps, and --steps is 48"):
        quality.read(path, 48)
