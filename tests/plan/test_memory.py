"""Memory follows the published estimator, and falls with every axis that cuts it."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyruntime.cli.plan_facts import find_model
from pyruntime.data_parallel.offload import ARRAYS, RING, Offload
from pyruntime.data_parallel.shard import BUCKET_BYTES as OF_STAGES
from pyruntime.pipeline import make_schedule
from pyruntime.plan.memory import (
    BUCKET_BYTES,
    OFFLOAD_BUFFERS,
    PAPER,
    layer_activations,
    memory_of_rank,
    parameters_of_rank,
    states,
    verdict,
    worst_memory,
)
from pyruntime.plan.mesh import Mesh
from pyruntime.plan.models import Adapters
from pyruntime.plan.pipelines import in_flight
from pyruntime.plan.step import Predictor
from pyruntime.train.planned import TRAINER
from tests.plan.jobs import job, pipe


@pytest.mark.parametrize(
    ("name", "coefficient"),
    [("llama3-8b", 41), ("llama2-7b", 37.5), ("llama2-13b", 37.6), ("llama3-70b", 40.5)],
)
def test_a_layer_keeps_what_equation_12_says(name, coefficient):
    model = find_model(name)
    assert layer_activations(model, 10) == pytest.approx(10 * model.hidden * coefficient, rel=1e-9)


def test_a_layer_of_8b_at_8192_tokens():
    assert layer_activations(find_model("llama3-8b"), 8192) == 1_375_731_712


def test_the_first_stage_of_8b_on_two_stages():
    model = find_model("llama3-8b")
    held = sum(parameters_of_rank(model, 2, 16, first=True, last=False))
    assert held == 2_007_629_824
    assert sum(states(held, Mesh(tp=2, pp=2, dp=4), 2, PAPER)) == pytest.approx(18.07e9, rel=1e-3)
    in_all = layer_activations(model, 8192, 2) * 16 * in_flight(pipe("1f1b", 2), 0, 2)
    assert in_all == pytest.approx(22.01e9, rel=1e-3)


@pytest.mark.parametrize(("zero", "expected"), [(0, 18), (1, 6 + 12 / 8), (2, 2 + 16 / 8), (3, 18 / 8)])
def test_bytes_of_a_parameter_at_every_zero_stage(zero, expected):
    assert sum(states(1, Mesh(dp=4, cp=2, zero=zero), 1, PAPER)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("zero", "expected"), [(0, 18 + 2), (1, 2 + 2 + 4 + 6), (2, 2 + 2 + 4 + 6), (3, 1 + 2 + 4 + 6)]
)
def test_the_trainer_keeps_whole_sums_of_earlier_micro_batches(zero, expected):
    assert sum(states(1, Mesh(dp=2, zero=zero), 4, TRAINER)) == pytest.approx(expected)


def test_hybrid_sharding_cuts_over_its_own_groups_only():
    whole = sum(states(1, Mesh(dp=8, zero=1), 1, PAPER))
    hybrid = sum(states(1, Mesh(dp=8, zero=1, replicate=4), 1, PAPER))
    assert (whole, hybrid) == (6 + 12 / 8, 6 + 12 / 2)


def test_stochastic_rounding_saves_the_master_weight_wherever_states_are_cut():
    nearest = job("llama3-8b", "dgx-h100", 8, 8)
    stochastic = replace(nearest, rounding="stochastic")
    for mesh in (Mesh(dp=8, zero=0), Mesh(dp=8, zero=1), Mesh(tp=8, zero=0)):
        before, after = (worst_memory(each, mesh, TRAINER) for each in (nearest, stochastic))
        held = before.optimizer / 12
        assert before.optimizer - after.optimizer == pytest.approx(4 * held)
        assert before.total - after.total == pytest.approx(4 * held)
        assert Predictor(stochastic).step(mesh).optimizer == pytest.approx(
            Predictor(nearest).step(mesh).optimizer * 22 / 28
        )


def test_offloaded_states_leave_their_buffers():
    resident = job("llama3-8b", "dgx-h100", 8, 8)
    for mesh in (Mesh(dp=8, zero=0), Mesh(dp=8, zero=1), Mesh(tp=8, zero=0)):
        before = worst_memory(resident, mesh, TRAINER)
        after = worst_memory(replace(resident, offload="states"), mesh, TRAINER)
        assert after.optimizer == OFFLOAD_BUFFERS == RING * ARRAYS * Offload("").run_bytes
        assert before.total - after.total == pytest.approx(before.optimizer - OFFLOAD_BUFFERS)


def test_muon_keeps_one_moment_of_the_layers_matrices_and_the_matrices_it_owns():
    adamw = job("llama3-8b", "dgx-h100", 8, 8)
    muon = replace(adamw, optimizer="muon")
    matrices = adamw.model.layers * adamw.model.layer_matrices
    for mesh, shard in (
        (Mesh(dp=8, zero=0), 1),
        (Mesh(dp=8, zero=1), 8),
        (Mesh(tp=8), 1),
        (Mesh(tp=2, dp=4), 4),
    ):
        before, after = (worst_memory(each, mesh, PAPER) for each in (adamw, muon))
        held = matrices / mesh.tp / shard
        assert before.optimizer - after.optimizer == pytest.approx(4 * held)
        own = after.workspaces - before.workspaces
        assert 2 * held < own < 2 * held + 1e9
        slots = worst_memory(muon, mesh, TRAINER).workspaces - worst_memory(adamw, mesh, TRAINER).workspaces
        assert slots > own or max(shard, mesh.tp) == 1


def test_an_optimizer_without_a_formula_is_refused():
    unknown = replace(job("llama3-8b", "dgx-h100", 8, 8), optimizer="lion")
    for estimate in (worst_memory, lambda job, mesh: Predictor(job).step(mesh)):
        with pytest.raises(AssertionError, match="lion"):
            estimate(unknown, Mesh(dp=8, zero=1))


def test_muons_work_is_shared_over_the_ranks_that_share_states_and_tensor_parallel_ones():
    adamw = job("llama3-8b", "dgx-h100", 8, 8)
    muon = replace(adamw, optimizer="muon")

    def seconds(**axes):
        mesh = Mesh(**axes)
        return Predictor(muon).step(mesh).optimizer - Predictor(adamw).step(mesh).optimizer

    alone = seconds(dp=8, zero=0)
    assert seconds(dp=8, zero=1) < alone / 3 and seconds(tp=8) < alone / 3
    # 32 layers of q, o 4096 x 4096, k, v 1024 x 4096, gate, up, down 4096 x 14336
    squares, narrow = 2 * 6 * 4096**3, 2 * (4 * 1024**2 * 4096 + 2 * 1024**3)
    wide = 3 * (4 * 4096**2 * 14336 + 2 * 4096**3)
    assert alone == pytest.approx(32 * 5 * (squares + narrow + wide) / adamw.cluster.flops)


def test_co2_needs_three_more_copies_of_the_parameters():
    assert sum(states(1, Mesh(dp=8, zero=0, tau=12), 1, PAPER)) == 18 + 3 * 2


@pytest.mark.parametrize(
    ("kind", "virtual", "slices"),
    [
        ("gpipe", 1, 1),
        ("1f1b", 1, 1),
        ("interleaved", 2, 1),
        ("interleaved", 4, 1),
        ("seq1f1b", 1, 4),
        ("terapipe", 1, 2),
    ],
)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.second_tier("4-4-interleaved-4-1")
def test_what_is_in_flight_is_what_the_schedule_holds(kind, virtual, slices, ranks, groups):
    micro_batches = groups * ranks
    made = make_schedule(kind, ranks, micro_batches, virtual=virtual, slices=slices)
    stages = made.stages // ranks
    for rank in range(ranks):
        held = made.peak_in_flight(rank) / stages / slices
        assert in_flight(pipe(kind, ranks, virtual, slices), rank, micro_batches) == held


def test_zb_h1_holds_up_to_what_1f1b_holds_on_its_first_rank():
    made = make_schedule("zb-h1", 4, 8)
    assert in_flight(pipe("zb-h1", 4), 0, 8) == made.peak_in_flight(0) == 4
    assert all(in_flight(pipe("zb-h1", 4), rank, 8) >= made.peak_in_flight(rank) for rank in range(4))


def test_zb_v_holds_as_much_as_1f1b_on_every_rank():
    made = make_schedule("zb-v", 4, 8)
    assert [in_flight(pipe("zb-v", 4), rank, 8) for rank in range(4)] == [4] * 4
    assert [made.peak_in_flight(rank) / 2 for rank in range(4)] == [4] * 4


@pytest.mark.parametrize(("ranks", "virtual", "expected"), [(4, 2, 5.5), (8, 4, 9.75)])
def test_interleaving_holds_more(ranks, virtual, expected):
    assert in_flight(pipe("interleaved", ranks, virtual), 0, 8 * ranks) == expected
    assert ranks * (1 + (ranks - 1) / (ranks * virtual)) == expected


@pytest.mark.parametrize(
    ("needed", "word"), [(80, "fits"), (80.1, "risky"), (100, "risky"), (100.1, "does not fit")]
)
def test_the_80_percent_rule(needed, word):
    assert verdict(needed, 100) == word


def held(**sizes):
    fixed = {"tp": 2, "cp": 1, "dp": 8, "pp": 2, "zero": 1} | sizes
    return worst_memory(job("llama3-8b", "dgx-h100", 1, 512, 8192), Mesh(**fixed))


@settings(max_examples=25, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4]),
    cp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2, 4]),
    dp=st.sampled_from([2, 4]),
    zero=st.sampled_from([0, 1, 2]),
)
def test_memory_falls_with_every_axis_that_cuts_it(tp, cp, pp, dp, zero):
    sizes = {"tp": tp, "cp": cp, "pp": pp, "dp": dp, "zero": zero}
    here = held(**sizes)
    for name in ("tp", "cp"):
        assert held(**{**sizes, name: 2 * sizes[name]}).total < here.total
    # Activations of twice as many micro-batches of half as many layers are in flight.
    assert held(**{**sizes, "pp": 2 * pp}).states < here.states
    assert held(**{**sizes, "zero": zero + 1}).states < here.states


def test_recomputation_keeps_the_inputs_of_layers():
    kept, again = held(pp=1), held(pp=1, recompute="full")
    assert again.activations < kept.activations / 5
    assert again.states == kept.states


def test_selective_recomputation_keeps_all_but_norms_and_what_follows_gate_and_up():
    """Of Llama 3 8B, a token's 12 + 4 k/a + 8 h_ffn/h is 41, and 8 + 4 k/a + 4 h_ffn/h is 23."""
    kept, again = held(pp=1), held(pp=1, recompute="selective")
    assert again.activations / kept.activations == pytest.approx(23 / 41)
    assert again.states == kept.states


