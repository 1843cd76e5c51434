"""Replicas that train alone and meet: each method is its definition, whatever the moment at which flights
leave; what is saved goes on bitwise; a rank that dies ends all."""

from __future__ import annotations

import math
import os
import signal
import time
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import pyruntime
from pyruntime import comm
from pyruntime.data_parallel import Compression
from pyruntime.replicas import (
    averaging,
    co2,
    diloco,
    local_sgd,
    outer_optimizer,
    overlapped_local_sgd,
    slowmo,
    streaming_diloco,
)
from tests.ranks import check_others_lost_rank_1
from tests.replicas import cases

TRANSPORTS = ["symmetric_memory", "process_group"]


def check(results, expected) -> None:
    for replica, (found, _) in enumerate(results):
        np.testing.assert_allclose(cases.flat(found), expected[replica], rtol=0, atol=1e-11)


def test_local_sgd_is_its_definition(ranks):
    for world in (2, 3):
        check(ranks.run(cases.trajectory, world, local_sgd(4)), cases.local_sgd(world, 4))


def test_one_step_of_local_sgd_is_synchronous_descent(ranks):
    """Tau 1, nothing late, gradient descent inside: the mean gradient's step."""
    x, expected = cases.Replicas(3), []
    for _ in range(cases.STEPS):
        x.x = x.x - cases.LR * (x.a * (x.x - x.c)).mean(0)
        expected.append(x.x[0].copy())
    check(ranks.run(cases.trajectory, 3, local_sgd(1)), [np.stack(expected)] * 3)


def test_slowmo_is_its_definition(ranks):
    results = ranks.run(cases.trajectory, 3, slowmo(3, lr=0.8, momentum=0.6))
    check(results, cases.slowmo(3, 3, 0.8, 0.6))


def test_diloco_is_local_training_with_torchs_nesterov_outside(ranks):
    results = ranks.run(cases.trajectory, 2, diloco(4, lr=0.7, momentum=0.9))
    check(results, cases.diloco(2, 4, 0.7, 0.9))


@pytest.mark.parametrize("momentum", [0.0, 0.7])
def test_overlapped_local_sgd_is_its_definition(ranks, momentum):
    results = ranks.run(cases.trajectory, 3, overlapped_local_sgd(3, pull=0.6, momentum=momentum))
    check(results, cases.overlapped_local_sgd(3, 3, 0.6, momentum))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_streaming_diloco_is_its_definition(ranks, transport):
    method = streaming_diloco(5, fragments=2, delay=2, pull=0.5, lr=0.7, momentum=0.9)
    results = ranks.run(cases.trajectory, 2, method, torch.float64, transport)
    check(results, cases.streaming_diloco(2, 5, 2, 2, 0.5, 0.7, 0.9))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world", [2, 3])
def test_co2_is_its_definition(ranks, world, transport):
    method = co2(3, lr=0.9, momentum=0.4, penalty=None)
    results = ranks.run(cases.trajectory, world, method, torch.float64, transport)
    check(results, cases.co2(world, 3, 0.9, 0.4)[0])


def test_co2_without_momentum_is_averaging_a_round_late(ranks):
    """z moves by what replicas moved on average, in the round after."""
    tau, results = 2, ranks.run(cases.trajectory, 2, co2(2, lr=1.0, momentum=0.0, penalty=None))
    x = [cases.flat(found) for found, _ in results]
    start = np.concatenate([np.ravel(value) for value in cases.start().values()])
    np.testing.assert_array_equal(x[0][tau - 1], start)  # the first displacement has only left
    first_round = np.mean([each[:tau] for each in x], 0)
    alone = cases.local_sgd(2, 10**6).mean(0)
    np.testing.assert_allclose(first_round[0], alone[0], atol=1e-12)
    np.testing.assert_allclose(x[0][2 * tau - 1], alone[tau - 1], atol=1e-12)


def with_penalties(group, method):
    seen: list[float] = []

    def before(_step, outer):
        seen.append(outer.last_penalty)

    return cases.trajectory(group, method, before_step=before)[0], seen


def test_the_gap_penalty_is_that_of_the_papers_terms_and_the_same_on_all_replicas(ranks):
    results = ranks.run(with_penalties, 3, co2(3, lr=0.9, momentum=0.4))
    expected, penalties = cases.co2(3, 3, 0.9, 0.4, penalised=True)
    check(results, expected)
    assert min(penalties) > 1.05
    for _, seen in results:
        assert seen == results[0][1]
        assert list(dict.fromkeys(seen))[1:] == pytest.approx(penalties, rel=1e-9)


