"""L-GreCo's dynamic program beside a search of all choices."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyruntime.comm.core import _C
from pyruntime.data_parallel.compression import allocate

LEVELS = 200  # few, so that rounding matters


@st.composite
def problems(draw):
    """Sizes and errors of each layer's choices, and the uniform choice; errors of very different size, some
    of them zero, some choices bad in both."""
    layers, choices = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    size = st.integers(0, 1000)
    error = st.one_of(st.just(0.0), st.floats(1e-9, 1e9), st.floats(0.1, 1.0))
    rows = st.lists(size, min_size=choices, max_size=choices)
    sizes = draw(st.lists(rows, min_size=layers, max_size=layers))
    rows = st.lists(error, min_size=choices, max_size=choices)
    errors = draw(st.lists(rows, min_size=layers, max_size=layers))
    return sizes, errors, [draw(st.integers(0, choices - 1))] * layers


def total(of, choices):
    return math.fsum(row[choice] for row, choice in zip(of, choices, strict=True))


def smallest(sizes, errors, budget):
    """By trying all."""
    choices = itertools.product(*(range(len(row)) for row in sizes))
    return min((total(sizes, each) for each in choices if total(errors, each) <= budget), default=math.inf)


@given(problems())
@settings(max_examples=300, deadline=None)
def test_never_larger_than_uniform_and_never_less_exact(problem):
    sizes, errors, uniform = problem
    found = allocate(sizes, errors, uniform, LEVELS)
    budget, size = total(errors, uniform), total(sizes, found)
    assert total(errors, found) <= budget
    assert size <= total(sizes, uniform)
    assert size >= smallest(sizes, errors, budget)
    # Errors that are rounded up add up to what a budget smaller by a step a layer would allow.
    assert size <= smallest(sizes, errors, budget * (1 - (len(sizes) + 1) / LEVELS))


@given(problems())
@settings(max_examples=100, deadline=None)
def test_with_many_levels_it_is_the_smallest(problem):
    sizes, errors, uniform = problem
    budget = total(errors, uniform)
    near = smallest(sizes, errors, budget * (1 - 1e-4))
    if near == smallest(sizes, errors, budget * (1 + 1e-4)):  # no choice is within rounding of the budget
        assert total(sizes, allocate(sizes, errors, uniform, 100_000)) == near


def test_the_uniform_choice_is_kept_where_rounding_up_would_exclude_it():
    """Three layers that each take a third of the budget: 4 of 10 levels each, rounded up."""
    sizes, errors = [[10, 20]] * 3, [[1.0, 0.99]] * 3
    assert allocate(sizes, errors, [0, 0, 0], levels=10) == [0, 0, 0]


def test_bytes_go_where_they_save_most_error():
    quiet = [0.16, 0.01, 0.001]
    assert allocate([[2, 4, 6]] * 2, [[160.0, 10.0, 1.0], [16.0, 1.0, 0.1]], [1, 1]) == [1, 1]
    assert allocate([[2, 4, 6]] * 3, [[1600.0, 100.0, 10.0], quiet, quiet], [1, 1, 1]) == [2, 0, 0]


def test_without_any_error_to_spend_the_smallest_exact_choices_are_taken():
    assert allocate([[4, 3, 1], [2, 1, 0]], [[0.0, 0.0, 1.0], [0.0, 1.0, 1.0]], [0, 0]) == [1, 0]


@pytest.mark.parametrize(
    ("steps", "levels", "sentence"),
    [
        ([[1, -1]], 5, r"steps\[0\]\[1\]=-1; they must not be negative"),
        ([[1, 1], [1, 1]], 5, "sizes of 1 layers and steps of 2"),
        ([[1]], 5, "layer 0 has 2 sizes and 1 steps"),
        ([[1, 1]], -1, "levels=-1"),
    ],
)
def test_what_is_no_knapsack_is_refused(steps, levels, sentence):
    with pytest.raises(ValueError, match=sentence):
        _C.least_choices([[1.0, 2.0]], steps, levels)


@pytest.mark.parametrize("error", [-1.0, math.nan, math.inf])
def test_an_error_that_is_none_is_refused(error):
    with pytest.raises(ValueError, match=r"errors\[1\].*an error is finite and not negative"):
        allocate([[1, 2]] * 2, [[0.0, 1.0], [0.0, error]], [0, 0])
