"""What weights and optimizer states take at every stage, by the formula: bf16 weights 2 bytes a parameter,
fp32 master and two moments 12 (Rajbhandari et al. 2020, section 5), each divided by the ranks where it is
cut."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import pyruntime
from pyruntime import comm
from pyruntime.data_parallel.bucket_weights import BucketWeights
from tests.transports import take

LAYERS, WIDTH = 4, 500


def held(group, stage):
    """Bytes of weights, of states, and of what flights travel through, after two steps, between passes. Every
    matrix is a bucket."""
    take(group, "symmetric_memory")
    whole = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]).to(torch.bfloat16)
    mesh = DeviceMesh.from_group(group, "cpu")
    handle = pyruntime.shard(whole, mesh, stage=stage, bucket_bytes=256 << 10)
    optimizer = handle.adamw()
    for _ in range(2):
        whole(torch.randn(16, WIDTH).to(torch.bfloat16)).float().sum().backward()
        optimizer.step()
    kept = {p.untyped_storage() for p in whole.parameters()}
    kept |= {rows.untyped_storage() for each in handle._weights for rows in each.rows}
    states = {
        tensor.to_local().untyped_storage()
        for key, tensor in optimizer.state_dict().items()
        if not key.startswith("steps.")
    }
    axis = handle.axes.shard if stage else handle.axes.replicate
    flights = comm.workspace_bytes(axis.name), comm.workspace_bytes(handle.axes.weights.name) if stage else 0
    sizes = [sum({s.data_ptr(): s.nbytes() for s in kind}.values()) for kind in (kept, states)]
    handle.close()
    return (*sizes, *flights)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_states_take_what_the_formula_says(ranks, stage, world):
    parameters = LAYERS * WIDTH**2
    whole = 2 * parameters / (world if stage == 3 else 1)
    states = 12 * parameters / (world if stage else 1)
    for rank in ranks.run(held, world, stage):
        assert rank[0] == pytest.approx(whole, rel=0.1)
        assert rank[1] == pytest.approx(states, rel=0.1)
        # Four slots of the largest bucket, whatever the number of layers; of its rows for weights.
        assert rank[2] <= 4 * 1.1 * 2 * WIDTH**2 + (1 << 20)
        assert rank[3] <= 4 * 1.1 * 2 * WIDTH**2 / world + (1 << 20)


def gathers_of_a_step(group, tied):
    """Names of the weights in the order in which stage 3 gathers them for a step."""
    take(group, "symmetric_memory")
    model = nn.Sequential(*[nn.Embedding(8, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 8, bias=False)])
    if tied:
        model[2].weight = model[0].weight
    handle = pyruntime.shard(model, DeviceMesh.from_group(group, "cpu"), stage=3, bucket_bytes=0)
    optimizer = handle.adamw()
    names: list[str] = []
    for _ in range(2):
        model(torch.arange(8)).sum().backward()
        names.clear()
        with patch.object(BucketWeights, "_send", watched(names)):
            optimizer.step()  # the first ones leave when they have been updated
            model(torch.arange(8)).sum().backward()
        optimizer.step()
    handle.close()
    return names


def watched(names):
    def send(bucket_weights, gather, rows, sent=BucketWeights._send):
        names.append(bucket_weights.bucket.name)
        sent(bucket_weights, gather, rows)

    return send


@pytest.mark.parametrize("tied", [False, True])
def test_what_backward_does_not_read_is_not_gathered_for_it(ranks, tied):
    """The table is not, and the last weight stays."""
    for names in ranks.run(gathers_of_a_step, 2, tied):
        assert names == ["0.weight", "1.weight", "0.weight" if tied else "2.weight", "1.weight"]
