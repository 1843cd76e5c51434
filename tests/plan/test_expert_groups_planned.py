"""The planner's experts over groups of their own: bytes are those that ranks count, and over the
tensor-parallel ranks nothing changes."""

from __future__ import annotations

from dataclasses import astuple, replace

import pytest
import torch

import pyruntime
from pyruntime import comm
from pyruntime.comm.core import _C
from pyruntime.llama import Llama, LlamaConfig
from pyruntime.llama.mixture import Mixture
from pyruntime.plan.cluster import Cluster, find_cluster
from pyruntime.plan.expert_costs import deals_share, share_of_rows
from pyruntime.plan.memory import worst_memory
from pyruntime.plan.mesh import Job, Mesh
from pyruntime.plan.search import SearchSpace, meshes, search
from pyruntime.plan.step import Predictor
from pyruntime.plan.traffic import bytes_of_step
from pyruntime.train.planned import TRAINER, of_llama
from tests.nn.test_expert_groups import runtime_of

EXPERTS, LAYERS, SEQ, STEPS = 8, (1, 2), 256, 2


def config_of(layers: int, experts: int = EXPERTS) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        mixture=Mixture(experts, 2, 192),
    )


def job_of(layers: int, mesh: Mesh, experts: int = EXPERTS) -> Job:
    ranks = mesh.ranks
    return Job(of_llama("", config_of(layers, experts)), Cluster.of_ranks(ranks), ranks, mesh.dp, SEQ)


def counted(_group, name: str, ep: int, zero: int) -> list[float]:
    """The bytes that this rank reads for a layer in a step, over tp, ep and dp."""
    runtime = runtime_of(name, ep)

    def counters() -> list[int]:
        over = [comm.stats(axis).bytes if axis.size > 1 else 0 for axis in (runtime.tp, runtime.ep)]
        return [*over, comm.bytes_read("dp")]

    def of(layers: int, steps: int) -> torch.Tensor:
        before = counters()
        model = Llama(config_of(layers), runtime.tp, experts=runtime.ep)
        handle = pyruntime.shard(model, runtime.replicas, stage=zero, bucket_bytes=1 << 25)
        optimizer = handle.adamw()
        torch.manual_seed(runtime.replicas.rank)
        ids = torch.randint(256, (1, SEQ))
        for _ in range(steps):
            model(ids, ids).backward()
            optimizer.step()
        handle.close()
        return torch.tensor(counters()) - torch.tensor(before)

    fewer, more = ((of(layers, 1 + STEPS) - of(layers, 1)) / STEPS for layers in LAYERS)
    return (more - fewer).tolist()


@pytest.mark.parametrize(("name", "ep", "zero"), [("dp2 tp2", 4, 1), ("dp2 tp2", 1, 0), ("tp4", 2, 1)])
@pytest.mark.second_tier(but=["dp2 tp2-4-1"])
def test_bytes_are_those_that_ranks_count(ranks, name, ep, zero):
    mesh = {"dp2 tp2": Mesh(tp=2, dp=2), "tp4": Mesh(tp=4)}[name]
    mesh = replace(mesh, ep=ep, zero=zero)
    of_layers = []
    for layers in LAYERS:
        found = bytes_of_step(job_of(layers, mesh), mesh, element=4)
        of_layers.append((found["tp"], found["ep"], found["gradients"] + found["weights"]))
    expected = [more - fewer for fewer, more in zip(*of_layers, strict=True)]
    for found in ranks.run(counted, 4, name, ep, zero):
        assert found == pytest.approx(expected, rel=0.03, abs=16)  # marks, norms and statistics besides


def held(_group, name: str, ep: int, zero: int) -> tuple[int, int]:
    """The elements of weights, and of one optimizer state, that this rank keeps."""
    runtime = runtime_of(name, ep)
    model = Llama(config_of(1, 2), runtime.tp, experts=runtime.ep)
    handle = pyruntime.shard(model, runtime.replicas, stage=zero, bucket_bytes=1)
    rows = sum(state.rows.numel() for state in handle.adamw().current() if state.parameter.dim() >= 2)
    whole = sum(p.numel() for p in model.parameters() if p.dim() >= 2)
    handle.close()
    return rows if zero == 3 else whole, rows


