"""What tuning measures: the model's own products, alike on all ranks, and the rule that chooses."""

import dataclasses

import pytest
import torch

from pyruntime.llama.presets import preset
from pyruntime.tuning.cache import Key
from pyruntime.tuning.linears import RankLinear, linears_of
from pyruntime.tuning.measure import Measured, Problem, accepted_tiers, choose, measure

PASSES = ("forward", "backward")
SHAPE = preset("debug", vocab_size=259)  # the head's 259 columns are cut unevenly


@pytest.mark.parametrize(
    ("seconds", "tier"),
    [
        ({"unfused": 1.0, "chunked": 0.9}, "chunked"),
        ({"unfused": 0.98, "chunked": 1.0}, "chunked"),  # within the noise
        ({"unfused": 0.96, "chunked": 1.0}, "unfused"),
        ({"unfused": 0.5, "chunked": 0.4, "fused": 0.3}, "fused"),
        ({"unfused": 0.5, "chunked": 0.7, "fused": 0.8}, "unfused"),
        ({"unfused": 0.5}, "unfused"),
        ({"chunked": 0.5}, "chunked"),
        (
            {"unfused": 1.0, "chunked": 0.9, "chunked:2": 0.88, "chunked:8": 1.0},
            "chunked",
        ),  # within the noise
        ({"unfused": 1.0, "chunked": 0.9, "chunked:2": 0.8, "chunked:8": 0.7}, "chunked:8"),
        ({"unfused": 0.5, "chunked": 0.9, "chunked:2": 0.7}, "unfused"),
        ({"unfused": 0.6, "chunked": 0.5, "fused": 0.4, "fused:small": 0.3}, "fused:small"),
        ({"unfused": 0.69, "chunked": 0.9, "chunked:2": 0.7}, "chunked:2"),
    ],
)
def test_the_fastest_is_chosen_and_unfused_only_where_it_wins_clearly(seconds, tier):
    assert choose(seconds) == tier


def test_figures_are_those_of_the_field():
    linear = RankLinear("qkv", "all_gather_matmul", 8, 4, 2)
    tiers = {"unfused": 5.0, "chunked": 3.6}
    found = Measured(linear, "forward", (), tiers, {}, gemm=3.0, collective=2.0, rounds=3)
    assert found.best == "chunked"
    assert found.bound_ratio == pytest.approx(3.6 / 3.0)
    assert found.efficiency == pytest.approx((3.0 + 2.0 - 3.6) / 2.0)


def of_a_model(group):
    return linears_of(SHAPE, group, 50)


def test_the_linears_are_those_of_the_model(ranks):
    first, second = ranks.run(of_a_model, 2)
    heads = SHAPE.num_attention_heads + 2 * SHAPE.num_key_value_heads
    hidden, ffn = SHAPE.hidden_size, SHAPE.intermediate_size
    gather, scatter = "all_gather_matmul", "matmul_reduce_scatter"
    assert first == [
        RankLinear("qkv", gather, 50, heads * SHAPE.head_dim // 2, hidden),
        RankLinear("o_proj", scatter, 50, hidden, hidden // 2),
        RankLinear("gate+up", gather, 50, ffn, hidden),
        RankLinear("down", scatter, 50, hidden, ffn // 2),
        RankLinear("head", gather, 50, 130, hidden),
    ]
    assert second == [*first[:4], dataclasses.replace(first[4], n=129)]


def measured(group, rows):
    return [
        measure(Problem(linear, group, torch.float32, torch.device("cpu"), group), when, 4, 60.0)
        for linear in linears_of(SHAPE, group, rows)[-2:]
        for when in PASSES
    ]


@pytest.mark.parametrize("rows", [34, 33])
def test_all_ranks_measure_the_same(ranks, rows):
    results = ranks.run(measured, 2, rows)
    for ours, theirs in zip(*results, strict=True):
        assert dataclasses.replace(ours, linear=theirs.linear) == theirs
        assert set(ours.tiers) == {"unfused", "chunked"} and ours.rounds == 4
        assert min(*ours.tiers.values(), ours.gemm, ours.collective) > 0
        assert list(ours.refused) == ["fused"] and "fused" in ours.refused["fused"]
    down, down_back, head, head_back = results[0]
    hidden, ffn = SHAPE.hidden_size, SHAPE.intermediate_size // 2
    assert down.keys == (Key("matmul_reduce_scatter", rows, hidden, ffn, "float32", "cpu"),)
    assert down_back.keys == (dataclasses.replace(down.keys[0], op="matmul_reduce_scatter_backward"),)
    for found, op in ((head, "all_gather_matmul"), (head_back, "all_gather_matmul_backward")):
        assert found.keys == tuple(Key(op, rows, n, hidden, "float32", "cpu") for n in (129, 130))


def few_rounds(group):
    problem = Problem(
        RankLinear("down", "matmul_reduce_scatter", 64, 32, 16),
        group,
        torch.float32,
        torch.device("cpu"),
        group,
    )
    return measure(problem, "forward", 50, 1e-9).rounds


def test_a_budget_that_is_used_up_leaves_three_rounds(ranks):
    assert ranks.run(few_rounds, 2) == [3, 3]


def timed_results(group, op):
    """Relative errors of what is timed: both passes in every tier, and the product alone."""
    size, rank, rows, n, k = group.size(), group.rank(), 37, 24, 16
    torch.manual_seed(rank)
    problem = Problem(RankLinear("any", op, rows, n, k), group, torch.float64, torch.device("cpu"), group)
    parts = [torch.zeros(()) for _ in range(size)]
    torch.distributed.all_gather_object(parts, (problem.x, problem.weight, problem.dy), group=group)
    xs, weights, dys = zip(*parts, strict=True)
    if problem.linear.gathers:
        x = torch.cat(xs)
        y = x @ problem.weight.t()
        dx = sum(dy @ w for dy, w in zip(dys, weights, strict=True)).tensor_split(size)[rank]
        dw = problem.dy.t() @ x
    else:
        y = sum(x @ w.t() for x, w in zip(xs, weights, strict=True)).tensor_split(size)[rank]
        dy = torch.cat(dys)
        dx, dw = dy @ problem.weight, dy.t() @ problem.x
    errors = []
    for tier in ("unfused", "chunked"):
        found = [problem.tier(tier, "forward")(), *problem.tier(tier, "backward")()]
        again = problem.tier(tier, "backward")
        again()
        found += again()  # the forward is kept, so a backward can be timed many times
        for seen, wanted in zip(found, (y, dx, dw, dx, dw), strict=True):
            errors.append(((seen - wanted).norm() / wanted.norm()).item())
    return errors


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_what_is_timed_is_the_linear(ranks, op, world_size):
    for errors in ranks.run(timed_results, world_size, op):
        assert len(errors) == 10 and max(errors) < 1e-12


def refused_by_one(group):
    problem = Problem(
        RankLinear("down", "matmul_reduce_scatter", 8, 4, 4), group, torch.float32, torch.device("cpu"), group
    )
    honest = problem.tier

    def refusing(name, when):
        if name == "unfused" and group.rank() == 1:
            raise ValueError("not on this rank")
        return honest(name, when) if name == "chunked" else lambda: None

    problem.tier = refusing
    accepted, refused = accepted_tiers(problem, "forward")
    return sorted(accepted), refused


def test_a_tier_that_one_rank_refuses_is_refused_for_all(ranks):
    assert ranks.run(refused_by_one, 2) == [(["chunked", "fused"], {"unfused": "not on this rank"})] * 2
