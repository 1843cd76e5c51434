"""The replayed model of a layer's exposed communication: by hand, and against the published table."""

from dataclasses import replace

import pytest

from bench.overlap.dry_run import calls_of
from bench.overlap.replay import (
    CASES,
    GEMM,
    OTHERS,
    RATES,
    Clock,
    data_parallel,
    least,
    linears,
    other,
    replay,
)
from pyruntime.llama import LlamaConfig
from pyruntime.llama.slices import order

# Milliseconds of a layer, forward and backward: another simulation, of 8192 tokens in bf16 on H100s.
PUBLISHED = {
    "no overlap": [(0.62, 0.93), (1.24, 1.85), (2.98, 4.47), (5.97, 8.95)],
    "TransformerEngine's scheme": [(0.24, 0.26), (0.31, 0.21), (1.37, 1.87), (2.19, 1.95)],
    "torchtitan's scheme": [(0.25, 0.33), (0.31, 0.39), (1.68, 2.27), (2.19, 3.15)],
    "perfect fusion of every op alone": [(0.19, 0.28), (0.20, 0.28), (1.61, 2.20), (2.04, 3.01)],
}
COMPUTE = [(0.91, 1.91), (3.14, 6.46), (3.64, 7.63), (12.6, 25.8)]


@pytest.mark.parametrize("number", range(4))
@pytest.mark.second_tier(but=["1"])
def test_rows_of_others_are_the_published_ones(number):
    case = list(CASES.values())[number]
    for scheme in OTHERS:
        found = other(case, scheme)
        exposed = 1e3 * found.exposed_forward, 1e3 * found.exposed_backward
        assert exposed == pytest.approx(PUBLISHED[scheme][number], abs=0.0075)
    assert (1e3 * found.forward, 1e3 * found.backward) == pytest.approx(COMPUTE[number], rel=0.007)


def test_without_overlap_all_that_travels_is_exposed():
    case = CASES["8B tp 8 NVLink"]
    found, _ = linears(case)
    rows = 7 / 8 * 8192 * 4096 * 2 / 380e9  # of every linear, whose rows are all of 4096 features
    assert [each.transfer for each in found] == [pytest.approx(rows)] * 4
    assert other(case, "no overlap").exposed_forward == pytest.approx(4 * rows)


@pytest.mark.parametrize("slices", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.second_tier(
    but=["8B tp 2 at 45 GB/s-1", "70B tp 2 at 45 GB/s-1", "70B tp 2 at 45 GB/s-4", "70B tp 8 NVLink-2"]
)
def test_an_infinite_bandwidth_exposes_nothing_and_slices_compute_the_same(name, slices):
    free = replay(replace(CASES[name], bandwidth=float("inf"), between_hosts=False), slices, False)
    assert free.exposed_forward == free.exposed_backward == 0
    whole = replay(replace(CASES[name], bandwidth=float("inf"), between_hosts=False), 1, False)
    assert (free.forward, free.backward) == pytest.approx((whole.forward, whole.backward))


@pytest.mark.parametrize("slices", [1, 2, 4])
@pytest.mark.second_tier("2", "4")
def test_a_slow_link_exposes_what_it_needs_less_what_is_computed(slices):
    """Whatever the schedule: the link is busy all the time."""
    case = replace(CASES["8B tp 8 NVLink"], bandwidth=1e9)
    found = replay(case, slices, False)
    volume = 7 / 8 * 8192 * 4096 * 2 / 1e9
    assert found.forward + found.exposed_forward == pytest.approx(4 * volume, rel=0.01)
    # Whole sequences gather X again in the backward pass on one host; slices keep it.
    transfers = 4 if slices > 1 else 6
    assert found.backward + found.exposed_backward == pytest.approx(transfers * volume, rel=0.01)


def test_a_gemm_waits_for_the_chunks_that_have_not_come():
    """3 chunks of 1 s each, and own rows that take 0.5 s: 4 parts of 0.5 s."""
    clock = Clock(replace(CASES["8B tp 8 NVLink"], ranks=4, bandwidth=3 / 4), fills=False)
    clock.publish(0, 4.0)
    clock.gemm_of_gathered(0, 2.0)
    assert clock.now == pytest.approx(4 * 4 / 3 * 3 / 4 + 0.5)
    assert clock.exposed == pytest.approx(clock.now - 2.0)


def test_weight_gradients_fill_waits_and_nothing_is_computed_twice():
    case = CASES["8B tp 8 NVLink"]
    plain, filled = replay(case, 1, False), replay(case, 1, True)
    assert filled.exposed_backward == pytest.approx(0, abs=1e-9)
    assert plain.exposed_backward > 1e-4
    assert filled.backward == pytest.approx(plain.backward)
    assert filled.exposed_forward == plain.exposed_forward


def test_slices_hide_what_the_target_allows():
    for name in ("8B tp 8 NVLink", "70B tp 8 NVLink"):
        assert replay(CASES[name], 4, False).share <= 0.015


def test_the_least_of_an_order_is_one_where_transfers_vanish_or_rule():
    assert least(RATES, 1e-6, 1, False) == pytest.approx(1, abs=1e-4)
    assert least(RATES, 50, 1, False) == pytest.approx(1, abs=0.03)  # the link is busy all the time
    assert least(RATES, 1, 1, False) > least(RATES, 1, 1, True) > least(RATES, 1, 4, True) >= 1


def test_the_calls_are_those_of_the_code():
    """Every half of a layer gathers and scatters all of its rows once, in the order of the schedule."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    for slices in (1, 2, 4):
        calls = calls_of(config, 2, 2, 64, slices, keep_gathered=True)
        gemms = [call for call in calls if call.name in ("end_column", "begin_row")]
        weights = 32 * (64 + 32 + 96 + 48) // 2
        assert sum(call.flops for call in gemms) == 2 * 2 * 64 * weights
        assert sum(call.bytes for call in gemms) == 2 * 4 * 64 * 32 * 2
    names = {"begin": "begin_column", "multiply": "end_column", "scatter": "begin_row", "finish": "end_row"}
    found = [call.name for call in calls if call.name in names.values()]
    assert found == [names[action.kind] for action in order(4, 4)]


def test_data_parallel_transfers_shorter_than_the_passes_leave_their_ends_alone():
    case = CASES["8B tp 8 NVLink"]
    found, _ = linears(case)
    one = sum(each.gemm for each in found) * GEMM / 8192 / 45e9
    slow = replace(
        replay(case, 4, False), forward=1.0, backward=1.0, exposed_forward=0.0, exposed_backward=0.0
    )
    share = data_parallel(case, slow, 4, 1, early=False)
    assert share == pytest.approx(2 * one / 8)  # the first layer's gradient and its weights
