"""Splits tests into two tiers.

The first is for a person who waits (`make test`). The second (`make test-second`, in CI too) has tests that
take longer: more cases of a behaviour, benches, packaging, compiled kernels.

    @pytest.mark.second_tier                  # the whole test; as `pytestmark`, the whole file
    @pytest.mark.second_tier("dp2", "tp4")    # the cases with these names
    @pytest.mark.second_tier(but=["tp2"])     # all its cases except these

pytest without --first-tier and --second-tier runs both. Random numbers begin at the same seed in every test
and on every rank. With --second-tier each session has another seed: its header names it, --seed repeats it.
--shuffled N takes files, and the tests of each, in another order for every N: a test that depends on one
before it fails in some orders.

--time SECONDS skips, and counts, what has not begun by then, for a machine that must end (.ci/run).
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

from tests.rank_worker import seed_all

FOLDERS = (
    "tests/bench/",
    "tests/cpp/",
    "tests/cuda/compiled/",
    "tests/cuda/gpu/",
    "tests/cuda/kernels/",
    "tests/tuning/",
)
"""Folders with only second-tier tests."""
BEGAN = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers")
    group.addoption("--first-tier", action="store_true", help="only what a person waits for")
    group.addoption("--second-tier", action="store_true", help="only the rest")
    group.addoption("--shuffled", type=int, metavar="N", help="take files and tests in an order made of N")
    group.addoption("--time", type=float, metavar="SECONDS", help="skip tests that have not begun by then")
    group.addoption("--seed", type=int, help="where random numbers begin (0; in the second tier, any)")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[BEGAN] = time.monotonic()
    if config.option.seed is None:  # workers get it from the session
        config.option.seed = random.SystemRandom().randrange(2**31) if config.option.second_tier else 0


def pytest_report_header(config: pytest.Config) -> str:
    return f"random numbers: --seed {config.option.seed}"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    allowed = item.config.option.time
    if allowed is not None and time.monotonic() - item.config.stash[BEGAN] > allowed:
        pytest.skip(f"not begun after {allowed:g} s (--time); `make test-second` runs all")


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    seed_all(request.config.option.seed)


def is_second(item: pytest.Item) -> bool:
    """Whether the test, or this case of it, belongs to the second tier."""
    if item.nodeid.startswith(FOLDERS):
        return True
    case = item.callspec.id if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ""
    return any(
        (not mark.args and "but" not in mark.kwargs)
        or case in mark.args
        or case not in mark.kwargs.get("but", [case])
        for mark in item.iter_markers("second_tier")
    )


def unknown_cases(items: list[pytest.Item]) -> Iterator[str]:
    """Yields cases that a mark names and the test does not have. items: all tests of some files."""
    cases: dict[str, set[str]] = {}
    named: dict[str, set[str]] = {}
    for item in items:
        test, _, case = item.nodeid.partition("[")
        cases.setdefault(test, set()).add(case.removesuffix("]"))
        for mark in item.iter_markers("second_tier"):
            named.setdefault(test, set()).update(mark.args, mark.kwargs.get("but", []))
    for test, names in named.items():
        yield from (f"{test}[{name}]" for name in sorted(names - cases[test]))


def shuffled(items: list[pytest.Item], number: int) -> list[pytest.Item]:
    """The same items in an order made of `number`, those of a file still together."""
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(str(item.path), []).append(item)
    order = random.Random(number)
    for file in (groups := list(files.values())):
        order.shuffle(file)
    order.shuffle(groups)
    return [item for file in groups for item in file]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.shuffled is not None:
        items[:] = shuffled(items, config.option.shuffled)
    if not (config.option.first_tier or config.option.second_tier):
        return
    if unknown := list(unknown_cases(items)):
        raise pytest.UsageError(f"second_tier names cases that are not there: {', '.join(unknown)}")
    chosen = [item for item in items if is_second(item) is config.option.second_tier]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
    items[:] = chosen
