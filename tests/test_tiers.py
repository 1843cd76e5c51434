"""Each test belongs to one tier, unknown names of cases are errors, and every test is seeded."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.inner_pytest import run_pytest

TESTS = """
import random

import pytest

@pytest.mark.second_tier
def test_long(): pass

@pytest.mark.second_tier("two", "three")
@pytest.mark.parametrize("name", ["one", "two", "three"])
def test_some(name): pass

@pytest.mark.second_tier(but=["b"])
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_but(name): pass

@pytest.mark.parametrize("again", range(2))
def test_short(again): assert random.random() == random.Random(7).random()
"""
FIRST = ["test_some[one]", "test_but[b]", "test_short[0]", "test_short[1]"]
SECOND = ["test_long", "test_some[two]", "test_some[three]", "test_but[a]", "test_but[c]"]


def run(folder: Path, *options: str, tests: str = TESTS) -> str:
    return run_pytest(folder, "tests.tiers", tests, "-v", *options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--first-tier", "--seed", "7"], FIRST),
        (["--second-tier"], SECOND),
        (["--seed", "7"], [*SECOND, *FIRST]),
    ],
)
def test_each_test_is_of_one_tier(tmp_path, options, expected):
    assert sorted(re.findall(r"::(\S+) PASSED", run(tmp_path, *options))) == sorted(expected)


def test_a_case_that_is_not_there_is_told(tmp_path):
    said = run(tmp_path, "--first-tier", tests=TESTS.replace('but=["b"]', 'but=["d"]'))
    assert "second_tier names cases that are not there: " in said and "::test_but[d]" in said


def test_the_second_tier_begins_at_another_seed_in_each_session(tmp_path):
    seeds = {re.search(r"--seed (\d+)", run(tmp_path, "--second-tier", "--co"))[1] for _ in range(2)}
    assert len(seeds) == 2
    assert "--seed 0\n" in run(tmp_path, "--first-tier", "--co")


def test_each_number_shuffles_in_its_own_way_and_leaves_nothing_out(tmp_path):
    orders = [
        re.findall(r"::(\S+) PASSED", run(tmp_path, "--seed", "7", "--shuffled", number)) for number in "1123"
    ]
    assert orders[0] == orders[1] and len(set(map(tuple, orders))) == 3
    assert all(sorted(order) == sorted([*FIRST, *SECOND]) for order in orders)


def test_what_has_not_begun_in_time_is_skipped_and_counted(tmp_path):
    slow = "import time, pytest\n@pytest.mark.parametrize('n', range(3))\ndef test_slow(n): time.sleep(0.5)\n"
    said = run(tmp_path, "--time", "0.4", "-rs", tests=slow)
    assert len(re.findall("PASSED", said)) <= 1 and "not begun after 0.4 s (--time)" in said
    assert len(re.findall("PASSED", run(tmp_path, "--time", "60", tests=slow))) == 3


def test_no_test_draws_from_a_generator_without_a_seed():
    """numpy's is seeded by nobody: np.random.default_rng(random.getrandbits(64)) begins at --seed."""
    unseeded = re.compile(r"default_rng\(\)|SystemRandom|np\.random\.(?!default_rng|Generator)\w+\(")
    files = [
        path for path in Path(__file__).parent.rglob("*.py") if path.name not in ("tiers.py", "test_tiers.py")
    ]
    assert not [str(path) for path in files if unseeded.search(path.read_text())]
