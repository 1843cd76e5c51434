"""The file between `profile` and `train`."""

import dataclasses
import json
import math
import re

import pytest

from pyruntime.plan import stage_costs
from pyruntime.plan.stage_costs import StageCosts

COSTS = StageCosts(
    seq_len=96,
    model={"hidden_size": 8},
    stages=4,
    layer=0.02,
    embedding=0.001,
    head=0.03,
    slices=(48, 32, 16),
)
DOCUMENT = dataclasses.asdict(COSTS)


def test_is_read_as_it_was_written_beside_other_things():
    assert stage_costs.read(json.dumps({"options": {}, **DOCUMENT})) == COSTS


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "it is not JSON"),
        ("[1]", "it lacks seq_len, model, stages, layer, embedding, head, slices"),
        (json.dumps({**DOCUMENT, "slices": [96.0]}), "must be numbers of tokens"),
        (json.dumps({**DOCUMENT, "slices": 96}), "must be numbers of tokens"),
        (json.dumps({**DOCUMENT, "slices": [90, 5]}), "add up to seq_len=96"),
        (
            json.dumps({**DOCUMENT, "head": math.nan}),
            "head must be finite and at least 0 seconds",
        ),
        (
            json.dumps({**DOCUMENT, "layer": "1"}),
            "layer must be a number of seconds, found '1'",
        ),
    ],
)
def test_refuses_what_it_cannot_use(text, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        stage_costs.read(text)