def test_the_last_stage_holds_the_logits_and_few_micro_batches():
    wanted = job("llama3-8b", "dgx-h100", 1, 512, 8192)
    mesh = Mesh(pp=4, dp=8)
    first, last = (memory_of_rank(wanted, mesh, rank) for rank in (0, 3))
    assert first.logits == 0 and last.logits >= 4 * 8192 * 128256
    # The last stage has fewer layers: the head counts for some.
    assert last.activations < first.activations / 4


def test_the_trainers_head_holds_the_logits_of_some_rows_where_they_are_many():
    """At 8192 tokens and a vocabulary of 128256 in bf16: a sixteenth of the rows, twice with several ranks,
    dW in fp32 if the head trains, and both copies of the last norm's rows."""
    wanted = job("llama3-8b", "dgx-h100", 1, 512, 8192)
    for tp in (1, 2):
        found = memory_of_rank(wanted, Mesh(tp=tp, dp=8 // tp), 0, TRAINER)
        rows, width = (1 if tp == 1 else 2) * 512, 128256 / tp
        normed = 2 * 2 * 8192 * 4096 / tp
        assert found.logits == pytest.approx(2 * rows * width + 4 * width * 4096 + normed)
    frozen = replace(wanted, adapters=Adapters(16, ((4096, 4096),), ()))
    assert memory_of_rank(frozen, Mesh(tp=2, dp=4), 0, TRAINER).logits == pytest.approx(
        2 * rows * width + normed
    )
    few = job("llama3-8b", "dgx-h100", 1, 512, 1024)  # below 512 MiB of logits: all at once
    assert memory_of_rank(few, Mesh(dp=8), 0, TRAINER).logits >= TRAINER.logits * 1024 * 128256
    assert memory_of_rank(wanted, Mesh(dp=8), 0).logits >= 4 * 8192 * 128256  # other programs


def test_weights_travel_together_as_shard_has_them():
    assert [math.ceil(OF_STAGES[stage] / 2**20) for stage in (0, 1, 2)] == [BUCKET_BYTES / 2**20] * 3
    assert OF_STAGES[3] < 2**20
