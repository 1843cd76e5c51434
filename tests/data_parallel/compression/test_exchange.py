"""Compressed gradients between ranks: what arrives, what is kept, what all ranks agree on, over any transport
and an odd number of ranks too."""

from __future__ import annotations

import math
import os
import signal
import time
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import pyruntime
from pyruntime import comm
from pyruntime.data_parallel.compression import Compression, compressor, power_sgd
from pyruntime.data_parallel.compression.codecs import codec_of
from pyruntime.data_parallel.compression.compressor import Compressor
from pyruntime.data_parallel.compression.units import (
    GRAIN,
    ROW,
    Unit,
    pieces_of,
    places_of,
    shared_out,
    units_of,
)
from pyruntime.ops.compression import quantized_bytes
from tests.data_parallel.cases import two_by_two
from tests.data_parallel.compression import cases
from tests.ranks import check_others_lost_rank_1
from tests.transports import TRANSPORTS

QUANTIZE = [Compression("quantize", bits=bits) for bits in (1, 3, 4, 8)]
METHODS = [*QUANTIZE, Compression("top_k", density=0.05), Compression("power_sgd", rank=3)]


def named(settings: Compression) -> str:
    return f"{settings.method}-{settings.bits}"


def check_telescopes(sent: list[cases.Sent], stage: int) -> None:
    """Over all steps: what arrived, and what all ranks still keep, is what all ranks had. Of a bucket that
    all ranks hold whole, what arrived is the same bits everywhere."""
    for i, arrived in enumerate(sent[0].reduced):
        given = sum(each.given[i] for each in sent)
        lost = sum(each.lost[i] for each in sent)
        if stage == 0:
            assert all(torch.equal(each.last[i], sent[0].last[i]) for each in sent)
            assert all(torch.equal(each.reduced[i], arrived) for each in sent)
        else:
            arrived = sum(each.reduced[i] for each in sent)
        size = float(given.abs().max())
        torch.testing.assert_close(arrived + lost, given, rtol=0, atol=1e-5 * size)


@pytest.mark.parametrize("settings", METHODS, ids=named)
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(("world", "stage"), [(2, 0), (2, 1), (3, 0), (3, 1)])
def test_error_feedback_telescopes(ranks, world, stage, together, settings):
    sent = ranks.run(cases.send, world, "symmetric_memory", stage, settings, together)
    check_telescopes(sent, stage)
    assert all(each.numbers == sent[0].numbers for each in sent)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("settings", [METHODS[2], METHODS[-1]], ids=named)
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.second_tier(
    "0-quantize-4-symmetric_memory",
    "0-quantize-4-process_group",
    "0-quantize-4-hierarchical",
    "1-quantize-4-process_group",
    "1-quantize-4-hierarchical",
)
def test_over_any_transport_the_same_bits_arrive(ranks, stage, settings, transport):
    sent = ranks.run(cases.send, 4, transport, stage, settings)
    check_telescopes(sent, stage)
    if settings.method == "quantize":  # sums are taken in the order of the ranks, whatever travels
        expected = ranks.run(cases.send, 4, "symmetric_memory", stage, settings)
        for one, other in zip(sent, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one.reduced, other.reduced, strict=True))


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.second_tier("0")
def test_rounded_at_random_nothing_is_kept_and_a_second_run_is_the_same(ranks, stage):
    settings = Compression("quantize", bits=8, error_feedback=False, seed=3)
    sent, again = (ranks.run(cases.send, 3, "symmetric_memory", stage, settings) for _ in range(2))
    settings = Compression("quantize", bits=8, error_feedback=False, seed=4)
    other = ranks.run(cases.send, 3, "symmetric_memory", stage, settings)
    assert all(not lost.any() for each in sent for lost in each.lost)
    for one, two in zip(sent, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.reduced, two.reduced, strict=True))
    assert not torch.equal(sent[0].reduced[0], other[0].reduced[0])
    given, arrived = (
        sum(getattr(each, name)[0] for each in (sent if stage or name == "given" else sent[:1]))
        for name in ("given", "reduced")
    )
    assert float((arrived - given).norm() / given.norm()) < 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_low_precision_arrive_in_it(ranks, dtype):
    settings = Compression("quantize", bits=8)
    sent = ranks.run(cases.send, 2, "symmetric_memory", 1, settings, True, dtype)
    given, arrived = (sum(getattr(each, name)[0] for each in sent) for name in ("given", "reduced"))
    assert float((arrived - given).norm() / given.norm()) < 0.02