@pytest.mark.parametrize(("name", "ep", "zero"), [("dp4", 2, 1), ("dp2 tp2", 1, 3), ("dp4", 1, 2)])
@pytest.mark.second_tier(but=["dp2 tp2-1-3"])
def test_states_are_those_that_ranks_hold(ranks, name, ep, zero):
    """Two experts, cut within one where four ranks hold the same."""
    mesh = replace({"dp2 tp2": Mesh(tp=2, dp=2), "dp4": Mesh(dp=4)}[name], ep=ep, zero=zero)
    planned = worst_memory(job_of(1, mesh, 2), mesh, TRAINER)
    for weights, states in ranks.run(held, 4, name, ep, zero):
        assert weights * TRAINER.weight == pytest.approx(planned.weights, rel=0.01)  # vectors besides
        assert states * TRAINER.optimizer == pytest.approx(planned.optimizer, rel=0.01)


@pytest.mark.parametrize("mesh", [Mesh(tp=2, dp=4), Mesh(tp=4, cp=2, zero=3), Mesh(tp=2, dp=4, replicate=2)])
def test_the_tensor_parallel_ranks_may_be_named(mesh):
    """Experts over ep = tp ranks are where they are by default, so all predictions are the same, but for the
    latency of two exchanges in place of one."""
    cluster = replace(find_cluster("dgx-h100"), latency_inside=0.0, latency_between=0.0)
    job = Job(of_llama("", config_of(4)), cluster, 8, 8, 512)
    named = replace(mesh, ep=mesh.tp)
    predictor = Predictor(job, sums_whole=True)
    assert astuple(predictor.step(named)) == pytest.approx(astuple(predictor.step(mesh)))
    assert worst_memory(job, named, TRAINER).weights == pytest.approx(
        worst_memory(job, mesh, TRAINER).weights
    )
    found, expected = bytes_of_step(job, named), bytes_of_step(job, mesh)
    assert found.pop("ep") + found.pop("tp") == pytest.approx(expected.pop("tp"))
    assert found == pytest.approx(expected)


def test_rows_stay_and_gradients_travel_where_each_rank_has_all_experts():
    job = Job(of_llama("", config_of(4)), Cluster.of_ranks(4), 4, 4, SEQ)
    tp, alone = Mesh(tp=2, dp=2, zero=0), Mesh(tp=2, dp=2, zero=0, ep=1)
    found, before = bytes_of_step(job, alone, 4), bytes_of_step(job, tp, 4)
    assert found["ep"] == 0
    assert found["tp"] < before["tp"]
    # All experts over four ranks in place of half of them over two: three quarters in place of a quarter.
    of_experts = 4 * job.model.layer_experts * 4
    assert found["gradients"] - before["gradients"] == pytest.approx(of_experts * (3 / 4 - 1 / 4))


def test_the_search_knows_every_group_that_gives_each_rank_equally_many():
    job = Job(of_llama("", config_of(4)), find_cluster("dgx-h100"), 8, 8, 512)
    kinds = SearchSpace(hybrid=True, recompute=False, axonn=False, kinds=("1f1b",))
    found = set(meshes(job, kinds))
    assert {mesh.ep for mesh in found if mesh.tp == 2 and mesh.dp == 4 and mesh.replicate == 1} == {
        0,
        1,
        4,
        8,
    }
    assert {mesh.ep for mesh in found if mesh.tp == 2 and mesh.dp == 4 and mesh.replicate == 2} == {0, 1, 4}
    assert not any(mesh.ep for mesh in found if mesh.tau)
    assert any(each.mesh.ep for each in search(job, kinds).candidates)


@pytest.mark.parametrize(
    ("experts", "ranks", "k"), [(128, 64, 8), (8, 2, 2), (9, 4, 1), (7, 8, 3), (16, 4, 16)]
)
def test_the_planner_deals_rows_as_the_core_does(experts, ranks, k):
    share = share_of_rows(experts, ranks, k)
    assert share == pytest.approx(_C.share_of_rows(experts, ranks, k))
    drawn = torch.rand(4096, experts).topk(k).indices
    assert share == pytest.approx((drawn < -(-experts // ranks)).any(1).float().mean().item(), abs=0.05)
    for rail in (1, 2, 8):
        assert deals_share(share, rail) == _C.deals_share(share, rail)