@pytest.mark.parametrize(("lr", "momentum"), [(1.0, 0.2), (1.0, 0.0), (0.7, 0.2)])
def test_what_a_round_solves_swings_by_the_root_of_momentum_and_outer_rate(lr, momentum):
    """lambda^2 - (1 + beta) lambda + beta + alpha rho = 0, where inner steps go the share rho of the way to
    the minimum, here 0."""
    share, tau, rounds = 0.9, 2, 60
    module = nn.Linear(1, 1, bias=False).double()
    outer = pyruntime.OuterOptimizer(module, None, co2(tau, lr, momentum, penalty=None))
    found = []
    for step in range(tau * rounds):
        with torch.no_grad():
            module.weight.mul_((1 - share) ** (1 / tau))
        outer.step()
        if step % tau == tau - 1:
            found.append(module.weight.item())
    determinants = [a * c - b * b for a, b, c in zip(found[:-2], found[1:-1], found[2:], strict=True)]
    # Of a recurrence of two terms it grows by the product of its roots, the square of their magnitude.
    growth = (determinants[-1] / determinants[9]) ** (1 / (len(determinants) - 10))
    assert growth == pytest.approx(momentum + lr * share, rel=1e-6)


def half(gap: float, reach: float) -> float:
    assert gap >= 0 and reach > 0
    return 2.0


def test_the_penalty_is_any_function(ranks):
    results = ranks.run(cases.trajectory, 2, co2(3, lr=1.0, momentum=0.0, penalty=half))
    check(results, cases.co2(2, 3, 0.5, 0.0)[0])


def test_a_first_step_too_long_for_what_travels_is_no_penalty_of_one():
    module = nn.Linear(4, 1, bias=False).half()
    outer = pyruntime.OuterOptimizer(module, None, co2(1))
    with pytest.raises(ValueError, match=r"overflows torch\.float16.*bfloat16 or float32"):
        for _ in range(3):
            with torch.no_grad():
                module.weight.add_(150.0)
            outer.step()


def test_clipping_bites_in_place(ranks):
    method = co2(3, lr=0.9, momentum=0.4, penalty=None, clip=0.05)
    clipped, free = (cases.co2(2, 3, 0.9, 0.4, clip=clip)[0] for clip in (0.05, math.inf))
    assert np.abs(clipped - free).max() > 0.1
    check(ranks.run(cases.trajectory, 2, method), clipped)


def test_finishing_leaves_one_model_the_mean_of_all(ranks):
    for method in (
        local_sgd(4),
        overlapped_local_sgd(4),
        streaming_diloco(5, 2, 2),
    ):
        results = ranks.run(cases.trajectory, 3, method)
        mean = {name: np.mean([found[name][-1] for found, _ in results], 0) for name in cases.SIZES}
        for _, last in results:
            for name in cases.SIZES:
                np.testing.assert_allclose(last[name], mean[name], atol=1e-12)
                np.testing.assert_array_equal(last[name], results[0][1][name])


def test_finishing_co2_takes_what_is_on_its_way(ranks):
    """14 steps are four rounds of 3 and 2 steps: the displacements of round 4 and of the rest are not
    lost."""
    results = ranks.run(cases.trajectory, 2, co2(3, lr=1.0, momentum=0.0, penalty=None))
    x = np.stack([cases.flat(found) for found, _ in results])
    begun = x[:, [2, 5, 8, 11]]  # where rounds 2 to 5 began, the same on both
    alone = cases.Replicas(2)
    alone.x = begun[:, 2].copy()  # round 4 began after step 9
    for _ in range(3):
        alone.inner()
    expected = begun[0, 3] - (begun[0, 2] - alone.mean()) - (begun[0, 3] - x[:, 13].mean(0))
    last = np.concatenate([np.ravel(each) for each in results[0][1].values()])
    np.testing.assert_allclose(last, expected, atol=1e-12)


def test_one_replica_alone_steps_too(ranks):
    ((found, _),) = ranks.run(cases.trajectory, 1, slowmo(3, lr=0.8, momentum=0.6))
    check([(found, None)], cases.slowmo(1, 3, 0.8, 0.6))


