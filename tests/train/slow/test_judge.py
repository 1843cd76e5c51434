"""A rank that computes longer than its peers, and a link that sends slower, are named; noise names none."""

import itertools
import random
from statistics import median

import numpy as np
import pytest

from pyruntime.train.slow.judge import FACTOR, WINDOWS, WORSE, HostLink, Judge, Window
from pyruntime.train.slow.windows import EVERY, FEWEST, median_and_error


def judge_of(ranks, every=EVERY, **settings):
    return Judge([f"h{rank}" for rank in range(ranks)], [range(ranks)], every, **settings)


def test_a_slow_rank_is_named_with_its_host_the_factor_the_steps_and_who_waited_most():
    judge = judge_of(4)
    windows = [Window(0.3, waited_for=3, waited_s=0.1 + rank) for rank in range(3)] + [Window(0.48)]
    for _ in range(WINDOWS - 1):
        assert judge.add(windows) == []
    assert judge.slow_ranks == []
    (found,) = judge.add(windows)
    assert found.sentence == (
        "rank 3 (host h3) computes 1.6 times as long as its peers over the last 60 steps: 0.48 s a step "
        "without waiting, where they take 0.3 s; rank 2 (host h2) waited 2.1 s for it since the last look."
    )
    assert (found.rank, found.host, found.is_slow, found.to) == (3, "h3", True, None)
    assert found.times == pytest.approx(1.6)
    assert judge.slow_ranks == [3]


def test_it_is_said_once_and_again_when_it_becomes_worse_or_ends():
    judge = judge_of(2, unit="layer")

    def said(times):
        return [each for _ in range(10) for each in judge.add([Window(1.0), Window(times)])]

    assert [each.is_slow for each in said(1.5)] == [True]
    assert said(1.5 * WORSE - 0.1) == []
    (worse,) = said(1.5 * WORSE + 0.1)
    assert "s a step and layer without waiting, where they take 1 s." in worse.sentence
    (over,) = said(1.0)
    assert over.sentence == (
        "rank 1 (host h1) computes 1.0 times as long as its peers over the last 60 steps, and is no longer "
        "slow."
    )
    assert not over.is_slow
    assert judge.slow_ranks == []


def test_windows_that_are_late_now_and_then_are_not_said():
    judge = judge_of(3)
    for number in range(50):
        late = number % WINDOWS > 0  # two of three in a row
        assert judge.add([Window(1.0), Window(3.0 if late else 1.0), Window(1.0)]) == []


def test_a_rank_is_compared_with_the_median_of_all_others_of_its_role():
    generator = np.random.default_rng(random.getrandbits(64))
    for ranks in range(2, 9):
        seconds = (1 + generator.integers(0, 4, ranks)).tolist()  # some alike
        slow = int(generator.integers(ranks))
        seconds[slow] = 10
        judge = Judge(["h"] * (ranks + 1), [range(ranks), [ranks]], EVERY)
        for _ in range(WINDOWS):
            found = judge.add([Window(each) for each in [*seconds, 100]])
        expected = {
            rank: each / median(seconds[:rank] + seconds[rank + 1 :]) for rank, each in enumerate(seconds)
        }
        assert {each.rank: each.times for each in found} == pytest.approx(
            {rank: times for rank, times in expected.items() if times > FACTOR}
        )


@pytest.mark.parametrize("times", [FACTOR - 0.01, FACTOR + 0.01])
def test_the_factor_decides(times):
    judge = judge_of(3)
    found = [judge.add([Window(1.0), Window(1.0), Window(times)]) for _ in range(WINDOWS)]
    assert bool(found[-1]) == (times > FACTOR)


NOISES = {
    "log-normal": lambda generator, size: generator.lognormal(0, 0.2, size),
    "wide": lambda generator, size: generator.lognormal(0, 0.6, size),
    "heavy-tailed": lambda generator, size: 1 + generator.pareto(1.5, size),
    "two kinds of steps": lambda generator, size: 1 + (generator.random(size) < 0.4) * 1.0,
}


