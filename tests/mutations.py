"""Makes damaged inputs: documents with replaced values, files with replaced bytes."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st

# The same few examples in every run; a failure that a longer search finds becomes an @example.
BOUNDED = settings(max_examples=60, derandomize=True, database=None)
MANY = 1000


def few_or_many(few: int) -> pytest.MarkDecorator:
    """Parametrizes a test by the settings `examples`: few, or a thousand with `make test-mutations`."""
    many = pytest.param(settings(BOUNDED, max_examples=MANY), marks=pytest.mark.mutations, id="many")
    return pytest.mark.parametrize(
        "examples", [pytest.param(settings(BOUNDED, max_examples=few), id="few"), many]
    )


NASTY: list[Any] = [
    None, True, False, 0, -1, 1, 3, 7,
    2**31, 2**63, 10**30, -(10**400), 0.0, 0.5, -1.5, 1e-320,
    1e308, math.nan, math.inf, -math.inf, "", "a", "3", "1e-5", "\0", "\ud800", "x" * 5000, "../..",
    [], [1], ["a"], [[]], {}, {"a": 1}, {"factor": "8"}, {"rope_type": []},
]  # fmt: skip
"""Replacements for a value."""


def values() -> st.SearchStrategy:
    return st.sampled_from(NASTY) | st.integers(-10, 10) | st.floats() | st.text(max_size=8)


def _places(document: Any, path: tuple = ()) -> list[tuple]:
    children = (
        document.items()
        if isinstance(document, dict)
        else enumerate(document)
        if isinstance(document, list)
        else ()
    )
    return [path, *(place for key, value in children for place in _places(value, (*path, key)))]


@st.composite
def documents(draw: st.DrawFn, valid: Any) -> Any:
    """Draws `valid` with one to three values replaced or removed."""
    document = copy.deepcopy(valid)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(_places(document)))
        if not path:
            if draw(st.integers(0, 9)) == 0:
                return draw(values())
            continue
        parent = document
        for key in path[:-1]:
            parent = parent[key]
        if draw(st.integers(0, 4)) == 0:
            del parent[path[-1]]
        else:
            # A copy: the next mutation could otherwise change a list or dict of NASTY itself, for all later
            # examples, or put it into itself.
            parent[path[-1]] = copy.deepcopy(draw(values()))
    return document


@st.composite
def contents(draw: st.DrawFn, valid: bytes) -> bytes:
    """Draws `valid` with bytes overwritten, removed, doubled or inserted."""
    content = bytearray(valid)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(content)))
        length = draw(st.integers(0, 12))
        kind = draw(st.sampled_from(["overwrite", "remove", "cut", "double", "insert"]))
        if kind == "overwrite":
            content[start : start + length] = draw(st.binary(min_size=length, max_size=length))
        elif kind == "remove":
            del content[start : start + length]
        elif kind == "cut":
            del content[start:]
        elif kind == "double":
            content[start:start] = content[start : start + 20 * length]
        else:
            content[start:start] = draw(
                st.sampled_from([b"\0", b"[", b"{" * 9, b"NaN", b"-", b'"', b"\xff", b"1e999"])
            )
    return bytes(content)


def is_one_sentence(error: BaseException) -> bool:
    text = str(error)
    return bool(text) and "\n" not in text
