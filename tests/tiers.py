"""Two tiers of tests.

The first is what a person waits for (`make test`). The second (`make test-second`, in CI too) has what takes
longer: more cases of what the first has one of, benches, packaging, compiled kernels.

    @pytest.mark.second_tier                  # the whole test; as `pytestmark`, the whole file
    @pytest.mark.second_tier("dp2", "tp4")    # its cases of these names
    @pytest.mark.second_tier(but=["tp2"])     # all its cases but these

pytest without --first-tier and --second-tier runs both. Random numbers begin at the same seed in every test
and on every rank; in the second tier at another one in each session, which the session's header names and
--seed repeats.
"""

from __future__ import annotations

import random
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
"""All of whose tests are of the second tier."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers")
    group.addoption("--first-tier", action="store_true", help="only what a person waits for")
    group.addoption("--second-tier", action="store_true", help="only the rest")
    group.addoption("--seed", type=int, help="where random numbers begin (0; in the second tier, any)")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.seed is None:  # workers are given it
        config.option.seed = random.SystemRandom().randrange(2**31) if config.option.second_tier else 0


def pytest_report_header(config: pytest.Config) -> str:
    return f"random numbers: --seed {config.option.seed}"


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    seed_all(request.config.option.seed)


def is_second(item: pytest.Item) -> bool:
    """Whether the test, or this case of it, is of the second tier."""
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
    """Cases that a mark names and the test does not have; `items` are all tests of some files."""
    cases: dict[str, set[str]] = {}
    named: dict[str, set[str]] = {}
    for item in items:
        test, _, case = item.nodeid.partition("[")
        cases.setdefault(test, set()).add(case.removesuffix("]"))
        for mark in item.iter_markers("second_tier"):
            named.setdefault(test, set()).update(mark.args, mark.kwargs.get("but", []))
    for test, names in named.items():
        yield from (f"{test}[{name}]" for name in sorted(names - cases[test]))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not (config.option.first_tier or config.option.second_tier):
        return
    if unknown := list(unknown_cases(items)):
        raise pytest.UsageError(f"second_tier names cases that are not there: {', '.join(unknown)}")
    chosen = [item for item in items if is_second(item) is config.option.second_tier]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
    items[:] = chosen
