"""Displacements that travel packed: nothing is lost for good, and all replicas have the same bits."""

from __future__ import annotations

import math
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import pyruntime
from pyruntime import replicas
from pyruntime.data_parallel import Compression
from pyruntime.replicas import averaging
from pyruntime.replicas.averaging import WIDTH, Averaging
from tests.replicas import cases
from tests.transports import take

QUANTIZE, TOP_K = Compression("quantize"), Compression("top_k", density=0.05)
ROUNDS, ELEMENTS, MANY = 5, 64 * 193, 64 * 4001


def rounds(group, transport, settings, dtype, elements=ELEMENTS, run_bytes=16 << 10):
    """Of this rank: what it gave, what came of each round, what it still keeps; the last lines; the bytes."""
    take(group, transport)
    with patch.object(averaging, "RUN_BYTES", run_bytes):
        sums = Averaging(DeviceMesh.from_group(group, "cpu"), [(elements + WIDTH, dtype)], settings)
    generator = torch.Generator().manual_seed(3 + group.rank())
    given, came, last = torch.zeros(elements, dtype=torch.float64), [], []
    sent = torch.zeros(elements + WIDTH, dtype=dtype)
    before = sums.stats()[1]
    for number in range(ROUNDS):
        sent[:-WIDTH] = torch.randn(elements, generator=generator).pow(3)
        sent[-WIDTH:] = 0
        sent[-WIDTH] = 1.0 + number + group.rank()
        given += sent[:-WIDTH].double()
        sums.begin(sent)
        for _ in range(group.rank() * 3):
            sums.pump()
        sums.wait(sent)
        came.append(sent[:-WIDTH].clone())
        last.append(float(sent[-WIDTH]))
    lost = sums.lost_of(sent)
    sums.close()
    return given, came, None if lost is None else lost.double(), last, sums.stats()[1] - before


@pytest.mark.parametrize("transport", ["symmetric_memory", "process_group"])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("settings", [QUANTIZE, TOP_K], ids=lambda settings: settings.method)
@pytest.mark.second_tier(
    "quantize-2-symmetric_memory", "quantize-3-symmetric_memory", "quantize-3-process_group"
)
def test_what_came_and_what_is_kept_is_what_was_given(ranks, settings, world, transport):
    results = ranks.run(rounds, world, transport, settings, torch.float32)
    for _, came, _, last, _ in results:
        assert all(map(torch.equal, came, results[0][1]))
        assert last == [sum(1.0 + number + rank for rank in range(world)) for number in range(ROUNDS)]
    given, kept = (sum(result[place] for result in results) for place in (0, 2))
    came = torch.stack(results[0][1]).double().sum(0)
    torch.testing.assert_close(came + kept, given, rtol=0, atol=2e-4)
    assert not torch.allclose(came, given, rtol=0, atol=1.0)  # something is kept


def test_a_fragment_of_few_elements_and_one_of_none_travel_too(ranks):
    for elements in (WIDTH, 0):
        results = ranks.run(rounds, 2, "symmetric_memory", QUANTIZE, torch.float32, elements)
        came = torch.stack(results[0][1]).double().sum(0)
        given = results[0][0] + results[1][0]
        torch.testing.assert_close(came + results[0][2] + results[1][2], given, rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    ("settings", "share"), [(QUANTIZE, 1 / 4), (Compression("quantize", bits=8), 1 / 2), (TOP_K, 0.2)]
)
@pytest.mark.second_tier(but=["settings2-0.2"])
def test_the_bytes_fall_as_the_values_do(ranks, settings, share):
    """Of bf16; with what the steps of blocks and the last line take."""
    sizes = torch.bfloat16, MANY, 1 << 20
    plain = ranks.run(rounds, 3, "process_group", None, *sizes)[0][-1]
    assert plain == pytest.approx(ROUNDS * 4 / 3 * 2 * MANY, rel=0.02)
    for *_, packed in ranks.run(rounds, 3, "process_group", settings, *sizes):
        assert 0 < packed < (share + 0.02) * plain


@pytest.mark.second_tier
def test_when_flights_leave_changes_no_bit(ranks):
    for method in (replicas.co2(4, momentum=0.4), replicas.streaming_diloco(5, 2, 2), replicas.diloco(3)):
        one, other = (ranks.run(trained, 3, method, pumps) for pumps in (0, 7))
        for (last, _), (again, _) in zip(one, other, strict=True):
            for name in cases.SIZES:
                np.testing.assert_array_equal(last[name], again[name])
                np.testing.assert_array_equal(last[name], one[0][0][name])  # one model at the end


