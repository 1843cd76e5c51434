"""Values in fewer bytes: what comes back, what is lost, and that nothing else decides it than the values, the
seed and their places."""

from __future__ import annotations

import pytest
import torch

from pyruntime.ops import compression
from pyruntime.ops.compression import BLOCK
from pyruntime.ops.layers import random_rounding

SIZES = [0, 1, 7, 8, 9, 511, 512, 513, 5_000, 70_001]
BITS = list(range(1, 9))
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def packed_of(values, bits, residual=None, rounding=None):
    packed = torch.full((compression.quantized_bytes(len(values), bits),), 0xAB, dtype=torch.uint8)
    compression.quantize(values, bits, packed, residual, rounding)
    return packed


def through(values, bits, residual=None, rounding=None):
    """What comes back."""
    out = torch.full((len(values),), torch.nan)
    compression.dequantize(packed_of(values, bits, residual, rounding), bits, out)
    return out


def read_by_hand(packed, count, bits):
    """By the layout as csrc/cpu/compression/quantize.h describes it, a bit at a time."""
    blocks = -(-count // BLOCK)
    steps = packed[: 4 * blocks].view(torch.float32).tolist()
    octets = packed[4 * blocks :].tolist()
    values = []
    for block, step in enumerate(steps):
        n = min(BLOCK, count - block * BLOCK)
        stride = -(-n // 8)
        for i in range(n):
            eighth, place = divmod(i, stride)
            code = sum((octets[plane * stride + place] >> eighth & 1) << plane for plane in range(bits))
            level = 2 * code - 1 if bits == 1 else code - (2 ** (bits - 1) - 1)
            values.append(level * step)
        octets = octets[bits * stride :]
    assert not octets
    return torch.tensor(values, dtype=torch.float64).float()


def steps_by_hand(x, bits, nearest=True):
    """fp64 [n]: the step of each value's block."""
    result = []
    for block in x.double().split(BLOCK) if len(x) else ():
        largest, mean = block.abs().max(), block.abs().mean()
        step = largest / max(1, 2 ** (bits - 1) - 1)
        if bits <= 2 and nearest:
            step = mean if bits == 1 else min(largest, 2 * mean)
        result.append(step.expand(len(block)))
    return torch.cat(result) if result else torch.zeros(0, dtype=torch.float64)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("count", SIZES)
def test_what_comes_back_is_the_nearest_multiple_of_the_block_s_step(count, bits):
    x = torch.randn(count) * torch.logspace(-6, 4, count)
    found, step = through(x, bits), steps_by_hand(x, bits)
    assert torch.equal(found, read_by_hand(packed_of(x, bits), count, bits))
    levels = 2 ** (bits - 1) - 1
    steps_away = x.double() / step
    if bits == 1:
        nearest, halfway = torch.where(x >= 0, step, -step), x.abs() < 1e-5 * step
    else:
        nearest = steps_away.round().clamp(-levels, levels) * step
        halfway = (steps_away.frac().abs() - 0.5).abs() < 1e-4
        assert bits == 2 or ((found - x).abs().double() <= 0.5001 * step).all()
    off = (found.double() - nearest).abs() > 1e-4 * step
    assert not (off & ~halfway).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [1, 4, 7])
def test_low_precision_is_packed_as_the_same_values_in_fp32(dtype, bits):
    x = torch.randn(3_001).to(dtype)
    residual = torch.randn(3_001)
    other = residual.clone()
    assert torch.equal(packed_of(x, bits, residual), packed_of(x.float(), bits, other))
    assert torch.equal(residual, other)


@pytest.mark.parametrize("bits", BITS)
def test_zero_comes_back_as_zero_and_a_block_of_zeros_takes_no_harm(bits):
    x = torch.zeros(2 * BLOCK)
    x[BLOCK::3] = torch.randn(171)
    found = through(x, bits)
    assert (found[:BLOCK] == 0).all()
    assert bits == 1 or (found[x == 0] == 0).all()


@pytest.mark.parametrize("rounding", [None, (5, 0)], ids=["nearest", "random"])
@pytest.mark.parametrize("bits", BITS)
def test_what_is_sent_and_the_residual_add_up_to_the_values(bits, rounding):
    """Error feedback telescopes, over steps of which each begins with what the one before lost."""
    residual = torch.zeros(3_333)
    sent, given = torch.zeros(3_333, dtype=torch.float64), torch.zeros(3_333, dtype=torch.float64)
    for step in range(20):
        gradient = torch.randn(3_333)
        own = None if rounding is None else (step, 0)
        sent += through(gradient, bits, residual, own)
        given += gradient
        size = float(residual.abs().max()) + 1
        torch.testing.assert_close(sent + residual, given, rtol=0, atol=4e-6 * size * (step + 1))


@pytest.mark.parametrize("bits", BITS)
def test_to_the_nearest_no_more_is_lost_than_there_was(bits):
    """Also of values of which one is far larger than all others."""
    for x in (torch.randn(BLOCK), torch.randn(BLOCK).pow(9), torch.eye(1, BLOCK)[0]):
        lost = torch.zeros(BLOCK)
        packed_of(x, bits, lost)
        assert lost.square().sum() < x.square().sum()


@pytest.mark.parametrize("bits", BITS)
def test_to_the_nearest_less_is_kept_than_at_random(bits):
    """Why error feedback rounds to the nearest; of gradients of mean square 1 all along. At random, of 1 bit
    what is kept grows without bound."""
    kept = {}
    for kind in ("nearest", "random"):
        residual = torch.zeros(20 * BLOCK)
        for step in range(60):
            packed_of(torch.randn(20 * BLOCK), bits, residual, None if kind == "nearest" else (step, 0))
        kept[kind] = float(residual.square().mean())
    assert kept["nearest"] < 1 and kept["random"] > 1.5 * kept["nearest"]
    assert bits > 1 or kept["random"] > 1e6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", SIZES)
def test_what_would_be_lost_is_what_is_lost(dtype, count):
    x, residual = (torch.randn(count) * torch.logspace(-3, 1, count)).to(dtype), torch.randn(count)
    before = residual.clone()
    bits = [4, *reversed(BITS)]
    for found, own in (
        (compression.quantization_errors(x, bits, residual), residual),
        (compression.quantization_errors(x, bits), torch.zeros(count)),
    ):
        for each, error in zip(bits, found, strict=True):
            lost = own.clone()
            packed_of(x, each, lost)
            assert error == pytest.approx(float(lost.double().square().sum()), rel=1e-4)
    assert torch.equal(residual, before)


def test_what_would_be_lost_is_the_same_at_any_number_of_threads():
    x, threads = torch.randn(300_001), torch.get_num_threads()
    found = []
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            found.append(compression.quantization_errors(x, BITS))
    finally:
        torch.set_num_threads(threads)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_would_be_lost_of_what_is_not_finite_is_not(bad):
    x = torch.randn(3 * BLOCK)
    x[BLOCK + 5] = bad
    for found in (compression.quantization_errors(x, BITS), compression.top_k_errors(x, [3, 0, 7])):
        assert not torch.tensor(found).isfinite().any()


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_rounded_at_random_the_mean_is_exact(bits):
    x = torch.randn(BLOCK)
    step = steps_by_hand(x, bits, nearest=False)
    gap = float(step[0]) * (2 if bits == 1 else 1)
    rounds = 4_000
    total = torch.zeros(BLOCK, dtype=torch.float64)
    for seed in range(rounds):
        found = through(x, bits, rounding=(seed * 7919, 0))
        assert ((found - x).abs() <= gap * 1.0001).all()
        total += found
    # The mean of so many of standard deviation gap / 2 at most: five of its own
    assert ((total / rounds - x).abs() < 5 * gap / 2 / rounds**0.5).all()


def test_random_numbers_depend_on_seed_and_place_alone():
    x = torch.randn(40 * BLOCK)
    seed, first = random_rounding("w", 3)
    whole = through(x, 3, rounding=(seed, first))
    cut = 7 * BLOCK
    parts = [through(x[:cut], 3, rounding=(seed, 0)), through(x[cut:], 3, rounding=(seed, cut))]
    assert torch.equal(whole, torch.cat(parts))
    assert not torch.equal(whole, through(x, 3, rounding=random_rounding("w", 4)))
    assert torch.equal(whole, through(x, 3, rounding=(seed, first)))


def test_the_number_of_threads_changes_no_bit():
    x, threads = torch.randn(300_001), torch.get_num_threads()
    found = []
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            residual = torch.ones(len(x))
            packed = packed_of(x, 5, residual, (9, 0))
            out = torch.ones(len(x))
            compression.dequantize(packed, 5, out, add=True)
            found.append((packed, residual, out))
    finally:
        torch.set_num_threads(threads)
    for each in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], each, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("bits", [1, 4])
