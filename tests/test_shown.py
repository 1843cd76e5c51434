"""What was found is said on one line of ASCII that is not too long to read."""

import pytest

from pyruntime.shown import shown


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
    assert shown(value) == said


def test_numbers_that_python_does_not_print_are_described():
    assert shown(10**5000) == "a number of thousands of digits"
    assert shown([10**5000]) == "a list"
