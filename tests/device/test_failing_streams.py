"""An operation that fails in a stream ends no process: its error is told on all ranks."""

from __future__ import annotations

import pytest
import torch

from tests.device.test_failures import DEADLINE_S, LAUNCH, MESHES, job, note_time, outcome

pytestmark = pytest.mark.usefixtures("simulated")


def read_beyond(folder, activations) -> None:
    note_time(folder)
    activations.detach().index_select(0, torch.tensor([10**6], device=activations.device))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.second_tier(but=["tp"])
def test_an_operation_that_fails_in_a_stream_is_told_on_all_ranks(ranks, tmp_path, mesh):
    other, own = ranks.launch(outcome, 2, tmp_path, job(tmp_path, mesh), read_beyond, **LAUNCH)
    assert own.exit_code == 0 and other.exit_code == 0, (own, other)
    words = "The simulated device has failed: aten::index_select"
    assert own.value[0] == "RuntimeError" and words in own.value[1], own
    kind, message, seconds = other.value
    assert kind == "PeerLost" and "rank 1" in message and words in message, other
    assert max(seconds, own.value[2]) < 2 * DEADLINE_S