def test_a_block_that_is_not_finite_says_so_and_is_not_remembered(bits, bad):
    x, residual = torch.randn(3 * BLOCK), torch.ones(3 * BLOCK)
    x[BLOCK + 5] = bad
    found = through(x, bits, residual)
    middle = slice(BLOCK, 2 * BLOCK)
    assert found[middle].isnan().all() and (residual[middle] == 0).all()
    assert found[:BLOCK].isfinite().all() and found[2 * BLOCK :].isfinite().all()
    assert through(torch.randn(3 * BLOCK), bits, residual).isfinite().all()


def top_k_of(values, k, residual=None):
    packed = torch.full((compression.top_k_bytes(k),), 0xAB, dtype=torch.uint8)
    compression.top_k(values, k, packed, residual)
    return packed


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("count", "k"), [(1, 1), (63, 5), (64, 64), (1_000, 0), (5_001, 50), (70_001, 9_000)]
)
def test_the_largest_values_travel_exactly(dtype, count, k):
    x, residual = torch.randn(count).to(dtype), torch.randn(count)
    whole = x.float() + residual
    packed = top_k_of(x, k, residual)
    places = packed[: 4 * k].view(torch.int32).long()
    assert (places.diff() > 0).all()
    expected = torch.zeros(count)
    largest = whole.abs().topk(k).indices  # no two magnitudes are the same here
    expected[largest] = whole[largest]
    found = torch.zeros(count)
    compression.add_top_k(packed, found)
    if whole.abs().unique().numel() == count:
        assert torch.equal(found, expected)
    assert torch.equal(found + residual, whole)
    assert int((found != 0).sum()) == k
    assert k in (0, count) or float(found[found != 0].abs().min()) >= float(residual.abs().max())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 63, 5_001])
