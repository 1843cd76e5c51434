"""Models that parallelize() has cut, under shard(): regions and the first call at every ZeRO stage."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from pyruntime import explain, parallelize, shard
from tests.any_model.test_regions import PLAN, Gain, Gated
from tests.any_model.test_row_shard import ROWS, Peeking
from tests.nn.cases import assert_near


def norms(group, stage: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mine = mesh["dp"].get_local_rank()
    torch.manual_seed(0)
    whole = nn.Sequential(Gain(), nn.Tanh(), Gated())
    model = parallelize(copy.deepcopy(whole), mesh["tp"], PLAN, tier="unfused")
    handle = shard(model, mesh["dp"], stage=stage)
    optimizer = handle.adamw(lr=1e-2, weight_decay=0.0)
    reference = torch.optim.AdamW(whole.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(3):
        batches = torch.randn(2, 2, 5, 12, generator=torch.Generator().manual_seed(step))
        model(batches[mine]).square().mean().backward()
        reference.zero_grad()
        whole(batches.flatten(0, 1)).square().mean().backward()
        expected = torch.nn.utils.get_total_norm([p.grad for p in whole.parameters()])
        assert_near(torch.as_tensor(optimizer.step().grad_norm), expected, f"norm of step {step}")
        reference.step()


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.second_tier("1")
def test_gradient_norms_are_those_of_one_rank(ranks, stage):
    ranks.run(norms, 4, stage)


def on_rows(group, stage: int) -> None:
    """Norms and residuals on a rank's rows, beside data parallelism: weights as those of one rank."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mine = mesh["dp"].get_local_rank()
    torch.manual_seed(0)
    whole = Peeking()
    model = parallelize(copy.deepcopy(whole), mesh["tp"], "auto", tier="unfused")
    handle = shard(model, mesh["dp"], stage=stage)
    optimizer = handle.adamw(lr=1e-2, weight_decay=0.0)
    reference = torch.optim.AdamW(whole.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(3):
        batches = torch.randint(101, (2, 2, 5), generator=torch.Generator().manual_seed(step))
        loss = model(batches[mine]).square().mean()
        loss.backward()
        reference.zero_grad()
        expected = [whole(batch).square().mean() for batch in batches]
        torch.stack(expected).mean().backward()
        assert_near(loss, expected[mine], f"loss of step {step}", 1e-4)
        norm = torch.nn.utils.get_total_norm([p.grad for p in whole.parameters()])
        assert_near(torch.as_tensor(optimizer.step().grad_norm), norm, f"norm of step {step}", 1e-4)
        reference.step()
    assert explain(model).form.startswith(ROWS)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.second_tier("3")
def test_rows_beside_data_parallelism(ranks, stage):
    ranks.run(on_rows, 4, stage)
