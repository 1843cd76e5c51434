"""A cut embedding on devices: the host does not wait to look at the ids."""

from __future__ import annotations

import pytest
import torch

from pyruntime.comm import Runtime
from pyruntime.nn import VocabParallelEmbedding
from pyruntime.nn.cut import memory_of
from tests.cuda import build as kernels
from tests.device import sim

pytestmark = pytest.mark.usefixtures("simulated")


def look_up(group):
    sim.begin_rank(delays=2)
    sim.use_kernels(kernels.LIBRARY)
    with Runtime.start(tp=2, device=sim.DEVICE) as runtime:
        torch.manual_seed(3)
        layer = VocabParallelEmbedding(11, 4, group=runtime.tp, sequence_parallel=False, device=sim.DEVICE)
        ids = torch.tensor([0, 5, 10])
        on_device = ids.to(sim.DEVICE)
        layer(on_device)  # makes the group's memory
        sim.reset_counts()
        found = layer(on_device)
        assert sum(sim.host_waits().values()) == 0, sim.host_waits()
        table, first, end = memory_of(layer.weight).detach().cpu(), layer.vocab_start, layer.vocab_end
        own = [at for at, each in enumerate(ids.tolist()) if first <= each < end]
        assert torch.equal(found.detach().cpu()[own], table[ids[own] - first])


def test_rows_are_found_and_the_host_waits_for_nothing(ranks):
    for rank in ranks.launch(look_up, 2, init=False):
        assert rank.error is None, rank.error