def test_what_would_be_lost_of_the_others_is_what_is_lost(dtype, count):
    x, residual = torch.randn(count).to(dtype), torch.randn(count)
    before, ks = residual.clone(), [count // 7, 0, count, count // 2, count // 7, min(1, count)]
    for found, own in (
        (compression.top_k_errors(x, ks, residual), residual),
        (compression.top_k_errors(x, ks), torch.zeros(count)),
    ):
        for k, error in zip(ks, found, strict=True):
            lost = own.clone()
            top_k_of(x, k, lost)
            assert error == pytest.approx(float(lost.double().square().sum()), rel=1e-6)
    assert torch.equal(residual, before)


def test_of_equal_magnitudes_the_first_travel():
    x = torch.tensor([1.0, -2.0, 2.0, 0.5, -2.0, 2.0] * 50)
    places = top_k_of(x, 7)[:28].view(torch.int32).tolist()
    assert places == [1, 2, 4, 5, 7, 8, 10]
    assert top_k_of(torch.zeros(100), 3)[:12].view(torch.int32).tolist() == [0, 1, 2]


def clustered(count):
    """Of which a sample of runs says little."""
    return (
        torch.randn(count)
        * (torch.rand(-(-count // 16)) < 0.01).float().mul(99).add(1).repeat_interleave(16)[:count]
    )


SHAPES_OF_VALUES = {
    "ascending": lambda count: torch.arange(count).float(),
    "descending": lambda count: -torch.arange(count, 0, -1).float(),
    "few magnitudes": lambda count: torch.randint(-3, 4, (count,)).float(),
    "nearly all zero": lambda count: torch.randn(count) * (torch.rand(count) < 1e-3),
    "large at the end": lambda count: (
        torch.randn(count).mul(1e-3).index_fill(0, torch.arange(count - 900, count), 7.0)
    ),
    "clustered": clustered,
    "heavy tails": lambda count: torch.randn(count).pow(9),
}


@pytest.mark.parametrize("shape", SHAPES_OF_VALUES)
def test_the_largest_are_found_however_they_are_spread(shape):
    """By a stable sort, and the squares of the others by its order."""
    for count, k in ((3_000, 30), (200_001, 2_000), (200_001, 60_000), *[(70_000, 700)] * 10):
        x, residual = SHAPES_OF_VALUES[shape](count), torch.zeros(count)
        order = x.abs().sort(descending=True, stable=True).indices
        places = order[:k].sort().values
        (lost,), (of_all, of_none) = compression.top_k_errors(x, [k]), compression.top_k_errors(x, [0, count])
        for kept in (residual, None):
            packed = top_k_of(x, k, kept)
            assert torch.equal(packed[: 4 * k].view(torch.int32).long(), places)
            assert torch.equal(packed[4 * k :].view(torch.float32), x[places])
        assert torch.equal(residual, x.index_fill(0, places, 0))
        assert lost == pytest.approx(float(x[order[k:]].double().square().sum()), rel=1e-12)
        assert of_all == pytest.approx(float(x.double().square().sum()), rel=1e-12) and of_none == 0


def test_values_that_are_not_finite_are_the_largest():
    x = torch.randn(500)
    x[400] = float("nan")
    assert top_k_of(x, 1)[:4].view(torch.int32).tolist() == [400]


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda: compression.quantized_bytes(4, 9), ValueError, "bits=9; a value takes 1 to 8 bits"),
        (lambda: packed_of(torch.zeros(4), 0), ValueError, "bits=0; a value takes 1 to 8 bits"),
        (lambda: compression.quantization_errors(torch.zeros(4), [4, 9]), ValueError, "bits=9; a value"),
        (lambda: compression.top_k_errors(torch.zeros(4), [5]), ValueError, "top_k_errors: k=5 of 4 values"),
        (lambda: packed_of(torch.zeros(4).double(), 4), TypeError, "it must be float32, bfloat16 or float16"),
        (lambda: packed_of(torch.zeros(4, 2).t()[0], 4), ValueError, "it must have one dimension and be"),
        (
            lambda: packed_of(torch.zeros(4), 4, torch.zeros(5)),
            ValueError,
            "residual has 5 elements; it must",
        ),
        (
            lambda: compression.dequantize(torch.zeros(3, dtype=torch.uint8), 4, torch.zeros(4)),
            ValueError,
            "packed has 3 elements; it must have 8",
        ),
        (lambda: top_k_of(torch.zeros(4), 5), ValueError, "k=5 of 4 values; use at most as many"),
        (
            lambda: compression.add_top_k(top_k_of(torch.ones(9), 9), torch.zeros(8)),
            IndexError,
            "a value for place 8, and out has 8 elements",
        ),
    ],
)
def test_misuse_is_told_of(call, error, sentence):
    with pytest.raises(error, match=sentence):
        call()