def pumped_or_not(group, method, dtype, way):
    """way: "never": flights leave when they are waited for; "late": rank 1 sleeps in some steps."""
    pump, is_late = averaging.Averaging.pump, way == "late" and group.rank() == 1
    if way == "never":
        averaging.Averaging.pump = lambda _: None
    try:
        return cases.trajectory(
            group,
            method,
            dtype,
            before_step=lambda step, _: time.sleep(0.05 * (is_late and step % 4 == 0)),
        )
    finally:
        averaging.Averaging.pump = pump


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "method",
    [co2(3, momentum=0.4), streaming_diloco(5, 2, 3)],
    ids=lambda method: method.name,
)
@pytest.mark.second_tier(but=["co2-dtype1"])
def test_when_flights_leave_changes_no_bit(ranks, method, dtype):
    """So what travels is a snapshot: training goes on beside it."""
    results = [ranks.run(pumped_or_not, 3, method, dtype, way) for way in ("always", "never", "late")]
    for other in results[1:]:
        for (found, last), (again, last_again) in zip(results[0], other, strict=True):
            for name in cases.SIZES:
                np.testing.assert_array_equal(found[name], again[name])
                np.testing.assert_array_equal(last[name], last_again[name])


def what_travels(group):
    """Whether anything that travels, or is kept, shares memory with a parameter; and whether flights were
    under way during the steps of a round."""
    model, inner, outer = cases.made(group, co2(4), torch.float32)
    live = {p.untyped_storage().data_ptr() for p in model.parameters()}
    shared, under_way = [], []
    for _ in range(cases.STEPS):
        cases.inner_step(model, inner)
        outer.step()
        for fragment in outer._fragments:
            kept = (fragment.sent, fragment.base, fragment.momentum)
            shared += [each.untyped_storage().data_ptr() in live for each in kept]
        under_way.append(bool(outer._averaging._last))
    outer.finish()
    outer.close()
    return any(shared), under_way


def test_the_buffer_under_all_reduce_is_never_the_live_parameters(ranks):
    for shared, under_way in ranks.run(what_travels, 2):
        assert not shared
        assert under_way[4] and not under_way[2]


def saved_and_resumed(group, method, at, compression):
    """Parameters after all steps, without a break and with one after step `at`."""

    def adam(model):
        return torch.optim.AdamW(model.parameters(), lr=0.05)

    model, _, outer = cases.made(group, method, torch.bfloat16, compression=compression)
    inner, state = adam(model), None
    for step in range(1, cases.STEPS + 1):
        cases.inner_step(model, inner)
        outer.step()
        if step == at:
            kept = {name: tensor.clone() for name, tensor in outer.state_dict().items()}
            weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            buffer = {"outer": kept, "model": weights}
            states = [{k: v.clone() for k, v in each.items()} for each in inner.state.values()]
            state = buffer | {"inner": states}
    whole = [p.detach().clone() for p in model.parameters()]
    outer.close()
    model, _, outer = cases.made(group, method, torch.bfloat16, compression=compression)
    inner = adam(model)
    model.load_state_dict(state["model"])
    for p, each in zip(model.parameters(), state["inner"], strict=True):
        inner.state[p] = each
    outer.load_state_dict(state["outer"])
    for _ in range(at, cases.STEPS):
        cases.inner_step(model, inner)
        outer.step()
    outer.close()
    return whole, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("at", [4, 7])
@pytest.mark.parametrize(
    "method",
    [co2(4, momentum=0.4), streaming_diloco(5, 2, 3), overlapped_local_sgd(4)],
    ids=lambda method: method.name,
)
def test_what_is_saved_goes_on_bitwise(ranks, method, at):
    compression = Compression("quantize") if at == 7 else None
    for whole, resumed in ranks.run(saved_and_resumed, 2, method, at, compression):
        assert all(torch.equal(one, other) for one, other in zip(whole, resumed, strict=True))


def test_a_round_that_stood_still_is_saved_as_one():
    """Of co2 the first one after finish(), whose momentum is of before."""

    def after_a_round(kept, weight) -> torch.Tensor:
        module = nn.Linear(3, 3, bias=False)
        outer = pyruntime.OuterOptimizer(module, None, co2(2, momentum=0.4))
        with torch.no_grad():
            module.weight.copy_(weight)
        outer.load_state_dict(kept)
        return a_round(module, outer)

    def a_round(module, outer) -> torch.Tensor:
        for _ in range(2):
            with torch.no_grad():
                module.weight.mul_(0.9)
            outer.step()
        return module.weight.detach().clone()

    module = nn.Linear(3, 3, bias=False)
    outer = pyruntime.OuterOptimizer(module, None, co2(2, momentum=0.4))
    for _ in range(3):
        a_round(module, outer)
    outer.finish()
    weight = a_round(module, outer)
    kept = {name: each.clone() for name, each in outer.state_dict().items()}
    assert torch.equal(after_a_round(kept, weight), a_round(module, outer))


def foreign_states(group):
    _, _, mine = cases.made(group, co2(4), torch.float32)
    state, sentences = mine.state_dict(), []
    for other in (state | {"base.layers.0.weight": torch.zeros(3)}, state | {"progress": torch.zeros(9)}):
        try:
            mine.load_state_dict(other)
        except ValueError as error:
            sentences.append(str(error))
    mine.close()
    return sentences


