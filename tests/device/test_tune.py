"""`tune` measures on devices, and its choices are taken there."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from pyruntime.cli import tune
from pyruntime.llama.presets import preset
from pyruntime.tuning import apply, cache
from tests.cuda import build as kernels
from tests.device import sim

pytestmark = pytest.mark.usefixtures("simulated")


def run(group, folder):
    sim.begin_rank()
    sim.use_kernels(kernels.LIBRARY)
    model = tune.TunedModel(preset("debug", vocab_size=256), tp=2, rows=16, dtype="bf16", threads=1)
    options = tune.TuneOptions(model="debug", device="auto", rounds=3, budget=20.0)
    tune.run(options, model, folder / "tuning.json", {})


@pytest.mark.second_tier
def test_the_tiers_of_linears_are_measured_on_devices(ranks, tmp_path):
    for rank in ranks.launch(run, 2, tmp_path, init=False, timeout=120.0):
        assert rank.error is None, rank.error
    ((place, choices),) = cache.read(tmp_path / "tuning.json").items()
    assert place.world_size == 2 and place.transport.startswith("symmetric memory and copy engines")
    assert {key.device for key in choices} == {"sim"} and len(choices) >= 8
    for key, choice in choices.items():
        assert {"unfused", "chunked", "fused"} <= choice.seconds.keys(), (key, choice)
    found = apply.find(tmp_path / "tuning.json", place.device, 2, apply.library())
    assert apply.usable(choices) == choices, astuple(found)
