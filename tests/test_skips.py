"""A session prints each reason of skipped tests once, and shows failures whole."""

from tests.inner_pytest import run_pytest

TESTS = """
import pytest

@pytest.mark.skipif(True, reason="no GPU is here")
@pytest.mark.parametrize("number", range(3))
def test_first(number): pass

@pytest.mark.skipif(True, reason="no GPU is here")
def test_second(): pass

def test_tool(): pytest.skip("no tool was found")

def test_wrong():
    assert 1 + 1 == 3
"""


def test_each_reason_is_one_line_and_a_failure_is_shown_whole(tmp_path):
    printed = run_pytest(tmp_path, "tests.skips", TESTS)
    lines = printed.splitlines()
    start = next(index for index, line in enumerate(lines) if line.strip("= ") == "skipped")
    assert lines[start + 1 : start + 3] == ["4 in .: no GPU is here", "1 in .: no tool was found"]
    assert printed.count("no GPU is here") == 1
    assert ">       assert 1 + 1 == 3" in printed
    assert any(line.startswith("FAILED ") and "test_some.py::test_wrong" in line for line in lines)