def test_the_state_of_another_model_or_method_is_refused(ranks):
    (sentences,) = ranks.run(foreign_states, 1)
    assert len(sentences) == 2
    assert "base.layers.0.weight of shape (7, 11)" in sentences[0] and "tau=4" in sentences[1]


class Clock:
    """In the place of `time`."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


def measured(group, step_s, exchange_s):
    """tau, its sentence, and parameters after a measured round and two of 6 steps, where a step takes so long
    on the fastest rank, and a wait for an exchange."""
    clock, wait = Clock(), averaging.Averaging.wait

    def slow(self, tensor):
        clock.now += exchange_s / (1 + group.rank())  # the slowest counts
        wait(self, tensor)

    model, inner, outer = cases.made(group, co2("auto"), torch.float64)
    before = outer.describe()
    with patch.object(outer_optimizer, "time", clock), patch.object(averaging.Averaging, "wait", slow):
        for _ in range(16):
            clock.now += step_s * (1 + group.rank())
            cases.inner_step(model, inner)
            outer.step()
    tau, sentence = outer.tau, outer.describe()
    outer.close()
    return before, tau, sentence, [p.detach() for p in model.parameters()]


def test_tau_is_measured_anew_where_a_run_goes_on_before_it_was_known():
    module = nn.Linear(3, 2)
    before = pyruntime.OuterOptimizer(module, None, co2("auto"))
    for _ in range(outer_optimizer.MEASURED_STEPS - 1):
        before.step()
    after = pyruntime.OuterOptimizer(module, None, co2("auto"))
    after.load_state_dict(before.state_dict())
    for _ in range(outer_optimizer.MEASURED_STEPS):
        assert after.tau is None
        after.step()
    assert after.tau is not None


def test_tau_auto_is_the_usual_number_that_hides_the_exchange_and_says_so(ranks):
    results = ranks.run(measured, 2, 0.05, 0.23)
    for before, tau, sentence, parameters in results:
        assert "tau measured" in before
        assert tau == 6
        assert "tau 6 (a step takes 0.05 s and the exchange 0.23 s, so tau_min is 5" in sentence
        assert all(map(torch.equal, parameters, results[0][3]))


def refused(_group):
    sentences = []
    for module, method in (
        (nn.Identity(), local_sgd(2)),
        (nn.Linear(3, 3), streaming_diloco(8, fragments=4)),
        (nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last), local_sgd(2)),
    ):
        try:
            pyruntime.OuterOptimizer(module, None, method)
        except ValueError as error:
            sentences.append(str(error))
    return sentences


def test_what_cannot_be_averaged_is_refused(ranks):
    (sentences,) = ranks.run(refused, 1)
    first, second, third = sentences
    assert first == "Identity has no parameter that requires a gradient."
    assert "fragments=4 is more than the module's 1 layer(s)" in second
    assert "weight is not contiguous" in third


def killed(group, at):
    """Rank 1 dies in the midst of a round."""
    comm.configure(group, deadline_s=4.0)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(4)])
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    outer = pyruntime.OuterOptimizer(model, DeviceMesh.from_group(group, "cpu"), co2(3))
    started = time.monotonic()
    try:
        for step in range(1, 20):
            model(torch.randn(8, 128)).square().sum().backward()
            if step == at and group.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            inner.step()
            inner.zero_grad()
            started = time.monotonic()
            outer.step()
    except comm.CommError as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "", "", 0.0


@pytest.mark.parametrize("at", [2, 4])
@pytest.mark.second_tier("2")
def test_a_rank_that_dies_ends_the_others_by_the_deadline(ranks, at):
    outcomes = ranks.launch(killed, 3, at)
    check_others_lost_rank_1(outcomes)


def two_models(group):
    """Parameters of two models whose rounds are interleaved, and of each trained without the other."""

    def trained(which):
        models = {number: cases.made(group, co2(2 + number), torch.float32) for number in which}
        for _ in range(9):
            for model, inner, outer in models.values():
                cases.inner_step(model, inner)
                outer.step()
        for _, _, outer in models.values():
            outer.finish()
            outer.close()
        return [[p.detach() for p in model.parameters()] for model, _, _ in models.values()]

    return trained([0, 1]), trained([0]) + trained([1])


def test_models_that_share_a_group_do_not_disturb_each_other(ranks):
    for together, apart in ranks.run(two_models, 2):
        for one, other in zip(together, apart, strict=True):
            assert all(map(torch.equal, one, other))
