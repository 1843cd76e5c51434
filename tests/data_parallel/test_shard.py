"""Training on several ranks equals training in one process: losses, every weight, gradient norms."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import pyruntime
from tests.data_parallel import cases
from tests.transports import TRANSPORTS, take

BUCKET = 400  # bytes: most matrices travel alone, vectors together
STEPS = 5


def trained(group, transport, mesh_kind, stage, tied, dtype, sequences, max_norm, keep=0):
    if mesh_kind == "hsdp":
        mesh = cases.two_by_two()
        rank, size = 2 * mesh.get_local_rank(0) + mesh.get_local_rank(1), 4
    else:
        take(group, transport)
        mesh = DeviceMesh.from_group(group, "cpu")
        rank, size = mesh.get_rank(), mesh.size()
    whole = cases.model(tied, stage == 3, dtype)
    handle = pyruntime.shard(whole, mesh, stage=stage, bucket_bytes=BUCKET, keep_gathered=keep)
    optimizer = handle.adamw(lr=1e-2, max_norm=max_norm)
    losses, norms = cases.train(whole, handle, optimizer, cases.batches(STEPS, sequences), rank, size)
    assert all(p.grad is None for p in whole.parameters())
    weights = {name: p.clone() for name, p in whole.state_dict().items()}
    handle.close()
    return losses, weights, norms


def expected(stage, tied, dtype, sequences, max_norm):
    return cases.reference(tied, stage == 3, dtype, STEPS, sequences, max_norm)


def check(results, expected, tolerance):
    losses, weights, norms = expected
    for step, loss in enumerate(losses):
        assert sum(result[0][step] for result in results) == pytest.approx(loss, rel=tolerance)
    for result in results:
        assert result[2] == pytest.approx(norms, rel=tolerance)
        for name, weight in weights.items():
            torch.testing.assert_close(
                result[1][name],
                weight,
                rtol=tolerance,
                atol=tolerance,
                msg=lambda text, n=name: f"{n}: {text}",
            )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("world", "sequences"), [(2, 2), (2, 8), (3, 3)])
def test_equals_one_process(ranks, stage, world, sequences):
    arguments = (torch.float64, sequences, 0.5)
    results = ranks.run(trained, world, "symmetric_memory", "dp", stage, False, *arguments)
    check(results, expected(stage, False, *arguments), 1e-9)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_equals_one_process_over_any_transport(ranks, stage, transport):
    results = ranks.run(trained, 4, transport, "dp", stage, True, torch.float64, 4, 0.0)
    check(results, expected(stage, True, torch.float64, 4, 0.0), 1e-9)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_hybrid_sharding_equals_one_process(ranks, stage):
    results = ranks.run(trained, 4, "", "hsdp", stage, False, torch.float64, 8, 1.0)
    check(results, expected(stage, False, torch.float64, 8, 1.0), 1e-9)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_equals_one_process_in_fp32(ranks, stage):
    results = ranks.run(trained, 2, "symmetric_memory", "dp", stage, False, torch.float32, 4, 1.0)
    check(results, expected(stage, False, torch.float32, 4, 1.0), 2e-6)
