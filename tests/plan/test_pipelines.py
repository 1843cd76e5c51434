"""Bubbles by formula are those of simulated schedules."""

import pytest

from pyruntime.cli.plan_facts import find_model
from pyruntime.llama.presets import PRESETS
from pyruntime.llama.stage import costs_of_stages, layers_of_stages
from pyruntime.pipeline import Costs, Kind, make_schedule, simulate
from pyruntime.pipeline.skipping import shares
from pyruntime.plan.mesh import Mesh
from pyruntime.plan.pipelines import bubble, deferred, in_flight, layers_by_rank
from pyruntime.train.planned import predicted
from tests.plan.jobs import job, pipe


def simulated(kind, ranks, micro_batches, forward, of_input, of_weight, virtual=1, slices=1):
    """`forward` and the others: of all stages of a rank."""
    stages = 2 if kind == "zb-v" else virtual
    parts = [seconds / stages / slices for seconds in (forward, of_input, of_weight)]
    timeline = simulate(
        make_schedule(kind, ranks, micro_batches, virtual=virtual, slices=slices), Costs(*parts)
    )
    return timeline.bubble(0)


@pytest.mark.parametrize("costs", [(1, 1, 1), (1.0, 1.3, 0.8), (2, 4, 1)])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (4, 16)])
@pytest.mark.parametrize(
    ("kind", "virtual", "slices"),
    [("1f1b", 1, 1), ("interleaved", 2, 1), ("zb-h1", 1, 1), ("seq1f1b", 1, 2)],
)
def test_bubbles_are_those_of_the_simulation(kind, virtual, slices, ranks, micro_batches, costs):
    found = bubble(pipe(kind, ranks, virtual, slices), micro_batches, *costs)
    expected = simulated(kind, ranks, micro_batches, *costs, virtual, slices)
    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (4, 16), (8, 16)])
@pytest.mark.second_tier("4-16", "8-16")
def test_the_bubble_of_zb_v(ranks, micro_batches):
    assert bubble(pipe("zb-v", ranks), micro_batches, 2, 2, 2) == ranks - 1
    assert simulated("zb-v", ranks, micro_batches, 2, 2, 2) == ranks - 1
    for costs in ((1, 1.3, 0.9), (1, 1.2, 1), (1.2, 1, 1), (1, 1.4, 0.8), (1, 1, 1.4)):
        work = micro_batches * sum(costs)
        found = bubble(pipe("zb-v", ranks), micro_batches, *costs) / work
        assert found == pytest.approx(simulated("zb-v", ranks, micro_batches, *costs) / work, abs=0.02)


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 1), (2, 3), (4, 5), (4, 7), (8, 9), (8, 15)])
def test_the_bubble_of_zb_v_with_few_micro_batches(ranks, micro_batches):
    for costs in ((1, 1, 1), (1, 1.3, 0.9), (1.2, 1, 1)):
        work = micro_batches * sum(costs)
        expected = simulated("zb-v", ranks, micro_batches, *costs)
        assert bubble(pipe("zb-v", ranks), micro_batches, *costs) == pytest.approx(expected, abs=0.15 * work)


@pytest.mark.parametrize("kind", ["1f1b", "zb-h1", "zb-v"])
@pytest.mark.parametrize(
    ("ranks", "micro_batches"), [(1, 4), (2, 1), (2, 4), (4, 5), (4, 8), (4, 16), (8, 16)]
)
def test_what_waits_for_its_weight_gradient_is_what_the_schedule_defers(kind, ranks, micro_batches):
    for rank, actions in enumerate(make_schedule(kind, ranks, micro_batches).actions):
        waiting = most = 0
        for action in actions:
            waiting += (action.kind is Kind.BACKWARD_INPUT) - (action.kind is Kind.BACKWARD_WEIGHT)
            most = max(most, waiting)
        stages = 2 if kind == "zb-v" else 1
        assert deferred(pipe(kind, ranks), rank, micro_batches) == (most / stages if ranks > 1 else 0)


@pytest.mark.parametrize(("micro_batches", "skip", "ranks"), [(8, 1, 4), (16, 1, 4), (12, 2, 6)])
def test_a_step_that_skips_stages_is_predicted_as_the_trainer_s_schedule_runs(micro_batches, skip, ranks):
    """The trainer takes the order that is best for GEMMs of layers and head; the planner knows more costs."""
    wanted, mesh = job("llama3-8b", "dgx-h100", ranks, micro_batches), Mesh(pp=ranks, skip=skip)
    model = PRESETS["llama3-8b"]
    layers = layers_of_stages(model, ranks, shares(ranks, skip))
    assert layers_by_rank(wanted.model, mesh) == tuple(map(len, layers))
    table = [[cost] for cost in costs_of_stages(model, layers)]
    costs = Costs(table, table, table)
    made = simulate(make_schedule("1f1b", ranks, micro_batches, skip=skip, costs=costs), costs)
    found = predicted(wanted, mesh)
    busiest = max(made.work(rank) for rank in range(ranks))
    assert 1 + found.bubble / found.compute == pytest.approx(made.makespan / busiest, rel=0.05)
    for rank in range(ranks):
        assert made.peak_in_flight(rank) <= in_flight(mesh, rank, micro_batches)


@pytest.mark.parametrize(("ranks", "virtual", "expected"), [(4, 2, 4.5), (8, 4, 2.625 * 2)])
def test_interleaved_bubbles(ranks, virtual, expected):
    assert bubble(pipe("interleaved", ranks, virtual), 4 * ranks, 1, 1, 1) == expected


@pytest.mark.parametrize(("ranks", "micro_batches"), [(4, 8), (4, 16), (8, 24)])
def test_zb_h1_has_a_third_of_the_bubble(ranks, micro_batches):
    assert bubble(pipe("zb-h1", ranks), micro_batches, 1, 1, 1) == ranks - 1
    assert bubble(pipe("1f1b", ranks), micro_batches, 1, 1, 1) == 3 * (ranks - 1)


def test_a_schedule_without_a_formula_is_refused():
    mesh = pipe("dualpipe", 4)
    for formula in (
        lambda: in_flight(mesh, 0, 8),
        lambda: deferred(mesh, 0, 8),
        lambda: bubble(mesh, 8, 1, 1, 1),
    ):
        with pytest.raises(AssertionError, match="dualpipe"):
            formula()


def test_the_head_counts_as_layers():
    model = find_model("llama3-8b")
    assert layers_by_rank(model, pipe("1f1b", 1)) == (32,)
    layers = layers_by_rank(model, pipe("1f1b", 4))
    assert sum(layers) == 32 and layers[-1] < layers[0]
    with pytest.raises(ValueError, match="32 layers cannot be cut into 64 stages"):
        layers_by_rank(model, pipe("1f1b", 64))
