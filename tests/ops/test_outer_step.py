"""The passes of an outer optimizer: each is its definition, and what replicas have in common has the same
bits whichever parts of a pass are asked for."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from pyruntime.ops.outer_step import outer_step_, squared_displacement, squared_gap
from tests.ops.cases import DTYPES, randn

SIZES = [0, 1, 33, 512, 40_001]
PARTS = [each for each in itertools.product([None, 0.4], [False, True], [False, True]) if any(each)]
"""step, pulls, launches"""
CO2 = {"lr": 0.9, "momentum": 0.3, "nesterov": False, "clip": 0.8, "pull": 1.0, "restarts": True}
LATE = {**CO2, "nesterov": True, "clip": math.inf, "pull": 0.6, "restarts": False}


def state_of(*dtypes: torch.dtype) -> torch.dtype:
    return torch.float64 if torch.float64 in dtypes else torch.float32


def tensors(count: int, dtype: torch.dtype, travels_as: torch.dtype) -> list[torch.Tensor]:
    """x, z, m, sent."""
    state = state_of(dtype, travels_as)
    z = randn(count, dtype=state)
    return [(z + 0.1 * randn(count)).to(dtype), z, randn(count, dtype=state), randn(count, dtype=travels_as)]


def by_definition(x, z, m, sent, *, step, pulls, launches, lr, momentum, nesterov, clip, pull, restarts):
    """In float64, but for what is stored."""
    dtypes = [each.dtype for each in (x, sent)]

    def displacement():
        return (z.to(dtypes[0]).double() if pull == 1 else z) - x

    x, z, m, sent = (each.double() for each in (x, z, m, sent))
    before = displacement()
    if step is not None:
        g = step * sent
        m = (momentum * m + g).clamp(-clip, clip)
        z = z - lr * (g + momentum * m if nesterov else m)
    if pulls:
        x = (x + pull * (z - x)).to(dtypes[0]).double()
    if launches:
        sent = (before if restarts else displacement()).to(dtypes[1]).double()
    return x, z, m, sent


@pytest.mark.parametrize("settings", [CO2, LATE], ids=["co2", "late"])
@pytest.mark.parametrize(
    ("dtype", "travels_as"),
    [*((dtype, dtype) for dtype in DTYPES), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float64)],
    ids=lambda dtype: str(dtype).removeprefix("torch."),
)
@pytest.mark.parametrize("count", SIZES)
def test_a_pass_is_its_definition(settings, dtype, travels_as, count):
    for step, pulls, launches in PARTS:
        found = tensors(count, dtype, travels_as)
        parts = {"step": step, "pulls": pulls, "launches": launches}
        expected = by_definition(*found, **parts, **settings)
        outer_step_(*found, **parts, **settings)
        for one, other in zip(found, expected, strict=True):
            # What is stored may be rounded the other way where float32 differs from float64.
            tolerance = 2 * torch.finfo(one.dtype).eps
            arithmetic = 1e-14 if state_of(dtype, travels_as) == torch.float64 else 1e-6
            atol = 4 * max(arithmetic, tolerance)
            torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=atol)


@pytest.mark.parametrize("settings", [CO2, LATE], ids=["co2", "late"])
def test_replicas_that_take_other_parts_of_a_pass_have_one_iterate_bit_by_bit(settings):
    x, *common = tensors(40_001, torch.float32, torch.bfloat16)
    taken = []
    for pulls, launches in itertools.product([False, True], repeat=2):
        z, m, sent = (each.clone() for each in common)
        outer_step_(x.clone(), z, m, sent, step=0.4, pulls=pulls, launches=launches, **settings)
        taken.append((z, m))
    for z, m in taken[1:]:
        assert torch.equal(z, taken[0][0]) and torch.equal(m, taken[0][1])
    z, m, sent = (each.clone() for each in common)
    for part in (slice(0, 17_003), slice(17_003, None)):  # wherever it is cut
        pieces = [each[part] for each in (x, z, m, sent)]
        outer_step_(*pieces, step=0.4, pulls=False, launches=False, **settings)
    assert torch.equal(z, taken[0][0]) and torch.equal(m, taken[0][1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_rounded_copy_follows_its_master_wherever_that_is_written(dtype):
    found = tensors(40_001, torch.float32, dtype)
    rounded = torch.zeros(7, 5714 + 1, dtype=dtype).view(-1)[:40_001]
    outer_step_(*found, rounded, step=0.4, pulls=False, launches=True, **LATE)
    assert not rounded.any()
    version = rounded._version
    outer_step_(*found, rounded, step=0.4, pulls=True, launches=False, **LATE)
    assert torch.equal(rounded, found[0].to(dtype)) and rounded._version > version


def test_clipping_passes_what_is_no_number():
    x, z, m, sent = tensors(100, torch.float32, torch.float32)
    sent[7], sent[8] = math.nan, math.inf
    outer_step_(x, z, m, sent, step=1.0, pulls=True, launches=False, **CO2)
    assert m[7].isnan() and m[8] == torch.tensor(0.8) and m[:7].abs().max() <= torch.tensor(0.8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", SIZES)
def test_norms_are_exact_to_float64(dtype, count):
    x, z, m, sent = tensors(count, dtype, dtype)
    exactness = 1e-12 if dtype == torch.float64 else 1e-6  # z - x is rounded to the type of z
    for rounds in (False, True):
        apart = (z.to(dtype) if rounds else z).double() - x.double()
        expected = pytest.approx(float(apart.square().sum()), rel=exactness)
        assert squared_displacement(z, x, rounds) == expected
    apart = 0.5 * sent.double() - 0.9 * m.double()
    assert squared_gap(sent, m, 0.5, 0.9) == pytest.approx(float(apart.square().sum()), rel=1e-12)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"m": torch.zeros(3)}, ValueError, "m has 3 elements and z 4; they must have as many."),
        ({"x": torch.zeros(8)[::2]}, ValueError, r"x has strides \[2\]"),
        ({"x": torch.zeros(4).double()}, TypeError, "z has dtype Float; beside the others it must be"),
        ({"m": torch.zeros(4).double()}, TypeError, "m has dtype Double"),
        ({"sent": torch.zeros(4).long()}, TypeError, "sent has dtype Long"),
        ({"rounded": torch.zeros(4)}, TypeError, "rounded has dtype Float and x Float"),
    ],
)
def test_what_does_not_fit_is_refused(changes, error, message):
    given: dict[str, Any] = {name: torch.zeros(4) for name in ("x", "z", "m", "sent")}
    with pytest.raises(error, match=message):
        outer_step_(**{**given, **changes}, step=None, pulls=True, launches=True, **CO2)
