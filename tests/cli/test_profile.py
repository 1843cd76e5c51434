"""`python -m pyruntime profile` measures a stage and proposes slices."""

import json
import re

import pytest
import torch

from pyruntime.cli import profile
from pyruntime.llama.presets import preset
from pyruntime.llama.stage_profile import StageClock, profile_stage, time_ends
from pyruntime.plan import stage_costs
from pyruntime.plan.slice_cost import fit
from pyruntime.train.errors import ConfigError

SMALL = ["--preset", "debug", "--layers", "1", "--seq_len", "64", "--step", "16", "--stages", "3"]


def test_prints_costs_and_slices_that_add_up(tmp_path, capsys):
    profile.main([*SMALL, "--json", str(tmp_path / "profile.json")])
    printed = capsys.readouterr().out
    (slices,) = re.findall(r"best slices +[\d.]+ ms, (.*) tokens", printed)
    written = json.loads((tmp_path / "profile.json").read_text())
    assert written["slices"] == [int(length) for length in slices.split(" + ")]
    assert sum(written["slices"]) == 64 and written["seconds"] > 0
    costs = stage_costs.read((tmp_path / "profile.json").read_text())
    assert costs.seq_len == 64 and min(costs.layer, costs.embedding, costs.head) > 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--step", "48"], "--step=48 must divide --seq_len=1024 into at least 4 parts"),
        (["--layers", "0"], "--layers must be at least 1, found 0"),
        (["--preset", "3x"], "There is no model preset '3x'"),
        (["--preset", "mixtral-8x7b"], "mixtral-8x7b has experts, which are not measured yet"),
    ],
)
def test_refuses_what_does_not_fit(arguments, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        profile.main(arguments)


def test_measures_longer_slices_and_later_ones_as_slower():
    config = preset("debug", max_position_embeddings=2048)
    clock = StageClock(config, 1, torch.float32)
    assert clock.seconds(512, 0) < clock.seconds(1536, 0)
    found = profile_stage(config, 1, torch.float32, [64, 128, 192, 256], [64, 128])
    assert len(found.seconds) == 4 and all(seconds > 0 for seconds in found.seconds)
    assert {(length, context) for length, context, _ in found.contexts} == {
        (64, 64), (64, 128), (128, 64), (128, 128), (192, 64)
    }  # fmt: skip
    fitted = fit(*zip(*found.contexts, strict=True), found.lengths, found.seconds)
    assert fitted.cost.context(64, 0) == 0


def test_a_head_takes_as_long_as_its_vocabulary_is_large():
    small, large = (
        time_ends(preset("debug", vocab_size=size, max_position_embeddings=512), torch.float32, 512).head
        for size in (256, 8192)
    )
    assert large > 4 * small
