"""What is hidden behind what: the rule of hideability, the chunks, and the exposed time of a Llama layer."""

import pytest

from pyruntime.cli.plan_facts import find_model
from pyruntime.plan.cluster import Cluster, Inside, find_cluster
from pyruntime.plan.communication import (
    Link,
    all_gather,
    all_reduce,
    link,
)
from pyruntime.plan.mesh import Job, Mesh
from pyruntime.plan.overlap import advice, exposed, exposed_of, linears, threshold
from pyruntime.plan.step import Predictor

F, B = 650e12, 380e9
NVLINK = Link(8, B, 0.0, False)


def test_the_threshold_on_nvlink_is_about_twelve_thousand_features():
    assert threshold(8, F, B) == pytest.approx(11974, abs=1)
    found = {each.name: each.deciding >= threshold(8, F, B) for each in linears(find_model("llama3-8b"))}
    assert found == {"qkv_proj": False, "o_proj": False, "gate_up_proj": True, "down_proj": True}


@pytest.mark.parametrize("tokens", [512, 8192])
def test_the_rule_is_that_the_transfer_is_no_longer_than_the_product(tokens):
    for name in ("llama3-8b", "llama3-70b"):
        for each in linears(find_model(name)):
            found = exposed_of(each, tokens, NVLINK, F)
            assert (each.deciding >= threshold(8, F, B)) == (found.transfer <= found.compute)


def test_a_transfer_as_long_as_its_product_exposes_one_chunk():
    assert exposed(1.0, 1.0, 4) == pytest.approx(0.25)
    assert exposed(0.75, 1.0, 4) == 0
    assert exposed(2.0, 1.0, 4) == pytest.approx(1.25)


# Exposed milliseconds of a layer, 8192 tokens in bf16, forward and backward: a two-resource simulation's
# figures.
SIMULATED = {
    ("llama3-8b", 8, B, "none"): (0.62, 0.93),
    ("llama3-8b", 8, B, "fused"): (0.19, 0.28),
    ("llama3-70b", 8, B, "none"): (1.24, 1.85),
    ("llama3-70b", 8, B, "fused"): (0.20, 0.28),
    ("llama3-8b", 2, 45e9, "none"): (2.98, 4.47),
    ("llama3-8b", 2, 45e9, "fused"): (1.61, 2.20),
    ("llama3-70b", 2, 45e9, "none"): (5.97, 8.95),
    ("llama3-70b", 2, 45e9, "fused"): (2.04, 3.01),
}


@pytest.mark.parametrize(("case", "expected"), SIMULATED.items())
def test_exposed_time_of_a_layer(case, expected):
    name, tp, bandwidth, overlap = case
    over = Link(tp, bandwidth, 0.0, False)
    found = [exposed_of(each, 8192, over, F, overlap) for each in linears(find_model(name))]
    assert 1e3 * sum(each.forward for each in found) == pytest.approx(expected[0], abs=0.012)
    # The simulation lets the next transfer begin under the last chunk of a product; here it does not.
    assert 1e3 * sum(each.backward for each in found) == pytest.approx(expected[1], rel=0.12, abs=0.012)


def test_weight_gradients_fill_the_backward_pass():
    job = Job(find_model("llama3-8b"), machine(B), 8, 8, 8192)
    layer, unfilled = (Predictor(job, overlap).layer(Mesh(tp=8)) for overlap in ("filler", "fused"))
    sums = 2 * 2 * 8192 * 4096 * (1 + 1 / 8) / job.cluster.memory_bandwidth  # of dX, twice a layer
    assert layer.tp_backward == pytest.approx(sums)
    assert unfilled.tp_backward > layer.tp_backward


def machine(bandwidth):
    inside = (Inside(1, 8, bandwidth),)
    return Cluster("test", "", "", F, 1.0, 80e9, 3e12, 8, 8 * bandwidth, inside)


def test_where_nothing_can_hide_the_advice_says_so():
    job = Job(find_model("llama3-8b"), find_cluster("thin"), 16, 16, 8192)
    predictor, mesh = Predictor(job), Mesh(tp=16)
    sentences = advice(job, mesh, predictor.link(mesh, "tp", 16))
    assert len(sentences) == 5 and "keep tensor parallelism inside a node" in sentences[-1]


def test_advice_names_the_linears_that_cannot_hide_alone():
    job = Job(find_model("llama3-8b"), machine(B), 8, 8, 8192)
    sentences = advice(job, Mesh(tp=8), link(job.cluster, 1, 8))
    assert [each.split()[0] for each in sentences[:-1]] == ["qkv_proj", "o_proj"]
    assert sentences[1] == (
        "o_proj cannot hide its transfer at tp 8: it has 4,096 input features and needs 11,974 "
        "((P - 1) F / B)"
    )
    assert "two micro-batches" in sentences[-1]


def test_volumes_are_what_the_transfers_of_a_layer_take():
    found = [
        exposed_of(each, 2048, NVLINK, F, "none", regather=False) for each in linears(find_model("llama3-8b"))
    ]
    seconds = sum(each.transfer + each.transfers_backward for each in found)
    # Megatron-LM: 8 b s h (t - 1)/t elements a layer (arXiv 2104.04473, section 3.2).
    assert seconds == pytest.approx(2 * 8 * 2048 * 4096 * 7 / 8 / B)


def test_a_ring_pays_its_latency_at_every_step():
    over = Link(4, 1e9, 1e-5, False)
    assert all_gather(4e6, over) == pytest.approx(3e-3 + 3e-5)
    assert all_reduce(4e6, over) == 2 * all_gather(4e6, over)
    assert all_gather(4e6, Link(1, 1e9, 1e-5, False)) == 0