def trained(group, method, pumps, settings=QUANTIZE):
    """This replica's parameters at the end, and their largest distance from where all are best off."""
    model, inner, outer_optimizer = cases.made(group, method, torch.float32, compression=settings)
    for step in range(60):
        cases.inner_step(model, inner)
        outer_optimizer.step()
        for _ in range(pumps * ((step + group.rank()) % 2)):
            outer_optimizer._averaging.pump()
    outer_optimizer.finish()
    last = {name: p.detach().double().numpy().copy() for name, p in model.named_parameters()}
    outer_optimizer.close()
    best = {}
    for name in cases.SIZES:
        a, c = (np.stack([cases.quadratic(r)[name][which] for r in range(group.size())]) for which in (0, 1))
        best[name] = (a * c).sum(0) / a.sum(0)
    return last, max(float(np.abs(last[name] - best[name]).max()) for name in best)


@pytest.mark.parametrize("settings", [QUANTIZE, TOP_K], ids=lambda settings: settings.method)
@pytest.mark.second_tier("quantize")
def test_replicas_come_as_near_to_the_best_as_without(ranks, settings):
    method = replicas.local_sgd(1)
    plain, packed = (ranks.run(trained, 2, method, 0, each)[0][1] for each in (None, settings))
    assert plain < 0.3 and packed < plain + 0.02


def one_bit(group, elements):
    """How far this replica's parameters are in the end from where all want them."""
    parameter = nn.Parameter(torch.zeros(elements))
    outer_optimizer = pyruntime.OuterOptimizer(
        nn.ParameterList([parameter]),
        DeviceMesh.from_group(group, "cpu"),
        replicas.local_sgd(1),
        compression=Compression("quantize", bits=1),
    )
    for _ in range(40):
        with torch.no_grad():
            parameter.lerp_(torch.ones(elements), 0.1)
        outer_optimizer.step()
    outer_optimizer.close()
    return float((parameter - 1).abs().max())


def test_what_pads_the_last_line_adds_nothing(ranks):
    """Of one bit there is no 0."""
    for far in ranks.run(one_bit, 2, 32 * WIDTH + 1):
        assert far < 0.2


def described(group):
    _, _, outer_optimizer = cases.made(group, replicas.co2(3), torch.float32, compression=QUANTIZE)
    words = outer_optimizer.describe()
    sentences = []
    for state in ({"lost.0": torch.zeros(3)}, {"lost.0": None}):
        kept = outer_optimizer.state_dict() | state
        try:
            outer_optimizer.load_state_dict({name: each for name, each in kept.items() if each is not None})
        except ValueError as error:
            sentences.append(str(error))
    outer_optimizer.close()
    return words, sentences


def test_the_log_says_so_and_a_state_without_it_is_refused(ranks):
    for words, sentences in ranks.run(described, 2):
        assert words == "co2: 2 replica(s), tau 3, displacements in 4 bits a value"
        assert len(sentences) == 2 and all("saved without compression" in each for each in sentences)


def refused(group):
    mesh = DeviceMesh.from_group(group, "cpu")
    sentences = []
    for settings, dtype in (
        (Compression("power_sgd"), torch.float32),
        (Compression("quantize", error_feedback=False), torch.float32),
        (Compression("quantize", plan_every=2), torch.float32),
        (QUANTIZE, torch.float64),
    ):
        try:
            pyruntime.OuterOptimizer(nn.Linear(40, 40).to(dtype), mesh, replicas.co2(3), compression=settings)
        except ValueError as error:
            sentences.append(str(error))
    return sentences


def test_what_cannot_be_compressed_is_refused(ranks):
    for sentences in ranks.run(refused, 2):
        matrices, random, plans, doubles = sentences
        assert "method=power_sgd needs matrices; use quantize or top_k" in matrices
        assert "only with error_feedback" in random and "plan_every=2" in plans
        assert "Displacements of torch.float64 cannot be compressed" in doubles
    with pytest.raises(ValueError, match="a single replica sends nothing; leave compression out"):
        pyruntime.OuterOptimizer(nn.Linear(4, 4), None, replicas.co2(3), compression=QUANTIZE)


def with_a_nan(group):
    sums = Averaging(DeviceMesh.from_group(group, "cpu"), [(4096 + WIDTH, torch.float32)], QUANTIZE)
    sent, seen = torch.zeros(4096 + WIDTH), []
    for value in (math.nan, 1.0):
        sent.fill_(1.0)
        if group.rank() == 1:
            sent[700] = value
        sums.begin(sent)
        sums.wait(sent)
        seen.append(bool(sent.isfinite().all()))
    sums.close()
    return seen


def test_nothing_is_kept_of_what_is_not_finite(ranks):
    assert ranks.run(with_a_nan, 2) == [[False, True], [False, True]]
