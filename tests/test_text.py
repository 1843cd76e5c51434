"""Values in error messages are short, on one line, and ASCII."""

import pytest

from pyruntime.text import short_repr


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("a\n\u00fc", r"'a\n\xfc'"),
        (1.5, "1.5"),
        (10**9, "1000000000"),
        ("x" * 100, f"'{'x' * 79}.."),
    ],
)
def test_values_are_shown_on_a_line(value, said):
    assert short_repr(value) == said


def test_numbers_that_python_does_not_print_are_described():
    assert short_repr(10**5000) == "a number of thousands of digits"
    assert short_repr([10**5000]) == "a list"