@pytest.mark.parametrize("settings", [METHODS[2], METHODS[-2], METHODS[-1]], ids=named)
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("got", [(0,), (2,), (7,)])  # rank 7 is none
def test_a_parameter_counts_where_some_rank_had_a_gradient(ranks, stage, settings, got):
    for sent in ranks.run(cases.send, 3, "symmetric_memory", stage, settings, True, torch.float32, got):
        assert sent.marks == [[got != (7,), True, True, True]]


@pytest.mark.parametrize("method", ["quantize", "top_k", "power_sgd"])
@pytest.mark.parametrize("stage", [0, 1])
def test_ranks_agree_on_a_plan_and_what_is_lost_still_telescopes(ranks, stage, method):
    settings = Compression(method, density=0.05, rank=8, plan_every=2)
    sent = ranks.run(cases.send, 3, "symmetric_memory", stage, settings, False)
    check_telescopes(sent, stage)
    numbers = sent[0].numbers
    assert all(each.numbers == numbers for each in sent)
    uniform = {"quantize": 4, "top_k": 50_000, "power_sgd": 8}[method]
    assert set(numbers) == {"w0", "w1", "w2", "w3"}
    assert any(number != uniform for name, number in numbers.items() if name != "w2"), numbers


def planned_otherwise(group):
    """As if every rank had measured other errors: rank 0 takes the finest numbers, others do not."""

    def of_its_own(sizes, _errors, _uniform):
        return [len(row) - 1 - group.rank() for row in sizes]

    with patch.object(compressor, "allocate", of_its_own):
        sent = cases.send(group, "symmetric_memory", 1, Compression("quantize", plan_every=2))
    return sent


def test_ranks_take_one_plan_where_each_would_make_another(ranks):
    sent = ranks.run(planned_otherwise, 3)
    check_telescopes(sent, 1)
    assert [set(each.numbers.values()) for each in sent] == [{8}] * 3


@pytest.mark.parametrize("stage", [0, 1])
def test_a_large_matrix_is_planned_in_pieces(ranks, stage):
    """Rows of very different size get different bits."""
    settings = Compression("quantize", plan_every=2)
    shapes = [(500, 401), (33, 64)]
    sent = ranks.run(cases.send, 3, "symmetric_memory", stage, settings, True, torch.float32, (), shapes)
    check_telescopes(sent, stage)
    numbers = sent[0].numbers
    assert all(each.numbers == numbers for each in sent)
    assert set(numbers) == {"w1", *(f"w0[{i}]" for i in range(5))}
    assert len({numbers[f"w0[{i}]"] for i in range(5)}) > 1


@pytest.mark.parametrize("is_cut", [True, False])
@pytest.mark.parametrize("most", [1, 24_576, 30_000])
def test_pieces_are_all_of_a_matrix_and_each_rank_sums_as_much_of_each(most, is_cut):
    stretches = ((64, 35_000), (35_064, 35_000), (70_064, 416)) if is_cut else shared_out(64, 70_416, 3)
    unit, step = Unit("w", 704, 100, False, stretches), GRAIN * -(-most // (3 * GRAIN))
    pieces = pieces_of(unit, most, is_cut)
    assert len({piece.key for piece in pieces}) == len(pieces) > 1
    runs = sorted(run for piece in pieces for run in piece.stretches if run[1])
    ends = [begin + size for begin, size in runs]
    assert [begin for begin, _ in runs] == [64, *ends[:-1]] and ends[-1] == 64 + 70_416
    assert all(size <= step for _, size in runs)
    for piece in pieces[:-1]:
        assert is_cut or [size for _, size in piece.stretches] == [step] * 3
    for rank, (first, count) in enumerate(stretches):
        own = [piece.stretches[rank] for piece in pieces if piece.stretches[rank][1]]
        if is_cut:
            assert own[0][0] == first and sum(size for _, size in own) == count
        for bits in (1, 4, 8):  # as many bytes as without pieces, but for one block and what fills up its row
            _, rows = places_of([quantized_bytes(size, bits) for _, size in own])
            _, whole = places_of([quantized_bytes(count, bits)])
            assert rows <= whole + (0 if is_cut else 1 + step * bits // (8 * ROW))
    assert pieces_of(unit, 70_416, is_cut) == [unit]


def bytes_of_a_step(group, transport, settings):
    axes = cases.opened(group, transport, 1)
    buckets = cases.buckets_of(True, 2, torch.float32)
    compressor = Compressor(settings, buckets, [], axes)
    before = comm.bytes_read("dp")
    compressor.launch(buckets[0], torch.float32, axes, lambda chunk, *_: chunk.zero_(), lambda *_: None)
    axes.shard.complete_all()
    return comm.bytes_read("dp") - before


@pytest.mark.parametrize("transport", ["symmetric_memory", "process_group"])
def test_the_transport_counts_what_travels(ranks, transport):
    expected = 0
    for shape in cases.SHAPES:
        count, bits = -(-shape[0] // 2) * shape[1], 8 if math.prod(shape) < 1024 else 4
        expected += -(-quantized_bytes(count, bits) // 64) * 64
    found = ranks.run(bytes_of_a_step, 2, transport, Compression("quantize"))
    assert found == [expected + 64] * 2  # and the marks


def refused(group):
    linear = nn.Linear(40, 40)
    mesh = DeviceMesh.from_group(group, "cpu")
    settings = Compression("quantize")
    with pytest.raises(ValueError, match="at stage=3, where weights travel"):
        pyruntime.shard(linear, mesh, stage=3, compression=settings)
    with pytest.raises(ValueError, match="one rank alone sends nothing"):
        pyruntime.shard(linear, None, compression=settings)
    with pytest.raises(ValueError, match="here are 2 replicas of 2 ranks"):
        pyruntime.shard(linear, two_by_two(), stage=1, compression=settings)
    with pytest.raises(ValueError, match=r"weight is torch\.float64, and gradients are compressed"):
        pyruntime.shard(nn.Linear(40, 40).double(), mesh, stage=1, compression=settings)


def test_what_it_does_not_go_together_with_is_refused(ranks):
    ranks.run(refused, 4)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"method": "huffman"}, "method='huffman' is none of"),
        ({"bits": 9}, "bits=9; a value takes 1 to 8 bits"),
        ({"density": 0.0}, "density=0.0; use a share above 0"),
        ({"rank": 0}, "rank=0; use at least 1"),
        ({"plan_every": -1}, "plan_every=-1; use at least 1 step"),
        ({"method": "top_k", "error_feedback": False}, "method=top_k without error_feedback never sends"),
    ],
)
def test_settings_that_are_none_are_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        Compression(**({"method": "quantize"} | options))