def measured(seconds):
    """Windows of ranks: seconds [ranks, steps]."""
    return [Window(*median_and_error(of_rank.tolist())) for of_rank in seconds]


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize(("ranks", "every"), [(2, EVERY), (4, FEWEST), (32, EVERY)])
def test_noise_alone_names_nobody(noise, ranks, every):
    generator = np.random.default_rng(random.getrandbits(64))
    judge = judge_of(ranks, every)
    for _ in range(400 if ranks < 32 else 60):
        assert judge.add(measured(NOISES[noise](generator, (ranks, every)))) == []


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_slow_rank_is_found_through_noise_and_no_other(ranks):
    generator = np.random.default_rng(random.getrandbits(64))
    slow = int(generator.integers(ranks))
    judge = judge_of(ranks)
    for number in range(40):
        seconds = NOISES["log-normal"](generator, (ranks, EVERY))
        seconds[slow] *= 2.0
        found = judge.add(measured(seconds))
        assert {each.rank for each in found if each.is_slow} <= {slow}
        assert number < 4 or judge.slow_ranks == [slow]


def test_a_rank_without_a_peer_of_its_role_is_not_judged():
    judge = Judge(["a", "b"], [[0], [1]], EVERY)
    assert [judge.add([Window(1.0), Window(9.0)]) for _ in range(WINDOWS)] == [[]] * WINDOWS


def over_links(seconds, slow=(), times=1.0):
    """Of a ring of ranks that compute so long, in which links [from, to] take `times` as long as others."""
    ranks = len(seconds)
    windows = []
    for rank, own in enumerate(seconds):
        links = []
        for to in sorted({(rank + 1) % ranks, (rank - 1) % ranks}):
            links.append(HostLink(to, 1e-8 * (times if (rank, to) in slow else 1.0)))
        windows.append(Window(own, links={"dp": links}))
    return windows


def test_a_slow_link_is_named_with_its_ends_and_seconds():
    judge = judge_of(3)
    found = [judge.add(over_links([1.0] * 3, {(1, 2)}, 4.0)) for _ in range(WINDOWS)]
    assert found[:-1] == [[]] * (WINDOWS - 1)
    (link,) = found[-1]
    assert link.sentence == (
        "the link from rank 1 (host h1) to rank 2 (host h2) takes 4.0 times as long as others for a byte of "
        "dp over the last 60 steps: 0.04 s for a MB until it is acknowledged, where others take 0.01 s."
    )
    assert (link.rank, link.to, link.traffic) == (1, 2, "dp")
    again = [judge.add(over_links([1.0] * 3)) for _ in range(WINDOWS)]
    assert again[-1][0].sentence.endswith("and no longer slow.")


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_a_host_all_of_whose_links_are_slow_is_named_once(ranks):
    judge, slow = judge_of(ranks), {(1, 0), (0, 1), (1, 2), (2, 1)}
    found = [judge.add(over_links([1.0] * ranks, slow, 20.0)) for _ in range(WINDOWS)]
    (of_rank,) = found[-1]
    assert of_rank.sentence == (
        "all links of rank 1 (host h1), both ways, take 20.0 times as long as others for a byte of dp over "
        "the last 60 steps: 0.2 s for a MB until it is acknowledged, where others take 0.01 s."
    )
    assert (of_rank.rank, of_rank.to, of_rank.traffic) == (1, None, "dp")
    again = [judge.add(over_links([1.0] * ranks)) for _ in range(WINDOWS)]
    assert [(each.rank, each.is_slow) for each in again[-1]] == [(1, False)]


def test_links_of_a_slow_rank_are_not_blamed_and_noisy_ones_neither():
    judge = judge_of(3)
    found = [judge.add(over_links([1.0, 1.0, 2.0], {(1, 2), (2, 0)}, 10.0)) for _ in range(2 * WINDOWS)]
    assert {(each.rank, each.traffic) for each in itertools.chain(*found)} == {(2, None)}
    generator, judge = np.random.default_rng(random.getrandbits(64)), judge_of(4)
    for _ in range(300):
        noisy = [
            Window(1.0, links={"dp": [HostLink(to, 1e-8 * generator.lognormal(0, 0.15)) for to in ends]})
            for ends in ((1, 3), (0, 2), (1, 3), (0, 2))
        ]
        assert judge.add(noisy) == []