def trained(group, stage, settings, accumulate=False):
    """The weights after steps on different data, with an embedding and biases among them."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 50))
    handle = pyruntime.shard(
        model, DeviceMesh.from_group(group, "cpu"), stage=stage, bucket_bytes=8_000, compression=settings
    )
    optimizer = handle.adamw(lr=1e-3, max_norm=1.0)
    generator = torch.Generator().manual_seed(group.rank())
    for _ in range(4):
        ids = torch.randint(50, (2, 40), generator=generator)
        if accumulate:
            with handle.accumulate():
                nn.functional.cross_entropy(model(ids[0]), ids[1]).backward()
        nn.functional.cross_entropy(model(ids[0]), ids[1]).backward()
        optimizer.step()
    handle.complete()
    weights = {name: p.clone() for name, p in model.state_dict().items()}
    handle.close()
    return weights


@pytest.mark.parametrize("settings", [METHODS[2], METHODS[-2], METHODS[-1]], ids=named)
@pytest.mark.parametrize(("stage", "accumulate"), [(0, False), (1, True), (2, False)])
@pytest.mark.second_tier(but=["0-False-quantize-4", "0-False-top_k-4", "0-False-power_sgd-4"])
def test_ranks_end_with_the_same_weights(ranks, stage, accumulate, settings):
    found = ranks.run(trained, 3, stage, settings, accumulate)
    again = ranks.run(trained, 3, stage, settings, accumulate)
    plain = ranks.run(trained, 3, stage, None, accumulate)
    for name, weight in found[0].items():
        assert all(torch.equal(each[name], weight) for each in [*found, *again]), name
    assert not torch.equal(found[0]["1.weight"], plain[0]["1.weight"])


def nonfinite(group, settings):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    handle = pyruntime.shard(model, DeviceMesh.from_group(group, "cpu"), stage=1, compression=settings)
    optimizer = handle.adamw(nonfinite="skip")
    skipped = []
    for step in range(3):
        loss = model(torch.randn(4, 64)).square().sum()
        if step == 1 and group.rank() == 1:
            loss = loss * model[1].weight[0, 0] * float("nan")
        loss.backward()
        skipped.append(optimizer.step().skipped)
    finite = all(bool(p.isfinite().all()) for p in model.parameters())
    handle.close()
    return skipped, finite


@pytest.mark.parametrize("settings", [METHODS[2], METHODS[-2], METHODS[-1]], ids=named)
def test_a_gradient_that_is_not_finite_is_noticed_and_not_remembered(ranks, settings):
    assert ranks.run(nonfinite, 2, settings) == [([False, True, False], True)] * 2


def killed(group, stage, settings):
    """Rank 1 dies between the buckets of a step; what the others were told, and after how long."""
    comm.configure(group, deadline_s=4.0)
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    mesh = DeviceMesh.from_group(group, "cpu")
    handle = pyruntime.shard(model, mesh, stage=stage, bucket_bytes=1, compression=settings)
    optimizer, started = handle.adamw(), 0.0
    try:
        for step in range(5):
            y = model(torch.randn(8, 256))
            if step == 2 and group.rank() == 1:
                model[1].register_full_backward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
                y = model(torch.randn(8, 256))
            started = time.monotonic()
            y.sum().backward()
            optimizer.step()
    except comm.CommError as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "", "", 0.0


@pytest.mark.parametrize(
    ("stage", "settings"),
    [(0, METHODS[2]), (1, METHODS[2]), (1, METHODS[-1])],
    ids=["quantize-0", "quantize-1", "power_sgd-1"],
)
@pytest.mark.second_tier(but=["quantize-0"])
def test_a_rank_that_dies_ends_the_others_by_the_deadline(ranks, stage, settings):
    outcomes = ranks.launch(killed, 3, stage, settings)
    check_others_lost_rank_1(outcomes)


def test_what_a_rank_loses_is_not_underestimated_and_from_a_warm_start_nearly_right():
    torch.manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(n, 30)).Q for n in (60, 45))
    matrix = left @ torch.diag(torch.logspace(0, -4, 30)) @ right.t()
    unit, ranks = Unit("w", 60, 45, False, ((0, 60 * 45),)), [1, 3, 6, 12]
    cold = power_sgd.first_q(unit, ranks[-1], 0)
    warm = matrix.t() @ power_sgd.orthonormal(matrix @ cold)
    values = torch.linalg.svdvals(matrix.double()).square()
    exact = [float(values[rank:].sum()) for rank in ranks]
    for q in (cold, warm):
        for least, error in zip(exact, power_sgd.errors(matrix, ranks, q), strict=True):
            assert error >= least * (1 - 1e-3) - 1e-6
            assert q is cold or error <= 2 * least + 1e-6


def test_a_matrix_whose_square_is_not_finite_has_no_error_and_nothing_raises():
    unit = Unit("w", 40, 30, False, ((0, 1200),))
    matrix = 5e37 * torch.randn(40, 30, generator=torch.Generator().manual_seed(1))
    found = power_sgd.errors(matrix, [1, 4], power_sgd.first_q(unit, 4, 0))
    assert all(math.isnan(each) for each in found)


def test_without_error_feedback_a_plan_takes_no_bits_whose_errors_are_not_those_that_are_measured():
    for bits in (4, 6):
        codec = codec_of(Compression("quantize", bits=bits, error_feedback=False, plan_every=2))
        assert codec.candidates() == [4, 5, 6, 7, 8]


def test_one_step_of_power_sgd_follows_its_definition(ranks):
    settings = Compression("power_sgd", rank=2, seed=5)
    for stage in (0, 1):
        found = ranks.run(one_step, 2, stage, settings)
        for arrived, expected in found:
            torch.testing.assert_close(arrived, expected, rtol=1e-4, atol=1e-4)


def one_step(group, stage, settings):
    """What arrives of the first step's matrices, and what it would be by the paper's algorithm in fp64."""
    axes = cases.opened(group, "symmetric_memory", stage)
    (bucket,) = [b for b in cases.buckets_of(False, axes.shard.size, torch.float32) if b.name == "w0"]
    (unit,) = units_of(bucket, 2)
    compressor = Compressor(settings, [bucket], [], axes)
    generator = torch.Generator().manual_seed(0)
    wholes = [torch.randn(bucket.lines, bucket.width, generator=generator) for _ in range(2)]
    for whole in wholes:
        cases.fill(bucket, whole, [True])
    result = []
    write = cases.copied_from(wholes[group.rank()], bucket)
    compressor.launch(bucket, torch.float32, axes, write, lambda _, gradient: result.append(gradient))
    (axes.shard if stage else axes.replicate).complete_all()
    matrices = [
        torch.cat([segment[: bucket.marks] for segment in whole.view(-1, bucket.segment_lines, bucket.width)])
        for whole in wholes
    ]
    total = sum(matrix.double() for matrix in matrices)
    p = torch.linalg.qr(total @ power_sgd.first_q(unit, 2, 5).double()).Q
    expected = p @ (p.t() @ total)
    if stage:
        share = len(expected) // 2
        expected = expected[group.rank() * share : (group.rank() + 1) * share]
    return result[0][: bucket.marks].double(), expected
